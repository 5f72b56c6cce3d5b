"""Paged prefill equals the formula in fp64: any mix of prompts, pieces of prompts and single tokens in one launch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shared.kernels.paged_prefill as module
from shared.kernels.launch import INTERPRETED
from shared.kernels.paged_prefill import PrefillTiling, paged_prefill, paged_prefill_kernel, prefill_tiling
from shared.ops.attention import naive_attention, visible

NAN = float("nan")
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def into_blocks(sequences, block_size, first_needed, seed=0):
    """Keys or values ``[S, Hkv, D]`` of each sequence in blocks at random places, from a first token on.

    Everything else is NaN, and between the tables, which stand in any order, are numbers of blocks that do not exist.
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
        rows[first_needed[b] : len(sequence)] = sequence[first_needed[b] :]
        memory[blocks.to(DEVICE)] = rows.view(-1, *shape[1:])
        starts[b] = start
        start += counts[b] + 2
    return memory, tables.to(DEVICE), torch.tensor(starts, dtype=torch.int32, device=DEVICE)


def reference(q, k, v, scale, window, softcap):
    """One sequence's n new tokens in fp64: ``[n, Hq, D]``, and what its error in steps of the dtype is measured by."""
    fp32_steps = torch.finfo(torch.float32).eps / torch.finfo(q.dtype).eps
    n, Hq, D = q.shape
    S, Hkv, _ = k.shape
    q = q.double().view(n, Hkv, -1, D).permute(1, 2, 0, 3)  # [Hkv, G, n, D]
    k, v = (x.double().transpose(0, 1)[:, None] for x in (k, v))  # [Hkv, 1, S, D]
    scores, sizes = q @ k.mT * scale, q.abs() @ k.abs().mT * scale
    if softcap is not None:
        scores, sizes = softcap * torch.tanh(scores / softcap), sizes + softcap
    mask = visible(n, S, window, q.device)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    sizes = sizes.masked_fill(~mask, 0.0).amax(-1, keepdim=True)
    out, scale = weights @ v, (1 + sizes * fp32_steps) * (weights @ v.abs())
    return tuple(x.permute(2, 0, 1, 3).reshape(n, Hq, D) for x in (out, scale))


def check(
    randn,
    assert_near,
    sequences,
    block_size=16,
    *,
    Hq=2,
    Hkv=1,
    D=16,
    dtype=torch.float32,
    window=None,
    softcap=None,
    size=1.0,
    unused=0,
):
    """``sequences``: of each its tokens in memory before the step, and its new ones."""
    num_new, lengths = [new for _, new in sequences], [past + new for past, new in sequences]
    T = sum(num_new)
    q = randn(T + unused, Hq + 2, D, dtype=dtype, scale=size)[:, :Hq]  # part of a larger result
    k, v = ([randn(length, Hkv, D, dtype=dtype) for length in lengths] for _ in range(2))
    needed = [0 if window is None or not new else max(0, past + 1 - window) for past, new in sequences]
    keys, tables, table_starts = into_blocks(k, block_size, needed)
    values, _, _ = into_blocks(v, block_size, needed)
    query_starts = torch.tensor([0, *num_new]).cumsum(0)
    out = torch.full((T + unused, Hq, D), NAN, dtype=dtype, device=DEVICE)
    scale = D**-0.5
    given = paged_prefill(
        q,
        keys,
        values,
        tables,
        table_starts,
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        query_starts.to(DEVICE, torch.int32),
        scale=scale,
        window=window,
        softcap=softcap,
        out=out,
    )
    assert given is out
    assert out[T:].isnan().all(), "rows of no sequence are not written"
    for b, queries in enumerate(q[:T].split(num_new)):
        if len(queries):
            expected, steps = reference(queries, k[b], v[b], scale, window, softcap)
            rows = slice(query_starts[b], query_starts[b + 1])
            assert_near(out[rows], expected, 8 if dtype == torch.float32 else 2, steps)
    return out


MIXED = [(0, 20), (37, 1), (5, 9), (0, 1), (64, 33)]  # a prompt, a token, a piece with history, a prompt of one token


@pytest.mark.parametrize("window", [None, 1, 40])
def test_a_mixed_batch_in_one_launch(randn, assert_near, num_launches, dtype, window):
    check(randn, assert_near, MIXED, Hq=2, Hkv=2, dtype=dtype, window=window)
    assert num_launches(paged_prefill_kernel) == num_launches() == 1


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_lengths_around_the_borders_of_blocks_and_tiles(randn, assert_near, block_size):
    check(randn, assert_near, [(past, n) for past in (0, 31, 33) for n in (1, 15, 17, 31, 33)], block_size, Hq=1)
    check(randn, assert_near, [(32, 16), (32, 32), (16, 48), (63, 2), (64, 1)], block_size, Hq=1)


@pytest.mark.parametrize("group", [1, 3, 5, 6, 7, 8])
def test_tiles_of_rows_may_end_within_a_token(randn, assert_near, group):
    check(randn, assert_near, [(3, 13), (0, 1), (17, 10)], Hq=2 * group, Hkv=2)


@pytest.mark.parametrize("D", [32, 64, 128, 256])
def test_head_sizes(randn, assert_near, dtype, D):
    check(randn, assert_near, [(20, 9), (0, 30)], Hq=2, Hkv=2, D=D, dtype=dtype)


@pytest.mark.parametrize("tiling", [PrefillTiling(16, 64), PrefillTiling(64, 32), PrefillTiling(128, 64)], ids=str)
@pytest.mark.parametrize("window", [None, 10])
def test_every_tiling(randn, assert_near, monkeypatch, tiling, window):
    """Also where tiles are much longer or shorter than what a sequence brings."""
    monkeypatch.setattr(module, "prefill_tiling", lambda *about: tiling)
    check(randn, assert_near, MIXED, Hq=2, window=window)


@settings(max_examples=8, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 80), st.integers(0, 40)), min_size=1, max_size=3),
    block_size=st.sampled_from([1, 2, 3, 7, 16, 31, 64, 100]),
    window=st.none() | st.integers(1, 80),
    heads=st.sampled_from([(1, 1), (3, 1), (2, 2)]),
    softcap=st.sampled_from([None, None, 3.0]),
    unused=st.integers(0, 9),
)
def test_any_mix_block_size_and_window(randn, assert_near, sequences, block_size, window, heads, softcap, unused):
    Hq, Hkv = heads
    check(randn, assert_near, sequences, block_size, Hq=Hq, Hkv=Hkv, window=window, softcap=softcap, unused=unused)


@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_softcap(randn, assert_near, dtype, softcap):
    check(randn, assert_near, [(10, 21)], dtype=dtype, softcap=softcap, size=20.0)


def test_scores_in_the_thousands(randn, assert_near, dtype):
    check(randn, assert_near, [(40, 33), (0, 3)], dtype=dtype, size=1000.0)


def test_no_token(randn, num_launches):
    q, keys = randn(0, 2, 16), randn(1, 8, 1, 16)
    none = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    out = paged_prefill(q, keys, keys, none, none, none, torch.zeros_like(none), scale=1.0)
    assert out.shape == (0, 2, 16)
    assert num_launches() == 0


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (None, 5.0), (3, 5.0)])
def test_without_a_gpu_the_op_does_the_same(randn, monkeypatch, window, softcap):
    monkeypatch.setattr(module, "launches", lambda tensor: False)
    sequences = [(4, 6), (9, 1), (2, 0), (0, 3)]
    k, v = ([randn(past + new, 2, 16) for past, new in sequences] for _ in range(2))
    q = randn(10, 4, 16)
    needed = [0 if window is None or not new else max(0, past + 1 - window) for past, new in sequences]
    keys, tables, table_starts = into_blocks(k, 3, needed)
    values, _, _ = into_blocks(v, 3, needed)
    lengths = torch.tensor([past + new for past, new in sequences], dtype=torch.int32, device=DEVICE)
    starts = [0, 6, 7, 7, 10]
    query_starts = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    about = {"scale": 0.25, "window": window, "softcap": softcap}
    out = paged_prefill(q, keys, values, tables, table_starts, lengths, query_starts, **about)
    for b in (0, 1, 3):
        rows, heads = slice(starts[b], starts[b + 1]), [x[b].transpose(0, 1) for x in (k, v)]
        torch.testing.assert_close(out[rows], naive_attention(q[rows], *heads, **about))


@pytest.mark.parametrize(
    ("num_rows", "num_sequences", "head_dim", "itemsize", "rows"),
    [
        (32 * 4, 32, 64, 2, 16),  # tokens of a decode step
        (17 * 4, 4, 64, 2, 64),
        (65, 1, 128, 2, 128),
        (4096, 1, 64, 2, 128),
        (4096, 1, 256, 2, 64),  # larger tiles would not fit
        (4096, 1, 64, 4, 32),
    ],
)
def test_the_tile_fits_the_average_sequence(num_rows, num_sequences, head_dim, itemsize, rows):
    assert prefill_tiling(num_rows, num_sequences, head_dim, itemsize).rows == rows


REAL = [(32, 8, 64, 16), (32, 8, 64, 1), (16, 8, 128, 16), (16, 8, 128, 64), (4, 1, 256, 16), (9, 3, 64, 3)]


@pytest.mark.gpu
@pytest.mark.parametrize(("Hq", "Hkv", "D", "block_size"), REAL)
def test_real_shapes(randn, assert_near, dtype, Hq, Hkv, D, block_size):
    """The three mixes take the three sizes of tiles."""
    for sequences in ([(0, 1500)], [(2000, 5), (300, 1), (0, 20), (4096, 16)], [(n, 1) for n in range(1, 900, 60)]):
        for window in (None, 512):
            about = {"Hq": Hq, "Hkv": Hkv, "D": D, "dtype": dtype, "window": window}
            check(randn, assert_near, sequences, block_size, **about)
