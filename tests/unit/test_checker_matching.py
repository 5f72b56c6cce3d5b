"""Shown output against printed output: what is equal, what is not, and the nearest text that is."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutorial.checker.matching import line_matches, printed_lines, reconcile

# As `printed_lines` gives them: no empty line at the end.
PRINTED = st.lists(st.sampled_from(["a", "b", "ab", "aba", ""]), max_size=6).filter(lambda lines: lines[-1:] != [""])
SHOWN = st.lists(st.sampled_from(["a", "b", "ab", "a...", "...b", "a...a", "..."]), max_size=5)


def stands_for(shown: list[str], printed: list[str]) -> bool:
    """The definition: a line ``...`` is any number of lines, ``...`` in a line any text."""
    pattern = "".join(
        "(?:.*\n)*" if line == "..." else f"{re.escape(line).replace(re.escape('...'), '.*')}\n" for line in shown
    )
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in printed)) is not None


@given(SHOWN, PRINTED)
def test_shown_text_is_kept_exactly_if_it_stands_for_what_was_printed(shown: list[str], printed: list[str]) -> None:
    assert (reconcile(shown, printed) == shown) == stands_for(shown, printed)


@given(SHOWN, PRINTED)
def test_the_nearest_text_matches_and_keeps_every_elided_run(shown: list[str], printed: list[str]) -> None:
    nearest = reconcile(shown, printed)
    assert stands_for(nearest, printed)
    assert reconcile(nearest, printed) == nearest
    assert nearest.count("...") == shown.count("...")


@given(st.lists(st.text(st.sampled_from("ab 1.sm%×/"), max_size=8), max_size=6))
def test_what_was_printed_stands_for_itself(lines: list[str]) -> None:
    printed = printed_lines("\n".join(lines))
    assert reconcile(printed, printed) == printed


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("took 1.8 s", "took 12.34 s"),
        ("took 1.8s", "took 1,200s"),
        ("one pass           4.74 ms (median of 5)", "one pass           13.1 ms (median of 5)"),
        ("   4 tokens   12.41 ms   3.102 ms per token", "   4 tokens    9.87 ms   2.468 ms per token"),
        ("decode 11.6 tokens/s · 8 tokens", "decode 9.99 tokens/s · 8 tokens"),
        ("│ load, seconds │ 1.817 │", "│ load, seconds │ 12.1  │"),
        ("02  Generation  ██▊ 329 tok/s  1.5×", "02  Generation  ████████ 52.1 tok/s  12×"),
        ("===== 5 passed in 1.23s =====", "=== 5 passed in 61.20s (0:01:01) ==="),
        ("tests/a.py ....  [ 50%]", "tests/a.py ....  [100%]"),
        ("peak memory 512 MiB", "peak memory 1.2 MiB"),
        ("wrote /tmp/tmpabc12/model.bin", "wrote /tmp/tmpxyz/model.bin"),
        ("decode ... tokens/s in 5 s", "decode 8 or 9 tokens/s in 7 s"),
        ("ends   ", "ends"),
    ],
)
def test_what_depends_on_the_machine_is_equal(shown: str, printed: str) -> None:
    assert line_matches(shown, printed)


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("8 tokens", "9 tokens"),
        ("took 1.8 s for 4 tokens", "took 1.8 s for 5 tokens"),
        ("took 1.8 s", "took 1.8 ms"),
        ("cache bytes 1,024", "cache bytes 2,048"),
        ("the cache takes 180 MiB", "the cache takes 181 MiB"),
        ("1.5× fewer", "2.5× fewer"),
        ("37% accepted", "38% accepted"),
        ("3 steps", "4 steps"),
        ("a  b", "a b"),
        (" a", "a"),
        ("a...b", "ab c"),
        ("aba...ba", "aba"),
        ("/tmp/x/model.bin", "/tmp/x/other.bin"),
        ("[0.34, 0.78]", "[0.34, 0.79]"),
    ],
)
def test_everything_else_is_exact(shown: str, printed: str) -> None:
    assert not line_matches(shown, printed)


def test_a_changed_line_is_replaced_and_elisions_stay() -> None:
    shown = ["first token 1 s", "...", "answer: old", "8 tokens in 3 s"]
    printed = ["first token 2 s", "x", "y", "answer: new", "8 tokens in 4 s"]
    assert reconcile(shown, printed) == ["first token 1 s", "...", "answer: new", "8 tokens in 3 s"]
    assert reconcile(["head", "..."], ["other", "x", "y"]) == ["other", "..."]
    assert reconcile([], ["a", "b"]) == ["a", "b"]
    assert reconcile(["a", "gone", "c"], ["a", "c"]) == ["a", "c"]


def test_printed_lines_are_what_a_terminal_shows() -> None:
    assert printed_lines("\x1b[1mbold\x1b[0m  \n 10%\r100%\nend\r\n\n\n") == ["bold", "100%", "end"]
    assert printed_lines("") == []
