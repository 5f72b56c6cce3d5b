"""Paged prefill equals the formula in fp64: any mix of prompts, pieces of prompts and single tokens in one launch."""

import pytest
import torch

import shared.kernels.attention.paged_prefill as module
from shared.kernels.attention.paged_prefill import PrefillTiling, paged_prefill, paged_prefill_kernel
from tests.kernels.attention import DEVICE, HEADS, NAN, REAL, PagedMemory, assert_attended, draw_tokens, ints


def check(randn, assert_near, sequences, block_size=16, *, Hq=2, Hkv=1, D=16, dtype=torch.float32, unused=0, **limits):
    """``sequences``: of each its tokens in memory before the step, and its new ones; ``limits``: window, softcap."""
    num_new, lengths = [new for _, new in sequences], [past + new for past, new in sequences]
    T, window, limits = sum(num_new), limits.get("window"), {"scale": D**-0.5} | limits
    q = randn(T + unused, Hq + 2, D, dtype=dtype)[:, :Hq]  # part of a larger result
    seen = [
        length if window is None else min(length, n + window - 1) for n, length in zip(num_new, lengths, strict=True)
    ]
    memory = PagedMemory(draw_tokens(randn, lengths, Hkv, D, dtype), block_size, seen)
    query_starts = torch.tensor([0, *num_new]).cumsum(0).to(DEVICE, torch.int32)
    out = torch.full((T + unused, Hq, D), NAN, dtype=dtype, device=DEVICE)
    assert paged_prefill(q, *memory.arrays, query_starts, **limits, out=out) is out
    assert out[T:].isnan().all(), "rows of no sequence are not written"
    assert_attended(assert_near, out[:T], q[:T], memory.tokens, num_new, **limits)


MIXED = [(0, 20), (37, 1), (5, 9), (0, 1), (64, 33)]  # a prompt, a token, a piece with history, a prompt of one token


@pytest.mark.parametrize("window", [None, 1, 40])
def test_a_mixed_batch_in_one_launch(randn, assert_near, num_launches, dtype, window):
    check(randn, assert_near, MIXED, Hq=2, Hkv=2, dtype=dtype, window=window)
    assert num_launches(paged_prefill_kernel) == num_launches() == 1


@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_lengths_around_the_borders_of_blocks_and_tiles(randn, assert_near, block_size):
    check(randn, assert_near, [(past, n) for past in (0, 31) for n in (1, 15, 17, 33)], block_size, Hq=1)
    check(randn, assert_near, [(32, 16), (32, 32), (16, 48), (63, 2), (64, 1)], block_size, Hq=1)


@pytest.mark.parametrize("group", [1, 3, 7, 8])
def test_tiles_of_rows_may_end_within_a_token(randn, assert_near, group):
    check(randn, assert_near, [(3, 13), (0, 1), (17, 10)], Hq=2 * group, Hkv=2)


@pytest.mark.parametrize(("D", "dtype"), HEADS)
def test_head_sizes(randn, assert_near, dtype, D):
    check(randn, assert_near, [(20, 9), (0, 30)], Hq=2, Hkv=2, D=D, dtype=dtype)


@pytest.mark.parametrize("tiling", [PrefillTiling(16, 64), PrefillTiling(64, 32), PrefillTiling(128, 64)], ids=str)
@pytest.mark.parametrize("window", [None, 10])
def test_every_tiling(randn, assert_near, monkeypatch, tiling, window):
    """Also where tiles are much longer or shorter than what a sequence brings."""
    monkeypatch.setattr(module, "prefill_tiling", lambda *sizes: tiling)
    check(randn, assert_near, MIXED, Hq=2, window=window)


@pytest.mark.parametrize(
    ("sequences", "block_size", "window", "heads", "unused"),
    [
        ([(0, 0), (3, 40)], 31, 1, (3, 1), 9),
        ([(80, 17), (0, 16)], 7, 64, (2, 2), 0),
        ([(31, 2), (16, 16), (64, 1)], 100, 33, (1, 1), 3),
    ],
)
def test_windows_with_softcaps_and_unused_rows(randn, assert_near, sequences, block_size, window, heads, unused):
    options = {"window": window, "softcap": 3.0, "unused": unused}
    check(randn, assert_near, sequences, block_size, Hq=heads[0], Hkv=heads[1], **options)


def test_no_token(randn, num_launches):
    q, keys, none = randn(0, 2, 16), randn(1, 8, 1, 16), ints([])
    assert paged_prefill(q, keys, keys, none, none, none, none, scale=1.0).shape == (0, 2, 16)
    assert num_launches() == 0


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, 5.0)])
def test_without_a_gpu_the_op_does_the_same(randn, assert_near, monkeypatch, num_launches, window, softcap):
    monkeypatch.setattr(module, "launches", lambda tensor: False)
    check(randn, assert_near, [(4, 6), (9, 1), (2, 0), (0, 3)], 3, Hq=4, Hkv=2, window=window, softcap=softcap)
    assert num_launches() == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("Hq", "Hkv", "D", "block_size"), REAL)
def test_real_shapes(randn, assert_near, dtype, Hq, Hkv, D, block_size):
    """The three mixes take the three sizes of tiles."""
    for sequences in ([(0, 1500)], [(2000, 5), (300, 1), (0, 20), (4096, 16)], [(n, 1) for n in range(1, 900, 60)]):
        for window in (None, 512):
            options = {"Hq": Hq, "Hkv": Hkv, "D": D, "dtype": dtype, "window": window}
            check(randn, assert_near, sequences, block_size, **options)
