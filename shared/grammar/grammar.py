"""What an output must be: a JSON Schema, any JSON object, a regular expression, or one of several texts.

A grammar is a description. So it can be part of the sampling parameters, and compares and hashes by content.
Introduced in phase 12.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from shared.grammar.automata.automaton import Automaton
from shared.grammar.automata.dfa import DFA, restrict
from shared.grammar.automata.spelling import spellable
from shared.grammar.calls import CallDescription, compile_calls
from shared.grammar.documents.json_schema import compile_json, compile_schema
from shared.grammar.limits import Budget, GrammarError, Limits
from shared.grammar.patterns.regex import automaton_of, compile_choice, compile_regex
from shared.sampling.params import StructuredOutput

MAX_TEXT = 1_000_000
"""Maximum characters of a grammar's description."""
MAX_CHOICES = 10_000


class GrammarKind(StrEnum):
    """The ways to describe a grammar."""

    JSON_SCHEMA = "json_schema"
    CLOSED_JSON_SCHEMA = "closed_json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    CALLS = "calls"


@dataclass(frozen=True)
class Grammar(StructuredOutput):
    """A description, made by one of the class methods. Raises GrammarError if the description is invalid.

    Attributes:
        text: the schema, the list of texts or the description of calls, as JSON; the pattern; "" for any JSON object.
        automaton: set if it was compiled in advance: a server compiles where this delays no step.
    """

    kind: GrammarKind
    text: str
    automaton: Automaton | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.text) > MAX_TEXT:
            raise GrammarError(f"The grammar has {len(self.text)} characters; it may have {MAX_TEXT}.")
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            half = ascii(self.text[error.start])
            raise GrammarError(f"The grammar holds {half}, half of a surrogate pair; write whole characters.") from None

    @classmethod
    def json_schema(cls, schema: object, *, is_closed: bool = False) -> Self:
        """A text that is valid JSON for a schema, given as an object, true, or such as JSON text. ``is_closed``:
        objects whose schema names properties, and says nothing about others, have no others.
        """
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise GrammarError(f"The schema is not JSON: {error}.") from error
        if not isinstance(schema, dict | bool):
            raise GrammarError(f"The schema is a {type(schema).__name__}; it must be a JSON object, or true.")
        try:
            text = json.dumps(schema, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise GrammarError(f"The schema holds what JSON does not have: {error}.") from error
        return cls(GrammarKind.CLOSED_JSON_SCHEMA if is_closed else GrammarKind.JSON_SCHEMA, text)

    @classmethod
    def json_object(cls) -> Self:
        """Any JSON object."""
        return cls(GrammarKind.JSON_OBJECT, "")

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """A text that the pattern matches as a whole."""
        if not isinstance(pattern, str) or pattern == "":
            raise GrammarError(f"The pattern is {pattern!r}; it must be a regular expression.")
        return cls(GrammarKind.REGEX, pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Self:
        """One of the texts."""
        is_list = isinstance(texts, list | tuple) and all(isinstance(text, str) and text for text in texts)
        if not is_list or not 1 <= len(texts) <= MAX_CHOICES:
            raise GrammarError(f"The choice must be a list of 1 to {MAX_CHOICES} texts, none of them empty.")
        return cls(GrammarKind.CHOICE, json.dumps(texts, ensure_ascii=False))

    @classmethod
    def calls(cls, description: CallDescription) -> Self:
        """An answer that may, or must, call tools."""
        try:
            text = description.text
        except (TypeError, ValueError, RecursionError) as error:
            raise GrammarError(f"A schema holds what JSON does not have: {error}.") from error
        return cls(GrammarKind.CALLS, text)

    def compiled(self, usable_bytes: NDArray[np.bool_], limits: Limits) -> Self:
        """The grammar with its automaton. ``usable_bytes``: bool ``[256]``, the bytes that the vocabulary can spell.
        Raises GrammarError.
        """
        if self.automaton is not None:
            return self
        return replace(self, automaton=compile_grammar(self, usable_bytes, limits))


def compile_grammar(grammar: Grammar, usable_bytes: NDArray[np.bool_], limits: Limits) -> Automaton:
    """The automaton of a grammar. Raises GrammarError."""
    automaton = _compile(grammar.kind, grammar.text, usable_bytes, Budget(limits))
    if automaton.num_bytes > limits.bytes:
        raise GrammarError(f"The grammar's tables take {automaton.num_bytes} bytes, more than {limits.bytes}.")
    return automaton


def _compile(kind: GrammarKind, text: str, usable_bytes: NDArray[np.bool_], budget: Budget) -> Automaton:
    match kind:
        case GrammarKind.JSON_SCHEMA | GrammarKind.CLOSED_JSON_SCHEMA:
            is_closed = kind is GrammarKind.CLOSED_JSON_SCHEMA
            return spellable(compile_schema(json.loads(text), budget, is_closed=is_closed), usable_bytes, budget)
        case GrammarKind.JSON_OBJECT:
            return spellable(compile_json(budget), usable_bytes, budget)
        case GrammarKind.REGEX:
            return _of_dfa(compile_regex(text, budget), usable_bytes)
        case GrammarKind.CHOICE:
            return _of_dfa(compile_choice(json.loads(text), budget), usable_bytes)
        case GrammarKind.CALLS:
            described = CallDescription.of_text(text)
            answer = None
            if described.answer is not None:
                own_kind, own_text = described.answer
                answer = _compile(GrammarKind(own_kind), own_text, usable_bytes, budget)
                budget.keep(answer.num_states)
            return compile_calls(described, answer, usable_bytes, budget)


def _of_dfa(dfa: DFA, usable_bytes: NDArray[np.bool_]) -> Automaton:
    dfa = restrict(dfa, usable_bytes)
    if dfa.is_empty:
        raise GrammarError("Every text of the grammar needs a byte that this model's vocabulary cannot spell.")
    return automaton_of(dfa)


def grammar_of(**described: Any) -> Grammar | None:
    """The grammar of the one argument that is not None; each is named like the class method that takes it. None without
    one. Raises GrammarError if several are given, or as that method does.
    """
    given = {name: value for name, value in described.items() if value is not None}
    if len(given) > 1:
        raise GrammarError(f"An output has one grammar, and {' and '.join(given)} are given; choose one of them.")
    for name, value in given.items():
        found: Grammar = getattr(Grammar, name)(value)
        return found
    return None
