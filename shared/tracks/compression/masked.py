"""Attention over keys of which each head sees its own. Introduced in phase 9.2.

Invariant: as in :mod:`shared.ops.attention`, causality follows the order in the cache, and the new tokens come last.
"""

import torch
from torch import Tensor

from shared.ops.attention import visible


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kept: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """As :func:`shared.ops.attention.naive_attention`, over the keys that are ``kept``, bool ``[Hkv, S]``."""
    T, Hq, D = q.shape
    Hkv, S, _ = k.shape
    scores = torch.einsum("thgd,hsd->hgts", q.view(T, Hkv, Hq // Hkv, D), k).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = visible(T, S, window, q.device) & kept[:, None, None]
    weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1).to(q.dtype)
    return torch.einsum("hgts,hsd->thgd", weights, v).reshape(T, Hq, D)
