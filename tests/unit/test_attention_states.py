"""What parts of the keys leave behind: one state of two, and attention over all keys however they are divided."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.attention.states import attention_state, merge, merge_rows
from tests.comparison import assert_close, assert_equal


def of_one_head(value, log):
    """A state of one head whose values are one number."""
    return torch.tensor([[value]], dtype=torch.float64), torch.tensor([log], dtype=torch.float64)


def assert_states(got, want):
    """Values and logarithms within the rounding of their dtype."""
    rtol, atol = (1e-7, 1e-7) if want[0].dtype == torch.float64 else (1.3e-6, 1e-5)
    assert_close(got[0], want[0], "values", ("head", "dim") if want[0].ndim == 2 else (), rtol=rtol, atol=atol)
    assert_close(got[1], want[1], "logarithm", ("head",) if want[1].ndim == 1 else (), rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((1.0, 0.0), (3.0, 0.0), (2.0, 1.0)),  # weights 1 and 1
        ((1.0, 1.0), (4.0, 0.0), (2.0, math.log2(3))),  # 2 and 1
        ((5.0, 3.0), (0.0, 3.0), (2.5, 4.0)),
        ((1.0, 2000.0), (3.0, 2000.0), (2.0, 2001.0)),  # 2^2000 overflows
        ((1.0, -2000.0), (3.0, -2000.0), (2.0, -1999.0)),
        ((1.0, 2000.0), (3.0, 0.0), (1.0, 2000.0)),
    ],
)
def test_two_states_that_can_be_merged_by_hand(a, b, expected):
    for merged in (merge(of_one_head(*a), of_one_head(*b)), merge(of_one_head(*b), of_one_head(*a))):
        assert_states(merged, of_one_head(*expected))


def test_every_head_has_weights_of_its_own():
    values, logs = torch.randn(2, 3, 8).double(), torch.tensor([[0.0, 5.0, -torch.inf], [0.0, -5.0, 1.0]]).double()
    merged, log = merge((values[0], logs[0]), (values[1], logs[1]))
    weights = logs.exp2()
    assert_close(
        merged,
        (weights[..., None] * values).sum(0) / weights.sum(0)[:, None],
        "values",
        ("head", "dim"),
        rtol=1e-7,
        atol=1e-7,
    )
    assert_close(log, weights.sum(0).log2(), "logarithm", ("head",), rtol=1e-7, atol=1e-7)


def test_a_head_far_below_another_keeps_its_weights():
    values, logs = torch.randn(2, 2, 8), torch.tensor([0.0, -2000.0])
    merged, log = merge((values[0], logs), (values[1], logs))
    assert_close(merged, values.mean(0), "values of heads with equal weights", ("head", "dim"), rtol=1e-6, atol=1e-6)
    assert_close(log, torch.tensor([1.0, -1999.0]), "logarithm", ("head",))


def test_no_keys_change_nothing_and_merge_to_zeros():
    some = torch.randn(3, 8), torch.randn(3)
    none = torch.zeros(3, 8), torch.full((3,), -torch.inf)
    for merged in (merge(some, none), merge(none, some)):
        assert_states(merged, some)
    values, log = merge(none, none)
    assert_equal(values, torch.zeros(3, 8), "values of no keys", ("head", "dim"))
    assert_equal(log, torch.full((3,), -torch.inf), "logarithm of no keys", ("head",))


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 50), max_size=6),
    order=st.randoms(use_true_random=False),
    size=st.sampled_from([0.1, 1.0, 40.0]),
    softcap=st.sampled_from([None, 5.0]),
)
def test_any_partition_merges_to_the_attention_of_all_keys(cuts, order, size, softcap):
    generator = torch.Generator().manual_seed(len(cuts))
    q = size * torch.randn(6, 8, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 2, 50, 8, generator=generator, dtype=torch.float64)
    bounds = [0, *sorted(cuts), 50]
    states = [
        attention_state(q, k[:, begin:end], v[:, begin:end], scale=0.3, softcap=softcap)
        for begin, end in pairwise(bounds)  # some of no key at all
    ]
    whole = attention_state(q, k, v, scale=0.3, softcap=softcap)
    while len(states) > 1:  # in any order, any two of them
        a, b = (states.pop(order.randrange(len(states))) for _ in range(2))
        states.append(merge(a, b))
    assert_states(states[0], whole)


def test_the_state_of_all_keys_is_attention():
    q, k, v = torch.randn(4, 8).double(), torch.randn(2, 9, 8).double(), torch.randn(2, 9, 8).double()
    values, log = attention_state(q, k, v, scale=0.5)
    weights = torch.exp(0.5 * (q.view(2, 2, 8) @ k.mT))
    torch.testing.assert_close(values.view(2, 2, 8), weights @ v / weights.sum(-1, keepdim=True))
    torch.testing.assert_close(log.view(2, 2), weights.sum(-1).log2())


def test_rows_without_states_keep_their_result():
    partial, log = torch.randn(3, 2, 4), torch.randn(3, 2)
    out = torch.full((3, 2, 4), 7.0)
    merge_rows(partial, log, torch.tensor([0, 2, 2, 3]), out)
    torch.testing.assert_close(out[0], merge((partial[0], log[0]), (partial[1], log[1]))[0])
    assert (out[1] == 7.0).all()
    torch.testing.assert_close(out[2], partial[2])
