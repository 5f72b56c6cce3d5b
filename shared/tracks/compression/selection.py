"""Selection: the keys that a KV head keeps, within a budget. Introduced in phase 9.2.

The attention of the window determines how many keys a head needs: n*, the size of the smallest set of keys with
attention mass p. HARD-KV (arXiv 2606.28831) searches for the temperature T at which a top-p choice by softmax(score /
T) keeps n* keys. Without ties these are the top n* by score, so no search is needed. The compressor's scores choose the
keys, and the budget bounds their number. So heads keep different numbers of keys: one that attends to few keys keeps
the budget's minimum, one that attends everywhere the maximum.

Invariant: the sinks and the recent keys are kept, whatever their scores; otherwise at most ``n`` keys are kept.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.tracks.compression.compressors import Compressor, window_attention

REDUCTIONS = ("raw", "mean", "sum", "max")


@dataclass(frozen=True)
class Budget:
    """How many keys a head keeps: as many as its attention needs for mass ``p``, clamped to two bounds."""

    least: int  # layer_budget; a head with fewer keys keeps all
    most: int  # layer_upper_budget
    p: float = 0.9
    num_sinks: int = 4  # the first tokens, which absorb surplus attention (arXiv 2309.17453)
    num_recent: int = 32
    reduction: str = "mean"  # reduces the window's rows; one of REDUCTIONS


def top_p_count(attention: Tensor, p: float) -> Tensor:
    """attention [..., n], rows that sum to 1 -> n*, the size of the smallest set with mass at least p, [...]."""
    # exercise 09.2x2: how many keys does a head need
    # hint: the smallest set takes the heaviest keys first: sort, then add up (cumsum, with dtype=torch.float64)
    # hint: count the sums that are below p; one key more reaches it
    # hint: rounding may leave the whole sum below p: never more than n keys
    mass = attention.sort(-1, descending=True).values.cumsum(-1, dtype=torch.float64)
    return ((mass < p).sum(-1) + 1).clamp(max=attention.shape[-1])
    # end exercise


def top_n(scores: Tensor, count: Tensor) -> Tensor:
    """scores [..., n], count [...] -> bool [..., n], the `count` highest of each row; ties go to the older key."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    is_high = torch.arange(scores.shape[-1], device=scores.device) < count[..., None]  # by rank
    return torch.empty_like(is_high).scatter_(-1, order, is_high)


def needed(attention: Tensor, p: float, reduction: str) -> Tensor:
    """attention [Hkv, g, w, n] -> how many keys each head needs for mass p, [Hkv].

    ``raw`` takes the largest count of all rows. The others reduce the g · w rows to one and normalize it, so ``sum``
    equals ``mean``; it exists because the original has it.
    """
    rows = attention.flatten(1, 2)
    if reduction == "raw":
        return top_p_count(rows, p).amax(-1)
    reduced = rows.amax(1) if reduction == "max" else rows.mean(1)
    return top_p_count(reduced / reduced.sum(-1, keepdim=True), p)


def select(queries: Tensor, keys: Tensor, compressor: Compressor, budget: Budget, scale: float | None = None) -> Tensor:
    """The keys that each head keeps, bool [Hkv, n]; arguments as for ``Compressor.scores``."""
    scores, index = compressor.scores(queries, keys), torch.arange(len(keys), device=keys.device)
    always = (index < budget.num_sinks) | (index >= len(keys) - budget.num_recent)
    # exercise 09.2x3: as many as a head needs, within the budget
    # hint: needed() says how many keys a head needs, from window_attention; top_n takes the best of each head
    # hint: what is always kept comes on top: count the union of both sets
    # hint: clamp the counts to budget.least and budget.most
    # hint: take the top `count` of scores in which whatever is always kept is infinite (torch.inf)
    # hint: last, a count is no smaller than the number of infinite scores, even above budget.most
    most_needed = needed(window_attention(queries, keys, scale), budget.p, budget.reduction)
    count = (top_n(scores, most_needed) | always).sum(-1).clamp(budget.least, budget.most)
    scores = scores.masked_fill(always, torch.inf)
    count = count.maximum(scores.isposinf().sum(-1))
    return top_n(scores, count)
    # end exercise
