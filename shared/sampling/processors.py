"""What is done to logits before a token is drawn, each step a pure function. Introduced in phase 2.

Order: grammar mask and penalties, temperature, top-k, top-p, draw. Each function takes float32 logits [B, V] with one
parameter per row, returns new logits and writes a removed token as -inf. Invariant: the arguments are never mutated.

Top-k and top-p are defined by the values of the other tokens ("strictly more likely"), not by a place in a sorted
list: tokens that tie share their fate, and every device agrees, whatever order its sort gives to equals. At least one
token always stays.
"""

import torch

_NUCLEUS_GUESS = 1024  # tokens; most nuclei are smaller, and finding so many is far cheaper than sorting a vocabulary


def apply_repetition_penalty(logits: torch.Tensor, seen: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """Make tokens of the prompt and the output so far less likely (CTRL, arXiv 1909.05858, section 4.1).

    A seen token's logit is divided by the penalty if positive and multiplied if negative, as in transformers.

    Args:
        logits: float32 [B, V].
        seen: bool [B, V], True for the ids of the row's prompt and output (``seen_mask``).
        penalty: float32 [B]; above 1 discourages repeats, 1 leaves the row as it is.
    """
    penalty = penalty[:, None]
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def seen_mask(rows: torch.Tensor, ids: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A bool mask [B, V] that is True at (rows[i], ids[i]): a ragged history, laid end to end, as a mask."""
    mask = torch.zeros(shape, dtype=torch.bool, device=ids.device)
    mask[rows, ids] = True
    return mask


def apply_temperature(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """``(logits - max) / temperature``: the softmax of ``logits / temperature``, with a likeliest token at exactly 0.

    Since the maximum is subtracted first, no temperature however small overflows, and at temperature 0 the likeliest
    tokens alone stay, at 0. ``temperature`` is float32 [B], finite and at least 0.
    """
    # exercise 02x1: divide by the temperature so that neither 0 nor a tiny one overflows
    # hint: subtract the row's maximum first; a likeliest token is then at 0, whatever it is divided by
    peak = logits.amax(-1, keepdim=True)  # [B, 1]
    scaled = (logits - peak).div_(temperature[:, None])
    return scaled.masked_fill_(logits == peak, 0.0)  # also where 0 / 0 or inf - inf would be NaN
    # end exercise


def apply_top_k(logits: torch.Tensor, top_k: torch.Tensor, largest: int | None = None) -> torch.Tensor:
    """Keep a token if fewer than k tokens are strictly more likely; ties at the cut all stay.

    Args:
        logits: float32 [B, V].
        top_k: int64 [B], each at least 1.
        largest: the host's knowledge of the largest limit, so that no more values are searched for; rows with a
            larger k are left as they are. None: the vocabulary's size.
    """
    # exercise 02x2: remove all tokens below the k-th largest value
    # hint: topk is sorted, so a row's cut stands at place k - 1; a row whose k exceeds largest stays as it is
    vocabulary = logits.shape[-1]
    largest = vocabulary if largest is None else min(largest, vocabulary)
    likeliest = logits.topk(largest).values  # [B, largest], descending
    cut = likeliest.gather(-1, (top_k.clamp(max=largest) - 1)[:, None])  # [B, 1], the k-th largest value
    return logits.masked_fill((logits < cut) & (top_k <= largest)[:, None], -torch.inf)
    # end exercise


def apply_top_p(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep a token if the tokens strictly more likely hold less than p of the probability (arXiv 1904.09751).

    So the token that crosses p stays, as do its equals; p = 1 leaves a row as it is. Masses are summed in float64 from
    float32 probabilities, from the likeliest down: the cut of a row is the same in every batch.

    Args:
        logits: float32 [B, V] without +inf, as ``apply_temperature`` leaves them.
        top_p: float64 [B], above 0 and at most 1.
    """
    # exercise 02x3: keep the likeliest tokens until they hold p of the probability
    # hint: cumsum in float64 from the likeliest down; token i stays if the i before it hold less than p
    # hint: to sort the whole vocabulary is right; the short search that comes first here is only faster
    vocabulary = logits.shape[-1]
    limit = top_p[:, None]
    probabilities = logits.softmax(-1)
    # On the CPU a look at the values costs nothing, so a short search comes first; elsewhere it would be a round trip.
    sizes = (_NUCLEUS_GUESS, vocabulary) if logits.is_cpu and vocabulary > _NUCLEUS_GUESS else (vocabulary,)
    for size in sizes:
        likeliest = probabilities.topk(size).values  # [B, size], descending
        mass = likeliest.cumsum(-1, dtype=torch.float64)
        if size == vocabulary or bool(((mass[:, -1:] >= limit) | (limit >= 1)).all()):
            break
    num_kept = 1 + (mass[:, :-1] < limit).sum(-1, keepdim=True)  # token i stays if the i before it hold less than p
    cut = likeliest.gather(-1, num_kept - 1)  # [B, 1]
    return logits.masked_fill((probabilities < cut) & (limit < 1), -torch.inf)
    # end exercise
