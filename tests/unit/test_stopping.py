"""Stop strings against an oracle that sees the whole text at once, with random cuts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import RequestError
from shared.text.stopping import FinishReason, StopChecker
from tests.comparison import assert_equal

SMALL = st.text("ab\n", min_size=1, max_size=5)
STOPS = st.lists(SMALL, max_size=4)
PIECES = st.lists(st.text("abc\n", max_size=4), max_size=20)


def _oracle(text, stops):
    """(text before the winning stop string, that string): smallest start, then first listed."""
    for start in range(len(text)):
        for stop in stops:
            if text.startswith(stop, start):
                return text[:start], stop
    return text, None


def _run(stops, pieces):
    checker = StopChecker(stops)
    released = [checker.push(piece) for piece in pieces]
    return checker, released


@settings(max_examples=400, deadline=None)
@given(stops=STOPS, pieces=PIECES)
def test_the_released_text_and_the_match_are_the_oracles(stops, pieces):
    checker, released = _run(stops, pieces)
    released.append(checker.flush())
    assert_equal(
        ("".join(released), checker.matched),
        _oracle("".join(pieces), stops),
        f"text and match of {pieces}, stop {stops}",
    )


@settings(max_examples=250, deadline=None)
@given(stops=STOPS, pieces=PIECES)
def test_text_is_held_back_only_while_it_may_begin_or_contain_a_stop_string(stops, pieces):
    checker = StopChecker(stops)
    released, seen = "", ""
    for piece in pieces:
        released += checker.push(piece)
        seen += piece
        if checker.matched is not None:
            break
        may_begin = (
            start
            for start in range(len(seen))
            if any(len(stop) > len(seen) - start and stop.startswith(seen[start:]) for stop in stops)
        )
        assert_equal(released, seen[: next(may_begin, len(seen))], f"released of {seen!r}, stop strings {stops}")


@settings(max_examples=250, deadline=None)
@given(stops=STOPS, pieces=PIECES)
def test_a_match_is_reported_as_soon_as_no_continuation_can_change_it(stops, pieces):
    """Where the checker still waits although a stop string is complete, some continuation makes another one win."""
    checker, _ = _run(stops, pieces)
    text = "".join(pieces)
    _, winner = _oracle(text, stops)
    if winner is None or checker.matched is not None:
        assert_equal(checker.matched, winner, f"match of {pieces}, stop strings {stops}")
        return
    tails = [stop[size:] for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])]
    assert any(_oracle(text + tail, stops) != _oracle(text, stops) for tail in tails), (
        f"the checker waits after {pieces}, stop strings {stops}, although no continuation can change the match"
    )


@settings(max_examples=200, deadline=None)
@given(stops=STOPS, text=st.text("ab\n", max_size=30), data=st.data())
def test_the_cuts_do_not_matter(stops, text, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    results = []
    for way in (pieces, list(text), [text]):
        checker, released = _run(stops, way)
        results.append(("".join(released) + checker.flush(), checker.matched))
    assert results[0] == results[1] == results[2]


def test_a_stop_string_that_spans_pieces_is_never_shown():
    checker, released = _run(["</answer>"], ["42", "</", "ans", "wer", "> more"])
    assert_equal(released, ["42", "", "", "", ""], "released after each piece", ("piece",))
    assert_equal(checker.matched, "</answer>", "the match")
    assert_equal(checker.push("more"), "", "released after the match")
    assert_equal(checker.flush(), "", "released at the end")


def test_a_false_beginning_is_released():
    checker, released = _run(["</answer>"], ["42", "</", "ant>"])
    assert_equal(released, ["42", "", "</ant>"], "released after each piece", ("piece",))
    assert_equal(checker.matched, None, "the match")


def test_a_held_beginning_is_released_at_the_end():
    checker, released = _run(["\n\n"], ["line\n"])
    assert released == ["line"]
    assert checker.flush() == "\n"
    assert checker.matched is None


def test_the_earlier_start_wins_even_if_it_completes_later():
    checker, released = _run(["abcd", "bc"], ["abc", "d"])
    assert (released, checker.matched) == (["", ""], "abcd")
    checker, released = _run(["abcd", "bc"], ["abc", "e"])
    assert (released, checker.matched) == (["", "a"], "bc")


def test_at_equal_start_the_first_listed_wins_and_does_not_wait_for_a_later_one():
    assert _run(["\n", "\n\n"], ["x\n"])[0].matched == "\n"
    checker, _ = _run(["\n\n", "\n"], ["x\n"])
    assert checker.matched is None
    assert checker.flush() == ""
    assert checker.matched == "\n"


def test_without_stop_strings_everything_passes_at_once():
    assert _run([], ["a", "", "b"])[1] == ["a", "", "b"]


def test_long_outputs_keep_the_buffer_short():
    checker = StopChecker(["a" * 200 + "b"])
    for _ in range(1000):
        checker.push("a" * 7)
        assert len(checker._held) <= 200


@pytest.mark.parametrize("stops", ["stop", ["ok", ""], [b"x"], [None]])
def test_an_empty_stop_string_is_refused(stops):
    with pytest.raises(RequestError, match="stop strings"):
        StopChecker(stops)


def test_finish_reasons_are_their_words():
    assert [str(reason) for reason in FinishReason] == ["eos", "stop", "length", "abort", "error"]
    assert FinishReason("stop") is FinishReason.STOP
