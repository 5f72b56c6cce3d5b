"""Logits processors: pure functions applied to logits before sampling. Introduced in phase 2.

Order, as in vLLM: logit bias, mask of the ids that ``min_tokens`` forbids, repetition penalty, frequency and presence
penalty, temperature, min-p, top-k, top-p, sampling. (transformers applies min-p last, after top-p.) Each function takes
float32 logits [B, V] with one parameter per row, returns new logits and sets removed tokens to -inf. Invariant: the
arguments are never mutated.

Top-k and top-p are defined by values ("strictly more likely"), not by ranks in a sorted list: tied tokens are kept or
removed together, and every device agrees, whatever order its sort gives to ties. At least one token is always kept.
"""

import torch

# tokens; most nuclei are smaller, and a top-k of this size is far cheaper than sorting the vocabulary
_NUCLEUS_GUESS = 1024


def apply_repetition_penalty(logits: torch.Tensor, seen: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """Make tokens of the prompt and the output so far, ``seen`` (bool [B, V]), less likely (CTRL, arXiv 1909.05858,
    section 4.1).

    A seen token's logit is divided by the penalty if positive and multiplied if negative, as in transformers.
    ``penalty`` is float32 [B]; above 1 discourages repeats, 1 leaves the row unchanged.
    """
    penalty = penalty[:, None]
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def apply_output_penalties(
    logits: torch.Tensor, counts: torch.Tensor, frequency: torch.Tensor, presence: torch.Tensor
) -> torch.Tensor:
    """Make tokens of the output so far less likely, as OpenAI and vLLM do; the prompt does not count.

    ``counts`` is int32 [B, V], how often each id occurs in the row's output. ``frequency`` and ``presence`` are
    float32 [B]: the first is subtracted for each occurrence, the second once from an id that occurs.
    """
    return logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)


def apply_temperature(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Logits with the same softmax as ``logits / temperature`` and a maximum of exactly 0.

    No small temperature overflows, and temperature 0 keeps only the most likely tokens, at 0. ``temperature`` is
    float32 [B], finite and at least 0.
    """
    # exercise 02x1: divide by the temperature so that neither 0 nor a tiny one overflows
    # hint: subtract the row's maximum first; the most likely token is then at 0, whatever the divisor
    peak = logits.amax(-1, keepdim=True)  # [B, 1]
    scaled = (logits - peak).div_(temperature[:, None])
    return scaled.masked_fill_(logits == peak, 0.0)  # also where the result would be NaN, from 0 / 0 or inf - inf
    # end exercise


def apply_min_p(logits: torch.Tensor, log_min_p: torch.Tensor) -> torch.Tensor:
    """Keep a token if it is at least ``min_p`` times as likely as the most likely token (arXiv 2407.01082).

    The logits have a maximum of 0, as ``apply_temperature`` leaves them. ``log_min_p`` is float32 [B], the logarithm of
    min_p; -inf leaves the row unchanged.
    """
    return logits.masked_fill(logits < log_min_p[:, None], -torch.inf)


def apply_top_k(logits: torch.Tensor, top_k: torch.Tensor, largest: int | None = None) -> torch.Tensor:
    """Keep a token if fewer than k tokens are strictly more likely; all ties at the cutoff are kept.

    ``top_k`` is int64 [B], each at least 1. ``largest`` is the largest limit, if known on the host, so that no more
    values are searched; rows with a larger k are left unchanged. None: the vocabulary's size.
    """
    # exercise 02x2: remove all tokens below the k-th largest value
    # hint: topk is sorted, so a row's cutoff is at index k - 1; a row whose k exceeds largest is left unchanged
    vocabulary = logits.shape[-1]
    largest = vocabulary if largest is None else min(largest, vocabulary)
    likeliest = logits.topk(largest).values  # [B, largest], descending
    cut = likeliest.gather(-1, (top_k.clamp(max=largest) - 1)[:, None])  # [B, 1], the k-th largest value
    return logits.masked_fill((logits < cut) & (top_k <= largest)[:, None], -torch.inf)
    # end exercise


def apply_top_p(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep a token if the strictly more likely tokens sum to less than p (nucleus sampling, arXiv 1904.09751).

    ``top_p`` is float64 [B], above 0 and at most 1. The token that crosses p is kept, as are its ties; p = 1 leaves a
    row unchanged. Probabilities are float32, of logits without +inf, and are summed in float64 in
    descending order, so a row's cutoff is the same in every batch.
    """
    # exercise 02x3: keep the most likely tokens until they sum to p
    # hint: cumsum in float64 in descending order; token i is kept if the i tokens before it sum to less than p
    # hint: sorting the whole vocabulary is correct; the top-k search first is only faster
    vocabulary = logits.shape[-1]
    limit = top_p[:, None]
    probabilities = logits.softmax(-1)
    # On a CPU, reading the values is free, so try a small top-k first; on a GPU, it would synchronize.
    sizes = (_NUCLEUS_GUESS, vocabulary) if logits.is_cpu and vocabulary > _NUCLEUS_GUESS else (vocabulary,)
    for size in sizes:
        likeliest = probabilities.topk(size).values  # [B, size], descending
        mass = likeliest.cumsum(-1, dtype=torch.float64)
        if size == vocabulary or bool(((mass[:, -1:] >= limit) | (limit >= 1)).all()):
            break
    num_kept = 1 + (mass[:, :-1] < limit).sum(-1, keepdim=True)  # token i is kept if the i before it sum to less than p
    cut = likeliest.gather(-1, num_kept - 1)  # [B, 1]
    return logits.masked_fill((probabilities < cut) & (limit < 1), -torch.inf)
    # end exercise
