"""Shapes: the possible values of one type, once the logic of their schema is resolved. Introduced in phase 12.

A schema becomes a union of shapes, each for one type. Where a shape contains further values (items, properties), it
holds them as a ``Value``: the conjunction of schemas that the value must satisfy. It is not resolved yet, because
schemas can be recursive.

Invariant: shapes are hashable, and equal shapes accept the same values.
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from shared.grammar.automata.automaton import UNBOUNDED
from shared.grammar.numbers.multiples import common_multiple

Value = frozenset[int]
"""A conjunction of literals; each is 2 × a node of the document, + 1 if it is negated. The empty conjunction accepts
any value."""
NEVER = 2**30
"""The depth of a value that nothing satisfies."""
ANYTHING: Value = frozenset()


@dataclass(frozen=True)
class Literal:
    """``null``, ``true`` or ``false``, by its text."""

    text: str


@dataclass(frozen=True)
class Number:
    """Numbers by value: integer, fractional or either, bounds (a value, and whether it is excluded), a divisor, and
    listed values."""

    is_whole: bool | None = None
    low: tuple[Fraction, bool] | None = None
    high: tuple[Fraction, bool] | None = None
    multiple: Fraction | None = None
    values: frozenset[Fraction] | None = None
    excluded: frozenset[Fraction] = frozenset()

    def at_least(self, bound: Fraction, is_excluded: bool) -> "Number":
        low = (bound, is_excluded)
        return replace(self, low=low if self.low is None else max(self.low, low))

    def at_most(self, bound: Fraction, is_excluded: bool) -> "Number":
        if self.high is None or (bound, not is_excluded) < (self.high[0], not self.high[1]):
            return replace(self, high=(bound, is_excluded))
        return self

    def contains(self, value: Fraction) -> bool:
        """Whether a value satisfies every constraint except the listed values."""
        if self.is_whole is not None and self.is_whole != (value.denominator == 1):
            return False
        if self.multiple is not None and (value / self.multiple).denominator != 1:
            return False
        if self.low and (value < self.low[0] or (value == self.low[0] and self.low[1])):
            return False
        if self.high and (value > self.high[0] or (value == self.high[0] and self.high[1])):
            return False
        return value not in self.excluded

    def among(self, values: frozenset[Fraction]) -> "Number":
        return replace(self, values=values if self.values is None else self.values & values)

    def times(self, divisor: Fraction) -> "Number":
        return replace(self, multiple=common_multiple(self.multiple, divisor) if self.multiple else divisor)

    @property
    def step(self) -> Fraction:
        """The least positive number that divides all others; 0 if there is none."""
        if not self.is_whole:
            return self.multiple or Fraction(0)
        return common_multiple(self.multiple, Fraction(1)) if self.multiple else Fraction(1)

    def settled(self) -> "Number | None":
        """The shape in normal form; None if it is plainly empty."""
        if self.values is not None:
            values = frozenset(value for value in self.values if self.contains(value))
            return Number(values=values) if values else None
        if step := self.step:
            is_whole = self.is_whole if step.denominator > 1 else True
            if self.is_whole is False and is_whole:
                return None
            shape = replace(self, is_whole=is_whole, multiple=None if step == 1 else step)
            low, high = self.low, self.high
            if low:
                first = int(-(-low[0] // step))
                low = (first + (low[1] and first * step == low[0])) * step, False
            if high:
                last = int(high[0] // step)
                high = (last - (high[1] and last * step == high[0])) * step, False
            if low and high:
                first, last = int(low[0] / step), int(high[0] / step)
                if last < first:
                    return None
                if is_whole and last - first <= 64:
                    return shape.among(frozenset(step * number for number in range(first, last + 1))).settled()
            shape = replace(shape, low=low, high=high)
            excluded = frozenset(
                value for value in self.excluded if replace(shape, excluded=frozenset()).contains(value)
            )
            return replace(shape, excluded=excluded)
        if self.low and self.high and (self.low[0] > self.high[0] or self.low[0] == self.high[0]):
            return self.among(frozenset({self.low[0]})).settled() if self.low[0] == self.high[0] else None
        return self


@dataclass(frozen=True)
class String:
    """Strings: the number of their characters, patterns and formats (and whether they must match), listed texts."""

    fewest: int = 0
    most: int = UNBOUNDED
    patterns: frozenset[tuple[str, bool]] = frozenset()
    formats: frozenset[tuple[str, bool]] = frozenset()
    values: frozenset[str] | None = None
    excluded: frozenset[str] = frozenset()

    @property
    def is_plain(self) -> bool:
        """Whether the number of characters is the only constraint."""
        return not (self.patterns or self.formats or self.excluded) and self.values is None


@dataclass(frozen=True)
class Array:
    """Arrays: the values of the first items and of all others, the number of items, values that some item must have,
    and whether items are unique.
    """

    first: tuple[Value, ...] = ()
    rest: Value = ANYTHING
    fewest: int = 0
    most: int = UNBOUNDED
    some: frozenset[Value] = frozenset()
    is_unique: bool = False

    def item(self, index: int) -> Value:
        return self.first[index] if index < len(self.first) else self.rest

    def also(self, first: tuple[Value, ...], rest: Value) -> "Array":
        """The arrays that also satisfy these items."""
        length = max(len(first), len(self.first))
        other = Array(first, rest)
        return replace(self, first=tuple(self.item(i) | other.item(i) for i in range(length)), rest=self.rest | rest)


class Wrong(NamedTuple):
    """Some key of an object has a wrong value, which satisfies ``literal``: a key that matches ``pattern`` or, without
    a pattern, a key that ``node`` does not describe.
    """

    node: int
    pattern: str | None
    literal: int


@dataclass(frozen=True)
class Object:
    """Objects: the document's nodes whose properties apply, and constraints on single keys.

    Attributes:
        nodes: schemas with ``properties``, ``patternProperties`` or ``additionalProperties``.
        members: further (key, literal): the value of the key, if present, satisfies the literal.
        names: literals that every key satisfies, as a string.
        dependents: (key, keys): the first key requires the others.
        outside: nodes that do not describe at least one of the keys.
        wrong: requirements that some key must still meet.
        last: a requirement that an unnamed key met; later unnamed keys must meet it too, since one may be the same key.
    """

    nodes: frozenset[int] = frozenset()
    members: frozenset[tuple[str, int]] = frozenset()
    names: frozenset[int] = frozenset()
    required: frozenset[str] = frozenset()
    forbidden: frozenset[str] = frozenset()
    dependents: frozenset[tuple[str, frozenset[str]]] = frozenset()
    outside: frozenset[int] = frozenset()
    wrong: frozenset[Wrong] = frozenset()
    last: frozenset[Wrong] = frozenset()
    fewest: int = 0
    most: int = UNBOUNDED

    @property
    def judges(self) -> frozenset[int]:
        """Nodes that constrain keys; their values need not be satisfied."""
        return self.outside | {one.node for one in self.wrong | self.last}


Shape = Literal | Number | String | Array | Object
