"""Planned attention equals the formula in fp64 whatever the plan: decode, prefill, windows, softcaps, any partition."""

import dataclasses
from itertools import product

import numpy as np
import pytest
import torch

import shared.kernels.attention.merge_states as merge_module
import shared.kernels.attention.planned_attention as decode_module
import shared.kernels.attention.planned_prefill as prefill_module
import shared.kernels.attention.planned_tiling as tilings
from shared.attention.descriptor import Grid
from shared.attention.plan import plan_decode, plan_prefill
from shared.kernels.attention.merge_states import merge_states_kernel
from shared.kernels.attention.planned_attention import planned_decode, planned_decode_kernel
from shared.kernels.attention.planned_prefill import planned_prefill, planned_prefill_kernel
from shared.kernels.attention.planned_tiling import (
    DECODE_TILINGS,
    SPECIALIZED_TILINGS,
    CopiedTiling,
    DecodeTiling,
    PrefillTiling,
    can_specialize,
    decode_tiling,
    fitted,
    prefill_tiling,
)
from shared.kernels.attention.prompt_keys import PromptKeys, copy_keys_kernel
from shared.kernels.attention.specialized_prefill import specialized_prefill_kernel
from shared.kernels.launch import GENERATIONS, HEAD_SIZES
from tests.kernels.attention import (
    DEVICE,
    HEADS,
    NAN,
    PagedMemory,
    assert_attended,
    draw_tokens,
    planned_workspace,
    sent,
)

SMALL = DecodeTiling(tile=16, least_split=16)
SMALL_PREFILL = PrefillTiling(rows=16, tile=16, num_warps=4, num_stages=2, least_split=16)


def check_decode(
    randn,
    assert_near,
    lengths,
    *,
    Hq=4,
    Hkv=2,
    D=16,
    dtype=torch.float32,
    block_size=4,
    size=1.0,
    tiling=SMALL,
    split_size=None,
    resident=6,
    **limits,
):
    """``limits``: the window and the softcap."""
    tiling, B = fitted(tiling, D, dtype.itemsize), len(lengths)
    window, limits = limits.get("window"), {"scale": D**-0.5} | limits
    q = randn(B, Hq + 2, 2 * D, dtype=dtype, scale=size)[:, :Hq, :D]  # part of a larger result
    seen = [length if window is None else min(window, length) for length in lengths]
    memory = PagedMemory(draw_tokens(randn, lengths, Hkv, D, dtype), block_size, seen)
    if split_size is not None:  # room for all of them, and no more: the interpreter visits idle programs too
        resident = sum(-(-length // split_size) for length in lengths)
    grid = Grid(resident, tiling.tile, max(tiling.least_split, tiling.tile))
    plan = sent(plan_decode(lengths, grid, window=window, split_size=split_size))
    workspace = planned_workspace(plan.num_states, B, Hq, Hkv, D)
    out = planned_decode(q, *memory.arrays, plan, **limits, tiling=tiling, workspace=workspace)
    assert_attended(assert_near, out, q, memory.tokens, [1] * B, **limits)
    assert (workspace.counters == 0).all(), "a counter of arrivals was not set back to 0"
    return out


def check_prefill(
    randn,
    assert_near,
    batch,
    *,
    Hq=4,
    Hkv=2,
    D=16,
    dtype=torch.float32,
    block_size=4,
    size=1.0,
    tiling=SMALL_PREFILL,
    split_size=None,
    resident=6,
    num_copied=None,
    **limits,
):
    """``batch``: of each sequence its new tokens and those before. ``num_copied``: rows for keys in one piece."""
    new, lengths = [n for n, _ in batch], [n + past for n, past in batch]
    window, limits = limits.get("window"), {"scale": D**-0.5} | limits
    q = randn(sum(new), Hq + 2, D, dtype=dtype, scale=size)[:, :Hq]
    seen = [length if window is None else min(length, n + window - 1) for n, length in zip(new, lengths, strict=True)]
    memory = PagedMemory(draw_tokens(randn, lengths, Hkv, D, dtype), block_size, seen)
    per_tile = tiling.tokens(Hq // Hkv)
    if split_size is not None:
        resident = sum(-(-n // per_tile) * -(-length // split_size) for n, length in zip(new, lengths, strict=True))
    grid = Grid(resident, tiling.unit, tiling.unit)
    plan = sent(plan_prefill(new, lengths, grid, tokens_per_tile=per_tile, window=window, split_size=split_size))
    workspace, copying = planned_workspace(plan.num_states, 0, Hq, Hkv, D), {}
    if num_copied is not None:
        matrix = torch.full((2 * num_copied, Hkv * D), NAN, dtype=dtype, device=DEVICE)
        copied = PromptKeys(
            matrix, torch.full((len(batch),), -1, dtype=torch.int32, device=DEVICE), has_windows=window is not None
        )
        workspace = dataclasses.replace(workspace, copied=copied)
        copying["copies"] = copied.copies(np.array(new), np.array(lengths), tiling.copied.tile)
    out = planned_prefill(q, *memory.arrays, plan, **limits, tiling=tiling, workspace=workspace, **copying)
    assert_attended(assert_near, out, q, memory.tokens, new, **limits)
    return copying.get("copies", out)


# Decode.


@pytest.mark.parametrize("is_arrival", [True, False], ids=["arrival", "launch"])
def test_a_ragged_batch_and_who_merges_it(randn, assert_near, num_launches, dtype, is_arrival):
    tiling = dataclasses.replace(SMALL, is_arrival=is_arrival)
    check_decode(randn, assert_near, [70, 0, 1, 129], dtype=dtype, tiling=tiling)
    assert num_launches(planned_decode_kernel) == 1
    assert num_launches(merge_states_kernel) == num_launches() - 1 == (not is_arrival)


@pytest.mark.parametrize(("Hq", "Hkv"), [(6, 6), (16, 8), (9, 3), (17, 1)])
def test_counts_of_heads(randn, assert_near, Hq, Hkv):
    """Few or many, alone or in groups; one group of more than the 16 rows that a smaller one is padded to."""
    check_decode(randn, assert_near, [21], Hq=Hq, Hkv=Hkv, split_size=16)


@pytest.mark.parametrize(("D", "dtype"), HEADS)
def test_head_sizes(randn, assert_near, dtype, D):
    tiling = decode_tiling(100, 2, D, dtype.itemsize)
    check_decode(randn, assert_near, [tiling.tile + 3], D=D, dtype=dtype, tiling=tiling, split_size=tiling.tile)


@pytest.mark.parametrize("block_size", [1, 3, 16, 100])
def test_block_sizes(randn, assert_near, block_size):
    check_decode(randn, assert_near, [50, 7, 16], block_size=block_size, split_size=32)


def test_lengths_around_the_borders_of_tiles_and_splits(randn, assert_near):
    check_decode(randn, assert_near, [1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65], split_size=32)


@pytest.mark.parametrize(("window", "split_size"), [(1, 16), (15, 16), (16, 16), (17, 16), (33, 16), (40, 1008)])
def test_a_window_counts_the_token_itself(randn, assert_near, window, split_size):
    check_decode(randn, assert_near, [41, 16, 0], window=window, split_size=split_size)


@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_softcap(randn, assert_near, dtype, softcap):
    check_decode(randn, assert_near, [40], dtype=dtype, softcap=softcap, size=20.0)


def test_scores_in_the_thousands(randn, assert_near, dtype):
    check_decode(randn, assert_near, [60, 3], dtype=dtype, size=1000.0, split_size=16)


@pytest.mark.parametrize(
    ("lengths", "window", "split_size", "resident", "softcap", "is_arrival", "merged_numbers"),
    [
        ([100, 0], None, 16, 1, None, True, 1),  # states are merged one at a time
        ([100, 47], 70, None, 20, 3.0, False, 128),
        ([33, 100], None, None, 3, None, True, 4096),  # a program has several items
        ([1, 96], 100, 96, 1, 3.0, True, 128),
        ([97, 64], 31, 32, 20, None, False, 1),  # a window that begins within a split
    ],
)
def test_any_partition(randn, assert_near, lengths, window, split_size, resident, softcap, is_arrival, merged_numbers):
    tiling = dataclasses.replace(SMALL, is_arrival=is_arrival, merged_numbers=merged_numbers)
    settled = {"window": window, "split_size": split_size, "resident": resident, "softcap": softcap}
    check_decode(randn, assert_near, lengths, Hkv=1, tiling=tiling, **settled)


def test_a_padded_sequence_is_left_alone_and_one_of_length_0_is_zero(randn):
    """A bucket of 4: two sequences, one that is empty, one that is only padding."""
    q = randn(4, 4, 16)
    memory = PagedMemory(draw_tokens(randn, [40, 5, 0, 0], 2, 16, torch.float32), 4)
    plan = sent(plan_decode([40, 5, 0], Grid(4, 16, 16), num_rows=4, is_captured=True))
    out, workspace = torch.full_like(q, 7.0), planned_workspace(plan.num_states, 4, 4, 2, 16)
    planned_decode(q, *memory.arrays, plan, scale=1.0, tiling=SMALL, workspace=workspace, out=out)
    assert out[:2].isfinite().all()
    assert (out[:2] != 7.0).all()
    assert (out[2] == 0.0).all()
    assert (out[3] == 7.0).all()


@pytest.mark.parametrize("is_arrival", [True, False], ids=["arrival", "launch"])
def test_launches_of_a_bucket_differ_by_the_contents_of_arrays_alone(randn, monkeypatch, is_arrival):
    """What a captured graph repeats: grids, numbers and sizes do not follow the plan."""
    launched = []

    def record(kernel, grid, *args, **options):
        args = [value.shape if isinstance(value, torch.Tensor) else value for value in args]
        launched.append((kernel.__name__, grid, args, options))

    for one in (decode_module, merge_module):
        monkeypatch.setattr(one, "launch", record)
    tiling = dataclasses.replace(SMALL, is_arrival=is_arrival)
    grid, memory, q = Grid(12, 16, 16), randn(1, 16, 2, 16), randn(8, 4, 16)
    workspace = planned_workspace(grid.max_states(), 8, 4, 2, 16)
    index = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    kinds = set()
    for lengths in ([3], [5000], [2048] * 8, [0, 700], []):
        plan = sent(plan_decode(lengths, grid, num_rows=8, is_captured=True))
        launched.clear()
        planned_decode(q, memory, memory, index, index, index, plan, scale=1.0, tiling=tiling, workspace=workspace)
        kinds.add(repr(launched))
    assert len(launched) == (1 if is_arrival else 2)
    assert len(kinds) == 1


# Prefill.


def test_a_ragged_batch_with_history(randn, assert_near, num_launches, dtype):
    check_prefill(randn, assert_near, [(5, 40), (0, 7), (1, 0), (11, 0), (1, 30)], dtype=dtype, resident=12)
    assert num_launches(planned_prefill_kernel) == num_launches(merge_states_kernel) == 1


@pytest.mark.parametrize("group", [1, 2, 3, 7, 8])
def test_groups_of_a_tile(randn, assert_near, group):
    check_prefill(randn, assert_near, [(5, 14)], Hq=group, Hkv=1, split_size=16)


@pytest.mark.parametrize(("D", "dtype"), HEADS)
def test_head_sizes_of_prefill(randn, assert_near, dtype, D):
    tiling = prefill_tiling(9, 1, 4, 2, D, dtype.itemsize)
    check_prefill(randn, assert_near, [(9, 60)], D=D, dtype=dtype, tiling=tiling, split_size=tiling.tile)


@pytest.mark.parametrize(
    ("rows", "batch", "split_size"), [(16, [(9, 16)], 32), (64, [(17, 16)], 32), (128, [(65, 0), (3, 20)], 1024)]
)
def test_tiles_of_rows(randn, assert_near, rows, batch, split_size):
    tiling = dataclasses.replace(SMALL_PREFILL, rows=rows, tile=32)
    check_prefill(randn, assert_near, batch, Hkv=1 if rows == 64 else 2, tiling=tiling, split_size=split_size)


@pytest.mark.parametrize(("window", "split_size"), [(1, 16), (7, 16), (16, 16), (17, 16), (30, 1008)])
def test_a_window_of_prefill(randn, assert_near, window, split_size):
    check_prefill(randn, assert_near, [(9, 13), (1, 40)], window=window, split_size=split_size)


@pytest.mark.parametrize("block_size", [1, 3, 100])
def test_block_sizes_of_prefill(randn, assert_near, block_size):
    check_prefill(randn, assert_near, [(5, 20)], block_size=block_size)


def test_softcap_and_large_scores_of_prefill(randn, assert_near, dtype):
    check_prefill(randn, assert_near, [(5, 9)], dtype=dtype, softcap=5.0, size=20.0)
    check_prefill(randn, assert_near, [(5, 19)], dtype=dtype, size=1000.0, split_size=16)


@pytest.mark.parametrize(
    ("batch", "window", "split_size", "resident", "softcap"),
    [
        ([(12, 50), (0, 9)], None, 16, 1, None),
        ([(5, 30), (12, 0)], 17, None, 12, 3.0),
        ([(1, 47), (11, 37)], 31, 48, 3, None),
        ([(7, 5), (2, 50)], 70, None, 2, 3.0),
    ],
)
def test_any_partition_of_prefill(randn, assert_near, batch, window, split_size, resident, softcap):
    settled = {"window": window, "split_size": split_size, "resident": resident, "softcap": softcap}
    check_prefill(randn, assert_near, batch, Hq=3, Hkv=1, **settled)


COPYING = dataclasses.replace(SMALL_PREFILL, rows=32, copied=CopiedTiling(32, 4, 2))


@pytest.mark.parametrize(
    ("batch", "num_copied", "copies", "limits"),
    [
        ([(65, 0)], 96, (True, False), {}),  # its tokens in whole tiles
        ([(65, 0)], 95, (False, True), {}),
        ([(64, 0)], 96, (True, False), {"window": 20}),  # and a tile of zeros
        ([(64, 0)], 95, (False, True), {"window": 20}),
        ([(63, 40)], 400, (False, True), {}),
        ([(65, 30), (3, 50), (70, 1)], 400, (True, True), {}),
        ([(64, 9), (70, 50), (64, 0)], 287, (True, True), {}),  # the last does not fit
        ([(80, 70), (64, 3)], 400, (True, False), {"window": 20}),
        ([(80, 70), (5, 9)], 400, (True, True), {"softcap": 2.0}),
    ],
)
@pytest.mark.parametrize("split_size", [None, 64])
def test_keys_in_one_piece(randn, assert_near, num_launches, batch, num_copied, copies, limits, split_size):
    """Of requests with many new tokens, as long as there is space; the others' are read from the blocks."""
    actual = check_prefill(
        randn,
        assert_near,
        batch,
        dtype=torch.float16,
        tiling=COPYING,
        num_copied=num_copied,
        split_size=split_size,
        **limits,
    )
    assert actual == copies, "requests whose keys are copied, and others"
    assert num_launches(copy_keys_kernel) == copies[0]
    assert num_launches(planned_prefill_kernel) == sum(copies)


@pytest.mark.parametrize("D", [32, 128, 256])
def test_head_sizes_of_keys_in_one_piece(randn, assert_near, D):
    tiling = prefill_tiling(256, 1, 4, 2, D, 2, can_copy=True)
    check_prefill(randn, assert_near, [(70, 30)], D=D, dtype=torch.float16, tiling=tiling, num_copied=300)


@pytest.mark.gpu
@pytest.mark.skipif(not can_specialize(2, 2, None, torch.device(DEVICE)), reason="Hopper's tensor cores only")
@pytest.mark.parametrize(("Hq", "Hkv", "D"), [(8, 2, 64), (4, 2, 128), (8, 1, 256), (4, 4, 128)])
@pytest.mark.parametrize(
    ("batch", "num_copied", "limits"),
    [
        ([(64, 0)], 256, {}),
        ([(700, 513), (63, 40), (64, 3), (130, 0)], 2400, {}),
        ([(700, 513), (64, 3), (500, 0)], 1700, {}),  # the last does not fit
        ([(300, 700), (200, 0)], 2400, {"window": 20}),
        ([(300, 700), (200, 0)], 2400, {"window": 300}),
        ([(2000, 100)] * 3, 7000, {}),  # more items than a GPU has multiprocessors
    ],
)
@pytest.mark.parametrize("split_size", [None, 256])
def test_specialized_warps(randn, assert_near, num_launches, Hq, Hkv, D, batch, num_copied, limits, split_size):
    """Tiles and splits of any size, several items a program, and requests that are left to the other kernel."""
    tiling = prefill_tiling(4096, 1, Hq, Hkv, D, 2, can_copy=True, can_specialize=True)
    dtype = torch.bfloat16 if D == 128 else torch.float16
    heads = {"Hq": Hq, "Hkv": Hkv, "D": D, "dtype": dtype, "block_size": 16}
    copies = check_prefill(
        randn, assert_near, batch, tiling=tiling, num_copied=num_copied, split_size=split_size, **heads, **limits
    )
    assert num_launches(specialized_prefill_kernel) == copies[0] == 1
    assert num_launches(planned_prefill_kernel) == copies[1]


# Both.


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (None, 5.0)])
def test_without_a_gpu_the_op_does_the_same(randn, assert_near, monkeypatch, num_launches, window, softcap):
    for module in (decode_module, prefill_module):
        monkeypatch.setattr(module, "launches", lambda tensor: False)
    check_decode(randn, assert_near, [10, 0, 2, 33], window=window, softcap=softcap)
    check_prefill(randn, assert_near, [(4, 6), (0, 3), (2, 0)], window=window, softcap=softcap)
    assert num_launches() == 0


def test_nothing_to_do(randn, num_launches):
    paged = PagedMemory([], 4).arrays
    workspace = planned_workspace(1, 1, 4, 2, 16)
    plan = sent(plan_decode([], Grid(4, 16, 16)))
    out = planned_decode(randn(0, 4, 16), *paged, plan, scale=1.0, tiling=SMALL, workspace=workspace)
    assert out.shape == (0, 4, 16)
    plan = sent(plan_prefill([], [], Grid(4, 16, 16), tokens_per_tile=8))
    out = planned_prefill(randn(0, 4, 16), *paged, plan, scale=1.0, tiling=SMALL_PREFILL, workspace=workspace)
    assert out.shape == (0, 4, 16)
    assert num_launches() == 0


def test_what_does_not_fit_is_refused(randn):
    paged = PagedMemory(draw_tokens(randn, [64, 64], 2, 16, torch.float32), 4).arrays
    plan = sent(plan_decode([64, 64], Grid(8, 16, 16)))
    large = planned_workspace(8, 2, 4, 2, 16)

    def decode(plan, workspace):
        planned_decode(randn(2, 4, 16), *paged, plan, scale=1.0, tiling=SMALL, workspace=workspace)

    with pytest.raises(ValueError, match="holds 7 states and the plan has 8"):
        decode(plan, planned_workspace(7, 2, 4, 2, 16))
    with pytest.raises(ValueError, match="serves 1 sequences, not 2"):
        decode(plan, planned_workspace(8, 1, 4, 2, 16))
    with pytest.raises(ValueError, match="plan has 1 sequences and the batch has 2"):
        decode(sent(plan_decode([64], Grid(8, 16, 16))), large)
    plan = sent(plan_prefill([2], [64], Grid(8, 16, 16), tokens_per_tile=4))
    with pytest.raises(ValueError, match="2 tokens in tiles of 4, and there are 2 in tiles of 8"):
        planned_prefill(randn(2, 4, 16), *paged, plan, scale=1.0, tiling=SMALL_PREFILL, workspace=large)
    tiling = dataclasses.replace(SMALL_PREFILL, copied=SPECIALIZED_TILINGS[128])
    plan = sent(plan_prefill([2], [64], Grid(8, 16, 16), tokens_per_tile=8))
    copying = dataclasses.replace(large, copied=PromptKeys.of(256, 1, 32, torch.float32, DEVICE, has_windows=False))
    with pytest.raises(ValueError, match="no tiles of zeros, which a window of 9 needs"):
        planned_prefill(randn(2, 4, 16), *paged, plan, scale=1.0, window=9, tiling=tiling, workspace=copying)
    with pytest.raises(ValueError, match="take no softcap"):
        planned_prefill(randn(2, 4, 16), *paged, plan, scale=1.0, softcap=5.0, tiling=tiling, workspace=copying)


def test_what_the_table_asks_for_fits():
    few, some, many = DECODE_TILINGS[128]
    assert decode_tiling(2, 8, 128, 2) == dataclasses.replace(few, pipeline_bytes=48 * 1024)
    for num_sequences in (3, 64):
        assert decode_tiling(num_sequences, 8, 128, 2) == dataclasses.replace(some, pipeline_bytes=48 * 1024)
    assert decode_tiling(65, 8, 128, 2) == dataclasses.replace(many, pipeline_bytes=96 * 1024)
    assert decode_tiling(2, 8, 256, 4) == dataclasses.replace(
        DECODE_TILINGS[256][0], tile=16, num_stages=2, pipeline_bytes=64 * 1024
    )
    assert [decode_tiling(3, 8, D, 1).tile for D in (64, 128, 256)] == [64, 64, 32], "8 bits: as many bytes in a tile"
    assert decode_tiling(65, 8, 64, 1).tile == decode_tiling(65, 8, 64, 2).tile == 32, "unless it is one warp's"
    for D in HEAD_SIZES:
        for num_sequences, itemsize in product((1, 128), (2, 4)):
            tiling = decode_tiling(num_sequences, 8, D, itemsize)
            assert tiling.tile >= 16
            assert tiling.num_stages >= 2
            assert tiling.pipeline_bytes == tiling.num_stages * 2 * tiling.tile * D * itemsize <= 96 * 1024
            if itemsize == 2:
                assert dataclasses.replace(tiling, pipeline_bytes=0) in DECODE_TILINGS[D], "16 bits need no cut"


@pytest.mark.parametrize(("capability", "programs"), [((9, 0), 4), ((8, 0), 3), ((8, 9), 2)])
def test_a_plan_counts_on_programs_whose_loads_fit_in_a_multiprocessor(capability, programs, monkeypatch):
    monkeypatch.setattr(tilings, "generation", lambda device: GENERATIONS[capability])
    monkeypatch.setattr(tilings, "num_multiprocessors", lambda device: 80)
    assert decode_tiling(64, 8, 128, 2).grid(8, torch.device("cpu")).resident == 80 * programs // 8


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize(("Hq", "Hkv", "D"), [(32, 8, 64), (32, 8, 128), (16, 8, 128), (4, 1, 256)])
@pytest.mark.parametrize("lengths", [[16384], [300], [1, 512, 0, 5000, 37, 4096, 4097, 2] * 4], ids=len)
@pytest.mark.parametrize(("window", "is_arrival"), [(None, True), (None, False), (512, True)])
def test_real_decode(randn, assert_near, dtype, Hq, Hkv, D, lengths, window, is_arrival):
    tiling = decode_tiling(len(lengths), Hkv, D, dtype.itemsize)
    tiling = dataclasses.replace(tiling, is_arrival=is_arrival)
    resident = tiling.grid(Hkv, DEVICE).resident
    options = {"dtype": dtype, "window": window, "block_size": 16, "tiling": tiling, "resident": resident}
    check_decode(randn, assert_near, lengths, Hq=Hq, Hkv=Hkv, D=D, **options)


@pytest.mark.gpu
@pytest.mark.parametrize(("Hq", "Hkv", "D"), [(32, 8, 64), (16, 8, 128), (4, 1, 256)])
@pytest.mark.parametrize("batch", [[(700, 0), (30, 1000), (1, 4000)], [(1, 300), (4, 5000)], [(3000, 0)]], ids=len)
@pytest.mark.parametrize("window", [None, 512])
def test_real_prefill(randn, assert_near, dtype, Hq, Hkv, D, batch, window):
    tiling = prefill_tiling(sum(new for new, _ in batch), len(batch), Hq, Hkv, D, dtype.itemsize)
    resident = tiling.grid(Hkv, DEVICE).resident
    options = {"dtype": dtype, "window": window, "block_size": 16, "tiling": tiling, "resident": resident}
    check_prefill(randn, assert_near, batch, Hq=Hq, Hkv=Hkv, D=D, **options)


@pytest.mark.gpu
def test_the_order_in_which_programs_arrive_changes_no_bit(randn):
    lengths = [4096, 4000, 3000, 2000, 1000, 500, 100, 1]
    paged = PagedMemory(draw_tokens(randn, lengths, 8, 64, torch.float32), 16).arrays
    tiling = decode_tiling(8, 8, 64, 4)
    plan = sent(plan_decode(lengths, Grid(10_000, tiling.tile, tiling.tile), split_size=2 * tiling.tile))
    q, options = randn(8, 32, 64), {"scale": 0.125, "tiling": tiling}
    options["workspace"] = planned_workspace(plan.num_states, 8, 32, 8, 64)
    first = planned_decode(q, *paged, plan, **options)
    assert first.isfinite().all()
    for _ in range(300):
        assert torch.equal(planned_decode(q, *paged, plan, **options), first)
