"""Decode attention equals the formula in fp64: ragged batches, windows, softcaps, every way a length can be split."""

import dataclasses

import pytest
import torch

import shared.kernels.attention.decode_attention as module
from shared.kernels.attention.decode_attention import (
    TILINGS,
    DecodeWorkspace,
    choose_splits,
    decode_attention,
    decode_attention_kernel,
)
from tests.kernels.attention import DEVICE, HEADS, NAN, assert_attended, decode_workspace, ints


def check(
    randn,
    assert_near,
    lengths,
    *,
    Hq=4,
    Hkv=2,
    D=16,
    dtype=torch.float32,
    window=None,
    softcap=None,
    splits=None,
    size=1.0,
):
    B, capacity, num_regions = len(lengths), max(*lengths, 1) + 5, len(lengths) + 2
    q = randn(B, Hq + 2, D, dtype=dtype, scale=size)[:, :Hq]  # part of a larger result
    keys, values = (randn(num_regions, Hkv, capacity, D, dtype=dtype) for _ in "kv")
    regions = torch.randperm(num_regions, generator=torch.Generator().manual_seed(B))[:B]
    tokens = []
    for region, length in zip(regions.tolist(), lengths, strict=True):
        first = 0 if window is None else max(0, length - window)
        tokens.append((keys[region, :, first:length].clone(), values[region, :, first:length].clone()))
        for memory in (keys, values):
            memory[region, :, length:] = NAN
            memory[region, :, :first] = NAN
    if splits is None:
        workspace = DecodeWorkspace.of(B, Hq, Hkv, D, capacity, DEVICE)
    else:
        workspace = decode_workspace(B, Hq, Hkv, D, splits)
    options = {"scale": D**-0.5, "softcap": softcap}
    args = q, keys, values, regions.to(DEVICE), ints(lengths)
    out = decode_attention(*args, **options, window=window, workspace=workspace)
    assert_attended(assert_near, out, q, tokens, [1] * B, **options)
    assert (workspace.counters == 0).all(), "a counter of arrivals was not set back to 0"
    return out


def test_a_ragged_batch_in_one_launch(randn, assert_near, num_launches, dtype):
    check(randn, assert_near, [70, 0, 1, 129], dtype=dtype)
    assert num_launches(decode_attention_kernel) == num_launches() == 1


@pytest.mark.parametrize(("Hq", "Hkv"), [(4, 1), (9, 3)])
@pytest.mark.parametrize(("D", "dtype"), HEADS)
def test_head_counts_and_sizes(randn, assert_near, dtype, Hq, Hkv, D):
    check(randn, assert_near, [TILINGS[D].tile + 3], Hq=Hq, Hkv=Hkv, D=D, dtype=dtype, splits=2)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 129, 192, 193])
def test_lengths_around_the_borders_of_tiles_and_splits(randn, assert_near, length):
    check(randn, assert_near, [length], Hkv=1, splits=3)


@pytest.mark.parametrize(
    ("lengths", "window", "splits", "heads"),
    [([1, 0], 1, 5, (1, 1)), ([150, 64], 100, 2, (3, 1)), ([260, 65], 63, 5, (2, 2)), ([65, 200], 300, 1, (5, 1))],
)
def test_windows_with_softcaps_and_splits(randn, assert_near, lengths, window, splits, heads):
    check(randn, assert_near, lengths, Hq=heads[0], Hkv=heads[1], window=window, splits=splits, softcap=3.0)


@pytest.mark.parametrize("window", [1, 64, 65, 1000])
def test_a_window_counts_the_token_itself(randn, assert_near, window):
    check(randn, assert_near, [130, 64], Hkv=1, window=window, splits=2)


@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_softcap(randn, assert_near, dtype, softcap):
    check(randn, assert_near, [100], dtype=dtype, softcap=softcap, size=20.0)


def test_scores_in_the_thousands(randn, assert_near, dtype):
    check(randn, assert_near, [200, 3], dtype=dtype, size=1000.0, splits=3)


@pytest.mark.parametrize("num_merged", [1, 2, 4])
def test_states_are_merged_some_at_a_time(randn, assert_near, monkeypatch, num_merged):
    tiling = dataclasses.replace(TILINGS[16], merge_numbers=num_merged * 2 * 16)
    monkeypatch.setitem(TILINGS, 16, tiling)
    check(randn, assert_near, [5 * tiling.tile - 1], Hkv=2, splits=5, size=20.0)


def test_a_workspace_and_an_output_are_used_again(randn):
    """The second launch finds the first one's states; both give the same bits."""
    keys, values, q = randn(1, 2, 300, 16), randn(1, 2, 300, 16), randn(1, 4, 16)
    workspace = decode_workspace(1, 4, 2, 16, num_splits=4)

    def attend(length, queries, out=None):
        options = {"scale": 0.25, "workspace": workspace, "out": out}
        return decode_attention(queries, keys, values, ints([0]).long(), ints([length]), **options)

    first = attend(300, q)
    attend(120, -q)
    out = torch.full_like(q, NAN)
    assert attend(300, q, out) is out
    assert torch.equal(out, first)


def test_a_batch_larger_than_the_workspace_and_an_empty_one(randn, num_launches):
    q, keys, one = randn(2, 2, 16), randn(2, 1, 8, 16), ints([1, 1])
    options = {"scale": 1.0, "workspace": decode_workspace(1, 2, 1, 16, 1)}
    with pytest.raises(ValueError, match="serves 1 sequences, not 2"):
        decode_attention(q, keys, keys, one, one, **options)
    assert decode_attention(q[:0], keys, keys, one[:0], one[:0], **options).shape == (0, 2, 16)
    assert num_launches() == 0


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, 5.0)])
def test_without_a_gpu_the_op_does_the_same(randn, assert_near, monkeypatch, num_launches, window, softcap):
    monkeypatch.setattr(module, "launches", lambda tensor: False)
    check(randn, assert_near, [10, 0, 2], window=window, softcap=softcap)
    assert num_launches() == 0


@pytest.mark.parametrize(
    ("num_rows", "capacity", "head_dim", "expected"),
    [
        (8, 512, 64, 8),  # no more than the longest sequence has tiles
        (8, 16384, 64, 17),  # 136 programs on 132 multiprocessors
        (8, 16384, 128, 17),
        (1, 16384, 256, 64),  # no more than one program merges in little time
        (1024, 16384, 64, 1),  # enough rows: no split
        (1, 1, 16, 1),
    ],
)
def test_splits_fill_the_multiprocessors(num_rows, capacity, head_dim, expected):
    assert choose_splits(num_rows, capacity, head_dim, multiprocessors=132) == expected


@pytest.mark.gpu
@pytest.mark.parametrize(("Hq", "Hkv", "D"), [(32, 8, 64), (16, 8, 128), (4, 1, 256)])
@pytest.mark.parametrize("lengths", [[16384], [300], [1, 512, 0, 5000, 37, 4096, 4097, 2]], ids=len)
@pytest.mark.parametrize("window", [None, 512])
def test_real_shapes(randn, assert_near, dtype, Hq, Hkv, D, lengths, window):
    check(randn, assert_near, lengths, Hq=Hq, Hkv=Hkv, D=D, dtype=dtype, window=window)


@pytest.mark.gpu
def test_the_order_in_which_splits_arrive_changes_no_bit(randn):
    q, keys, values = randn(8, 32, 64), randn(8, 8, 4096, 64), randn(8, 8, 4096, 64)
    args = q, keys, values, torch.arange(8, device=DEVICE), ints([4096, 4000, 3000, 2000, 1000, 500, 100, 1])
    workspace = decode_workspace(8, 32, 8, 64, num_splits=33)
    first = decode_attention(*args, scale=0.125, workspace=workspace)
    assert first.isfinite().all()
    for _ in range(300):
        assert torch.equal(decode_attention(*args, scale=0.125, workspace=workspace), first)
