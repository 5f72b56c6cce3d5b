"""Grouped-query attention of one sequence's new tokens over its cache. Introduced in phase 1a.

Vaswani et al., arXiv 1706.03762; grouped heads: Ainslie et al., arXiv 2305.13245. Two backends with one signature:
``naive`` spells out the formula, ``sdpa`` calls PyTorch's. Invariant: causality follows the order in the cache. Of S
cached tokens the last T are the new ones, so query i has cache index S - T + i and attends to no later index; positions
are not used. Keys and values are never expanded to the number of query heads.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F


def visible(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """The attention mask: which cache index each new token attends to, bool ``[T, S]``; a window includes the token
    itself."""
    # exercise 01ax2: which of the S cached tokens each of the T new ones may see
    # hint: number the queries S - T … S - 1 and the keys 0 … S - 1, and compare a column with a row
    query = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    key = torch.arange(num_keys, device=device)[None, :]
    mask = key <= query
    return mask if window is None else mask & (key > query - window)
    # end exercise


def naive_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """``softmax(scale · q kᵀ) v``, computed by the formula, with scores in fp32.

    Args:
        q: ``[T, Hq, D]``, the new tokens.
        k, v: ``[Hkv, S, D]``, all cached tokens, with the new ones last; Hq is a multiple of Hkv.
        window: attend only to the last ``window`` tokens, the token itself included.
        softcap: scores become ``c · tanh(scores / c)`` before the mask.

    Returns:
        ``[T, Hq, D]`` in the dtype of ``q``.
    """
    T, Hq, D = q.shape
    Hkv, S, _ = k.shape
    # exercise 01ax4: scores, softcap, mask, softmax, values, with Hq / Hkv query heads to a KV head
    # hint: view q as [T, Hkv, Hq / Hkv, D]; two einsums then need no copy of the keys
    grouped = q.view(T, Hkv, Hq // Hkv, D)
    scores = torch.einsum("thgd,hsd->hgts", grouped, k).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible(T, S, window, q.device), float("-inf"))
    weights = scores.softmax(dim=-1).to(q.dtype)
    return torch.einsum("hgts,hsd->thgd", weights, v).reshape(T, Hq, D)
    # end exercise


def sdpa_without_cudnn(*args: Any, **kwargs: Any) -> torch.Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` without cuDNN's kernels.

    PyTorch prefers cuDNN on a Hopper GPU. cuDNN makes a plan for every new length of the keys: 45 ms on an H100 for an
    attention of 10 µs, and during decode every length is new.
    """
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        return F.scaled_dot_product_attention(*args, **kwargs)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_enabled)


def sdpa_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Like :func:`naive_attention`, using ``scaled_dot_product_attention``; softcap falls back to the formula."""
    if softcap is not None:
        return naive_attention(q, k, v, scale=scale, window=window, softcap=softcap)
    T, Hq, D = q.shape
    Hkv, S, _ = k.shape
    G = Hq // Hkv
    if T == 1 and window is not None:
        k, v = k[:, -window:], v[:, -window:]
    k, v = k[None], v[None]  # the fast kernels need four dimensions
    if T > 1 and S == T and (window is None or window >= S):
        out = sdpa_without_cudnn(q.transpose(0, 1)[None], k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)
    # With a mask the fast kernels need equal head counts, so the heads of a group become rows that share their keys.
    mask = None if T == 1 else visible(T, S, window, q.device).repeat(G, 1)  # [G · T, S]
    rows = q.view(T, Hkv, G, D).permute(1, 2, 0, 3).reshape(1, Hkv, G * T, D)
    out = sdpa_without_cudnn(rows, k, v, attn_mask=mask, scale=scale)
    return out.view(Hkv, G, T, D).permute(2, 0, 1, 3).reshape(T, Hq, D)


AttentionOp = Callable[..., torch.Tensor]
ATTENTION_BACKENDS: dict[str, AttentionOp] = {"naive": naive_attention, "sdpa": sdpa_attention}
