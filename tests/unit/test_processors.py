"""Each processor against its definition, counted out token by token, and against transformers where they agree."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from shared.sampling.logit_mask import LogitMaskProcessor
from shared.sampling.processors import (
    apply_min_p,
    apply_temperature,
    apply_top_k,
    apply_top_p,
)
from tests.comparison import assert_close, assert_equal

INF = math.inf
QUARTERS = st.integers(-20, 20).map(lambda n: n / 4)  # few values, so that ties are common
LOGITS = st.lists(st.one_of(QUARTERS, st.just(-INF)), min_size=1, max_size=12).filter(lambda row: max(row) > -INF)


def row_of(values):
    return torch.tensor([values], dtype=torch.float32)


def kept(logits):
    return [value > -INF for value in logits[0].tolist()]


def random_logits(rows, vocabulary, seed=0):
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_is_that_of_its_own_row(dtype):
    logits, masks = random_logits(4, 3).to(dtype), [None, np.array([True, False, True]), None, np.eye(3, dtype=bool)[1]]
    before, expected = logits.clone(), logits.float().clone()
    expected[1, 1] = expected[3, 0] = expected[3, 2] = -INF
    processor = LogitMaskProcessor.of(masks)
    assert_equal(processor.sent(lambda array: array)(logits), expected, "masked logits", ("row", "token"))
    assert torch.equal(logits, before)
    assert LogitMaskProcessor.of([None, None]) is None
    shared = LogitMaskProcessor.of([masks[3], masks[1], masks[3], None])
    assert len(shared.allowed) == 2, "rows share a mask"
    assert (shared(logits) == -INF).tolist() == [(~masks[number]).tolist() for number in (3, 1, 3)] + [[False] * 3]


@settings(max_examples=100)
@given(LOGITS, st.integers(1, 14))
def test_top_k_keeps_tokens_with_fewer_than_k_better(values, k):
    out = apply_top_k(row_of(values), torch.tensor([k]))
    expected = [v if sum(w > v for w in values) < k else -INF for v in values]
    assert_equal(out[0].tolist(), expected, f"{values} with k = {k}", ("token",))


@settings(max_examples=100)
@given(LOGITS, st.floats(0.001, 1.0))
def test_top_p_keeps_tokens_with_less_than_p_above_them(values, p):
    weights = [math.exp(v - max(values)) for v in values]
    above = [sum(w for w in weights if w > own) / sum(weights) for own in weights]
    assume(p == 1 or all(abs(mass - p) > 1e-5 for mass in above))  # the oracle rounds too
    out = apply_top_p(row_of(values), torch.tensor([p], dtype=torch.float64))
    expected = [v if mass < p or p == 1 else -INF for v, mass in zip(values, above, strict=True)]
    assert_equal(out[0].tolist(), expected, f"{values} with p = {p:g}", ("token",))


@settings(max_examples=100)
@given(LOGITS, st.floats(0.05, 20.0))
def test_temperature_divides_and_keeps_the_distribution(values, temperature):
    logits = row_of(values)
    out = apply_temperature(logits, torch.tensor([temperature]))
    assert_equal(out.max().item(), 0, f"highest of the scaled {values}")
    wanted = (logits.double() / temperature).softmax(-1).float()
    assert_close(
        out.softmax(-1),
        wanted,
        f"softmax of {values} at temperature {temperature:g}",
        ("row", "token"),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("k", [1, 2, 50, 999, 1000])
def test_top_k_as_transformers(k):
    logits = random_logits(4, 1000)
    assert_equal(
        apply_top_k(logits, torch.full((4,), k)), TopKLogitsWarper(k)(None, logits), "logits", ("row", "token")
    )
    coarse = (logits * 2).round() / 2  # with ties
    assert_equal(
        apply_top_k(coarse, torch.full((4,), k), k),
        TopKLogitsWarper(k)(None, coarse),
        "logits with ties",
        ("row", "token"),
    )


@pytest.mark.parametrize("p", [0.01, 0.3, 0.5, 0.9, 0.99])
@pytest.mark.parametrize(("vocabulary", "scale"), [(50, 1.0), (3000, 1.0), (3000, 0.1)])  # the last: wide nuclei
def test_top_p_as_transformers(p, vocabulary, scale):
    logits = random_logits(4, vocabulary) * scale
    out = apply_top_p(logits, torch.full((4,), p, dtype=torch.float64))
    assert_equal(out, TopPLogitsWarper(p)(None, logits), "logits", ("row", "token"))
    assert 1 <= (out > -INF).sum(-1).min() < vocabulary, "a row keeps no token or all of them"


@pytest.mark.parametrize("min_p", [0.001, 0.03, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
def test_min_p_as_transformers(min_p, temperature):
    """The function is the same; transformers applies it last, after top-p, and vLLM and we before top-k."""
    logits = random_logits(4, 1000)
    scaled = apply_temperature(logits, torch.full((4,), temperature))
    out = apply_min_p(scaled, torch.full((4,), math.log(min_p)))
    assert torch.equal(out > -INF, MinPLogitsWarper(min_p)(None, logits / temperature) > -INF)
    assert torch.equal(out[out > -INF], scaled[out > -INF])


def test_the_token_that_crosses_p_stays():
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    for p, expected in [(0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (5e-324, 1)]:
        assert_equal(
            sum(kept(apply_top_p(logits, torch.tensor([p], dtype=torch.float64)))),
            expected,
            f"tokens that p = {p:g} keeps of (0.5, 0.3, 0.2)",
        )


def test_tokens_that_hold_p_exactly_are_enough():
    """Probabilities that are sums of powers of two have no rounding: the next token is kept only above p."""
    logits = torch.tensor([[4.0, 2.0, 1.0, 1.0]]).div(8).log()
    assert_equal(logits.softmax(-1).tolist(), [[0.5, 0.25, 0.125, 0.125]], "probabilities", ("row", "token"))
    for p, expected in [(0.5, 1), (math.nextafter(0.5, 1), 2), (0.75, 2), (math.nextafter(0.75, 1), 4)]:
        found = sum(kept(apply_top_p(logits, torch.tensor([p], dtype=torch.float64))))
        assert_equal(found, expected, f"tokens that p = {p!r} keeps of (0.5, 0.25, 0.125, 0.125)")
    wide = torch.full((1, 4096), -INF)  # a vocabulary of which the likeliest are searched first
    wide[0, 1000:1004] = logits
    for p, expected in [(0.5, 1), (math.nextafter(0.5, 1), 2)]:
        found = sum(kept(apply_top_p(wide, torch.tensor([p], dtype=torch.float64))))
        assert_equal(found, expected, f"tokens that p = {p!r} keeps of these four among 4,096")
    # Rounded to fp32, a sum moves to the other side of a p between the two.
    uneven = random_logits(1, 50)
    mass = uneven.softmax(-1)[0].sort(descending=True).values.cumsum(0, dtype=torch.float64)[:40]
    for index, (exact, rounded) in enumerate(zip(mass.tolist(), mass.float().tolist(), strict=True)):
        p = (exact + rounded) / 2
        if exact != rounded:
            found = sum(kept(apply_top_p(uneven, torch.tensor([p], dtype=torch.float64))))
            what = f"tokens that p = {p!r} keeps where {index + 1} hold {exact!r}, in fp32 {rounded!r}"
            assert_equal(found, index + 1 + (exact < p), what)


def test_each_row_has_its_own_limit():
    logits = random_logits(5, 4000)
    top_k = torch.tensor([1, 3, 3999, 5000, 2**63 - 1])
    found = (apply_top_k(logits, top_k) > -INF).sum(-1).tolist()
    assert_equal(found, [1, 3, 3999, 4000, 4000], f"tokens that {top_k.tolist()} keep of 4,000", ("row",))
    bounded = (apply_top_k(logits, torch.tensor([1, 3, 4, 5000, 2**63 - 1]), 4) > -INF).sum(-1).tolist()
    assert_equal(bounded, [1, 3, 4, 4000, 4000], "tokens that 1, 3, 4 and two larger k keep, largest = 4", ("row",))


def test_a_row_with_a_larger_k_than_was_searched_for_stays_as_it_is():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0], [3.0, 2.0, 1.0, 0.0]])
    kept = apply_top_k(logits, torch.tensor([2, 2**62]), largest=2)
    assert_equal(
        kept.tolist(),
        [[3.0, 2.0, -torch.inf, -torch.inf], [3.0, 2.0, 1.0, 0.0]],
        "logits with k = 2 and k = 2^62",
        ("row", "token"),
    )


def test_top_p_of_one_leaves_a_row_as_it_is_beside_others():
    """Rounded sums reach 1 before the tail of a large vocabulary, so p = 1 may not be left to the sum."""
    logits = random_logits(3, 5000) * 10
    logits[1] /= 1000  # its nucleus is wider than the tokens that are searched first
    out = apply_top_p(logits, torch.tensor([1.0, 0.5, 1.0], dtype=torch.float64))
    assert_equal(out[[0, 2]], logits[[0, 2]], "logits of rows with p = 1", ("row", "token"))
    assert 2000 < (out[1] > -INF).sum() < 3000, "p = 0.5 keeps about half of what is equally likely"


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-6, 1.0, 3e38])
@pytest.mark.parametrize(
    "values",
    [
        [1e30, -1e30, 1e30, 0.0],
        [3e38, -3e38, 0.0, -INF],
        [INF, 1.0, INF, -INF],
        [-INF, -INF, -INF, -INF],
        [-1e30, -INF, -1e30, -2e30],
    ],
)
def test_extreme_logits_make_no_nan(values, temperature):
    scaled = apply_temperature(row_of(values), torch.tensor([temperature]))
    assert_equal(scaled.max().item(), 0, "highest of the scaled logits")
    for out in (
        scaled,
        apply_min_p(scaled, torch.tensor([-0.1])),
        apply_top_k(scaled, torch.tensor([2])),
        apply_top_p(scaled, torch.tensor([0.5], dtype=torch.float64)),
    ):
        assert not out.isnan().any(), "the result has a NaN"
        assert_equal(out.max().item(), 0, "highest of the result")
        assert not out.softmax(-1).isnan().any(), "the softmax of the result has a NaN"


def test_each_row_has_its_own_temperature():
    out = apply_temperature(torch.tensor([[1.0, 3.0], [1.0, 3.0]]), torch.tensor([2.0, 4.0]))
    expected = [[-1.0, 0.0], [-0.5, 0.0]]
    assert_equal(out.tolist(), expected, "logits 1 and 3 at the temperatures 2 and 4", ("row", "token"))


def test_temperature_zero_leaves_the_likeliest_tokens():
    out = apply_temperature(row_of([1.0, 2.0, 2.0, 1.9999999]), torch.tensor([0.0]))
    assert_equal(out[0].tolist(), [-INF, 0.0, 0.0, -INF], "logits at temperature 0", ("token",))
