"""Decode attention equals the formula in fp64: ragged batches, windows, softcaps, every way a length can be split."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shared.kernels.decode_attention as module
from shared.kernels.decode_attention import (
    TILINGS,
    DecodeWorkspace,
    choose_splits,
    decode_attention,
    decode_attention_kernel,
)
from shared.kernels.launch import INTERPRETED
from shared.ops.attention import naive_attention
from tests.comparison import assert_equal

NAN = float("nan")
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def make_workspace(B, Hq, Hkv, D, num_splits):
    """A workspace with a number of splits of our choice."""
    workspace = DecodeWorkspace.of(B, Hq, Hkv, D, 1, DEVICE)
    states = (B, Hkv, num_splits, Hq // Hkv)
    return dataclasses.replace(
        workspace,
        num_splits=num_splits,
        partial=torch.full((*states, D), NAN, device=DEVICE),
        partial_max=torch.full(states, NAN, device=DEVICE),
        partial_sum=torch.full(states, NAN, device=DEVICE),
    )


def reference(q, k, v, scale, window, softcap):
    """One sequence in fp64: the result ``[Hq, D]``, and what its error in steps of the dtype is measured by.

    That is the sum of the magnitudes of the weighted values; a score's error, in steps of fp32, becomes a relative one.
    """
    fp32_steps = torch.finfo(torch.float32).eps / torch.finfo(q.dtype).eps
    Hkv, S, D = k.shape
    if S == 0:
        return torch.zeros_like(q, dtype=torch.float64), torch.ones_like(q, dtype=torch.float64)
    q, k, v = q.double().view(Hkv, -1, D), k.double(), v.double()
    scores, sizes = q @ k.mT * scale, q.abs() @ k.abs().mT * scale
    if softcap is not None:
        scores, sizes = softcap * torch.tanh(scores / softcap), sizes + softcap
    if window is not None:
        scores[..., : max(0, S - window)] = -torch.inf
    weights = scores.softmax(-1)
    scale = (1 + sizes.amax(-1, keepdim=True) * fp32_steps) * (weights @ v.abs())
    return (weights @ v).view(-1, D), scale.view(-1, D)


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
    keys = randn(num_regions, Hkv, capacity, D, dtype=dtype)
    values = randn(num_regions, Hkv, capacity, D, dtype=dtype)
    regions = torch.randperm(num_regions, generator=torch.Generator().manual_seed(B))[:B]
    for region, length in zip(regions.tolist(), lengths, strict=True):
        keys[region, :, length:] = NAN
        values[region, :, length:] = NAN
        if window is not None:
            keys[region, :, : max(0, length - window)] = NAN
            values[region, :, : max(0, length - window)] = NAN
    workspace = DecodeWorkspace.of(B, Hq, Hkv, D, capacity, DEVICE)
    if splits is not None:
        workspace = make_workspace(B, Hq, Hkv, D, splits)
    scale = D**-0.5
    out = decode_attention(
        q,
        keys,
        values,
        regions.to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        scale=scale,
        window=window,
        softcap=softcap,
        workspace=workspace,
    )
    assert_equal(out.dtype, dtype, "dtype of the result")
    for b, (region, length) in enumerate(zip(regions.tolist(), lengths, strict=True)):
        first = 0 if window is None else max(0, length - window)
        k, v = keys[region, :, first:length], values[region, :, first:length]
        expected, steps = reference(q[b], k, v, scale, None, softcap)
        ulps, what = 8 if dtype == torch.float32 else 2, f"attention of sequence {b}, {length} keys"
        assert_near(out[b], expected, ulps, steps, what, ("head", "dim"))
        if length == 0:
            assert (out[b] == 0).all(), f"sequence {b} sees no key, and its result is not 0"
    assert (workspace.counters == 0).all(), "a counter of arrivals was not set back to 0"
    return out


def test_a_ragged_batch_in_one_launch(randn, assert_near, num_launches, dtype):
    check(randn, assert_near, [70, 0, 1, 129], dtype=dtype)
    assert num_launches(decode_attention_kernel) == num_launches() == 1


@pytest.mark.parametrize(("Hq", "Hkv", "D"), [(4, 1, 256), (4, 2, 128), (8, 2, 64), (5, 1, 16), (9, 3, 64), (2, 2, 32)])
def test_head_counts_and_sizes(randn, assert_near, dtype, Hq, Hkv, D):
    check(randn, assert_near, [TILINGS[D].tile + 3], Hq=Hq, Hkv=Hkv, D=D, dtype=dtype, splits=2)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 257])
def test_lengths_around_the_borders_of_tiles_and_splits(randn, assert_near, length):
    check(randn, assert_near, [length], Hkv=1, splits=3)


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 400), min_size=1, max_size=2),
    window=st.none() | st.integers(1, 300),
    splits=st.integers(1, 5),
    heads=st.sampled_from([(1, 1), (3, 1), (2, 2)]),
    softcap=st.sampled_from([None, None, 3.0]),
)
def test_any_length_window_and_split(randn, assert_near, lengths, window, splits, heads, softcap):
    Hq, Hkv = heads
    check(randn, assert_near, lengths, Hq=Hq, Hkv=Hkv, window=window, splits=splits, softcap=softcap)


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


def test_a_workspace_is_used_again(randn):
    """The second launch finds the first one's states; both give the same bits."""
    keys, values, q = randn(1, 2, 300, 16), randn(1, 2, 300, 16), randn(1, 4, 16)
    workspace = make_workspace(1, 4, 2, 16, num_splits=4)
    regions = torch.zeros(1, dtype=torch.int64, device=DEVICE)

    def attend(length, queries):
        lengths = torch.tensor([length], dtype=torch.int32, device=DEVICE)
        return decode_attention(queries, keys, values, regions, lengths, scale=0.25, workspace=workspace)

    first = attend(300, q)
    attend(120, -q)
    assert torch.equal(attend(300, q), first)
    out = torch.full_like(q, NAN)
    lengths = torch.tensor([300], dtype=torch.int32, device=DEVICE)
    decode_attention(q, keys, values, regions, lengths, scale=0.25, workspace=workspace, out=out)
    assert torch.equal(out, first)


def test_a_batch_larger_than_the_workspace(randn):
    q, keys = randn(2, 2, 16), randn(2, 1, 8, 16)
    indices = torch.ones(2, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="serves 1 sequences, not 2"):
        decode_attention(q, keys, keys, indices, indices, scale=1.0, workspace=make_workspace(1, 2, 1, 16, 1))


def test_no_sequence(randn, num_launches):
    q, keys = randn(0, 2, 16), randn(1, 1, 8, 16)
    none = torch.empty(0, dtype=torch.int32, device=DEVICE)
    out = decode_attention(q, keys, keys, none, none, scale=1.0, workspace=make_workspace(1, 2, 1, 16, 1))
    assert out.shape == (0, 2, 16)
    assert num_launches() == 0


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (None, 5.0), (3, 5.0)])
def test_without_a_gpu_the_op_does_the_same(randn, monkeypatch, window, softcap):
    q, keys, values = randn(3, 4, 16), randn(3, 2, 10, 16), randn(3, 2, 10, 16)
    monkeypatch.setattr(module, "launches", lambda tensor: False)
    regions, lengths = (
        torch.tensor([2, 0, 1], device=DEVICE),
        torch.tensor([10, 0, 2], dtype=torch.int32, device=DEVICE),
    )
    out = decode_attention(
        q,
        keys,
        values,
        regions,
        lengths,
        scale=0.25,
        window=window,
        softcap=softcap,
        workspace=make_workspace(3, 4, 2, 16, 2),
    )
    expected = [
        naive_attention(
            q[b, None], keys[region, :, :length], values[region, :, :length], scale=0.25, window=window, softcap=softcap
        )[0]
        for b, region, length in [(0, 2, 10), (2, 1, 2)]
    ]
    torch.testing.assert_close(out[[0, 2]], torch.stack(expected))
    assert (out[1] == 0).all()


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
def test_a_captured_launch_follows_the_lengths(randn, assert_near):
    """A CUDA graph is replayed with other lengths and regions than it was captured with."""
    q, keys, values = randn(2, 32, 64), randn(4, 8, 2048, 64), randn(4, 8, 2048, 64)
    regions = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    lengths = torch.ones(2, dtype=torch.int32, device=DEVICE)
    workspace = DecodeWorkspace.of(2, 32, 8, 64, 2048, DEVICE)
    out = torch.empty_like(q)

    def attend():
        decode_attention(q, keys, values, regions, lengths, scale=0.125, workspace=workspace, out=out)

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    for case in ([(3, 2048), (1, 1)], [(0, 0), (2, 700)], [(1, 64), (0, 1025)]):
        regions.copy_(torch.tensor([region for region, _ in case]))
        lengths.copy_(torch.tensor([length for _, length in case]))
        graph.replay()
        for b, (region, length) in enumerate(case):
            expected, steps = reference(q[b], keys[region, :, :length], values[region, :, :length], 0.125, None, None)
            assert_near(out[b], expected, 8, steps)


@pytest.mark.gpu
def test_the_order_in_which_splits_arrive_changes_no_bit(randn):
    q, keys, values = randn(8, 32, 64), randn(8, 8, 4096, 64), randn(8, 8, 4096, 64)
    regions = torch.arange(8, device=DEVICE)
    lengths = torch.tensor([4096, 4000, 3000, 2000, 1000, 500, 100, 1], dtype=torch.int32, device=DEVICE)
    workspace = make_workspace(8, 32, 8, 64, num_splits=33)

    def attend():
        return decode_attention(q, keys, values, regions, lengths, scale=0.125, workspace=workspace)

    first = attend()
    assert first.isfinite().all()
    assert all(torch.equal(attend(), first) for _ in range(300))
