"""Rejection sampling of drafts gives the target's distribution, whatever the drafts' distribution."""

from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from shared.engine.sampling.drawing import plain
from shared.engine.sampling.rejection import Rejection, acceptance
from shared.engine.sampling.sampler import Sampler
from shared.sampling.noise import Stream
from shared.sampling.params import SamplingParams
from shared.sampling.rejection import accept_or_replace
from shared.sampling.sampler import SamplingBatch, SamplingRow, adjust_logits, filter_logits, sample
from shared.scheduling.drafts import num_equal
from shared.speculation.draft_draw import DraftDraw
from tests.comparison import assert_close, assert_equal

VOCABULARY = 7
NUM_DRAWS = 6000
LEAST_P = 1e-4  # of a test that fails; some eighty positions are tested
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"logit_bias": {1: 2.0, 2: -100.0}},
]


def logits_of(seed: int, count: int) -> torch.Tensor:
    """Of ``count`` positions."""
    return 1.5 * torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def answers(params: SamplingParams, target: torch.Tensor, draft: torch.Tensor | None) -> list[list[int]]:
    """The tokens that each of many seeds keeps of one step whose rows have the logits ``target [K + 1, V]``.

    The drafts are sampled from the softmax of ``draft [K, V]`` with the same options; None: the most likely token.
    """
    K = len(target) - 1
    seeds = range(NUM_DRAWS)
    if draft is None:
        batch = SamplingBatch.of([SamplingRow(params, 0, 0, [0], [3])] * K)
        drafts, q = adjust_logits(target[:K], batch).argmax(-1).expand(NUM_DRAWS, K), None
    else:
        rows = [SamplingRow(params, seed, j, [0], [3]) for seed in seeds for j in range(K)]
        batch = SamplingBatch.of(rows)
        drafts = sample(draft.repeat(NUM_DRAWS, 1), batch, stream=Stream.DRAFT).view(NUM_DRAWS, K)
        q = filter_logits(adjust_logits(draft.repeat(NUM_DRAWS, 1), batch), batch, slice(None)).softmax(-1)
    batch = SamplingBatch.of([SamplingRow(params, seed, j, [0], [3]) for seed in seeds for j in range(K + 1)])
    logits = target.repeat(NUM_DRAWS, 1)
    with_draft = torch.arange(NUM_DRAWS * (K + 1)).view(NUM_DRAWS, K + 1)[:, :K].flatten()
    ids = accept_or_replace(sample(logits, batch), logits, batch, with_draft, drafts.flatten(), q).view(
        NUM_DRAWS, K + 1
    )
    return [row[: num_equal(row, proposed) + 1] for row, proposed in zip(ids.tolist(), drafts.tolist(), strict=True)]


@pytest.mark.parametrize("is_certain", [False, True])
def test_the_shares_of_three_tokens_are_those_of_the_target(is_certain: bool) -> None:
    """Sampled drafts are accepted with probability 1, 0.6 and 1 / 3, or 0.6 of them; certain ones with p = 0.6."""
    p, q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.5, 0.3])
    kept = answers(SamplingParams(), p.log().expand(2, 3), None if is_certain else q.log()[None])
    shares = torch.bincount(torch.tensor([tokens[0] for tokens in kept]), minlength=3) / NUM_DRAWS
    assert_close(shares, p, "shares", ("token",), atol=0.025)
    share = torch.tensor(sum(len(tokens) == 2 for tokens in kept) / NUM_DRAWS)
    assert_close(share, torch.tensor(0.6), "share of accepted drafts", atol=0.025)


@pytest.mark.parametrize(
    ("K", "options", "is_certain"),
    [
        *((k, {}, is_certain) for k in (2, 8) for is_certain in (False, True)),
        *((1, options, n % 2 == 1) for n, options in enumerate(OPTIONS)),
    ],
)
def test_the_tokens_of_every_position_are_distributed_as_without_drafts(
    K: int, options: dict[str, Any], is_certain: bool
) -> None:
    """The logits of a position do not depend on the tokens before it here, so each position can be counted alone."""
    params = SamplingParams(**options)
    target, draft = logits_of(K, K + 1), None if is_certain else logits_of(K, K + 1)[:K] + logits_of(99, K)
    kept = answers(params, target, draft)
    batch = SamplingBatch.of([SamplingRow(params, 0, 0, [0], [3])] * (K + 1))
    expected = filter_logits(adjust_logits(target, batch), batch, slice(None)).softmax(-1).double()
    for position in range(K + 1):
        drawn = [tokens[position] for tokens in kept if len(tokens) > position]
        if len(drawn) < 500:  # few reach the last positions
            continue
        counts = torch.bincount(torch.tensor(drawn), minlength=VOCABULARY)
        possible = expected[position] > 0
        assert not counts[~possible].any()
        shares = expected[position][possible] / expected[position].sum()
        assert chisquare(counts[possible].numpy(), (shares * len(drawn)).numpy()).pvalue > LEAST_P, position
    num_accepted = sum(len(tokens) - 1 for tokens in kept)
    assert 0 < num_accepted < K * NUM_DRAWS


def test_drafts_are_accepted_as_often_as_the_distributions_overlap() -> None:
    """1 - TV, and of certain drafts p(x): no scheme that keeps the distribution accepts more."""
    target, draft = logits_of(5, 2), logits_of(6, 1)
    p, q = target.softmax(-1)[0], draft.softmax(-1)[0]
    for proposed, chance in ((draft, torch.minimum(p, q).sum()), (None, p.max())):
        kept = answers(SamplingParams(), target, proposed)
        share = torch.tensor(sum(len(tokens) == 2 for tokens in kept) / NUM_DRAWS)
        assert_close(share, chance, "share of accepted drafts", atol=4 * (0.25 / NUM_DRAWS) ** 0.5)


def test_where_rounding_leaves_no_residual_a_draft_is_replaced_by_a_draw_from_the_target() -> None:
    logits = torch.tensor([-torch.inf, 1.0, 2.0, 3.0]).expand(64, -1)
    batch = SamplingBatch.of([SamplingRow(SamplingParams(), seed, 0) for seed in range(64)])
    rows, more_than_p = torch.arange(64), 2 * logits.softmax(-1)
    drafts = torch.where(rows % 2 == 0, 3, 0)  # 0 is possible in neither distribution
    found = accept_or_replace(torch.zeros_like(rows), logits, batch, rows, drafts, more_than_p)
    assert_equal(set(found.tolist()), {1, 2, 3}, "tokens that are drawn")


def test_equal_distributions_accept_every_draft() -> None:
    target = logits_of(7, 4)
    kept = answers(SamplingParams(), target, target[:3])
    assert_equal({len(tokens) for tokens in kept}, {4}, "tokens that steps with three drafts keep")


def rows_of(count: int) -> list[SamplingRow]:
    """Rows of as many requests, every third of them greedy, with the draft 2."""
    options: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.6}, {"top_k": 3}]
    return [
        SamplingRow(SamplingParams(**options[n % 3]), n, 4 + n % 5, serial=100 + n, draft_id=2) for n in range(count)
    ]


def test_drafts_are_drawn_by_their_own_noise_and_their_distributions_are_kept() -> None:
    rows, logits, kept = rows_of(30), logits_of(1, 30), dict[tuple[int, int], torch.Tensor]()
    ids = Sampler(torch.device("cpu"), 30, draw=DraftDraw(kept)).sample(logits, rows, range(30)).ids
    batch = SamplingBatch.of(rows)
    assert_equal(ids.tolist(), sample(logits, batch, stream=Stream.DRAFT).tolist(), "drafts", ("row",))
    greedy = Sampler(torch.device("cpu"), 10, draw=DraftDraw({})).sample(logits[::3], rows[::3], range(10)).ids
    assert_equal(greedy.tolist(), ids[::3].tolist(), "drafts of greedy rows alone", ("row",))
    drawn = [row for row in rows if not row.params.is_greedy]
    assert_equal(list(kept), [(row.serial, row.index) for row in drawn], "the drafts that have a distribution")
    q = filter_logits(adjust_logits(logits, batch), batch, slice(None)).softmax(-1)
    for number, row in enumerate(rows):
        if row in drawn:
            assert_close(kept[row.serial, row.index], q[number], f"distribution of row {number}", ("id",))


def test_each_draft_is_judged_by_its_own_distribution() -> None:
    """One without a distribution was certain, and one of a greedy row says nothing about its token."""
    rows, logits, q = rows_of(60), logits_of(2, 60), logits_of(3, 60).softmax(-1)
    known = [n for n, row in enumerate(rows) if not row.params.is_greedy and n % 2]
    distributions = {(rows[n].serial, rows[n].index): q[n] for n in known}
    distributions |= {(row.serial, row.index + 1): q[0] for row in rows}
    assert acceptance("coupled", distributions) is plain
    draw = acceptance("rejection", distributions)
    ids = Sampler(torch.device("cpu"), 60, draw=draw).sample(logits, rows, range(60)).ids
    batch, judged = SamplingBatch.of(rows), [n for n in range(60) if n % 3]
    certain = torch.nn.functional.one_hot(torch.tensor(2), VOCABULARY).float()
    of_drafts = torch.stack([q[n] if n in known else certain for n in judged])
    drafts = torch.full((len(judged),), 2)
    expected = accept_or_replace(sample(logits, batch), logits, batch, torch.tensor(judged), drafts, of_drafts)
    assert_equal(ids.tolist(), expected.tolist(), "tokens", ("row",))
    lookup = Sampler(torch.device("cpu"), 60, draw=Rejection()).sample(logits, rows, range(60)).ids
    expected = accept_or_replace(sample(logits, batch), logits, batch, torch.tensor(judged), drafts)
    assert_equal(lookup.tolist(), expected.tolist(), "tokens of drafts found by lookup", ("row",))
    alone = Sampler(torch.device("cpu"), 20, draw=Rejection()).sample(logits[::3], rows[::3], range(20)).ids
    for greedy in (ids[::3], alone):
        assert_equal(greedy.tolist(), logits[::3].argmax(-1).tolist(), "tokens of greedy rows", ("row",))


def test_a_replacement_does_not_follow_from_the_rejection() -> None:
    """A rejection says that the number which decides on acceptance was large. The residual is 0.2 for tokens 0 and 1:
    noise made of that number would favour one of them."""
    p, q = torch.tensor([0.4, 0.4, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    kept = answers(SamplingParams(), p.log().expand(2, 3), q.log()[None])
    shares = torch.bincount(torch.tensor([tokens[0] for tokens in kept]), minlength=3) / NUM_DRAWS
    assert_close(shares, p, "shares", ("token",), atol=0.025)
