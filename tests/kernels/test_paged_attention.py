"""Paged decode attention equals the formula in fp64, wherever the blocks lie and whatever lies in the others."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shared.kernels.paged_attention as module
from shared.kernels.decode_attention import DecodeWorkspace, decode_attention
from shared.kernels.launch import INTERPRETED
from shared.kernels.paged_attention import TILINGS, paged_attention, paged_attention_kernel
from shared.ops.attention import naive_attention

NAN = float("nan")
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def make_workspace(B, Hq, Hkv, D, num_splits):
    """A workspace with a number of splits of our choice, its states NaN."""
    states = (B, Hkv, num_splits, Hq // Hkv)
    return dataclasses.replace(
        DecodeWorkspace.of(B, Hq, Hkv, D, 1, DEVICE),
        num_splits=num_splits,
        partial=torch.full((*states, D), NAN, device=DEVICE),
        partial_max=torch.full(states, NAN, device=DEVICE),
        partial_sum=torch.full(states, NAN, device=DEVICE),
    )


def into_blocks(sequences, block_size, window=None, seed=0):
    """Keys or values ``[S, Hkv, D]`` of each sequence in blocks at random places.

    All other slots are NaN: those of free blocks, after a sequence's last token and before its window. Between the
    tables, which stand in any order, are numbers of blocks that do not exist.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-len(sequence) // block_size) for sequence in sequences]
    order = torch.randperm(sum(counts) + 3, generator=generator)
    shape = (len(order), block_size, *sequences[0].shape[1:])
    memory = torch.full(shape, NAN, dtype=sequences[0].dtype, device=DEVICE)
    tables = torch.full((sum(counts) + 2 * len(counts) + 1,), 2**30, dtype=torch.int32)
    starts, start = [0] * len(counts), 1
    for b in torch.randperm(len(counts), generator=generator).tolist():
        sequence, blocks = sequences[b], order[: counts[b]]
        order = order[counts[b] :]
        tables[start : start + counts[b]] = blocks
        rows = torch.full((counts[b] * block_size, *shape[2:]), NAN, dtype=memory.dtype, device=DEVICE)
        first = 0 if window is None else max(0, len(sequence) - window)
        rows[first : len(sequence)] = sequence[first:]
        memory[blocks.to(DEVICE)] = rows.view(-1, *shape[1:])
        starts[b] = start
        start += counts[b] + 2
    return memory, tables.to(DEVICE), torch.tensor(starts, dtype=torch.int32, device=DEVICE)


def reference(q, k, v, scale, softcap):
    """One sequence in fp64: the result ``[Hq, D]``, and what its error in steps of the dtype is measured by.

    That is the sum of the magnitudes of the weighted values; a score's error, in steps of fp32, becomes a relative one.
    """
    fp32_steps = torch.finfo(torch.float32).eps / torch.finfo(q.dtype).eps
    S, Hkv, D = k.shape
    if S == 0:
        return torch.zeros_like(q, dtype=torch.float64), torch.ones_like(q, dtype=torch.float64)
    q, k, v = q.double().view(Hkv, -1, D), k.double().transpose(0, 1), v.double().transpose(0, 1)
    scores, sizes = q @ k.mT * scale, q.abs() @ k.abs().mT * scale
    if softcap is not None:
        scores, sizes = softcap * torch.tanh(scores / softcap), sizes + softcap
    weights = scores.softmax(-1)
    scale = (1 + sizes.amax(-1, keepdim=True) * fp32_steps) * (weights @ v.abs())
    return (weights @ v).view(-1, D), scale.view(-1, D)


def check(
    randn,
    assert_near,
    lengths,
    block_size,
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
    B = len(lengths)
    q = randn(B, Hq + 2, D, dtype=dtype, scale=size)[:, :Hq]  # part of a larger result
    k = [randn(length, Hkv, D, dtype=dtype) for length in lengths]
    v = [randn(length, Hkv, D, dtype=dtype) for length in lengths]
    keys, tables, table_starts = into_blocks(k, block_size, window)
    values, _, _ = into_blocks(v, block_size, window)
    if splits is None:
        workspace = DecodeWorkspace.of(B, Hq, Hkv, D, max(*lengths, 1), DEVICE)
    else:
        workspace = make_workspace(B, Hq, Hkv, D, splits)
    scale = D**-0.5
    out = paged_attention(
        q,
        keys,
        values,
        tables,
        table_starts,
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        scale=scale,
        window=window,
        softcap=softcap,
        workspace=workspace,
    )
    assert out.dtype == dtype
    for b, length in enumerate(lengths):
        first = 0 if window is None else max(0, length - window)
        expected, steps = reference(q[b], k[b][first:], v[b][first:], scale, softcap)
        assert_near(out[b], expected, 8 if dtype == torch.float32 else 2, steps)
        if length == 0:
            assert (out[b] == 0).all()
    assert (workspace.counters == 0).all()
    return out


def test_a_ragged_batch_in_one_launch(randn, assert_near, num_launches, dtype):
    check(randn, assert_near, [70, 0, 1, 129], 16, dtype=dtype)
    assert num_launches(paged_attention_kernel) == num_launches() == 1


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_lengths_around_the_borders_of_blocks_tiles_and_splits(randn, assert_near, block_size):
    borders = {1, block_size, 2 * block_size, 64, 128, 192}
    lengths = sorted({border + n for border in borders for n in (-1, 0, 1)})
    check(randn, assert_near, lengths, block_size, Hq=1, Hkv=1, splits=3)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 8])
def test_any_number_of_heads_shares_a_key_head(randn, assert_near, group):
    check(randn, assert_near, [67], 16, Hq=2 * group, Hkv=2, splits=2)


@pytest.mark.parametrize("D", [32, 64, 128, 256])
def test_head_sizes(randn, assert_near, dtype, D):
    check(randn, assert_near, [TILINGS[D].tile + 3], 16, Hq=4, Hkv=2, D=D, dtype=dtype, splits=2)


@settings(max_examples=10, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=2),
    block_size=st.sampled_from([1, 2, 3, 7, 16, 31, 64, 100]),
    window=st.none() | st.integers(1, 200),
    splits=st.integers(1, 5),
    heads=st.sampled_from([(1, 1), (3, 1), (2, 2)]),
    softcap=st.sampled_from([None, None, 3.0]),
)
def test_any_length_block_size_window_and_split(
    randn, assert_near, lengths, block_size, window, splits, heads, softcap
):
    Hq, Hkv = heads
    check(randn, assert_near, lengths, block_size, Hq=Hq, Hkv=Hkv, window=window, splits=splits, softcap=softcap)


@pytest.mark.parametrize("window", [1, 3, 64, 65, 1000])
def test_a_window_counts_the_token_itself(randn, assert_near, window):
    check(randn, assert_near, [130, 64], 3, Hkv=1, window=window, splits=2)


@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_softcap(randn, assert_near, dtype, softcap):
    check(randn, assert_near, [100], 16, dtype=dtype, softcap=softcap, size=20.0)


def test_scores_in_the_thousands(randn, assert_near, dtype):
    check(randn, assert_near, [200, 3], 16, dtype=dtype, size=1000.0, splits=3)


def test_the_same_bits_wherever_the_blocks_lie_and_as_from_contiguous_memory(randn):
    """Looking a place up is no arithmetic; one region is one block as large as the memory, with heads before tokens."""
    length, D = 150, 16
    k, v, q = randn(length, 2, D), randn(length, 2, D), randn(1, 6, D)
    lengths = torch.tensor([length], dtype=torch.int32, device=DEVICE)
    workspace = make_workspace(1, 6, 2, D, 3)
    regions = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    contiguous = [x.transpose(0, 1)[None].contiguous() for x in (k, v)]
    expected = decode_attention(q, *contiguous, regions, lengths, scale=0.25, workspace=workspace)
    for block_size, seed in [(1, 1), (16, 2), (16, 3), (40, 4), (200, 5)]:
        keys, tables, starts = into_blocks([k], block_size, seed=seed)
        values, _, _ = into_blocks([v], block_size, seed=seed)
        out = paged_attention(q, keys, values, tables, starts, lengths, scale=0.25, workspace=workspace)
        assert torch.equal(out, expected), block_size


def test_a_workspace_and_an_output_are_used_again(randn):
    """The second launch finds the first one's states; both give the same bits."""
    k, q = randn(300, 2, 16), randn(1, 4, 16)
    keys, tables, starts = into_blocks([k], 16)
    workspace = make_workspace(1, 4, 2, 16, num_splits=4)

    def attend(length, queries, out=None):
        lengths = torch.tensor([length], dtype=torch.int32, device=DEVICE)
        return paged_attention(queries, keys, keys, tables, starts, lengths, scale=0.25, workspace=workspace, out=out)

    first = attend(300, q)
    attend(120, -q)
    assert torch.equal(attend(300, q), first)
    out = torch.full_like(q, NAN)
    assert attend(300, q, out) is out
    assert torch.equal(out, first)


def test_a_batch_larger_than_the_workspace_and_an_empty_one(randn, num_launches):
    q, keys = randn(2, 2, 16), randn(4, 8, 1, 16)
    indices = torch.ones(2, dtype=torch.int32, device=DEVICE)
    workspace = make_workspace(1, 2, 1, 16, 1)
    with pytest.raises(ValueError, match="serves 1 sequences, not 2"):
        paged_attention(q, keys, keys, indices, indices, indices, scale=1.0, workspace=workspace)
    out = paged_attention(q[:0], keys, keys, indices, indices[:0], indices[:0], scale=1.0, workspace=workspace)
    assert out.shape == (0, 2, 16)
    assert num_launches() == 0


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (None, 5.0), (3, 5.0)])
def test_without_a_gpu_the_op_does_the_same(randn, monkeypatch, window, softcap):
    monkeypatch.setattr(module, "launches", lambda tensor: False)
    lengths = [10, 0, 2]
    k, v = ([randn(length, 2, 16) for length in lengths] for _ in range(2))
    q = randn(3, 4, 16)
    keys, tables, starts = into_blocks(k, 3, window)
    values, _, _ = into_blocks(v, 3, window)
    out = paged_attention(
        q,
        keys,
        values,
        tables,
        starts,
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        scale=0.25,
        window=window,
        softcap=softcap,
        workspace=make_workspace(3, 4, 2, 16, 2),
    )
    for b in (0, 2):
        heads = [x[b].transpose(0, 1) for x in (k, v)]
        expected = naive_attention(q[b, None], *heads, scale=0.25, window=window, softcap=softcap)
        torch.testing.assert_close(out[b], expected[0])
    assert (out[1] == 0).all()


REAL = [(32, 8, 64, 16), (32, 8, 64, 1), (16, 8, 128, 16), (16, 8, 128, 64), (4, 1, 256, 16), (9, 3, 64, 3)]


@pytest.mark.gpu
@pytest.mark.parametrize(("Hq", "Hkv", "D", "block_size"), REAL)
def test_real_shapes(randn, assert_near, dtype, Hq, Hkv, D, block_size):
    for lengths in ([16384], [300], [1, 512, 0, 5000, 37, 4096, 4097, 2]):
        for window in (None, 512):
            check(randn, assert_near, lengths, block_size, Hq=Hq, Hkv=Hkv, D=D, dtype=dtype, window=window)


@pytest.mark.gpu
def test_a_captured_launch_follows_lengths_and_tables(randn, assert_near):
    """A CUDA graph is replayed with other lengths, and other blocks, than it was captured with."""
    sequences = [randn(2048, 8, 64) for _ in range(3)]
    keys, table, starts = into_blocks(sequences, 16)
    q = randn(2, 32, 64)
    table_starts = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    lengths = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    workspace = DecodeWorkspace.of(2, 32, 8, 64, 2048, DEVICE)
    out = torch.empty_like(q)

    def attend():
        paged_attention(q, keys, keys, table, table_starts, lengths, scale=0.125, workspace=workspace, out=out)

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    for case in ([(2, 2048), (1, 1)], [(0, 0), (2, 700)], [(1, 64), (0, 1025)]):
        table_starts.copy_(starts[[sequence for sequence, _ in case]])
        lengths.copy_(torch.tensor([length for _, length in case]))
        graph.replay()
        for b, (sequence, length) in enumerate(case):
            k = sequences[sequence][:length]
            expected, steps = reference(q[b], k, k, 0.125, None)
            assert_near(out[b], expected, 8, steps)


@pytest.mark.gpu
def test_the_order_in_which_splits_arrive_changes_no_bit(randn):
    lengths = [4096, 4000, 3000, 2000, 1000, 500, 100, 1]
    keys, tables, starts = into_blocks([randn(length, 8, 64) for length in lengths], 16)
    q = randn(8, 32, 64)
    on_device = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    workspace = make_workspace(8, 32, 8, 64, num_splits=33)

    def attend():
        return paged_attention(q, keys, keys, tables, starts, on_device, scale=0.125, workspace=workspace)

    first = attend()
    assert first.isfinite().all()
    assert all(torch.equal(attend(), first) for _ in range(300))
