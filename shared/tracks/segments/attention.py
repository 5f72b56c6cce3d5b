"""Attention over one range of keys, as a state that can be merged with other ranges' states. Introduced in phase 9.1.

A request made of segments attends to several ranges of keys: its segments, and its own tokens. Each range gives a state
(:mod:`shared.attention.states`, phase 6.1), and the merged states give the attention over all keys. A segment that
several sequences of a step read is one range for all of their queries, so its keys are read once. FlashInfer calls this
cascade attention (arXiv 2501.01005).

Invariant: within a range, keys are numbered from 0, and a query has an index on the same scale. It sees the keys up to
its index or, with a window, only the last of those. For a request's own tokens this is causality. For a segment, whose
keys all precede the query, the index is the distance that the window counts.
"""

import torch
from torch import Tensor

from shared.attention.states import State

LOG2_E = 1.4426950408889634


def range_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> State:
    """The state of T queries over the keys of a range; scores and the result in fp32.

    Args:
        q: ``[T, Hq, D]``.
        k, v: ``[Hkv, S, D]``; Hq is a multiple of Hkv.
        indices: int64 ``[T]``; query t sees the keys numbered up to ``indices[t]``.
        window: it sees only numbers greater than ``indices[t] - window``, since the window counts the query's own
            token.
        softcap: scores become ``c · tanh(scores / c)`` before the mask.

    Returns:
        Values ``[T, Hq, D]`` and logarithms ``[T, Hq]``, base 2; zeros and -inf for a query that sees no key.
    """
    T, Hq, D = q.shape
    Hkv, S, _ = k.shape
    grouped = q.float().view(T, Hkv, Hq // Hkv, D).permute(1, 2, 0, 3).reshape(Hkv, -1, D)
    scores = (grouped @ k.float().mT * scale).view(Hkv, -1, T, S)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    # exercise 09.1x2: the state of a range
    # hint: number the keys 0 … S - 1; a query sees key j if j <= index, and with a window only if j > index - window
    # hint: set the scores of the others to -inf; `scores` is [Hkv, G, T, S], the mask [T, S]
    # hint: leave in `peak` the largest score of each row, in `weights` exp(scores - peak), in `total` their sum
    # hint: -inf minus -inf is NaN: a row that sees no key needs another peak, such as 0
    number = torch.arange(S, device=q.device)
    sees = number <= indices[:, None]  # [T, S]
    if window is not None:
        sees &= number > indices[:, None] - window
    if not sees.all():
        scores = scores.masked_fill(~sees, -torch.inf)
    peak = scores.amax(-1, keepdim=True)  # [Hkv, G, T, 1]
    peak = torch.where(peak == -torch.inf, 0.0, peak)
    weights = (scores - peak).exp_()
    total = weights.sum(-1, keepdim=True)
    # end exercise
    values = (weights.view(Hkv, -1, S) @ v.float()).view(Hkv, -1, T, D) / torch.where(total == 0, 1.0, total)
    logs = (peak + total.log())[..., 0] * LOG2_E  # [Hkv, G, T]
    return values.permute(2, 0, 1, 3).reshape(T, Hq, D), logs.permute(2, 0, 1).reshape(T, Hq)
