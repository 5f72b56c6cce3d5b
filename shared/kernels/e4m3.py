"""Keys and values in 8 bits (FP8, e4m3), in kernels and ops. Used from phase 10 on; ``kv_write`` imports it in phase
3.1.

A KV head's numbers are stored as e4m3, divided by the head's scale. e4m3 has 4 bits of exponent and 3 of fraction:
numbers from 2^-6 to 448 keep a relative precision of 2^-4, smaller ones are multiples of 2^-9, and larger ones become
448 (Micikevicius et al., arXiv 2209.05433).

From capability 8.9 on, a GPU converts e4m3 to fp16, which holds each number exactly, two at a time. On an older GPU the
bytes are uint8, and integer operations move their bits into an fp16. This divides the number by 256, since the exponent
biases differ by 8; the scale includes the factor 256. So if the model computes in 16 bits, attention over these bytes
multiplies in fp16, and its products keep everything that bf16 would.

Invariant: rounding uses integer arithmetic, so every GPU and the op store a number as the same byte; a NaN is stored as
NaN, which an older GPU reads as 480.
"""

import torch

from shared.kernels.launch import INTERPRETED as IS_INTERPRETED
from shared.kernels.launch import tl, triton

LARGEST = 448.0
INTERPRETED = tl.constexpr(IS_INTERPRETED)  # the interpreter has no assembler


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """fp32 as FP8 or uint8 memory stores it: the nearest e4m3, ties to even."""
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)  # 3 bits of fraction; the bias falls by 120
    subnormal = (tl.abs(x) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000  # in fp32 2^14 + x rounds to 2^-9
    magnitude = tl.where(size < 0x3C800000, subnormal, tl.minimum(normal, 0x7E))  # 2^-6; 448
    magnitude = tl.where(size > 0x7F800000, 0x7F, magnitude)  # NaN
    return (((bits >> 24) & 0x80) | magnitude).to(tl.uint8).to(dtype, bitcast=True)


@triton.jit
def widened(x, dtype: tl.constexpr):
    """e4m3 in a wider dtype, divided by 256 if it is uint8; other dtypes are unchanged."""
    if x.dtype == tl.uint8:
        bits = x.to(tl.uint16)
        return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(dtype)
    elif x.dtype == tl.float8e4nv:
        return x.to(tl.float16).to(dtype)
    else:
        return x


@triton.jit
def widened_pair(pairs, dtype: tl.constexpr):
    """Two e4m3 in uint16, widened and divided by 256: the low byte's, and the high byte's.

    A product over tokens needs the numbers of two tokens in one register, and the loads that transpose a tile move 16
    bits. Loaded as bytes, values come one at a time; loaded in pairs of columns, four numbers take five instructions.
    """
    if INTERPRETED:
        low = widened(pairs.to(tl.uint8), dtype)
        high = widened((pairs >> 8).to(tl.uint8), dtype)
    else:
        low, high = tl.inline_asm_elementwise(
            """{
                .reg .b32 size, sign;
                and.b32 size, $2, 0x7f007f00;
                and.b32 sign, $2, 0x80008000;
                shr.u32 size, size, 1;
                or.b32 $1, size, sign;
                shl.b32 size, $2, 8;
                and.b32 sign, size, 0x80008000;
                and.b32 size, size, 0x7f007f00;
                shr.u32 size, size, 1;
                or.b32 $0, size, sign;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return low.to(dtype), high.to(dtype)


@triton.jit
def for_product(queries, memory):
    """Queries, in the dtype in which they are multiplied with keys stored in ``memory``."""
    if memory.dtype.element_ty.primitive_bitwidth == 8 and queries.dtype != tl.float32:
        return queries.to(tl.float16)
    else:
        return queries


@triton.jit
def scale_of(scales, kv_head, memory):
    """The factor for a head's widened numbers; 1 if there are no scales."""
    if scales is None:
        return 1.0
    elif memory.dtype.element_ty == tl.uint8:
        return tl.load(scales + kv_head) * 256.0
    else:
        return tl.load(scales + kv_head)


def quantized(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The op: x ``[T, Hkv, D]`` as bytes, uint8, with fp32 ``[Hkv]`` scales."""
    scaled = (x.float() / scales[:, None]).clamp(-LARGEST, LARGEST)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8)


def dequantized(x: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The op: bytes ``[S, Hkv, D]``, uint8 or FP8, as numbers of ``dtype``."""
    return (x.view(torch.float8_e4m3fn).float() * scales[:, None]).to(dtype)
