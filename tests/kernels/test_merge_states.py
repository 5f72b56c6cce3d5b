"""The merge as a kernel equals the formula in fp64: any number of states, states of no keys, rows without states."""

import pytest
import torch

import shared.kernels.attention.merge_states as module
from shared.attention.states import merge_rows
from shared.kernels.attention.merge_states import merge_states, merge_states_kernel
from shared.kernels.launch import INTERPRETED

NAN = float("nan")
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def check(randn, assert_near, counts, *, Hq=3, D=16, dtype=torch.float32, empty=(), spread=3.0):
    num_states = sum(counts)
    partial = torch.full((num_states + 3, Hq, D), NAN, device=DEVICE)  # after the states there may be anything
    log = torch.full((num_states + 3, Hq), NAN, device=DEVICE)
    partial[:num_states], log[:num_states] = randn(num_states, Hq, D), randn(num_states, Hq, scale=spread)
    for state in empty:
        partial[state], log[state] = 0.0, -torch.inf
    indptr = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    out = torch.full((len(counts), Hq, D), 7.0, dtype=dtype, device=DEVICE)
    expected = merge_rows(partial.double(), log.double(), indptr, out.double())
    assert merge_states(partial, log, indptr, out) is out
    sizes = merge_rows(partial.double().abs(), log.double(), indptr, out.double().abs())
    assert_near(out, expected, 8 if dtype == torch.float32 else 1, sizes * (1 + spread))
    for row, count in enumerate(counts):
        if count == 0:
            assert (out[row] == 7.0).all()
    return out


def test_rows_of_any_number_of_states_in_one_launch(randn, assert_near, num_launches, stored_dtype):
    check(randn, assert_near, [2, 0, 70, 1, 3], dtype=stored_dtype)
    assert num_launches(merge_states_kernel) == num_launches() == 1


@pytest.mark.parametrize(("Hq", "D"), [(1, 64), (5, 128), (4, 256), (8, 32)])
def test_head_counts_and_sizes(randn, assert_near, Hq, D):
    check(randn, assert_near, [5, 2], Hq=Hq, D=D)


@pytest.mark.parametrize(("lanes", "spread"), [(1, 30.0), (2, 1000.0), (4, 0.1), (64, 30.0)])
def test_lanes_share_the_states(randn, assert_near, monkeypatch, lanes, spread):
    monkeypatch.setattr(module, "MERGED_NUMBERS", lanes * 16)
    check(randn, assert_near, [1, 7, 0, 9, 40], spread=spread)


@pytest.mark.parametrize("Hq", [1, 5])
def test_all_heads_of_a_row_in_one_program(randn, assert_near, monkeypatch, Hq):
    monkeypatch.setattr(module, "MOST_ROWS", 2)
    check(randn, assert_near, [6, 0, 3], Hq=Hq)


def test_states_of_no_keys_change_nothing_and_alone_give_zeros(randn, assert_near):
    out = check(randn, assert_near, [3, 2, 1], empty=[0, 3, 4, 5])
    assert (out[1:] == 0).all()


def test_without_a_gpu_the_formula_does_the_same(randn, monkeypatch):
    partial, log = randn(5, 2, 16), randn(5, 2)
    indptr = torch.tensor([0, 3, 3, 5], dtype=torch.int32, device=DEVICE)
    launched = merge_states(partial, log, indptr, torch.zeros(3, 2, 16, device=DEVICE))
    monkeypatch.setattr(module, "launches", lambda tensor: False)
    torch.testing.assert_close(merge_states(partial, log, indptr, torch.zeros(3, 2, 16, device=DEVICE)), launched)


def test_offsets_of_another_number_of_rows(randn):
    with pytest.raises(ValueError, match="bound 2 rows of states, not 3"):
        merge_states(randn(1, 2, 16), randn(1, 2), torch.zeros(3, dtype=torch.int32), randn(3, 2, 16))


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128, 256])
def test_real_shapes(randn, assert_near, stored_dtype, D):
    check(randn, assert_near, [0, 1, 2, 132, 33, *[4] * 27], Hq=32, D=D, dtype=stored_dtype)
