"""Attention and positions in a step that verifies guesses and makes the next ones. Introduced in phase 11.1.

A request's new tokens are n *real* ones (its newest token and n - 1 guesses) and, for each of them, a *group* of k mask
tokens, which represent the k tokens that follow it. If the guesses up to real token g are right, the hidden states of
group g yield the next guesses (Samragh et al., arXiv 2507.11851). With n = k + 1 there are (k + 1)² tokens.

The real tokens come first, then the groups. So the keys and values of accepted tokens are already in their final slots,
and nothing is copied. The paper's order, with each group after its token, would move them in every layer of every step.

A token has a group g and, within it, a rank r: a real token has rank 0, mask tokens 1 to k. Invariants: a real token
sees what it would see without masks; a mask token sees the real tokens up to its group's own, and its group's masks up
to itself.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Integers = NDArray[np.int64]


def groups_and_ranks(num_real: int, num_masks: int) -> tuple[Integers, Integers]:
    """g and r of each of the ``num_real · (1 + num_masks)`` new tokens, in the order of the step."""
    real = np.arange(num_real)
    ranks = np.tile(np.arange(1, num_masks + 1), num_real)
    return np.append(real, real.repeat(num_masks)), np.append(np.zeros_like(real), ranks)


def positions(start: int, num_real: int, num_masks: int) -> Integers:
    """The position of each new token of a request whose first new token has position ``start``."""
    group, rank = groups_and_ranks(num_real, num_masks)
    # exercise 11.1x2: where in the text each token stands
    # hint: real token g is the g-th after `start`, whatever is laid down between
    # hint: the mask of rank r represents the token r positions after its group's real token
    return start + group + rank
    # end exercise


def visible_with_masks(
    num_cached: int, num_real: int, num_masks: int, window: int | None = None, device: torch.device | None = None
) -> Tensor:
    """The attention mask: which keys each new token attends to, bool ``[T, num_cached + T]``.

    Args:
        num_cached: keys before the new tokens; with a window, at least those that the first new token can see.
        window: of a sliding-window layer, the token itself included; distances are between positions.
    """
    numbers = groups_and_ranks(num_real, num_masks)
    group, rank = (torch.from_numpy(array).to(device) for array in numbers)  # [T] each
    # exercise 11.1x1: what each new token sees of the new tokens
    # hint: compare a column, the queries, with a row, the keys: group[:, None] and group[None, :]
    # hint: every token sees the real tokens (rank 0) of its own group and of those before
    # hint: a mask token also sees the masks of its own group, up to its own rank
    # hint: leave the result in `new`, bool [T, T]
    is_real = (rank == 0)[None, :] & (group[None, :] <= group[:, None])
    is_own = (group[None, :] == group[:, None]) & (rank[None, :] > 0) & (rank[None, :] <= rank[:, None])
    new = is_real | is_own
    # end exercise
    mask = torch.cat((new.new_ones(len(new), num_cached), new), dim=1)
    if window is None:
        return mask
    numbered = torch.from_numpy(positions(num_cached, num_real, num_masks)).to(device)
    keys = torch.cat((torch.arange(num_cached, device=device), numbered))
    return mask & (keys[None, :] > numbered[:, None] - window)


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, scale: float, softcap: float | None = None
) -> Tensor:
    """Like :func:`shared.ops.attention.naive_attention`, with a mask, bool ``[T, S]``, instead of causality."""
    T, Hq, D = q.shape
    Hkv = k.shape[0]
    grouped = q.view(T, Hkv, Hq // Hkv, D)
    scores = torch.einsum("thgd,hsd->hgts", grouped, k).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1).to(q.dtype)
    return torch.einsum("hgts,hsd->thgd", weights, v).reshape(T, Hq, D)
