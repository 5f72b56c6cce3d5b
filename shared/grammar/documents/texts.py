"""Strings of a schema as automata over the bytes between the quotes. Introduced in phase 12.

Strings with no constraint except their length share one rule, whose counters are in the push. All others are automata
in which patterns, formats, lengths and lists are combined.
"""

import json
from collections.abc import Hashable
from dataclasses import replace
from functools import partial

import numpy as np

from shared.grammar.automata.automaton import UNBOUNDED
from shared.grammar.automata.counting import any_text, character_steps, is_free_to_count
from shared.grammar.automata.dfa import DEAD, DFA, trim
from shared.grammar.automata.languages import combine, difference, intersection, union, words
from shared.grammar.documents.counted_strings import Counted, in_blocks
from shared.grammar.limits import Budget, GrammarError, Remembered
from shared.grammar.patterns.characters import Spelling
from shared.grammar.patterns.formats import FORMATS
from shared.grammar.patterns.regex import compile_regex
from shared.grammar.schema.document import SchemaDocument
from shared.grammar.schema.shapes import String

MOST_REMEMBERED = 256


def spell(text: str) -> bytes | None:
    """A text between its quotes, as ``json.dumps`` writes it; None if it has lone surrogates."""
    try:
        return json.dumps(text, ensure_ascii=False)[1:-1].encode()
    except UnicodeEncodeError:
        return None


_patterns: Remembered[DFA] = Remembered(MOST_REMEMBERED)


def matching(pattern: str, budget: Budget, *, is_search: bool) -> DFA:
    """Like :func:`compile_regex`, for JSON strings; the last few hundred results are cached."""
    make = partial(compile_regex, pattern, budget, search=is_search, spelling=Spelling.JSON)
    return _patterns.get((pattern, is_search), make, budget)


def of_length(dfa: DFA, fewest: int, most: int, budget: Budget) -> DFA:
    """The strings of an automaton that have a limited number of characters: a copy of the automaton for each character
    counted."""
    size, count = len(dfa), (fewest if most == UNBOUNDED else most) + 1
    budget.check(size * count)
    budget.spend(size * count * dfa.next.shape[1] // 16)
    level = np.arange(count)[:, None, None]
    following = np.tile(level, (1, size, 1))
    following[:, list(character_steps(dfa, budget))] += 1  # where a character begins
    if most == UNBOUNDED:
        following = np.minimum(following, count - 1)
    is_dead = (dfa.next == DEAD) | (following >= count)
    targets = np.where(is_dead, DEAD, following * size + dfa.next).astype(np.int32)
    accepts = np.where(level[:, :, 0] >= fewest, dfa.accepts, 0)
    return trim(DFA(dfa.columns, targets.reshape(size * count, -1), accepts.reshape(-1)))


class Texts:
    """The automata of the strings of one document."""

    def __init__(self, document: SchemaDocument) -> None:
        self.document, self.budget = document, document.budget
        self._counted: dict[String, tuple[Hashable, Counted] | None] = {}
        self._dfas: dict[String, DFA] = {}
        self._groups: dict[tuple[tuple[String, ...], ...], DFA] = {}

    def pattern(self, pattern: str) -> DFA:
        """The strings in which a pattern matches. Raises GrammarError with the location of the pattern."""
        return self._located("pattern", pattern, pattern, is_search=True)

    def _located(self, keyword: str, text: str, pattern: str, *, is_search: bool) -> DFA:
        try:
            return matching(pattern, self.budget, is_search=is_search)
        except GrammarError as error:
            raise type(error)(
                f"The schema cannot be compiled at {self.document.places.get((keyword, text), '#')}: {error}"
            ) from error

    def dfa(self, shape: String) -> DFA:
        """The strings of a shape; may be empty."""
        if shape not in self._dfas:
            self._dfas[shape] = self._build(shape)
        return self._dfas[shape]

    def _build(self, shape: String) -> DFA:
        parts: list[DFA] = []
        denied: list[DFA] = []
        for pattern, holds in sorted(shape.patterns):
            (parts if holds else denied).append(self.pattern(pattern))
        for name, holds in sorted(shape.formats):
            if name in FORMATS:
                (parts if holds else denied).append(self._located("format", name, FORMATS[name], is_search=False))
            elif not holds:
                return words([], self.budget)  # an unknown format allows everything, so its negation accepts nothing
        listed = shape.values if shape.values is not None else shape.excluded
        self.budget.spend(sum((2 + len(value)) * (1 + len(parts) + len(denied)) for value in listed))
        if shape.values is not None:
            texts = [
                text
                for value in shape.values
                if shape.fewest <= len(value) <= shape.most
                and value not in shape.excluded
                and (text := spell(value)) is not None
                and all(part.run(text) for part in parts)
                and not any(part.run(text) for part in denied)
            ]
            return words(texts, self.budget)
        if shape.excluded:
            denied.append(words([text for value in shape.excluded if (text := spell(value)) is not None], self.budget))
        dfa = difference(intersection(parts, self.budget) if parts else any_text(), denied, self.budget)
        if shape.fewest or shape.most != UNBOUNDED:
            dfa = of_length(dfa, shape.fewest, shape.most, self.budget)
        return dfa

    def counted(self, shape: String) -> tuple[Hashable, Counted] | None:
        """The automaton of a shape whose length a counter limits, and its key; None if its states limit the length."""
        if shape.values is not None or (not shape.is_plain and (shape.fewest, shape.most) == (0, UNBOUNDED)):
            return None
        if shape not in self._counted:
            self._counted[shape] = self._count(shape)
        return self._counted[shape]

    def _count(self, shape: String) -> tuple[Hashable, Counted] | None:
        free = replace(shape, fewest=0, most=UNBOUNDED)
        dfa = self.dfa(free)
        if shape.is_plain or is_free_to_count(dfa, shape.fewest, shape.most, self.budget):
            counts = np.zeros(dfa.next.shape, np.bool_)
            counts[list(character_steps(dfa, self.budget))] = True
            return free, Counted(dfa, counts, shape.fewest, shape.most)
        if shape.most == UNBOUNDED:
            return None
        found = in_blocks(self.dfa(replace(free, fewest=shape.fewest)), shape.most, self.budget)
        if found is None:
            return None
        blocks, counts, most = found
        return (free, shape.fewest, shape.most), Counted(blocks, counts, 0, most)

    def is_empty(self, shape: String) -> bool:
        return shape.fewest > shape.most or (self.counted(shape) is None and self.dfa(shape).is_empty)

    def group(self, shapes: tuple[String, ...]) -> DFA:
        """The strings of any of these shapes."""
        if String() in shapes:
            return any_text()
        listed = [shape for shape in shapes if shape.values is not None]
        dfas = [self.dfa(shape) for shape in shapes if len(shapes) == 1 or shape.values is None]
        if len(shapes) > 1 and listed:
            merged = frozenset().union(*(self._kept(shape) for shape in listed))
            dfas.append(words([text for value in merged if (text := spell(value)) is not None], self.budget))
        return union(dfas, self.budget)

    def _kept(self, shape: String) -> frozenset[str]:
        """The listed texts of a shape that meet its other constraints."""
        dfa = self.dfa(shape)
        self.budget.spend(sum(2 + len(value) for value in shape.values or ()))
        return frozenset(value for value in shape.values or () if dfa.run(spell(value) or b""))

    def groups(self, groups: tuple[tuple[String, ...], ...]) -> DFA:
        """Side by side: bit i accepts what the i-th group accepts."""
        if groups not in self._groups:
            dfas = [self.group(group) for group in groups]
            self._groups[groups] = dfas[0] if len(dfas) == 1 else combine(dfas, self.budget)
        return self._groups[groups]
