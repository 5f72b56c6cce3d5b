"""What a branch of a schema's logic knows so far, by type. Introduced in phase 12.

Invariant: facts never change; adding one gives new facts, with the same values or fewer.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

from shared.grammar.schema.document import TYPES
from shared.grammar.schema.shapes import Array, Literal, Number, Object, Shape, String, Value


@dataclass(frozen=True)
class Facts:
    """The remaining types, and the constraints on each of them."""

    types: frozenset[str] = TYPES
    booleans: frozenset[bool] = frozenset({False, True})
    number: Number = field(default_factory=Number)
    string: String = field(default_factory=String)
    array: Array = field(default_factory=Array)
    object: Object = field(default_factory=Object)

    @property
    def size(self) -> int:
        """Units of work to read the facts, or to add one."""
        number, text, shape = self.number, self.string, self.object
        scalars = (number.values or (), number.excluded, text.values or (), text.excluded)
        members = (shape.nodes, shape.members, shape.required, shape.forbidden, shape.dependents, shape.judges)
        return 4 + (sum(map(len, scalars)) + len(self.array.first) + sum(map(len, members))) // 4

    def only(self, *types: str) -> "Facts":
        return replace(self, types=self.types & set(types))

    def whole(self, is_whole: bool) -> "Facts":
        """Numbers are integers, or are not."""
        if self.number.is_whole is (not is_whole):
            return replace(self, types=self.types - {"number"})
        return replace(self, number=replace(self.number, is_whole=is_whole))

    def typed(self, names: Collection[str]) -> "Facts":
        facts = self.only(*("number" if name == "integer" else name for name in names))
        return facts.whole(True) if "integer" in names and "number" not in names else facts

    def not_typed(self, names: Collection[str]) -> "Facts":
        facts = self.only(*(TYPES - set(names)))
        return facts.whole(False) if "integer" in names else facts

    def among(self, values: list[Any]) -> "Facts":
        """The value is one of the listed scalars."""
        booleans, numbers, texts, has_null = _sorted(values)
        kinds = {"boolean": booleans, "number": numbers, "string": texts, "null": has_null}
        types = [name for name, found in kinds.items() if found]
        return replace(
            self.only(*types),
            booleans=self.booleans & booleans,
            number=self.number.among(numbers),
            string=replace(self.string, values=texts if self.string.values is None else self.string.values & texts),
        )

    def not_among(self, values: list[Any]) -> "Facts":
        booleans, numbers, texts, has_null = _sorted(values)
        return replace(
            self,
            types=self.types - {"null"} if has_null else self.types,
            booleans=self.booleans - booleans,
            number=replace(self.number, excluded=self.number.excluded | numbers),
            string=replace(self.string, excluded=self.string.excluded | texts),
        )

    def with_object(self, **sets: Any) -> "Facts":
        """Further members in the sets of the object's shape."""
        shape = self.object
        merged = {name: getattr(shape, name) | value for name, value in sets.items()}
        return replace(self, object=replace(shape, **merged))

    def with_bound(self, side: str, value: Fraction, is_excluded: bool) -> "Facts":
        """Numbers have a ``low`` or ``high`` bound."""
        bounded = self.number.at_least if side == "low" else self.number.at_most
        return replace(self, number=bounded(value, is_excluded))

    def multiple_of(self, divisor: Fraction) -> "Facts":
        """Numbers are multiples of a positive number."""
        facts = self.whole(True) if divisor.denominator == 1 else self
        return replace(facts, number=facts.number.times(divisor))

    def with_texts(self, keyword: str, found: frozenset[tuple[str, bool]]) -> "Facts":
        """Strings match (or do not) a ``pattern`` or a ``format``."""
        shape, name = self.string, f"{keyword}s"
        return replace(self, string=replace(shape, **{name: getattr(shape, name) | found}))

    def with_lengths(self, kind: str, fewest: int = 0, most: int = 2**31 - 1) -> "Facts":
        """Bounds on a string's characters, an array's items, or an object's members."""
        shape = getattr(self, kind)
        return replace(self, **{kind: replace(shape, fewest=max(shape.fewest, fewest), most=min(shape.most, most))})

    def with_some_item(self, value: Value) -> "Facts":
        """At least one item of an array satisfies a value."""
        return replace(self.only("array"), array=replace(self.array, some=self.array.some | {value}))

    def shapes(self) -> list[Shape]:
        """A shape for each remaining type, without those that are plainly empty."""
        found: list[Shape] = []
        if "null" in self.types:
            found.append(Literal("null"))
        if "boolean" in self.types:
            found += [Literal("true" if value else "false") for value in sorted(self.booleans)]
        if "number" in self.types and (number := self.number.settled()):
            found.append(number)
        if "string" in self.types and self.string.fewest <= self.string.most and self.string.values != frozenset():
            found.append(self.string)
        if "array" in self.types and self.array.fewest <= self.array.most:
            found.append(self.array)
        shape = self.object
        if "object" in self.types and shape.fewest <= shape.most and not shape.required & shape.forbidden:
            found.append(shape)
        return found


def exact(number: float) -> Fraction:
    """The decimal number as written, not its nearest binary fraction."""
    return Fraction(number) if isinstance(number, int) else Fraction(Decimal(repr(number)))


def _sorted(values: list[Any]) -> tuple[frozenset[bool], frozenset[Fraction], frozenset[str], bool]:
    """The scalars of a list by type: booleans, numbers, texts, and whether null is among them."""
    booleans = frozenset(value for value in values if isinstance(value, bool))
    numbers = frozenset(
        exact(value) for value in values if isinstance(value, (int, float)) and value is not True and value is not False
    )
    texts = frozenset(value for value in values if isinstance(value, str))
    return booleans, numbers, texts, None in values
