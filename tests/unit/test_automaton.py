"""The automaton of a grammar, byte by byte: a small document language written as tables by hand."""

from dataclasses import replace

import numpy as np

from shared.grammar.automata.automaton import MAX_DEPTH, MAX_DIGITS, REFUSED, START, UNBOUNDED, Action, Automaton, entry
from shared.grammar.documents.json_schema import compile_schema
from tests.grammars import assert_language, budget


def nested() -> Automaton:
    """``value = "[" value? "]" | '"' of two or three letters a '"'``, with blanks inside the brackets.

    States: 0 the value, 1 the end, 2 after a bracket that opens, 3 after its value, 4 inside a string.
    """
    letters = b'[]"a \n\t'
    columns = np.full(256, len(letters), np.uint8)
    columns[list(letters)] = range(len(letters))
    bracket, string = entry(Action.PUSH, 0), entry(Action.PUSH, 1)
    inner_bracket, inner_string = entry(Action.PUSH, 2), entry(Action.PUSH, 3)
    close, end = entry(Action.POP, 0), REFUSED
    blank2, blank3 = entry(Action.BLANK, 2), entry(Action.BLANK, 3)
    table = [
        [bracket, end, string, end, end, end, end, end],
        [end] * 8,
        [inner_bracket, close, inner_string, end, blank2, blank2, blank2, end],
        [end, close, end, end, blank3, blank3, blank3, end],
        [end, end, close, entry(Action.COUNT, 4), end, end, end, end],
    ]
    return Automaton(
        columns=columns,
        table=np.array(table, np.int32),
        is_final=np.array([False, True, False, False, False]),
        depths=np.zeros(5, np.int32),
        pushes=np.array([[s, f, n, m, 1] for f in (0, 1) for s, n, m in ((2, 0, UNBOUNDED), (4, 2, 3))], np.int32),
        returns=np.array([1, 3], np.int32),
        pops=np.zeros((1, 4), np.int32),
        clauses=np.empty((0, 5), np.uint64),
        keys=np.empty((0, 3), np.uint64),
        guards=np.empty((0, 4), np.uint64),
    )


def test_brackets_nest_strings_count_and_blanks_end() -> None:
    automaton = nested()
    accepted = (b"[]", b'"aa"', b'[["aaa"]]', b"[ ]", b"[ [ ]]", b"[\n\t  [ ]\n]", b"[\n" + b" " * 20 + b"]")
    refused = (b"", b"]", b"[", b'"a"', b'"aaaa"', b"[] ", b"[  ]", b"[\n\n]", b"[\n" + b" " * 21 + b"]", b"[][]")
    assert_language(automaton, accepted, refused)


def test_digits_that_could_go_on_for_ever_end() -> None:
    automaton = compile_schema({"type": "array", "items": {"type": "integer"}}, budget())
    many = b"1" * (1 + MAX_DIGITS)
    assert_language(automaton, [b"[%b , %b\n]" % (many, many)], [b"[1%b]" % many])


def test_a_stack_is_never_too_deep_to_end() -> None:
    automaton = nested()
    assert automaton.accepts(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    assert automaton.walk(START, b"[" * MAX_DEPTH) is not None
    assert automaton.walk(START, b"[" * (MAX_DEPTH + 1)) is None


def objects() -> Automaton:
    """An object of keys a, b and c without values, each at most once: a is required, and b needs c.

    States: 0 the object, 1 the end, 2 after the brace, 3 after a comma, 4 after a key.
    """
    letters = b"{},abc"
    columns = np.full(256, len(letters), np.uint8)
    columns[list(letters)] = range(len(letters))
    close, comma = entry(Action.POP, 0), entry(Action.GUARD, 0)
    end = REFUSED
    names = [entry(Action.KEY, number) for number in range(3)]
    table = [
        [entry(Action.PUSH, 0), end, end, end, end, end, end],
        [end] * 7,
        [end, end, end, *names, end],
        [end, end, end, *names, end],
        [end, close, comma, end, end, end, end],
    ]
    empty = np.empty((0, 4), np.uint64)
    return Automaton(
        columns=columns,
        table=np.array(table, np.int32),
        is_final=np.array([False, True, False, False, False]),
        depths=np.zeros(5, np.int32),
        pushes=np.array([[2, 0, 0, UNBOUNDED, 1]], np.int32),
        returns=np.array([REFUSED, 1], np.int32),
        pops=np.array([[1, 0, 2, 0]], np.int32),
        clauses=np.array([[1, 0, 0b001, 1, 0], [1, 0b010, 0b100, 1, 0]], np.uint64),
        keys=np.array([[4, 1 << number, True] for number in range(3)], np.uint64),
        guards=np.concatenate([empty, np.array([[3, 0b111, 0, 3]], np.uint64)]),
    )


def test_a_key_of_several_becomes_seen_one_by_one() -> None:
    """An ``a`` is the first key, and a second one the key that needs a ``c``."""
    keys = np.array([[4, 0b011, True], [4, 0b010, True], [4, 0b100, True]], np.uint64)
    assert_language(replace(objects(), keys=keys), [b"{a}", b"{a,a,c}"], [b"{a,a}", b"{a,a,a,c}", b"{a,b}"])


def test_keys_in_any_order() -> None:
    automaton = objects()
    accepted = (b"{a}", b"{a,c}", b"{c,a}", b"{b,c,a}", b"{a,b,c}")
    refused = (b"{}", b"{c}", b"{a,b}", b"{a,a}", b"{a,}", b"{b,c}")
    assert_language(automaton, accepted, refused)
    assert automaton.walk(START, b"{a,b,c,") is None, "after all keys no comma, since no key could follow"
