"""Vocabularies of real checkpoints as grammars see them: the bytes of tokens, and the masks that follow from these."""

from pathlib import Path

import numpy as np
import pytest

from shared.grammar.grammar import Grammar
from shared.grammar.tokens.fsm import TokenFSM
from shared.grammar.tokens.vocabulary import SPECIAL_BYTE, GrammarVocabulary
from shared.text.tokenizer import Tokenizer
from tests.grammars import UNTIMED

DOCUMENT = '{"list": [1, -2.5e-06, {"é": "a – b\\n🙂"}], "ok": true}'
SCRIPTS = " Leading space, then\n\n  two;\tÜnïcödé 日本語 한국어 עברית हिन्दी 👩\u200d👧"
TEXTS = [DOCUMENT, SCRIPTS, "x = 1  # <0x41>\n", "\x00\x01\x7f"]


@pytest.fixture
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_folder)


def test_bytes_of_tokens_are_those_of_the_text(tokenizer: Tokenizer) -> None:
    vocabulary = GrammarVocabulary.of(tokenizer, tokenizer.vocab_size + 64)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(vocabulary.tokens[token_id] for token_id in ids) == text.encode()
    assert vocabulary.usable_bytes[:SPECIAL_BYTE].all()
    for token_id in tokenizer.special_ids - tokenizer.eos_ids:
        assert vocabulary.tokens[token_id][0] == SPECIAL_BYTE
    assert not any(vocabulary.tokens[token_id] for token_id in tokenizer.eos_ids)
    ordinary = [token for token in vocabulary.tokens[: tokenizer.vocab_size] if token[:1] != bytes([SPECIAL_BYTE])]
    opened = sum(token.count(b"[") + token.count(b"{") > 3 for token in ordinary)
    assert ordinary.count(b"") <= len(tokenizer.eos_ids) + 1 + opened + 8, "a token without bytes is never drawn"


@pytest.mark.parametrize(
    "grammar",
    [Grammar.json_object(), Grammar.regex(r"[\w.+-]{1,64}@[\w-]+(\.[\w-]+)+"), Grammar.json_schema({"maxLength": 9})],
)
def test_masks_are_those_of_the_walk(tokenizer: Tokenizer, grammar: Grammar) -> None:
    vocabulary = GrammarVocabulary.of(tokenizer, tokenizer.vocab_size)
    automaton = grammar.compiled(vocabulary.usable_bytes, UNTIMED).automaton
    assert automaton is not None
    fsm = TokenFSM(automaton, vocabulary)
    text = "ada.lovelace@example.org" if automaton.walk(fsm.initial_state, b"a") else DOCUMENT
    now = fsm.initial_state
    for number, token_id in enumerate(tokenizer.encode(text, add_special_tokens=False)):
        assert token_id in np.flatnonzero(fsm.mask(now))
        if number % 6 == 0:
            assert np.flatnonzero(fsm.mask(now)).tolist() == fsm.allowed_tokens(now)
        following = fsm.next_state(now, token_id)
        assert following is not None
        now = following
    assert fsm.is_terminal(now)
