"""Grammars for vocabularies that cannot spell every byte."""

import numpy as np
import pytest

from shared.grammar.automata.automaton import START
from shared.grammar.automata.spelling import spellable
from shared.grammar.documents.json_schema import compile_schema
from shared.grammar.grammar import Grammar, compile_grammar
from shared.grammar.limits import GrammarError, Limits
from tests.grammars import UNTIMED, assert_language, budget


def usable(*missing: int) -> np.ndarray:
    found = np.ones(256, bool)
    found[list(missing)] = False
    return found


def test_texts_without_the_byte_are_left() -> None:
    """Without the first byte of characters from U+40000 on; without that of é."""
    for missing, wrong in ((0xF1, "\U00040000"), (0xC3, "é")):
        automaton = spellable(compile_schema({"type": ["string", "object"]}, budget()), usable(missing), budget())
        for text in ('"a"', '"ü"', '{"a": "😀"}', f'"{wrong}"', f'{{"{wrong}": 1}}'):
            is_left = bytes([missing]) not in text.encode()
            assert automaton.accepts(text.encode()) == is_left, text
    for schema, missing in (({"type": "string"}, ()), ({"type": "integer"}, (0xA9,))):
        whole = compile_schema(schema, budget())
        assert spellable(whole, usable(*missing), budget()) is whole
    closed = {"type": "object", "properties": {"k": {"type": "string"}}, "additionalProperties": False}
    assert spellable(compile_schema(closed, budget()), usable(0xF1), budget()).accepts(b'{"k": "a"}')


def test_a_text_that_could_not_be_ended_is_refused() -> None:
    """The last byte of é is missing, after a first byte that is not."""
    missing = 0xA9
    for schema in ({"const": "aé"}, {"properties": {"é": {}}, "required": ["é"], "additionalProperties": False}):
        with pytest.raises(GrammarError, match=r"cannot spell \(A9\)"):
            spellable(compile_schema(schema, budget()), usable(missing), budget())
    automaton = spellable(compile_schema({"type": "string"}, budget()), usable(missing), budget())
    assert automaton.accepts('"ä"'.encode())
    assert not automaton.accepts('"é"'.encode())


def test_every_kind_of_grammar() -> None:
    for grammar, right, wrong in (
        (Grammar.choice(["xa", "xé"]), b"xa", "xé".encode()),
        (Grammar.regex("x[aé]+"), b"xa", "xé".encode()),
    ):
        automaton = compile_grammar(grammar, usable(0xA9), UNTIMED)
        assert_language(automaton, [right], [wrong])
        walked = automaton.walk(START, b"x\xc3")
        assert walked is None, "no text goes on there"
    for grammar in (Grammar.choice(["é"]), Grammar.regex("é+"), Grammar.json_schema({"const": "é"})):
        with pytest.raises(GrammarError, match="cannot spell"):
            compile_grammar(grammar, usable(0xA9), UNTIMED)
    assert_language(compile_grammar(Grammar.json_object(), usable(), UNTIMED), [b'{"a": [1]}'], [b"[1]", b"1"])
    for grammar in (Grammar.json_object(), Grammar.regex("[a-z]{50}")):
        size = compile_grammar(grammar, usable(), UNTIMED).num_bytes
        assert compile_grammar(grammar, usable(), Limits(bytes=size)).num_bytes == size
        with pytest.raises(GrammarError, match=f"tables take {size} bytes, more than {size - 1}"):
            compile_grammar(grammar, usable(), Limits(bytes=size - 1))
