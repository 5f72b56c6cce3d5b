"""Stop strings against an oracle that sees the whole text at once, with random cuts."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shared.errors import RequestError
from shared.text.stopping import StopChecker
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


@settings(max_examples=300)
@given(stops=STOPS, pieces=PIECES)
@example(stops=["abcd", "bc"], pieces=["abc", "d"])
@example(stops=["abc", "ab", "abd"], pieces=["ab", "c"])
@example(stops=["abc", "ab", "abcd"], pieces=["ab", "c"])
def test_the_released_text_and_the_match_are_the_oracles(stops, pieces):
    checker, released = _run(stops, pieces)
    released.append(checker.flush())
    assert_equal(
        ("".join(released), checker.matched),
        _oracle("".join(pieces), stops),
        f"text and match of {pieces}, stop {stops}",
    )


@settings(max_examples=200)
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


@settings(max_examples=200)
@given(stops=STOPS, pieces=PIECES)
@example(stops=["a", "ab"], pieces=["a"])
@example(stops=["abc", "ab", "abd"], pieces=["ab"])
@example(stops=["abc", "ab", "abcd"], pieces=["ab"])
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


def test_long_outputs_keep_the_buffer_short():
    checker = StopChecker(["a" * 200 + "b"])
    for _ in range(1000):
        checker.push("a" * 7)
        assert len(checker._held) <= 200


@pytest.mark.parametrize("stops", ["stop", ["ok", ""], [b"x"], [None]])
def test_an_empty_stop_string_is_refused(stops):
    with pytest.raises(RequestError, match="stop strings"):
        StopChecker(stops)
