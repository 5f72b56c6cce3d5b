"""The pool of grammars' tables: ranges that requests hold never move, overlap or change, and what fits is let in."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.errors import ConfigError
from shared.grammar.automata.automaton import ACTION_BITS, REFUSED, Action, Configuration, entry
from shared.grammar.automata.plain import free_loops, plain_from
from shared.grammar.documents.json_schema import compile_schema
from shared.grammar.patterns.regex import automaton_of, compile_regex
from shared.grammar.tokens.device import AT_END, GROUP, LONGEST, NEVER, GrammarTokens, pack_row, unpack_row
from shared.grammar.tokens.fsm import TokenFSM
from shared.grammar.tokens.pool import HEADER, GrammarPool
from shared.grammar.tokens.vocabulary import GrammarVocabulary
from tests.grammars import budget, random_tokens

SIZE = 20 * HEADER


def content(key: int) -> np.ndarray:
    return np.arange(1, 1 + key * 11, dtype=np.int32) * (key + 1)


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = GrammarPool(4 * SIZE, "cpu")
        self.holds: dict[int, int] = {}
        self.bases: dict[int, int] = {}

    @rule(key=st.integers(1, 18))
    def acquire(self, key: int) -> None:
        base = self.pool.acquire(key, content(key))
        if base is None:
            assert key not in self.holds
            assert self.largest_gap() < len(content(key)), "unheld ranges make room"
            return
        assert self.holds.get(key, 0) == 0 or base == self.bases[key]
        self.holds[key] = self.holds.get(key, 0) + 1
        self.bases[key] = base

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.holds)))
        self.pool.release(key)
        self.holds[key] -= 1
        if not self.holds[key]:
            del self.holds[key]

    @rule(key=st.integers(1, 18))
    def release_what_is_not_held(self, key: int) -> None:
        if key not in self.holds:
            with pytest.raises(KeyError):
                self.pool.release(key)

    @invariant()
    def held_tables_stand_where_they_stood(self) -> None:
        for key in self.holds:
            size = len(content(key))
            assert self.pool.tables[self.bases[key] :][:size].tolist() == content(key).tolist()

    def largest_gap(self) -> int:
        is_taken = np.zeros(SIZE + 1, bool)
        is_taken[-1] = True
        for key in self.holds:
            is_taken[self.bases[key] : self.bases[key] + -(-len(content(key)) // HEADER) * HEADER] = True
        ends = np.flatnonzero(is_taken)
        return int(np.diff(ends, prepend=-1).max()) - 1


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestPool = PoolMachine.TestCase


def test_a_grammar_that_never_fits() -> None:
    pool = GrammarPool(4 * SIZE, "cpu")
    assert pool.acquire("key", np.zeros(SIZE + 1, np.int32)) is None
    assert pool.acquire("key", np.zeros(SIZE, np.int32)) == 0


def test_the_range_that_was_released_first_makes_room() -> None:
    pool, half = GrammarPool(4 * SIZE, "cpu"), np.zeros(SIZE // 2, np.int32)
    bases = {key: pool.acquire(key, half) for key in "ab"}
    for key in "ba":
        pool.release(key)
    assert pool.acquire("c", half) == bases["b"]
    assert pool.acquire("a", None) == bases["a"]


def test_a_grammar_that_is_asked_for_again_is_not_uploaded_again() -> None:
    pool = GrammarPool(4 * SIZE, "cpu")
    base = pool.acquire("key", content(3))
    pool.release("key")
    pool.tables += 1
    assert pool.acquire("key", content(3)) == base
    assert pool.tables[0] == content(3)[0] + 1


FRAMES = st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 2**64 - 1))
NUMBERS = st.integers(0, 2**31 - 1)


@given(
    NUMBERS,
    st.builds(
        Configuration, NUMBERS, NUMBERS, NUMBERS, NUMBERS, st.integers(0, 2**64 - 1), st.lists(FRAMES, max_size=64)
    ),
)
def test_a_configuration_that_was_packed_is_the_same(base: int, now: Configuration) -> None:
    now = now._replace(stack=tuple(now.stack))
    assert unpack_row(pack_row(base, now)) == (base, now)


def test_every_token_has_a_place_on_the_device() -> None:
    tokens = [b"</s>", *(bytes([byte]) for byte in range(256)), *random_tokens(random.Random(0))]
    tokens += [b"%s%03d" % (prefix, n) for prefix in (b"no", b"z") for n in range(150)]
    vocabulary = GrammarVocabulary.of_tokens(tokens, [0])
    found, plain = GrammarTokens.of(vocabulary, "cpu"), plain_from(vocabulary.tokens, vocabulary.usable_bytes)
    text, groups = bytes(found.text.tolist()), [list[bytes]() for _ in found.prefixes]
    for token_id, token in enumerate(vocabulary.tokens):
        rank, (start, length) = int(found.ranks[token_id]), found.ids[token_id].tolist()
        if not token:
            assert (rank, start, length) == (NEVER if token_id else AT_END, 0, 0)
            continue
        assert text[start:][: length + 1] == token + b"\0"
        assert found.starts[rank] == start
        num_characters = sum(byte & 0xC0 != 0x80 for byte in token)
        assert found.packed[rank] == num_characters << 20 | int(plain[token_id]) << 10 | length
        assert (rank >= found.first_plain) == (plain[token_id] == 0)
        groups[rank // GROUP].append(token + b"\0")
    prefixes = list[int]()
    for group in groups:
        firsts, seconds = ({token[n] for token in group} for n in range(2))
        prefixes.append(-1 if len(firsts) > 1 else firsts.pop() | (seconds.pop() << 8 if len(seconds) == 1 else 0))
    assert prefixes == found.prefixes.tolist()
    assert {-1, ord("z"), ord("n") | ord("o") << 8} <= set(prefixes)
    assert found.first_plain % GROUP == 0
    assert found.num_words == len(groups) + 1
    assert text.endswith(bytes(4 + found.longest))
    with pytest.raises(ConfigError, match="has 1024 bytes; grammars on a GPU take up to 1023"):
        GrammarTokens.of(GrammarVocabulary.of_tokens([b"a" * (LONGEST + 1)], []), "cpu")


class Holder:
    """Of a range."""


def test_a_range_is_held_while_its_holders_exist_and_long_tokens_have_none() -> None:
    automaton = automaton_of(compile_regex("a+", budget()))
    fits, long = (
        TokenFSM(automaton, GrammarVocabulary.of_tokens([b"a", b"a" * n], [])) for n in (LONGEST, LONGEST + 1)
    )
    pool, holders = GrammarPool(100_000, "cpu"), [Holder(), Holder()]
    assert [pool.hold("key", fits, holder) for holder in holders] == [0, 0]
    assert pool.hold("other", long, holders[0]) is None
    holders.clear()
    with pytest.raises(KeyError):
        pool.release("key")


def test_the_strings_of_json_are_free() -> None:
    automaton = compile_schema({"type": "string", "maxLength": 9}, budget())
    loops = free_loops(automaton, np.ones(256, bool))
    (string,) = np.flatnonzero(loops != REFUSED)
    assert loops[string] == string << ACTION_BITS | Action.COUNT
    columns, tails = automaton.columns, automaton.table[string, automaton.columns[0xC3]] >> ACTION_BITS
    for state, symbols, change in (
        (string, [ord("k")], REFUSED),
        (string, [ord("u")], entry(Action.GOTO, string)),  # which does not count
        (string, [0xF4], REFUSED),  # of the last sequence of bytes
        (string, range(0xC2, 0xE0), entry(Action.GOTO, tails)),  # of which no byte counts
        (tails, range(0x80, 0xC0), entry(Action.COUNT, string)),  # of which two count
    ):
        table = automaton.table.copy()
        table[state, columns[list(symbols)]] = change
        changed = type(automaton)(**vars(automaton) | {"table": table})
        assert (free_loops(changed, np.ones(256, bool)) == REFUSED).all()


@pytest.mark.parametrize(
    ("token", "first"),
    [
        (b"abc", 0),
        ("né字🙂".encode(), 0),
        (b'a"b', 2),
        (b'",', 1),
        (b"\\", 1),
        (b"a\n", 2),
        ("\u2028x".encode(), 3),
        (b"\xa9x", 1),
        (b"x\xc3", 2),
        (b"\xed\xa0\x80", 3),
        (b"\xc0\xafz", 2),
        (b"", 0),
    ],
)
def test_from_which_byte_on_a_token_is_plain(token: bytes, first: int) -> None:
    assert plain_from([token], np.ones(256, bool)).tolist() == [first]
    assert plain_from([token], np.zeros(256, bool)).tolist() == [len(token)]
