"""The draw follows the exact distribution, depends on (seed, index, stream) alone, and survives extreme logits."""

import math
from itertools import cycle

import pytest
import torch
from scipy import stats

from shared.sampling.noise import Stream
from shared.sampling.params import SamplingParams
from shared.sampling.sampler import SamplingBatch, SamplingRow, adjust_logits, sample

INF = math.inf
NUM_DRAWS = 8_000
LEAST_P = 1e-3  # of a fixed sample: at these seeds no right draw is near it
LOGITS = torch.tensor([1.0, 0.3, -0.5, 2.0, 2.0, -1.5, 0.3, 1.7, -INF, 0.0])

DISTRIBUTIONS = [
    {},
    {"temperature": 0.7},
    {"temperature": 2.0},
    {"top_k": 3},
    {"top_k": 1},
    {"top_p": 0.6},
    {"top_p": 0.95},
    {"temperature": 1.5, "top_k": 6, "top_p": 0.8},
    {"repetition_penalty": 1.5, "temperature": 0.8},
    {"repetition_penalty": 0.7, "top_k": 5, "top_p": 0.9, "temperature": 1.2},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"min_p": 0.3, "temperature": 2.0, "top_k": 5, "top_p": 0.8},
    {"presence_penalty": 1.2},
    {"frequency_penalty": 0.5, "presence_penalty": -0.4},
    {"frequency_penalty": -0.6, "repetition_penalty": 1.4, "temperature": 1.5},
    {"logit_bias": {4: -100.0, 5: 3.5, 9: 1.0}},
    {"min_tokens": 9},
    {
        "logit_bias": {3: 5.0, 6: 1.0, 5: 2.0},
        "min_tokens": 9,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "temperature": 1.4,
        "min_p": 0.08,
        "top_k": 7,
        "top_p": 0.97,
    },
]
UNBIASED = [settings for settings in DISTRIBUTIONS if "logit_bias" not in settings]
PROMPT, OUTPUT = [3, 3, 1], [0, 5, 7, 5]
END_IDS = (3, 8)  # masked before min_tokens; at 3 is one of the two likeliest


def exact_distribution(params):
    """The pipeline written out over Python floats."""
    scores = LOGITS.tolist()
    for i, bias in dict(params.logit_bias).items():
        scores[i] += bias
    for i in END_IDS if params.min_tokens else ():
        scores[i] = -INF
    for i in {*PROMPT, *OUTPUT}:
        scores[i] = scores[i] / params.repetition_penalty if scores[i] > 0 else scores[i] * params.repetition_penalty
    for i in OUTPUT:
        scores[i] -= params.frequency_penalty
    for i in set(OUTPUT):
        scores[i] -= params.presence_penalty
    scores = [s / params.temperature for s in scores]
    scores = [s if math.exp(s - max(scores)) >= params.min_p else -INF for s in scores]
    if params.top_k is not None:
        scores = [s if sum(o > s for o in scores) < params.top_k else -INF for s in scores]
    total = sum(math.exp(s) for s in scores)
    above = [sum(math.exp(o) for o in scores if o > s) / total for s in scores]
    weights = [math.exp(s) if mass < params.top_p else 0.0 for s, mass in zip(scores, above, strict=True)]
    return [w / sum(weights) for w in weights]


def assert_follows(ids, distribution):
    counts = torch.bincount(ids, minlength=len(distribution)).tolist()
    possible = [i for i, p in enumerate(distribution) if p > 0]
    assert sum(counts[i] for i in possible) == len(ids)  # nothing outside the support
    if len(possible) > 1:
        expected = [distribution[i] * len(ids) for i in possible]
        assert min(expected) > 5
        assert stats.chisquare([counts[i] for i in possible], expected).pvalue > LEAST_P


def draw_many(params, axis, stream=Stream.DRAW):
    masked = END_IDS if params.min_tokens else ()
    rows = [
        SamplingRow(params, *((n, 4) if axis == "seed" else (4, n)), PROMPT, OUTPUT, masked) for n in range(NUM_DRAWS)
    ]
    return sample(LOGITS.expand(NUM_DRAWS, -1), SamplingBatch.of(rows), stream=stream)


def mixed_rows(count):
    """Rows of every kind, in a fixed order that repeats."""
    kinds = [
        {"temperature": 0},
        {"temperature": 0.7, "top_p": 0.9},
        {},
        {"top_k": 50, "temperature": 1.3},
        {"temperature": 0, "repetition_penalty": 1.3},
        {"temperature": 2.0, "top_p": 0.98},
        {"top_k": 2000, "top_p": 0.5, "repetition_penalty": 1.1},
        {"temperature": 1e-6},
        {"temperature": 0, "frequency_penalty": 0.7, "presence_penalty": 0.2},
        {"min_p": 0.1, "logit_bias": {4: 3.0, 40: -100.0}},
    ]
    params = [SamplingParams(**kinds[b % len(kinds)]) for b in range(count)]
    return [
        SamplingRow(p, 2**63 + 17 * b, b * b, range(b, 400, 7), [b] * b, (b,) * (b % 3 == 0))
        for b, p in enumerate(params)
    ]


def make_logits(rows, vocabulary, seed=0):
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize(("settings", "axis"), list(zip(DISTRIBUTIONS, cycle(["seed", "index"]))), ids=str)
def test_draws_follow_the_exact_distribution(settings, axis):
    params = SamplingParams(**settings)
    assert_follows(draw_many(params, axis), exact_distribution(params))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_draws_the_same_alone_and_among_fifty(dtype):
    rows = mixed_rows(50)
    logits = make_logits(50, 5003).to(dtype)
    together = sample(logits, SamplingBatch.of(rows))
    alone = [int(sample(logits[b : b + 1], SamplingBatch.of(rows[b : b + 1]))) for b in range(50)]
    assert together.tolist() == alone
    order = list(reversed(range(50)))
    assert sample(logits[order], SamplingBatch.of([rows[b] for b in order])).tolist() == alone[::-1]


@pytest.mark.parametrize("settings", DISTRIBUTIONS, ids=str)
def test_greedy_takes_the_likeliest_of_the_adjusted_logits(settings):
    adjusted = {k: v for k, v in settings.items() if k not in ("temperature", "top_k", "top_p", "min_p")}
    params = SamplingParams(temperature=1.0, **adjusted)
    likeliest = max(range(10), key=exact_distribution(params).__getitem__)
    masked = END_IDS if params.min_tokens else ()
    row = SamplingRow(SamplingParams(**settings | {"temperature": 0}), 1, 4, PROMPT, OUTPUT, masked)
    assert sample(LOGITS[None], SamplingBatch.of([row])).tolist() == [likeliest]


def test_a_masked_token_is_not_drawn_whatever_its_logit():
    logits = torch.tensor([[INF, 1.0, 0.0], [-INF, -INF, -INF], [5.0, 1.0, 0.0]])
    masks = [(0,), (0,), (0, 1, 2)]
    for temperature in (0, 1.0):
        params = SamplingParams(temperature=temperature, min_tokens=1, frequency_penalty=1.0, repetition_penalty=2.0)
        for seed in range(20):
            rows = [SamplingRow(params, seed, 0, [0], [1], masked) for masked in masks]
            batch = SamplingBatch.of(rows)
            assert not adjust_logits(logits, batch).isnan().any()
            ids = sample(logits, batch).tolist()
            assert ids[0] in (1, 2)
            assert all(0 <= token_id < 3 for token_id in ids)


def test_fields_that_no_row_needs_are_none():
    greedy = SamplingRow(SamplingParams(temperature=0, top_k=3, top_p=0.5), 1, 2, [1])
    assert SamplingBatch.of([greedy, greedy]) == SamplingBatch(num_rows=2)
    plain = SamplingBatch.of([SamplingRow(SamplingParams(), 1, 2, [1])])
    assert plain.temperature is not None
    assert (plain.top_k, plain.top_p, plain.counts, plain.drawing_rows) == (None,) * 4
    # the filters of a greedy row do not make its neighbours pay for a search
    beside = SamplingBatch.of([greedy, SamplingRow(SamplingParams(), 1, 2, [1])])
    assert (beside.top_k, beside.top_p) == (None, None)
    penalised = SamplingRow(SamplingParams(temperature=0, repetition_penalty=1.5), 0, 0, [0])
    assert SamplingBatch.of([greedy, penalised]).penalised_rows.tolist() == [1]
    assert beside.drawing_rows.tolist() == [1]


def test_an_all_greedy_batch_draws_nothing(monkeypatch):
    monkeypatch.setattr("shared.sampling.sampler._draw", None)
    batch = SamplingBatch.of([SamplingRow(SamplingParams(temperature=0, top_k=3), 1, 2, [1])])
    logits = make_logits(1, 50)
    assert torch.equal(sample(logits, batch), logits.argmax(-1))


@pytest.mark.parametrize("settings", [*UNBIASED, {"temperature": 1e-6}, {"temperature": 5e-324}], ids=str)
@pytest.mark.parametrize(
    ("values", "allowed"),
    [
        ([1e30, -1e30, 0.0, -INF], {0}),
        ([-INF, -INF, -5.0, -INF], {2}),
        ([-1e30, -INF, -1e30, -3e38], {0, 2}),
        ([INF, 3e38, -INF, 0.0], {0}),
    ],
)
def test_extreme_logits(values, allowed, settings):
    logits = torch.tensor([values])
    for seed in range(5):
        batch = SamplingBatch.of([SamplingRow(SamplingParams(**settings), seed, 0, [])])
        assert int(sample(logits, batch)) in allowed


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1e300},
        {"repetition_penalty": 1e300},
        {"repetition_penalty": 1e-300},
        {"top_k": 2**80},
        {"top_k": 2**63 - 1},
        {"top_p": 1e-300},
        {"seed": 2**64 - 1},
    ],
    ids=str,
)
def test_extreme_parameters(settings):
    params = SamplingParams(**settings)
    logits = torch.tensor([[1.0, 0.0, -1.0, -INF]])
    row = SamplingRow(params, 2**64 - 1, 2**31, [0, 1, 2])
    plain = SamplingRow(SamplingParams(top_k=3), 3, 0, [])
    assert int(sample(logits, SamplingBatch.of([row]))) in {0, 1, 2}
    assert sample(logits.expand(2, -1), SamplingBatch.of([row, plain]))[1] == sample(logits, SamplingBatch.of([plain]))


def test_raw_logits_are_not_mutated():
    logits, before = make_logits(16, 500), make_logits(16, 500)
    sample(logits, SamplingBatch.of(mixed_rows(16)))
    sample(logits[1:3], SamplingBatch.of(mixed_rows(16)[1:3]))
    assert torch.equal(logits, before)


def test_an_empty_batch():
    assert sample(torch.empty(0, 7), SamplingBatch.of([])).shape == (0,)


def test_rows_must_match():
    batch = SamplingBatch.of([SamplingRow(SamplingParams(), 0, 0, [])])
    with pytest.raises(ValueError, match="logits have 2 rows, the sampling batch has 1"):
        sample(torch.zeros(2, 5), batch)
