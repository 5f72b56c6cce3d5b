"""Paged decode attention equals the formula in fp64, wherever the blocks lie and whatever lies in the others."""

import pytest
import torch

import shared.kernels.attention.paged_attention as module
from shared.kernels.attention.decode_attention import DecodeWorkspace, decode_attention
from shared.kernels.attention.paged_attention import TILINGS, paged_attention, paged_attention_kernel
from tests.kernels.attention import (
    DEVICE,
    HEADS,
    REAL,
    PagedMemory,
    assert_attended,
    decode_workspace,
    draw_tokens,
    ints,
)


def check(randn, assert_near, lengths, block_size, *, Hq=4, Hkv=2, D=16, dtype=torch.float32, splits=None, **limits):
    """``limits``: the window and the softcap."""
    B, window, limits = len(lengths), limits.get("window"), {"scale": D**-0.5} | limits
    q = randn(B, Hq + 2, D, dtype=dtype)[:, :Hq]  # part of a larger result
    seen = [length if window is None else min(window, length) for length in lengths]
    memory = PagedMemory(draw_tokens(randn, lengths, Hkv, D, dtype), block_size, seen)
    if splits is None:
        workspace = DecodeWorkspace.of(B, Hq, Hkv, D, max(*lengths, 1), DEVICE)
    else:
        workspace = decode_workspace(B, Hq, Hkv, D, splits)
    out = paged_attention(q, *memory.arrays, **limits, workspace=workspace)
    assert_attended(assert_near, out, q, memory.tokens, [1] * B, **limits)
    assert (workspace.counters == 0).all()
    return out


def test_a_ragged_batch_in_one_launch(randn, assert_near, num_launches, dtype):
    check(randn, assert_near, [70, 0, 1, 129], 16, dtype=dtype)
    assert num_launches(paged_attention_kernel) == num_launches() == 1


@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_lengths_around_the_borders_of_blocks_tiles_and_splits(randn, assert_near, block_size):
    lengths = sorted({border + n for border in (1, block_size, 64, 128) for n in (-1, 0, 1)})
    check(randn, assert_near, lengths, block_size, Hq=1, Hkv=1, splits=3)


@pytest.mark.parametrize(("D", "dtype"), HEADS)
def test_head_sizes(randn, assert_near, dtype, D):
    check(randn, assert_near, [TILINGS[D].tile + 3], 16, Hq=4, Hkv=2, D=D, dtype=dtype, splits=2)


@pytest.mark.parametrize(
    ("lengths", "block_size", "window", "splits", "heads"),
    [
        ([0, 3], 2, 1, 5, (1, 1)),
        ([150, 64], 31, 100, 2, (3, 1)),
        ([260, 7], 100, 63, 5, (2, 2)),
        ([65, 200], 7, 300, 1, (5, 1)),
    ],
)
def test_windows_with_softcaps_and_splits(randn, assert_near, lengths, block_size, window, splits, heads):
    options = {"window": window, "splits": splits, "softcap": 3.0}
    check(randn, assert_near, lengths, block_size, Hq=heads[0], Hkv=heads[1], **options)


def test_the_same_bits_wherever_the_blocks_lie_and_as_from_contiguous_memory(randn):
    """Looking a place up is no arithmetic; one region is one block as large as the memory, with heads before tokens."""
    tokens, q, workspace = (
        draw_tokens(randn, [150], 2, 16, torch.float32),
        randn(1, 6, 16),
        decode_workspace(1, 6, 2, 16, 3),
    )
    contiguous = [x[None].contiguous() for x in tokens[0]]
    expected = decode_attention(q, *contiguous, ints([0]), ints([150]), scale=0.25, workspace=workspace)
    for block_size, seed in [(1, 1), (16, 2), (16, 3), (40, 4), (200, 5)]:
        memory = PagedMemory(tokens, block_size, seed=seed)
        out = paged_attention(q, *memory.arrays, scale=0.25, workspace=workspace)
        assert torch.equal(out, expected), block_size


def test_a_batch_larger_than_the_workspace_and_an_empty_one(randn, num_launches):
    q, keys, one = randn(2, 2, 16), randn(4, 8, 1, 16), ints([1, 1])
    options = {"scale": 1.0, "workspace": decode_workspace(1, 2, 1, 16, 1)}
    with pytest.raises(ValueError, match="serves 1 sequences, not 2"):
        paged_attention(q, keys, keys, one, one, one, **options)
    assert paged_attention(q[:0], keys, keys, one, one[:0], one[:0], **options).shape == (0, 2, 16)
    assert num_launches() == 0


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, 5.0)])
def test_without_a_gpu_the_op_does_the_same(randn, assert_near, monkeypatch, num_launches, window, softcap):
    monkeypatch.setattr(module, "launches", lambda tensor: False)
    check(randn, assert_near, [10, 0, 2], 3, window=window, softcap=softcap)
    assert num_launches() == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("Hq", "Hkv", "D", "block_size"), REAL)
def test_real_shapes(randn, assert_near, dtype, Hq, Hkv, D, block_size):
    for lengths in ([16384], [300], [1, 512, 0, 5000, 37, 4096, 4097, 2]):
        for window in (None, 512):
            check(randn, assert_near, lengths, block_size, Hq=Hq, Hkv=Hkv, D=D, dtype=dtype, window=window)
