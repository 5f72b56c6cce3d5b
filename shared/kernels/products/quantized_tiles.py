"""Tiles of a quantized matrix in registers. Introduced in phase 10.

A tile holds the bytes as stored. With 8 bits, a byte is one column; with 4 bits, it is two. Byte i of a run of columns
holds column i in its low half and, in its high half, the column half a run later. So a tile is multiplied by two
contiguous pieces of x. FP8 is stored as uint8 on a GPU that cannot convert it.
"""

from shared.kernels.launch import INTERPRETED, tl, triton

COMPILED = tl.constexpr(not INTERPRETED)  # the interpreter has no assembler


@triton.jit
def widened(tile, dtype: tl.constexpr):
    """8-bit numbers in a wider dtype, exactly; FP8 stays FP8 if that is the dtype."""
    if tile.dtype == dtype:
        return tile
    elif tile.dtype == tl.uint8:
        # e4m3 and fp16 differ in the exponent's bias, 7 and 15, and in 7 bits of fraction, which are zero.
        # exercise 10x4: FP8 widened by its bits
        # hint: e4m3 is sign, 4 bits of exponent, 3 of fraction; fp16 is sign, 5 and 10
        # hint: in 16 bits, the sign goes from bit 7 to bit 15, and the other seven bits 7 places up
        # hint: .to(tl.float16, bitcast=True) reads the bits as fp16; the factor for the bias comes after
        bits = tile.to(tl.uint16)
        halves = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        # end exercise
        return (halves.to(tl.float32) * 256.0).to(dtype)
    elif COMPILED and (dtype == tl.bfloat16 or (dtype == tl.float32 and tile.dtype == tl.int8)):
        return widened_by_bits(tile, dtype)
    elif tile.dtype == tl.int8:
        return tile.to(dtype)
    else:
        return tile.to(tl.float16).to(dtype)


@triton.jit
def widened_by_bits(tile, dtype: tl.constexpr):
    """INT8 in fp32 or bf16, or FP8 in bf16, without conversion instructions, which take four times as long as others.

    INT8 in fp32: a byte plus 128 is the last byte of the fraction of 2^23. INT8 in bf16: seven bits are the fraction of
    128, and the eighth is the last bit of an exponent, which gives -128 or -256; their sum is the number. FP8: its bits
    are moved to bf16's positions, and a factor of 2^120 compensates for the different exponent biases.
    """
    if dtype == tl.float32:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            xor.b32 a, $4, 0x80808080;
            mov.b32 b, 0x4B000000;
            prmt.b32 $0, a, b, 0x7440;
            prmt.b32 $1, a, b, 0x7441;
            prmt.b32 $2, a, b, 0x7442;
            prmt.b32 $3, a, b, 0x7443;
            add.rn.f32 $0, $0, 0fCB000080;
            add.rn.f32 $1, $1, 0fCB000080;
            add.rn.f32 $2, $2, 0fCB000080;
            add.rn.f32 $3, $3, 0fCB000080;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [tile],
            dtype=tl.float32,
            is_pure=True,
            pack=4,
        )
    elif tile.dtype == tl.int8:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, one;
            prmt.b32 a, $2, 0, 0x4140;
            prmt.b32 b, $2, 0, 0x4342;
            lop3.b32 c, a, 0x00800080, 0xC300C300, 0xEA;
            lop3.b32 d, b, 0x00800080, 0xC300C300, 0xEA;
            lop3.b32 a, a, 0x007F007F, 0x43004300, 0xEA;
            lop3.b32 b, b, 0x007F007F, 0x43004300, 0xEA;
            mov.b32 one, 0x3F803F80;
            fma.rn.bf16x2 $0, a, one, c;
            fma.rn.bf16x2 $1, b, one, d;
            }""",
            "=&r,=&r,r",
            [tile],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, factor, zero;
            prmt.b32 a, $2, 0, 0x1404;
            prmt.b32 b, $2, 0, 0x3424;
            shr.b32 c, a, 4;
            shr.b32 d, b, 4;
            and.b32 c, c, 0x07F007F0;
            and.b32 d, d, 0x07F007F0;
            lop3.b32 c, a, 0x80008000, c, 0xEA;
            lop3.b32 d, b, 0x80008000, d, 0xEA;
            mov.b32 factor, 0x7B807B80;
            mov.b32 zero, 0x80008000;
            fma.rn.bf16x2 $0, c, factor, zero;
            fma.rn.bf16x2 $1, d, factor, zero;
            }""",
            "=&r,=&r,r",
            [tile.to(tl.uint8, bitcast=True)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )


@triton.jit
def loaded_row(i, WARPS: tl.constexpr):
    """The row of a tile whose bytes are loaded as row i, for :func:`as_operand`: 8 rows per warp, then the next
    warp."""
    return i // (16 * WARPS) * (16 * WARPS) + i // 8 % WARPS * 16 + i // (8 * WARPS) % 2 * 8 + i % 8


@triton.jit
def operand_column(j, BITS: tl.constexpr):
    """The column at position j in the rows of :func:`as_operand`; with 4 bits, that of the low half."""
    return j // 64 * (512 // BITS) + j // 2 % 4 * 16 + j // 16 % 4 * 4 + j // 8 % 2 * 2 + j % 2


@triton.jit
def as_operand(tile, WARPS: tl.constexpr):
    """Bytes ``[S, R, 64]`` of R rows, as loaded, as the tensor cores' first operand ``[R, 64 S]``.

    A thread loads 16 adjacent bytes of a row, but a tensor core expects a thread to hold 2 columns at one position and
    2 at another, in two rows that are 8 apart. But a product may take columns and rows in any order, as long as x and
    the result use the same order. So the bytes that a thread has loaded are relabelled as those that it should have,
    and no byte moves to another thread.
    """
    S: tl.constexpr = tile.shape[0]
    R: tl.constexpr = tile.shape[1]
    tile = tile.reshape([S, R // (16 * WARPS), 2, WARPS, 8, 4, 4, 2, 2])
    return tile.permute([1, 3, 2, 4, 0, 6, 7, 5, 8]).reshape([R, 64 * S])


@triton.jit
def halves(tile, zero, dtype: tl.constexpr):
    """The low and high halves of bytes, minus ``zero``, in fp16 or bf16: two tiles.

    Four bits become the last fraction bits of ``128 + n`` in bf16 and of ``1024 + n`` in fp16, so no number is
    converted: for a pair, one operation makes the fractions and one subtracts 128 and the zero.
    """
    if COMPILED and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, one;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            lop3.b32 $0, a, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 $1, b, 0x000F000F, 0x43004300, 0xEA;
            shr.b32 a, a, 4;
            shr.b32 b, b, 4;
            lop3.b32 $2, a, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 $3, b, 0x000F000F, 0x43004300, 0xEA;
            mov.b32 one, 0x3F803F80;
            fma.rn.bf16x2 $0, $0, one, $5;
            fma.rn.bf16x2 $1, $1, one, $6;
            fma.rn.bf16x2 $2, $2, one, $5;
            fma.rn.bf16x2 $3, $3, one, $6;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r",
            [tile, (-128.0 - zero).to(tl.bfloat16)],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    elif COMPILED and dtype == tl.float16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            lop3.b32 $0, a, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 $1, b, 0x000F000F, 0x64006400, 0xEA;
            shr.b32 a, a, 4;
            shr.b32 b, b, 4;
            lop3.b32 $2, a, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 $3, b, 0x000F000F, 0x64006400, 0xEA;
            add.rn.f16x2 $0, $0, $5;
            add.rn.f16x2 $1, $1, $6;
            add.rn.f16x2 $2, $2, $5;
            add.rn.f16x2 $3, $3, $6;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r",
            [tile, (-1024.0 - zero).to(tl.float16)],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        return ((tile & 15).to(tl.float32) - zero).to(dtype), ((tile >> 4).to(tl.float32) - zero).to(dtype)


@triton.jit
def columns(b, RUN: tl.constexpr, BITS: tl.constexpr):
    """The column of byte b of a row; of its low half if a byte holds two."""
    if BITS == 8:
        return b
    else:
        HALF: tl.constexpr = RUN // 2
        return b // HALF * RUN + b % HALF
