"""``kv.write`` in one launch: QK-norm, rotation, and the store of keys and values. Introduced in phase 3.1.

Between the QKV product and attention, families with QK-norm need two norms, a rotation of queries and keys, and two
copies into the KV cache: about a dozen operations in PyTorch, each of which reads and writes a few kilobytes. Here one
program loads a few heads of one token, keeps them in registers, and stores keys and values in their slots. It combines
the fused RoPE and cache kernels of vLLM (``reshape_and_cache``) and FlashInfer with the norm.

A token's slot is an element offset from the start of the layer's KV cache to the row of its first head, plus a stride
between heads. Contiguous caches, regions and blocks differ only in these numbers. Invariants: all arithmetic is fp32
and each result is rounded once; unlike with separate ops, the normed head is not rounded before it is rotated;
positions and offsets are uploaded before the step's first kernel, so they are read above the wait (``launch.py``).
"""

from typing import Protocol

import torch

from shared.kernels.e4m3 import quantized, rounded
from shared.kernels.launch import launch, launch_dependents, launches, next_power_of_two, tl, triton, wait_for_previous
from shared.kernels.products.rmsnorm import Norm

PROGRAMS = ((128, 512, 4), (512, 2048, 4), (2**62, 2048, 2))
"""How many numbers a program handles, and its warps, in steps of up to this many tokens. Starting a program takes the
GPU about a nanosecond, so with more tokens each program does more, and each thread as well."""


class NormAndRotation(Protocol):
    """The parts of a layer's transform that the launcher reads; ``shared.models.attention.NormAndRotate`` is one."""

    @property
    def table(self) -> torch.Tensor: ...  # fp32 [positions, 2, 1, D]
    @property
    def q_norm(self) -> Norm | None: ...
    @property
    def k_norm(self) -> Norm | None: ...

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


@triton.jit
def norm_and_rotate(
    x, out, x_head_stride, out_head_stride, first_head, turn, weight, eps, scales,
    OFFSET: tl.constexpr, num_heads, D: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norm (if there is a weight) and rotate HEADS heads, starting at ``first_head``; ``turn`` is the row of the RoPE
    table.

    ``scales``: the heads' scales, if they are stored as e4m3.
    """
    head = first_head + tl.arange(0, HEADS)[:, None]  # [HEADS, 1]
    d = tl.arange(0, HALF)[None, :]  # [1, HALF], over half a head
    in_half = d < D // 2
    inside = (head < num_heads) & in_half
    # The table's second half holds the cosine and the sine with a positive sign.
    cos = tl.load(turn + D // 2 + d, mask=in_half, other=0.0)
    sin = tl.load(turn + D + D // 2 + d, mask=in_half, other=0.0)
    if weight is not None:
        low_scale = tl.load(weight + d, mask=in_half, other=0.0).to(tl.float32) + OFFSET
        high_scale = tl.load(weight + D // 2 + d, mask=in_half, other=0.0).to(tl.float32) + OFFSET
    wait_for_previous(PDL)
    x += head * x_head_stride + d
    low = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(x + D // 2, mask=inside, other=0.0).to(tl.float32)
    if weight is not None:
        inverse_rms = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D + eps)[:, None]
        low *= inverse_rms * low_scale
        high *= inverse_rms * high_scale
    out += head * out_head_stride + d
    is_head = head < num_heads
    tl.store(out, stored(low * cos - high * sin, scales, head, is_head, out), mask=inside)
    tl.store(out + D // 2, stored(high * cos + low * sin, scales, head, is_head, out), mask=inside)


@triton.jit
def stored(x, scales, head, is_head, out):
    """x ``[HEADS, …]`` as it is stored: as e4m3 if there are scales."""
    if scales is None:
        return x
    else:
        scale = tl.load(scales + head, mask=is_head, other=1.0)
        return rounded(x.to(tl.float32) / scale, out.dtype.element_ty)


@triton.jit
def kv_write_kernel(
    q, k, v, q_out, keys, values, positions, offsets, table, q_weight, k_weight, q_token_stride, q_head_stride,
    k_token_stride, k_head_stride, v_token_stride, v_head_stride, memory_head_stride, q_eps, k_eps, k_scales, v_scales,
    Q_OFFSET: tl.constexpr, K_OFFSET: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)  # the programs of the queries come first, then those of the keys and of the values
    ALIGNMENT: tl.constexpr = D & -D  # the largest power of two that divides D, and therefore every offset
    Q_PARTS: tl.constexpr = (HQ + HEADS - 1) // HEADS
    KV_PARTS: tl.constexpr = (HKV + HEADS - 1) // HEADS
    if part < Q_PARTS:
        norm_and_rotate(
            q + token * q_token_stride, q_out + token * (HQ * D), q_head_stride, D, part * HEADS,
            table + tl.load(positions + token) * (2 * D), q_weight, q_eps, None, Q_OFFSET, HQ, D, HEADS, HALF, PDL,
        )  # fmt: skip
    elif part < Q_PARTS + KV_PARTS:
        start = tl.load(offsets + token)
        norm_and_rotate(
            k + token * k_token_stride, keys + tl.multiple_of(start, ALIGNMENT), k_head_stride, memory_head_stride,
            (part - Q_PARTS) * HEADS, table + tl.load(positions + token) * (2 * D), k_weight, k_eps, k_scales, K_OFFSET,
            tl.where(start >= 0, HKV, 0), D, HEADS, HALF, PDL,
        )  # fmt: skip
    else:
        head = (part - Q_PARTS - KV_PARTS) * HEADS + tl.arange(0, HEADS)[:, None]
        d = tl.arange(0, 2 * HALF)[None, :]
        start = tl.load(offsets + token)
        inside = (head < HKV) & (d < D) & (start >= 0)
        start = tl.multiple_of(start, ALIGNMENT)
        wait_for_previous(PDL)
        row = tl.load(v + token * v_token_stride + head * v_head_stride + d, mask=inside)
        row = stored(row, v_scales, head, head < HKV, values)
        tl.store(values + start + head * memory_head_stride + d, row, mask=inside)


def kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    qk: NormAndRotation,
    keys: torch.Tensor,
    values: torch.Tensor,
    offsets: torch.Tensor,
    head_stride: int,
    out: torch.Tensor | None = None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm and rotate q and k, store k and v in a layer's KV cache, return the queries.

    Args:
        q: ``[T, Hq, D]``, D even; q, k and v may be views into one QKV result.
        k, v: ``[T, Hkv, D]``.
        positions: int64 ``[T]``, rows of the RoPE table.
        qk: the layer's transform.
        keys, values: the layer's KV cache, each contiguous and of the same layout.
        offsets: int64 ``[T]``, in elements, from the start of the cache to the row of the token's first head; like
            ``head_stride``, multiples of D.
            Negative: the token is not stored (padding of a captured step).
        head_stride: elements between the rows of adjacent heads.
        out: output buffer of the queries, ``[T, Hq, D]`` contiguous; None: allocated.
        k_scales, v_scales: fp32 ``[Hkv]``, for a KV cache in e4m3 (FP8 or uint8); None: numbers are stored unscaled.

    Returns:
        ``[T, Hq, D]`` in the dtype of q.
    """
    T, Hq, D = q.shape
    Hkv = k.shape[1]
    if not launches(q):
        q, k = qk(q, k, positions)
        if k_scales is not None and v_scales is not None:
            k, v = quantized(k, k_scales), quantized(v, v_scales)
            keys, values = keys.view(torch.uint8), values.view(torch.uint8)
        rows = (offsets[:, None] + head_stride * torch.arange(Hkv, device=k.device)).flatten() // D  # [T · Hkv]
        keys.view(-1, D).index_copy_(0, rows, k.reshape(-1, D))
        values.view(-1, D).index_copy_(0, rows, v.reshape(-1, D))
        return q if out is None else out.copy_(q)
    if out is None:
        out = torch.empty(T, Hq, D, dtype=q.dtype, device=q.device)
    if T == 0:
        return out
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    numbers, num_warps = next(programs for most_tokens, *programs in PROGRAMS if most_tokens >= T)
    heads = max(1, numbers // next_power_of_two(D))
    launch(
        kv_write_kernel, (T, -(-Hq // heads) + 2 * -(-Hkv // heads)),
        q, k, v, out, keys, values, positions, offsets, qk.table, None if qk.q_norm is None else qk.q_norm.weight,
        None if qk.k_norm is None else qk.k_norm.weight, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        v.stride(0), v.stride(1), head_stride, 0.0 if qk.q_norm is None else qk.q_norm.eps,
        0.0 if qk.k_norm is None else qk.k_norm.eps, k_scales, v_scales,
        Q_OFFSET=0.0 if qk.q_norm is None else qk.q_norm.offset,
        K_OFFSET=0.0 if qk.k_norm is None else qk.k_norm.offset, HQ=Hq, HKV=Hkv, D=D, HEADS=heads,
        HALF=next_power_of_two(D // 2), num_warps=num_warps,
    )  # fmt: skip
    return out
