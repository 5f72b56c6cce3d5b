"""Calibration: how many keys a head needs, and the temperature that makes any score agree. Introduced in phase 9.2.

n* is the size of the smallest set of keys whose attention has mass p. The temperature T at which the top-n* mass of
softmax(score / T) is p makes a top-p choice by score keep n* keys (HARD-KV, arXiv 2606.28831). Without ties that is the
top n* by score, so no T is searched.

Invariant: a count is at least 1 and at most n.
"""

import torch
from torch import Tensor


def top_p_count(attention: Tensor, p: float) -> Tensor:
    """attention [..., n], rows that sum to 1 -> the size n* of the smallest set with mass at least p, [...]."""
    # exercise 09.2x2: how many keys does a head need
    # hint: the smallest set takes the heaviest keys first: sort, then add up (cumsum, with dtype=torch.float64)
    # hint: count the sums that are below p; one key more reaches it
    # hint: rounding may leave the whole sum below p: never more than n keys
    mass = attention.sort(-1, descending=True).values.cumsum(-1, dtype=torch.float64)
    return ((mass < p).sum(-1) + 1).clamp(max=attention.shape[-1])
    # end exercise


def top_n(scores: Tensor, count: Tensor) -> Tensor:
    """scores [..., n], count [...] -> bool [..., n], the `count` highest of each row; of equal ones the older."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    is_high = torch.arange(scores.shape[-1], device=scores.device) < count[..., None]  # by rank
    return torch.empty_like(is_high).scatter_(-1, order, is_high)


def pack(kept: Tensor) -> Tensor:
    """bool [..., n] -> uint8 [..., ceil(n / 8)]; bit j of byte b is slot 8 b + j."""
    padded = torch.nn.functional.pad(kept, (0, -kept.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (padded << torch.arange(8, device=kept.device)).sum(-1).to(torch.uint8)


def unpack(mask: Tensor, n: int) -> Tensor:
    """uint8 [..., ceil(n / 8)] -> bool [..., n]."""
    return (mask[..., None] >> torch.arange(8, device=mask.device) & 1).flatten(-2)[..., :n].bool()
