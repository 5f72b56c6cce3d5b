"""Tiles of a quantized matrix in registers. Introduced in phase 10.

A tile holds the bytes as they are stored. With 8 bits a byte is a column, with 4 bits two: byte i of a run of columns
holds column i in its low half and column i + half a run in its high half, so a tile is multiplied by two contiguous
pieces of x. FP8 is uint8 on a GPU that cannot convert it.
"""

from shared.kernels.launch import tl, triton


@triton.jit
def widened(tile, dtype: tl.constexpr):
    """8 bits in a wider dtype, exactly; in FP8 itself FP8 stays as it is."""
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
    elif tile.dtype == tl.int8:
        return tile.to(dtype)
    else:
        return tile.to(tl.float16).to(dtype)


@triton.jit
def columns(b, RUN: tl.constexpr, BITS: tl.constexpr):
    """The column of byte b of a row, of its low half where a byte holds two."""
    if BITS == 8:
        return b
    else:
        HALF: tl.constexpr = RUN // 2
        return b // HALF * RUN + b % HALF
