"""Rounding, scales and packing on matrices small enough to be checked by hand."""

import pytest
import torch

from shared.quantization.formats.stored import unpack_int32
from shared.quantization.rounding import rounded
from shared.quantization.weight import QuantizedWeight, dequantize, spread
from tests.comparison import assert_close, assert_equal


def test_the_largest_of_a_row_is_the_largest_number() -> None:
    numbers, scales = rounded(torch.tensor([[1.0, -2.54, 0.5], [0.1, 0.3, -0.635]]), 127.0, torch.int8)
    assert_close(scales, torch.tensor([[0.02], [0.005]]), "scales", ("row",), rtol=1e-6)
    assert_equal(numbers.tolist(), [[50, -127, 25], [20, 60, -127]], "numbers", ("row", "column"))


def test_numbers_are_rounded_to_the_nearest() -> None:
    row = torch.tensor([[127.0, 0.4, 0.6, -0.6, 5.7, -5.7]])
    numbers, _ = rounded(row, 127.0, torch.int8)
    assert_equal(numbers.tolist(), [[127, 0, 1, -1, 6, -6]], "numbers, scale 1", ("row", "column"))


def test_a_row_of_zeros_stays_zero() -> None:
    numbers, scales = rounded(torch.tensor([[0.0, 0.0], [4.0, 0.0]]), 4.0, torch.int8)
    assert_equal(scales.tolist(), [[1.0], [1.0]], "scales; the first row has only zeros", ("row",))
    assert_equal(numbers.tolist(), [[0, 0], [4, 0]], "numbers", ("row", "column"))


def test_four_bits_reach_from_minus_eight_to_seven() -> None:
    numbers, _ = rounded(torch.tensor([[7.5, -1.0], [-7.5, 1.0]]), 7.5, torch.int8)
    assert_equal(numbers.tolist(), [[7, -1], [-8, 1]], "numbers of 4 bits, scale 1", ("row", "column"))


def test_values_on_their_device_are_aligned() -> None:
    """Those of a mapped file begin anywhere."""
    weight = QuantizedWeight(torch.zeros(65, dtype=torch.int8)[1:].view(4, 16), torch.ones(4, 1), None, 16)
    assert_equal(weight.to(torch.device("cpu")).values.data_ptr() % 16, 0, "bytes past a multiple of 16")


def test_floats_of_8_bits_keep_their_fraction() -> None:
    numbers, scales = rounded(torch.tensor([[448.0, 0.875, -0.4375]]), 448.0, torch.float8_e4m3fn)
    assert_equal(scales.tolist(), [[1.0]], "scales", ("row",))
    assert_equal(numbers.float().tolist(), [[448.0, 0.875, -0.4375]], "numbers of FP8", ("row", "column"))


@pytest.mark.parametrize(
    ("rows_per_scale", "columns_per_scale", "scales"),
    [
        pytest.param(1, 4, [[1], [2], [3]], id="a scale a row"),
        pytest.param(3, 4, [[5]], id="a scale a tensor"),
        pytest.param(1, 2, [[1, 2], [3, 4], [5, 6]], id="a scale a group"),
        pytest.param(2, 2, [[1, 2], [3, 4]], id="a scale a block, the last one of one row"),
    ],
)
def test_a_scale_belongs_to_its_block(rows_per_scale: int, columns_per_scale: int, scales: list[list[int]]) -> None:
    ones = torch.ones(3, 4, dtype=torch.int8)
    weight = QuantizedWeight(ones, torch.tensor(scales).float(), None, columns_per_scale, rows_per_scale)
    expected = [[scales[n // rows_per_scale][k // columns_per_scale] for k in range(4)] for n in range(3)]
    assert_equal(dequantize(weight), torch.tensor(expected).float(), "weights of one unit", ("row", "column"))
    found = spread(weight, torch.tensor(scales, dtype=torch.uint8))
    assert_equal(found, torch.tensor(expected).float(), "what belongs to each number, of uint8", ("row", "column"))
    found, tenths = spread(weight, torch.tensor(scales) / 10), torch.tensor(expected) / 10
    assert_equal(found, tenths, "what belongs to each number, in fp32", ("row", "column"))


@pytest.mark.parametrize(("scales", "zeros"), [([[1, 10]], [[3, 5]]), ([[1]], [[8]])])
def test_a_zero_belongs_to_the_block_of_its_scale(scales: list[list[int]], zeros: list[list[int]]) -> None:
    of_scales, of_zeros = torch.tensor(scales).float(), torch.tensor(zeros).to(torch.uint8)
    nines = torch.full((2, 2), 0x99, dtype=torch.uint8)
    weight = QuantizedWeight(nines, of_scales, of_zeros, 4 // len(scales[0]), 2)
    row = [(9 - zero) * scale for scale, zero in zip(scales[0], zeros[0], strict=True)]
    expected = [[row[k * len(row) // 4] for k in range(4)]] * 2
    assert_equal(dequantize(weight), torch.tensor(expected).float(), "weights of nine units", ("row", "column"))


NIBBLES = torch.tensor([0x76543210, -0x01234568], dtype=torch.int32)  # the second is 0xFEDCBA98
IN_ORDER = list(range(16))


def test_eight_nibbles_along_a_row() -> None:
    numbers = unpack_int32(NIBBLES[None], 4, dim=1)
    assert_equal(numbers.tolist(), [IN_ORDER], "nibbles of 0x76543210 and 0xFEDCBA98", ("row", "column"))
    assert_equal(numbers.dtype, torch.uint8, "dtype of the numbers")


def test_eight_nibbles_along_a_column() -> None:
    numbers = unpack_int32(torch.stack((NIBBLES, NIBBLES), dim=1), 4, dim=0)
    assert_equal(numbers.tolist(), [[n, n] for n in IN_ORDER], "nibbles along columns", ("row", "column"))


def test_four_bytes_of_an_int32() -> None:
    numbers = unpack_int32(torch.tensor([[-0x7EFD7F01]], dtype=torch.int32), 8, dim=1)  # 0x810280FF
    assert_equal(numbers.tolist(), [[0xFF, 0x80, 0x02, 0x81]], "bytes of 0x810280FF", ("row", "column"))
