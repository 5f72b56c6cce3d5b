"""Masks over a vocabulary: those of all tokens at once are those of each token by itself."""

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from shared.grammar.automaton import MAX_DEPTH, START, UNBOUNDED, Automaton, Configuration
from shared.grammar.fsm import TokenFSM
from shared.grammar.json_schema import compile_schema
from shared.grammar.limits import GrammarError
from shared.grammar.masks import TokenMasks, _Walk
from shared.grammar.regex import automaton_of, compile_regex
from shared.grammar.vocabulary import GrammarVocabulary
from tests.comparison import assert_equal
from tests.grammars import any_json, budget, random_automaton, random_tokens, random_walk
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
            shown, (["</s>"] if "</s>" in expected else []) + [w for w in WORDS if w in expected], f"behind {text!r}"
        )


@settings(max_examples=25)
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


def test_a_string_is_left_without_a_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all beginnings of tokens only those are stepped that a token follows that is not plain."""
    words = [b"abcdef", b"abcxyz", "né".encode(), b'ab"', "字".encode()[:2]]
    tokens = vocabulary([*(bytes([byte]) for byte in range(256)), *words])
    masks, stepped = TokenMasks(any_json(0, 5), tokens), []
    read = _Walk._read
    monkeypatch.setattr(_Walk, "_read", lambda walk: stepped.extend(walk.walks["node"].tolist()) or read(walk))
    now = any_json(0, 5).walk(START, b'{"":"')
    assert now is not None
    mask = masks.mask(now)
    assert [mask[tokens.tokens.index(word)] for word in words] == [False, False, True, True, True]
    # One node for each byte that is not plain by itself, two for the tokens that are not, and their beginnings.
    assert len(stepped) == 32 + 2 + 128 + len("ab") + 1 + 1


def test_characters_are_counted_and_not_bytes() -> None:
    tokens = vocabulary([*(bytes([byte]) for byte in range(256)), "ééééé".encode(), "éééééé".encode()])
    automaton = any_json(0, 5)
    now = automaton.walk(START, b'{"":"')
    assert now is not None
    found = np.flatnonzero(TokenMasks(automaton, tokens).mask(now)).tolist()
    assert found == by_hand(automaton, tokens, now)
    assert len(tokens.tokens) - 2 in found


def test_tokens_of_many_brackets_are_never_allowed() -> None:
    """The kernel that walks tokens has room for so many frames; shorter tokens spell the same bytes."""
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
    ("automaton", "letters", "size"), [(objects(), b"{},abc", 1), (nested(), b'[]"a \n', 2), (TREE, b'{}[]"a:,b\n', 1)]
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
        reached += [deep] if now.stack and automaton.has_room(deep) else []
    for token in itertools.product(letters, repeat=size):
        tokens = vocabulary([bytes(token)])
        masks = TokenMasks(automaton, tokens)
        for now in reached:
            assert np.flatnonzero(masks.mask(now)).tolist() == by_hand(automaton, tokens, now), (token, now)


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
