"""Log-probabilities of sampled tokens and of the most likely tokens. Introduced in phase 4.

Invariant: they are computed from raw logits, before all logits processors, in fp32 whatever the logits' dtype; so they
do not depend on the sampling parameters.
"""

import torch


def top_logprobs(logits: torch.Tensor, ids: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of chosen tokens ``ids``, int64 ``[n]``, and of the k most likely (at least 0, at most V).

    ``logits`` are ``[n, V]`` in any float dtype, and not mutated. Returns float32 ``[n]`` of the chosen tokens;
    float32 and int64 ``[n, k]`` of the most likely, in descending order.
    """
    logprobs = logits.log_softmax(-1, dtype=torch.float32)
    chosen = logprobs.gather(-1, ids[:, None]).squeeze(-1)
    top = logprobs.topk(min(k, logits.shape[-1]))
    return chosen, top.values, top.indices
