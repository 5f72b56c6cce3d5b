"""The screen of a failed check, and how a failure is compared with what known mistakes do, without running a test."""

from pathlib import Path

import click
import pytest

from shared.errors import ConfigError
from tutorial.screens.check import looks_like, screen
from tutorial.workshop.exercises import find_exercise, reference
from tutorial.workshop.mistakes import (
    MOST_ALIKE,
    Mistake,
    fails_by_returning_nothing,
    is_alike,
    recognise,
    returns_nothing,
)
from tutorial.workshop.verdicts import Case, Outcome, Verdict, judge
from tutorial.workshop.workspace import Workspace

EXERCISE, EXERCISE_THAT_RETURNS = find_exercise("03x2"), find_exercise("03x1")
FILE = "phases/phase_03/test_parity.py"


def case(parameters: str, outcome: str = "failed", error: str = "", name: str = "test_x") -> Case:
    brackets = f"[{parameters}]" if parameters else ""
    return Case(f"{FILE}::{name}{brackets}", outcome, error or "AssertionError: keys, token 1: expected 1.5, got 2.5")


def verdict(*cases: Case) -> Verdict:
    return Verdict(EXERCISE, Outcome.FAILED, cases=cases)


def shown(*cases: Case) -> list[str]:
    return [line.strip() for line in screen(Workspace(Path("/nowhere")), verdict(*cases))][1:]


def test_the_table_holds_only_the_parameters_that_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.style", lambda text, **_: text)
    cases = [
        case(f"{family}-{sizes}-{backend}", "failed" if sizes != "whole" and family == "gemma3" else "passed")
        for family in ("llama", "gemma3")
        for sizes in ("whole", "one by one")
        for backend in ("naive", "sdpa")
    ]
    assert shown(*cases) == [
        "✗ test_x, 6 of 8 cases pass",
        "whole  one by one",
        "llama   ✓      ✓",
        "gemma3  ✓      ✗",
        "",
        "the smallest failing case: test_x[gemma3-one by one-naive]",
        "keys, token 1: expected 1.5, got 2.5",
        f"in {FILE}::test_x[gemma3-one by one-naive]",
    ]
    few = [case("1", "passed"), case("64", "failed"), case("65", "failed")]
    assert shown(*few)[1:6] == ["1   ✓", "64  ✗", "65  ✗", "", "the smallest failing case: test_x[64]"]
    odd = [case("1e-06", "passed"), case("3", "failed")]
    assert shown(*odd)[:3] == ["✗ test_x, 1 of 2 cases pass", "1e-06  ✓", "3      ✗"]
    signed = [case(f"7-{n}-{kind}", "failed" if n else "passed") for n in (1, 0, -60) for kind in ("a", "b")]
    assert shown(*signed)[:4] == ["✗ test_x, 2 of 6 cases pass", "1    ✗", "0    ✓", "-60  ✗"]
    many = [case(f"{n}", "failed" if n else "passed") for n in range(30)]
    assert shown(*many)[11] == "and 20 more, of which 0 pass"


def test_the_smallest_of_the_first_test_that_fails_is_shown() -> None:
    exercise = find_exercise("03x1")
    test = exercise.tests[0]
    results = [Case(f"{test}[{name}]", "failed", "ValueError: x") for name in ("(7, 1000)", "(5, 33)", "(64, 64)")]
    found = judge(exercise, results, {}, Path("/nowhere"), {})
    assert found.test == f"{test}[(5, 33)]"
    assert (found.num_passed, found.num_tests, found.reason) == (0, 3, "ValueError: x")


@pytest.mark.parametrize(
    ("error", "alike"),
    [
        ("AssertionError: keys, token 1: expected 1.5, got 2.5001", True),
        ("AssertionError: keys, token 1: expected 1.5, got 2.6", False),
        ("AssertionError: keys, token 2: expected 1.5, got 2.5", False),
        ("AssertionError: values, token 1: expected 1.5, got 2.5", False),
        ("AssertionError: keys, token 1: expected 1.5, got nan", False),
    ],
)
def test_a_failure_is_alike_if_the_same_cases_fail_with_nearly_the_same_values(error: str, alike: bool) -> None:
    one = verdict(case("a", "passed"), case("b"))
    assert is_alike(one, verdict(case("a", "passed"), case("b", error=error))) is alike
    assert not is_alike(one, verdict(case("a"), case("b")))
    assert not is_alike(one, verdict(case("b")))


def test_variants_of_one_mistake_share_its_sentence_and_of_a_few_mistakes_it_may_be_any() -> None:
    one, other = (Mistake("03x2", says, ()) for says in ("short", "long"))
    variant = Mistake("03x2", "short", (("a", "b"),))
    seen = verdict(case("a"))
    assert recognise(seen, {one: verdict(case("a")), other: verdict(case("b"))}) == (one,)
    found = recognise(seen, {one: verdict(case("a")), variant: verdict(case("a"))})
    assert [mistake.says for mistake in found] == ["short"]
    found = recognise(seen, {one: verdict(case("a")), other: verdict(case("a"))})
    assert [click.unstyle(line).strip() for line in looks_like(found) if line] == [
        "This looks like: short.",
        "or: long.",
    ]
    many = {Mistake("03x2", str(n), ()): verdict(case("a")) for n in range(MOST_ALIKE + 1)}
    assert recognise(seen, many) == ()
    assert looks_like(()) == []


def test_a_function_that_returns_nothing_is_seen_from_its_text() -> None:
    source, _ = reference(EXERCISE_THAT_RETURNS)
    lines = ("return 2 * config", "result = 2 * config")
    assert not returns_nothing(EXERCISE_THAT_RETURNS, source)
    assert returns_nothing(EXERCISE_THAT_RETURNS, source.replace(*lines))
    inner = "each = lambda: 0\n    def inner():\n        return 1\n    result = 2 * config"
    assert returns_nothing(EXERCISE_THAT_RETURNS, source.replace(lines[0], inner))
    assert returns_nothing(EXERCISE_THAT_RETURNS, source.replace(lines[0], f"# a note\n    {lines[1]}"))
    assert not returns_nothing(EXERCISE_THAT_RETURNS, "no such function")
    assert not returns_nothing(EXERCISE_THAT_RETURNS, "def kv_bytes(:")
    attend = find_exercise("03x4")
    comment_at_the_margin = source.replace(
        "        k, v = self.keys[layer]", "# a note\n        k, v = self.keys[layer]"
    )
    assert not returns_nothing(attend, comment_at_the_margin)
    assert returns_nothing(attend, comment_at_the_margin.replace("return self.attention", "self.attention"))
    assert not returns_nothing(EXERCISE, source), "it sets attributes, and returns nothing in the reference either"


def test_an_error_in_the_exercise_s_own_lines_is_not_for_want_of_a_return() -> None:
    """The function never came to its end; one that did makes another line of the file fail, or none."""
    exercise = find_exercise("06.1x4")
    text = reference(exercise)[0].replace("    return offsets\n", "    offsets[len(num_splits) + num_rows] = 0\n")
    assert returns_nothing(exercise, text)
    own = text.splitlines().index("    offsets[len(num_splits) + num_rows] = 0") + 1
    for where, is_so in ((f"plan.py:{own}", False), (f"plan.py:{own + 30}", True), (None, True)):
        assert fails_by_returning_nothing(Verdict(exercise, Outcome.FAILED, where=where), text) is is_so


def test_a_mistake_that_does_not_fit_its_exercise_is_refused() -> None:
    with pytest.raises(ConfigError, match="stands 0 times"):
        Mistake("03x2", "nothing", (("no such text", ""),)).text(EXERCISE)
