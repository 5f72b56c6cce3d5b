"""Automata over bytes: made, combined, and as small as can be."""

import itertools
from collections.abc import Iterator
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.grammar.automata import languages
from shared.grammar.automata.dfa import DEAD, DFA
from shared.grammar.automata.languages import combine, difference, intersection, union, words
from shared.grammar.automata.minimization import minimize
from shared.grammar.automata.nfa import NFA, determinize
from shared.grammar.limits import LOOK, Budget, GrammarError, Limits, Remembered, WorkError
from shared.grammar.patterns.regex import compile_regex
from tests.comparison import assert_equal
from tests.grammars import budget

LETTERS = b"abc"
TEXTS = [bytes(text) for size in range(5) for text in itertools.product(LETTERS, repeat=size)]
WORDS = st.lists(st.sampled_from(TEXTS), min_size=1, max_size=8)


def accepted(dfa: DFA) -> list[bytes]:
    return [text for text in TEXTS if dfa.run(text)]


def ends_with_ab() -> NFA:
    """Texts of a and b that end with "ab": states 0 (any), 1 after an a, 2 the end."""
    nfa = NFA()
    any_, after, end = nfa.state(), nfa.state(), nfa.state()
    nfa.edges[any_] += [(ord("a"), ord("b"), any_), (ord("a"), ord("a"), after)]
    nfa.edges[after].append((ord("b"), ord("b"), end))
    nfa.accepts[end] = 1
    return nfa


def test_the_sets_of_an_nfa_become_states() -> None:
    dfa = determinize(ends_with_ab(), budget())
    expected = [text for text in TEXTS if text.endswith(b"ab") and b"c" not in text]
    assert_equal(accepted(dfa), expected, "the texts that are accepted", ("text",))
    assert len(dfa) == 3, f"expected 3 states, got {len(dfa)}"
    assert len(dfa.next[0]) == 3, "a column for a, one for b, one for all other bytes"


def test_free_edges_are_followed() -> None:
    nfa = NFA()
    start, middle, end = nfa.state(), nfa.state(), nfa.state()
    nfa.free[start].append(middle)
    nfa.edges[middle].append((ord("a"), ord("c"), end))
    nfa.free[end].append(start)
    nfa.accepts[end] = 1
    assert_equal(accepted(determinize(nfa, budget())), TEXTS[1:], "the texts that are accepted", ("text",))


def test_a_state_that_is_reached_again_is_not_the_beginning() -> None:
    """Any number of a; but the end counts at the beginning alone, so only the empty text is accepted."""
    nfa = NFA()
    start, before, end = nfa.state(), nfa.state(), nfa.state()
    nfa.edges[start].append((ord("a"), ord("a"), start))
    nfa.ends[start] = [before]
    nfa.begins[before] = [end]
    nfa.accepts[end] = 1
    assert_equal(accepted(determinize(nfa, budget())), [b""], "the texts that are accepted", ("text",))


@given(WORDS)
def test_words(texts: list[bytes]) -> None:
    dfa = words(texts, budget())
    assert accepted(dfa) == sorted(set(texts), key=lambda text: (len(text), text))
    assert len(minimize(dfa, budget())) == len(dfa) == num_distinguishable(dfa)


def num_distinguishable(dfa: DFA) -> int:
    """The number of states that differ in some text, by comparing the languages of all of them."""
    languages = set()
    for state in range(len(dfa)):
        rows = np.array([state, *range(len(dfa))])
        order = np.append(dfa.next, [[DEAD] * dfa.next.shape[1]], axis=0)
        found = []
        for text in TEXTS:
            place = int(rows[0])
            for byte in text:
                place = int(order[place, dfa.columns[byte]]) if place != DEAD else DEAD
            found.append(0 if place == DEAD else int(dfa.accepts[place]))
        languages.add(tuple(found))
    return len(languages)


def test_words_with_bits_and_many_of_them() -> None:
    dfa = words([b"ab", b"abc", b"b"], budget(), [1, 2, 4])
    assert [dfa.run(text) for text in (b"ab", b"abc", b"b", b"a", b"")] == [1, 2, 4, 0, 0]
    many = words([f"word {n}".encode() for n in range(10_000)], budget())
    assert len(many) < 30
    assert many.run(b"word 9999")
    assert not many.run(b"word 10000")
    letters = [bytes([byte]) for byte in range(256)]
    assert all(map(words(letters, budget()).run, letters))


@settings(max_examples=40)
@given(WORDS, WORDS, WORDS, st.sampled_from([1, 1024]))
def test_combinations(first: list[bytes], second: list[bytes], third: list[bytes], piece: int) -> None:
    dfas = [words(texts, budget()) for texts in (first, second, third)]
    sets = [set(texts) for texts in (first, second, third)]
    with patch.object(languages, "PIECE", piece):
        everything = combine(dfas, budget())
    for text in TEXTS:
        assert everything.run(text) == sum((text in texts) << n for n, texts in enumerate(sets))
    for dfa, expected in (
        (union(dfas, budget()), sets[0] | sets[1] | sets[2]),
        (intersection(dfas, budget()), sets[0] & sets[1] & sets[2]),
        (difference(dfas[0], dfas[1:], budget()), sets[0] - sets[1] - sets[2]),
    ):
        assert set(accepted(dfa)) == expected
        assert dfa.is_empty == (not expected)
        assert all(reaches_an_end(dfa)) or dfa.is_empty


def test_languages_of_one_cycle_stay_apart() -> None:
    both = combine([compile_regex(pattern, budget()) for pattern in ("(aa)*", "a(aa)*")], budget())
    assert [both.run(b"a" * size) for size in range(5)] == [1, 2, 1, 2, 1]
    assert len(both) == 2


def reaches_an_end(dfa: DFA) -> Iterator[bool]:
    for state in range(len(dfa)):
        found, waiting = {state}, [state]
        while waiting:
            more = set(dfa.next[waiting.pop()].tolist()) - found - {DEAD}
            found |= more
            waiting += more
        yield any(dfa.accepts[list(found)])


def test_a_budget_ends_what_is_too_large() -> None:
    nfa = NFA()
    states = [nfa.state() for _ in range(19)]
    nfa.edges[0] += [(97, 98, 0), (97, 97, states[1])]
    for state, after in itertools.pairwise(states[1:]):
        nfa.edges[state].append((97, 98, after))
    nfa.accepts[states[-1]] = 1
    with pytest.raises(GrammarError, match="more than 1000 states"):
        determinize(nfa, budget(states=1000))
    with pytest.raises(WorkError, match="more than 5,000 units of work"):
        determinize(nfa, Budget(Limits(work=5000)))


def test_finished_parts_count_too() -> None:
    kept = budget(states=1000)
    kept.keep(500)
    kept.keep(100)
    kept.check(400)
    with pytest.raises(GrammarError, match="more than 1000 states"):
        kept.check(401)


def test_the_clock_is_the_last_net() -> None:
    """It is read now and then, and its error says that the machine is at fault."""
    times = itertools.chain([0.0, 59.0], itertools.repeat(61.0))
    budget = Budget(clock=lambda: next(times))
    budget.spend(2 * LOOK)
    budget.spend(LOOK - 1)
    with pytest.raises(GrammarError, match="not compiled within 60 s of the clock, though") as error:
        budget.spend(1)
    assert not isinstance(error.value, WorkError)


def test_what_is_remembered_costs_each_budget_once_what_it_cost_to_make() -> None:
    remembered = Remembered[str](2)
    for paying in (Budget(Limits(states=10)), Budget(Limits(states=10))):

        def make(name: str, paying: Budget = paying) -> str:
            paying.spend(30)
            paying.check(9)
            return name

        for key in "abab":
            assert remembered.get(key, partial(make, key), paying) == key
        assert paying.work == 62
        assert paying.most_states == 9
    small = Budget(Limits(states=10))
    small.keep(2)
    with pytest.raises(GrammarError, match="more than 10 states"):
        remembered.get("b", str, small)


def test_what_a_remembered_result_needs_is_paid_with_it() -> None:
    tables, work = [Remembered[int](9) for _ in range(4)], []

    def make(depth: int, paying: Budget) -> int:
        paying.spend(30)
        return tables[depth].get("x", partial(make, depth + 1, paying), paying) if depth < len(tables) else depth

    for _ in range(2):
        make(0, paying := budget())
        work.append(paying.work)
    assert work == [150, 150]


@pytest.mark.parametrize("num_words", [31, 32, 40, 60])
def test_more_combinations_than_an_integer_of_64_bits_can_number(num_words: int) -> None:
    """Of automata of three states and the dead one, 32 have 2⁶⁴ combinations."""
    texts = [bytes([ord("0") + number, ord("x")]) for number in range(num_words)]
    combined = combine([words([text], budget()) for text in texts], budget())
    for number, text in enumerate(texts):
        assert combined.run(text) == 1 << number, f"{text!r} is accepted by {combined.run(text):b}"
        assert not combined.run(text[:1])
        assert not combined.run(text + b"x")
    assert len(combined) == 1 + 2 * num_words
