"""Masks of the rows of a request with a grammar, without an engine: after outputs, drafts and a least number."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shared.grammar.constraint import Constraints
from shared.grammar.grammar import Grammar
from shared.grammar.tokens.vocabulary import GrammarVocabulary
from shared.sampling.params import SamplingParams
from shared.sampling.sampler import SamplingRow
from shared.scheduling.schedule import DecodeRun, NextRows, Schedule, Scheduled

END, A, B, C = range(4)


def begin(pattern: str, **options: Any) -> tuple[Constraints, Any]:
    """A request whose outputs match a pattern of a, b and c."""
    constraints = Constraints(lambda: GrammarVocabulary.of_tokens([b"</s>", b"a", b"b", b"c"], [END]))
    params = SamplingParams(structured_output=Grammar.regex(pattern), **options)
    return constraints, SimpleNamespace(
        constraint=constraints.of(params), params=params, output_ids=[], draft_ids=[], serial=5, request_id="a"
    )


def masked(constraints: Constraints, request: Any, masked_ids: tuple[int, ...] = ()) -> list[tuple[Any, Any]]:
    """Of each row what is allowed, and the ids that are masked besides."""
    count = len(request.draft_ids)
    rows = [SamplingRow(request.params, 0, n, serial=request.serial, masked_ids=masked_ids) for n in range(count + 1)]
    schedule: Any = [(request, None, None, count, count + 1, None)]
    found = constraints.masked(schedule, rows)
    return [
        (None if row.allowed is None else np.flatnonzero(row.allowed).tolist(), tuple(row.masked_ids)) for row in found
    ]


def test_a_row_is_masked_behind_the_drafts_before_it() -> None:
    constraints, request = begin("(ab)+c?")
    for outputs, drafts, allowed in (
        ([], [A, B], [[A], [B], [END, A, C]]),
        ([A], [B, A, A], [[B], [END, A, C], [B], None]),  # no row matters after a draft that is refused
        ([A, B, A], [], [[B]]),
        ([A, B, A, B], [C], [[END, A, C], [END]]),
        ([A, B, A, B, C], [], [[END]]),
        ([A, B, A, B, C, END, A], [], [None]),  # what follows the end is dropped
    ):
        request.output_ids, request.draft_ids = outputs, drafts
        assert [row for row, _ in masked(constraints, request)] == allowed
    assert constraints.num_masks == 3 + 4 + 1 + 2 + 1 + 1


@pytest.mark.parametrize(("pattern", "left"), [("a", ()), ("a+", (END,))])
def test_a_grammar_that_allows_the_end_alone_wins_over_min_tokens(pattern: str, left: tuple[int, ...]) -> None:
    constraints, request = begin(pattern, min_tokens=3)
    request.output_ids = [A]
    assert masked(constraints, request, (END,))[0][1] == left


@pytest.mark.parametrize("min_tokens", [0, 3])
def test_the_device_makes_masks_unless_the_end_is_forbidden(min_tokens: int) -> None:
    constraints, request = begin("a+", min_tokens=min_tokens)
    held: list[Any] = []
    constraints.pool = SimpleNamespace(hold=lambda *asked: held.append(asked) or 0)  # type: ignore[assignment]
    assert [masked(constraints, request) for _ in range(2)] == [[(None, ())]] * 2
    assert held == [(request.constraint.grammar, request.constraint.fsm, request.constraint)], "once for a request"
    if min_tokens:
        assert masked(constraints, request, (END,)) == [([A], (END,))]
        return
    run = DecodeRun([request], 9)
    run.rows = [SamplingRow(request.params, 0, 0, serial=request.serial)]
    rows, schedule = NextRows(run, 1), Schedule(1, (Scheduled(request, 0, 1),), 1)
    for number in (3, 4):
        assert constraints.masked(schedule, rows) is rows
        assert constraints.num_masks == number
        schedule = Schedule(2)  # the requests of a run are asked once


def test_a_mask_of_the_host_is_made_anew_in_each_step_of_a_run() -> None:
    constraints, request = begin("ab")
    run = DecodeRun([request], 9)
    run.rows = [SamplingRow(request.params, 0, 0, serial=request.serial)]
    schedule = Schedule(1, (Scheduled(request, 0, 1),), 1)
    for num_after, allowed in enumerate((A, B)):
        (row,) = constraints.masked(schedule, NextRows(run, num_after))
        assert np.flatnonzero(row.allowed).tolist() == [allowed]
        request.output_ids = [A]
