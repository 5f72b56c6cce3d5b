"""Masks over a vocabulary: those of all tokens at once are those of each token by itself."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from shared.grammar.automata.automaton import (
    MAX_DEPTH,
    MAX_DIGITS,
    REFUSED,
    START,
    UNBOUNDED,
    Action,
    Automaton,
    Configuration,
)
from shared.grammar.automata.plain import Loops
from shared.grammar.documents.json_schema import compile_schema
from shared.grammar.limits import GrammarError
from shared.grammar.patterns.regex import automaton_of, compile_regex
from shared.grammar.tokens import taken_tokens, token_walk
from shared.grammar.tokens.contexts import Contexts
from shared.grammar.tokens.fsm import TokenFSM
from shared.grammar.tokens.masks import TokenMasks
from shared.grammar.tokens.token_walk import TokenWalk
from shared.grammar.tokens.vocabulary import GrammarVocabulary
from tests.comparison import assert_equal
from tests.grammars import KEY_SETS, Table, any_json, budget, random_automaton, random_tokens, random_walk
from tests.unit.test_automaton import nested, objects

END = 0


def vocabulary(tokens: Sequence[bytes]) -> GrammarVocabulary:
    return GrammarVocabulary.of_tokens([b"</s>", b"", *tokens], [END])


def by_hand(automaton: Automaton, tokens: GrammarVocabulary, now: Configuration) -> list[int]:
    allowed = [n for n, token in enumerate(tokens.tokens) if token and automaton.walk(now, token) is not None]
    return [END, *allowed] if automaton.is_end(now) else allowed


WORDS = ["a", "b", "[", "]", '"', "[[", "[]", '"aa', "aa", 'a"', '"]', "]]", '["', " ", "\n  "]


def test_the_tokens_that_may_follow() -> None:
    """Whole tokens, those that end one value and begin the next, and the end of the output."""
    tokens = vocabulary([word.encode() for word in WORDS])
    fsm = TokenFSM(nested(), tokens)
    for text, expected in {
        "": ["[", '"', "[[", "[]", '"aa', '["'],
        "[": ["[", "]", '"', "[[", "[]", '"aa', '["', " ", "\n  "],
        '"aa': ["a", '"', 'a"'],
        '["aa': ["a", '"', 'a"', '"]'],
        '["aa"': ["]", " ", "\n  "],
        "[]": ["</s>"],
    }.items():
        now = nested().walk(START, text.encode())
        assert now is not None, f"the automaton refuses {text!r}"
        shown = ["</s>" if n == END else tokens.tokens[n].decode() for n in fsm.allowed_tokens(now)]
        assert_equal(
            shown, (["</s>"] if "</s>" in expected else []) + [w for w in WORDS if w in expected], f"after {text!r}"
        )
    letters = TokenFSM(automaton_of(compile_regex("a*", budget())), tokens)
    expected = [END, *(2 + WORDS.index(word) for word in ("a", "aa"))]
    found = letters.allowed_tokens(letters.initial_state)
    assert_equal(found, expected, "ids at the beginning of a*, which may end there", ("token",))


def test_a_token_may_end_only_where_the_stack_has_room() -> None:
    """Also if the stack is too full in the middle of the token. Two tokens may have the same bytes.

    Where brackets may not be empty, a bracket still has its frame and the value inside it has none.
    """
    tokens = vocabulary([*(word.encode() for word in WORDS), b"[", b"[[]", b"[[]]"])
    any_brackets = nested()
    table = any_brackets.table.copy()
    table[2, any_brackets.columns[ord("]")]] = REFUSED
    filled = replace(any_brackets, table=table, depths=np.array([1, 0, 1, 0, 0], np.int32))
    for automaton, name in ((any_brackets, "brackets"), (filled, "brackets that may not be empty")):
        fsm = TokenFSM(automaton, tokens)
        for depth in range(MAX_DEPTH - 3, MAX_DEPTH + 1):
            now = automaton.walk(START, b"[" * depth)
            if now is not None:
                shown = fsm.allowed_tokens(now)
                assert_equal(shown, by_hand(automaton, tokens, now), f"ids after {depth} {name}", ("token",))


WAYS = [(0, 0, 1, 1), (3, 1000, 1, 1), (48, 48, 20, 5)]


@pytest.fixture(params=WAYS, ids=str)
def thresholds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small vocabularies take all ways: as arrays or one by one, with masks that are taken over."""
    names = (token_walk, "FEW"), (token_walk, "MANY"), (taken_tokens, "MIN_TAKEN"), (token_walk, "MIN_MORE")
    for (module, name), value in zip(names, request.param, strict=True):
        monkeypatch.setattr(module, name, value)


@pytest.mark.usefixtures("thresholds")
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32), st.booleans())
def test_any_automaton_and_free_strings(seed: int, is_json: bool) -> None:
    """Random rules of all actions, with states that all text leads back to, and stacks that are nearly full."""
    chance = random.Random(seed)
    letters = [bytes([byte]) for byte in range(256) if chance.random() < 0.99]
    tokens = vocabulary([*letters, b'a"', b'",', b'"a', '"é"'.encode(), *random_tokens(chance)])
    bounds = chance.choice([(0, UNBOUNDED), (0, 3), (2, 6)])
    automaton = any_json(*bounds) if is_json else random_automaton(chance)
    try:
        fsm = TokenFSM(automaton, tokens)
    except GrammarError:
        reject()
    for now in random_walk(automaton, chance, 20):
        expected = by_hand(automaton, tokens, now)
        assert fsm.allowed_tokens(now) == expected
        assert fsm.is_terminal(now) == (END in expected)
        for token_id in expected[:3]:
            assert fsm.next_state(now, token_id) == (automaton.walk(now, tokens.tokens[token_id]) if token_id else None)
        for _ in range(2):  # the second from the cache
            assert np.flatnonzero(fsm.mask(now)).tolist() == expected, now


OPEN = {
    "type": "object",
    "properties": {"ab": {"type": "string", "maxLength": 4}, "abc": {"type": "integer"}, "b": {"enum": ["ab", "é"]}},
    "required": ["b"],
    "maxProperties": 3,
}
SCHEMAS = [
    OPEN,
    OPEN | {"additionalProperties": {"$ref": "#"}, "propertyNames": {"maxLength": 3}},
    OPEN | {"patternProperties": {"^a": {"type": "string"}}, "additionalProperties": False},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "array", "items": {"type": "string", "pattern": "^[a-zé]*b"}},
    {"type": "string", "pattern": "^\\S+$"},
    {"type": "string", "pattern": "^(a0)?[a-z ]*$", "maxLength": 4},
    {"anyOf": [{"type": "number"}, {"type": "string", "format": "date"}]},
    {"type": "array", "items": {"enum": ["a", "b", "ab", 0]}, "uniqueItems": True},
    {
        "anyOf": [
            {"type": "object", "properties": {"a": {"const": n}, "b": wanted}}
            for n, wanted in enumerate(
                [{"type": "array"}, {"type": "array", "items": {"type": "null"}}, {"pattern": "^x"}, {"const": 1}]
            )
        ]
    },
]
REGEXES = ["[a-z ]*b[^a]*", "(a|é|b)[a-zé\u2028]{2,}", "[^<]*<b>.*", "([a-z]{0,20}[A-Z]*)*", "[0-9]+(a[0-9]*)*"]
PIECES = [*'ab ,:{}[]"<>0A\n\\', "abc", "é", "\u2028", "\u00a0", "字", "\\u00e9", "\\n", '"ab"', '":"', "00", 'b"}']


@pytest.fixture(scope="module")
def automata() -> list[Automaton]:
    found = [compile_schema(schema, budget()) for schema in SCHEMAS]
    return found + [automaton_of(compile_regex(regex, budget())) for regex in REGEXES]


@pytest.mark.usefixtures("thresholds")
@pytest.mark.parametrize("seed", range(2))
def test_masks_of_schemas_and_regexes(seed: int, automata: list[Automaton]) -> None:
    """Keys that are known beside any others, counted strings, loops of some letters, parts of characters."""
    chance = random.Random(seed)
    words = ["".join(chance.choices(PIECES, k=chance.randint(2, 5))).encode() for _ in range(200)]
    cut = [word[: -chance.randint(1, 2)] for word in words[:60]]
    known = [b"a0", b"a0b", b'ab":0', b'b":"', b'","', b'", "', b'"a", ']
    tokens = vocabulary([*(bytes([byte]) for byte in range(256)), *words, *cut, *known])
    for automaton in automata:
        masks = TokenMasks(automaton, tokens)
        for now in random_walk(automaton, chance, 10):
            assert np.flatnonzero(masks.mask(now)).tolist() == by_hand(automaton, tokens, now), now


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        (SCHEMAS[-2], ["[", '["a"', '["b"', '["ab"', '["a", "b"', '["b", 0', '["a", ']),
        (SCHEMAS[-1], ["{", *(f'{{"a": {n}' for n in range(4)), '{"b": []', '{"b": [0]', '{"b": "x"', '{"c": 1']),
    ],
)
def test_masks_of_choices_depend_on_what_was_seen(schema: dict[str, Any], texts: list[str]) -> None:
    ends = [
        f', "{text}' for text in ('a"', 'b"', 'ab"', 'a": 0', 'a": 1', 'b": [', 'b": [0', 'b": "', 'b": "y', 'b": 1')
    ]
    tokens = vocabulary([*(bytes([byte]) for byte in range(256)), *map(str.encode, [*ends, '", "', '"]'])])
    automaton = compile_schema(schema, budget())
    masks = TokenMasks(automaton, tokens)
    for text in [*texts, *texts]:
        now = automaton.walk(START, text.encode())
        assert now is not None
        assert np.flatnonzero(masks.mask(now)).tolist() == by_hand(automaton, tokens, now), text


def test_a_string_is_left_without_a_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all tokens only those are stepped that are not plain, from their first byte that is not."""
    words = [b"abcdef", b"abcxyz", "né".encode(), b'ab"', "字".encode()[:2], b'abc"d']
    tokens = vocabulary([*(bytes([byte]) for byte in range(256)), *words])
    automaton, read, stepped = any_json(0, 5), TokenWalk._read, []

    def counted(walk: TokenWalk) -> None:
        stepped.extend(walk.node.tolist())
        read(walk)

    monkeypatch.setattr(TokenWalk, "_read", counted)
    now = automaton.walk(START, b'{"":"')
    assert now is not None
    mask = TokenMasks(automaton, tokens).mask(now)
    assert [mask[tokens.tokens.index(word)] for word in words] == [False, False, True, True, True, False]
    assert len(stepped) == 1 + 3, "a backslash and three quotes; the d after one of them is stepped by itself"


def in_a_character(counts_last: bool) -> Automaton:
    """One state that all plain characters lead back to; inside them two more frames are needed."""
    table = Table()
    table.characters(table.state(), Action.COUNT, counts_last=counts_last)
    size = len(table.rows)
    depths = np.array([0] + [2] * (size - 1), np.int32)
    return Automaton(np.arange(256, dtype=np.uint8), np.array(table.rows, np.int32), np.zeros(size, np.bool_), depths)


def test_a_state_is_free_only_if_all_plain_characters_lead_back_alike() -> None:
    automaton = in_a_character(counts_last=False)
    usable = np.ones(256, np.bool_)
    assert Loops(automaton, usable).is_free(0)
    table = automaton.table
    for state, byte in np.argwhere(table != REFUSED).tolist():
        changed = table.copy()
        changed[state, byte] ^= Action.GOTO ^ Action.COUNT  # it counts, or no longer does
        assert not Loops(replace(automaton, table=changed), usable).is_free(0), (state, byte)


@pytest.mark.usefixtures("thresholds")
@pytest.mark.parametrize("counts_last", [False, True])
def test_tokens_that_end_inside_a_character(counts_last: bool) -> None:
    """The last character counts at any of its bytes, and its state may need frames that do not fit the stack."""
    parts = "字".encode()[:1], "字".encode()[:2], "\u2028".encode(), "\u2028".encode()[:2], "字a".encode(), b"\xe5a"
    words = [b"a" * count + part for part in parts for count in range(4)]
    tokens = vocabulary([*(bytes([byte]) for byte in range(256)), *words])
    automaton = in_a_character(counts_last)
    masks = TokenMasks(automaton, tokens)
    for most, height in itertools.product([*range(5), UNBOUNDED], range(MAX_DEPTH - 3, MAX_DEPTH + 1)):
        now = Configuration(0, 0, most, stack=((0, 0),) * height)
        assert np.flatnonzero(masks.mask(now)).tolist() == by_hand(automaton, tokens, now), (most, height)


def test_tokens_that_go_on_alike_walk_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of nine digits one walks, and of the digits after it one; others end at another node, or in another state."""
    numbers = [str(number).encode() for number in range(1000)]
    tokens = vocabulary([*(bytes([byte]) for byte in range(256)), *numbers, b"7a", b"77]"])
    automaton, step, stepped = compile_schema({"items": {"type": "integer", "minimum": 0}}, budget()), Contexts.step, []

    def counted(contexts: Contexts, *walk: int) -> tuple[int, int]:
        stepped.append(walk)
        return step(contexts, *walk)

    monkeypatch.setattr(Contexts, "step", counted)
    masks = TokenMasks(automaton, tokens)
    for text in ("[", "[1", "[0", "[12, "):
        now = automaton.walk(START, text.encode())
        assert now is not None
        stepped.clear()
        assert np.flatnonzero(masks.mask(now)).tolist() == by_hand(automaton, tokens, now), text
        assert len(stepped) < 80, "of 1,110 beginnings of numbers"


def test_a_second_line_break_ends_a_run_of_blanks() -> None:
    blanks = ["\n \n", "\n\t\t\n", "\n  ", "\n \t]", " \n", "  ", "\n \n]", "1\n", "1\n\n", "1 ", "\n\n", "\n]"]
    tokens = vocabulary([*(bytes([byte]) for byte in range(256)), *map(str.encode, blanks)])
    automaton = compile_schema({"items": {"type": "integer"}}, budget())
    masks = TokenMasks(automaton, tokens)
    for text in ("[", "[ ", "[\n", "[\n ", "[1", "[1,", '["'):
        now = automaton.walk(START, text.encode())
        if now is not None:
            assert np.flatnonzero(masks.mask(now)).tolist() == by_hand(automaton, tokens, now), text


def made(masks: TokenMasks, now: Configuration, text: str) -> tuple[int, Configuration]:
    """How many masks are made along a text, each of which is right, and where it leads."""
    before = masks.num_walks
    for byte in text.encode():
        assert np.flatnonzero(masks.mask(now)).tolist() == by_hand(masks.automaton, masks.vocabulary, now), now
        after = masks.automaton.step(now, byte)
        assert after is not None
        now = after
    return masks.num_walks - before, now


def test_masks_are_made_for_what_tokens_can_tell_apart() -> None:
    """Of a long string, a long number, and an object whose keys come one by one."""
    names = [f"key{chr(ord('a') + number)}" for number in range(20)]
    tokens = vocabulary([*(bytes([byte]) for byte in range(256)), b"000", b"aaaa", b'", "'])
    value = {"type": ["number", "string"], "maxLength": 100}
    properties = {"properties": dict.fromkeys(names, value), "additionalProperties": False}
    masks = TokenMasks(compile_schema({"type": "object"} | properties, budget()), tokens)
    _, now = made(masks, START, '{"keya":"')
    assert made(masks, now, "a" * 100)[0] <= 6, "the longest token has four bytes"
    _, now = made(masks, START, '{"keya":0.')
    assert made(masks, now, "0" * (MAX_DIGITS + 1))[0] <= 6, "the longest token has three digits"
    counts, now = [], START
    for number, name in enumerate(names):
        count, now = made(masks, now, f'{", " if number else "{"}"{name}": 0')
        counts.append(count)
    assert max(counts[2:]) <= 2, "of the keys before only the end of a key and of the object depend"


def test_characters_are_counted_and_not_bytes() -> None:
    tokens = vocabulary([*(bytes([byte]) for byte in range(256)), "ééééé".encode(), "éééééé".encode()])
    automaton = any_json(0, 5)
    now = automaton.walk(START, b'{"":"')
    assert now is not None
    found = np.flatnonzero(TokenMasks(automaton, tokens).mask(now)).tolist()
    assert found == by_hand(automaton, tokens, now)
    assert len(tokens.tokens) - 2 in found


def test_tokens_of_many_brackets_are_never_allowed() -> None:
    """The kernel that walks tokens has space for so many frames; shorter tokens spell the same bytes."""
    words = [b"[", b'[[["', b"[[[[", b"[" * 20]
    fsm = TokenFSM(nested(), vocabulary(words))
    assert [fsm.vocabulary.tokens[n] for n in fsm.allowed_tokens(START)] == words[:2]
    assert np.flatnonzero(fsm.mask(START)).tolist() == fsm.allowed_tokens(START)


def test_a_mask_is_made_once_for_all_that_it_depends_on() -> None:
    """Strings of any length, and stacks that no token can close, share a mask."""
    tokens = vocabulary([bytes([letter]) for letter in b'[]"a \n'] + [b"aaa", b'a"', b"]]"])
    masks = TokenMasks(nested(), tokens)
    for depth in range(1, 30):
        now = nested().walk(START, b"[" * depth)
        assert now is not None
        masks.mask(now)
    assert masks.num_walks <= 4, "a token closes two frames at most"
    small = TokenMasks(nested(), tokens, cache_bytes=1)
    for text in (b"", b"[", b'"', b""):
        now = nested().walk(START, text)
        assert now is not None
        assert np.flatnonzero(small.mask(now)).tolist() == by_hand(nested(), tokens, now)
    assert small.num_walks == 4, "one mask is kept"
    two = TokenMasks(nested(), tokens, cache_bytes=2 * (len(tokens) // 8 + 200))
    for text in (b"", b"[", b"", b'"', b""):
        now = nested().walk(START, text)
        assert now is not None
        two.mask(now)
    assert two.num_walks == 3, "the two that were used last are kept"


LIST = {"type": "array", "items": {"type": "array", "items": {"$ref": "#"}}, "minItems": 1}
TREE = compile_schema(
    {"type": "object", "properties": {"a": LIST, "b": LIST}, "additionalProperties": False, "minProperties": 1},
    budget(),
)


@pytest.mark.parametrize(
    ("automaton", "letters", "size"),
    [(objects(), b"{},abc", 1), (objects(), b"{},abc", 2), (nested(), b'[]"a \n', 2), (TREE, b'{}[]"a:,b\n', 1)],
)
def test_a_kept_mask_serves_no_state_that_differs_in_what_it_depends_on(
    automaton: Automaton, letters: bytes, size: int
) -> None:
    """Vocabularies of one token, so that no other one tells configurations apart, and stacks that are nearly full."""
    reached = [START]
    for now in itertools.islice(reached, 40):  # which grows
        found = (automaton.walk(now, [byte]) for byte in letters)
        reached += [after for after in dict.fromkeys(found) if after is not None and after not in reached]
    for now, height in itertools.product(reached[1:40], range(MAX_DEPTH - 3, MAX_DEPTH + 1)):
        deep = now._replace(stack=now.stack[:1] * (height - len(now.stack)) + now.stack)
        reached += [deep] if now.stack and automaton.fits(deep) else []
    for token in itertools.product(letters, repeat=size):
        tokens = vocabulary([bytes(token)])
        masks = TokenMasks(automaton, tokens)
        for now in reached:
            assert np.flatnonzero(masks.mask(now)).tolist() == by_hand(automaton, tokens, now), (token, now)


@pytest.mark.parametrize("seed", range(12))
def test_a_kept_mask_serves_no_other_keys(seed: int) -> None:
    """The keys of each open object are changed, and each mask is asked for by one token, as others may depend on
    more."""
    chance = random.Random(seed)
    automaton = random_automaton(chance)
    reached = []
    for now in random_walk(automaton, chance, 12):
        for keys in KEY_SETS:
            reached.append(now._replace(seen=keys))
            for depth, (frame, _) in enumerate(now.stack[-2:], max(0, len(now.stack) - 2)):
                reached.append(now._replace(stack=(*now.stack[:depth], (frame, keys), *now.stack[depth + 1 :])))
    for token in random_tokens(chance)[:12]:
        tokens = vocabulary([token])
        masks = TokenMasks(automaton, tokens)
        for now in reached:
            assert np.flatnonzero(masks.mask(now)).tolist() == by_hand(automaton, tokens, now), (token, now)


@pytest.mark.parametrize("seed", range(60))
def test_a_kept_mask_knows_what_a_choice_sets(seed: int) -> None:
    """The token's first byte is a choice, which counts keys as seen; a guard of them is its second."""
    chance, table = random.Random(seed), Table()
    bits = partial(chance.choice, KEY_SETS)
    first, second, last = table.state(), table.state(), table.state()
    table.put(first, b"a", Action.CHOOSE, 0)
    table.put(second, b"b", Action.GUARD, 0)
    automaton = Automaton(
        columns=np.arange(256, dtype=np.uint8),
        table=np.array(table.rows, np.int32),
        is_final=np.zeros(3, np.bool_),
        depths=np.zeros(3, np.int32),
        returns=np.full(2, second, np.int32),
        pops=np.array([[1, 0, 1, 0]], np.int32),
        clauses=np.array([[1, chance.choice([0, bits()]), chance.choice([0, bits()]), 1, bits()]], np.uint64),
        guards=np.array([[last, bits(), 0, chance.randrange(1, 4)]], np.uint64),
    )
    tokens = vocabulary([b"ab"])
    for order in (KEY_SETS, KEY_SETS[::-1]):
        masks = TokenMasks(automaton, tokens)
        for keys in order:
            now = Configuration(first, seen=keys)
            assert np.flatnonzero(masks.mask(now)).tolist() == by_hand(automaton, tokens, now), now


@pytest.mark.usefixtures("thresholds")
@pytest.mark.parametrize(
    ("letter", "schema", "texts"),
    [
        ("b", {"type": "string", "pattern": "^b[a-z ]*$", "minLength": 3, "maxLength": 6}, ['"']),
        (
            "x",
            {"required": ["b"], "type": "object", "additionalProperties": {"type": "integer"}},
            ['{"b":0,"', '{"c":0,"', '{"b":0,"'],
        ),
    ],
    ids=["counted characters", "required keys"],
)
def test_masks_of_which_parts_are_taken_over(letter: str, schema: dict[str, Any], texts: list[str]) -> None:
    words = [f"{letter}{'a' * count}{end}".encode() for count in range(8) for end in ("", '"', '":0}')]
    tokens = vocabulary([*(bytes([byte]) for byte in range(256)), *words])
    automaton = compile_schema(schema, budget())
    masks = TokenMasks(automaton, tokens)
    for text in texts:
        now = automaton.walk(START, text.encode())
        assert now is not None
        assert np.flatnonzero(masks.mask(now)).tolist() == by_hand(automaton, tokens, now), text


def test_a_grammar_that_no_token_begins_is_refused() -> None:
    with pytest.raises(GrammarError, match="No token of this model's vocabulary"):
        TokenFSM(automaton_of(compile_regex("z+", budget())), vocabulary([b"a"]))


@given(st.lists(st.binary(max_size=6), max_size=40))
def test_the_trie_holds_every_token(tokens: list[bytes]) -> None:
    found = GrammarVocabulary.of_tokens(tokens, [])
    for token_id, token in enumerate(tokens):
        node = 0
        for byte in token:
            node = dict(found.children(node))[byte]
        assert node == found.node_of[token_id]
    prefixes = {token[:n] for token in tokens for n in range(len(token) + 1)} | {b""}
    assert len(found.byte_of) == len(found.first_child) - 1 == len(prefixes)
    ended = GrammarVocabulary.of_tokens(tokens, [0] if tokens else [])
    assert ended.tokens[1:] == found.tokens[1:]
    assert not any(ended.tokens[:1])
    assert [n for n in range(256) if found.usable_bytes[n]] == sorted({t[0] for t in tokens if len(t) == 1})


def test_a_token_with_the_byte_of_special_tokens_has_no_text() -> None:
    tokens: Any = SimpleNamespace(vocab_size=5, special_tokens=["<x>"], token_id=lambda name: 3, eos_ids=(4, 6))
    tokens.token_bytes = [b"a", b"\xff", b"a\xff", b"<x>", b"b"].__getitem__
    found = GrammarVocabulary.of(tokens, 6)
    assert (found.tokens, found.end_ids) == ([b"a", b"", b"", b"\xff<x>", b"", b""], (4,)), "id 6 has no logit"
    assert GrammarVocabulary.of(tokens, 3).tokens == [b"a", b"", b""], "the special token has none either"
