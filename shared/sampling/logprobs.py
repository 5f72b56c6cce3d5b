"""What the model gave the tokens, as log-probabilities. Introduced in phase 4.

Invariant: they are the model's own, of raw logits before penalty, temperature and filters, in fp32 whatever the logits'
dtype; so they do not depend on how a token was chosen.
"""

import torch


def top_logprobs(logits: torch.Tensor, ids: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of chosen tokens and of the k likeliest.

    Args:
        logits: ``[n, V]`` in any float dtype; not mutated.
        ids: int64 ``[n]``, the chosen tokens.
        k: how many of the likeliest, at least 0; of a smaller vocabulary all.

    Returns:
        float32 ``[n]`` of the chosen; float32 and int64 ``[n, k]`` of the likeliest, in descending order.
    """
    logprobs = logits.log_softmax(-1, dtype=torch.float32)
    chosen = logprobs.gather(-1, ids[:, None]).squeeze(-1)
    top = logprobs.topk(min(k, logits.shape[-1]))
    return chosen, top.values, top.indices
