"""Numbers by their value: automata over the digits of JSON numbers. Introduced in phase 12.

A number is compared with its bounds (:mod:`shared.grammar.numbers.bounds`) and divided by its divisor
(:mod:`shared.grammar.numbers.multiples`) while its digits are read. A whole number has neither a fraction nor an
exponent. A multiple of a fraction has no exponent, and no digits that its divisor does not need.

The number of digits is limited: by ``MAX_DIGITS`` of the automaton, for multiples by ``Multiples``, and for a large
bound or constant by ``LARGEST``. So no number overflows the range of a float. For a divisor with very many remainders,
the first multiples are listed.

Readers round a number to a float, so a fraction has no more digits than it takes to distinguish it from an excluded
bound.

Invariant: every text that is accepted has an accepted value, and every state can reach an end.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from shared.grammar.automata.automaton import MAX_DIGITS
from shared.grammar.automata.machines import Machine, explore, spell_all
from shared.grammar.limits import Budget, Remembered
from shared.grammar.numbers.bounds import HUGE, Bound
from shared.grammar.numbers.exponents import ALL, EXPONENT_ENDS, EXPONENTS
from shared.grammar.numbers.multiples import MOST_LISTED, WHOLE_DIGITS, Multiples
from shared.grammar.schema.shapes import Literal, Number

MOST_REMEMBERED = 512
WHOLE_PART = Fraction(10**9)
ALWAYS_KEPT = 6
"""Digits of a fraction that a float keeps after a whole part below ``WHOLE_PART``."""
LARGEST = Fraction(10**308)
"""A float can hold this number, and every smaller one."""
LONG = Fraction(10 ** (206 - MAX_DIGITS))
"""Digits that are only counted, and an exponent of 99, may follow those of a smaller number: a float can hold the
result."""


class State(NamedTuple):
    """A position in a number: its part, its sign, a state for each bound, the remainder, and which digits it has
    had."""

    part: str = "start"
    sign: str = ""
    orders: tuple[tuple[int, str], ...] = ()
    remainder: int = 0
    is_short: bool = False  # one nonzero digit before the point
    has_fraction: bool = False  # a nonzero digit after the point
    num_digits: int = 0  # the remainder of a multiple: of its whole part, then of its fraction
    left: int | None = None  # digits that may still follow in the fraction, if they are limited


_machines: Remembered[Machine] = Remembered(MOST_REMEMBERED)


def machine(shape: Number | Literal, budget: Budget) -> Machine:
    """The automaton of a shape's texts; the last few hundred are cached. Raises GrammarError as ``Budget`` does."""
    return _machines.get(shape, lambda: _build(shape, budget), budget)


def machines(shapes: Sequence[Number | Literal], budget: Budget) -> list[Machine]:
    """For shapes that are read side by side, so that one may begin where another has already read many digits."""
    if len(shapes) > 1 and any(isinstance(shape, Number) and _is_long(shape) for shape in shapes):
        shapes = [_bounded(shape) if isinstance(shape, Number) and _is_free(shape) else shape for shape in shapes]
    return [machine(shape, budget) for shape in shapes]


def _is_free(shape: Number) -> bool:
    """Whether the digits of its numbers are only counted."""
    return shape.values is None and shape.multiple is None


def _is_long(shape: Number) -> bool:
    """Whether its numbers may have more digits than ``LONG`` has, unless digits are only counted."""
    if shape.values is not None:
        return any(abs(value) >= LONG for value in shape.values)
    sides = [bound[0] for bound in (shape.low, shape.high) if bound]
    if shape.multiple:
        sides.append(Fraction(10**WHOLE_DIGITS))
    elif len(sides) < 2 and any(abs(side) >= HUGE for side in sides):
        sides.append(LARGEST)
    return any(abs(side) >= LONG for side in sides)


def _build(shape: Number | Literal, budget: Budget) -> Machine:
    if isinstance(shape, Literal):
        return spell_all([shape.text], budget)
    if shape.values is not None:
        budget.spend(8 * len(shape.values))
        return spell_all([text for value in sorted(shape.values) for text in _texts(value, shape.is_whole)], budget)
    reader = _Reader(shape, budget)
    if reader.multiples and not reader.multiples.num_digits:
        found = replace(shape, values=_nearest(shape)).settled()
        return _build(found, budget) if found else spell_all([], budget)
    return explore(State(), reader.steps, reader.is_end, budget, reader.cost)


def _texts(value: Fraction, is_whole: bool | None) -> Iterator[str]:
    """The way Python and people write a number."""
    try:
        text = repr(float(value))
    except OverflowError:  # readers have no such number
        return
    if value.denominator == 1:
        yield str(value)
        if value == 0:
            yield "-0"
        if is_whole or abs(value) < HUGE:  # an integer, as readers expect it
            return
    if Fraction(text) == value:
        yield text


def _nearest(shape: Number) -> frozenset[Fraction]:
    """The multiples of a divisor nearest to 0, or to the bound that excludes 0."""
    middle = max(0, int(shape.low[0] // shape.step)) if shape.low else 0
    middle = min(middle, int(shape.high[0] // shape.step)) if shape.high else middle
    return frozenset(shape.step * number for number in range(middle - MOST_LISTED, middle + MOST_LISTED + 1))


def _bounded(shape: Number) -> Number:
    """The numbers of a shape that a float can hold, unless it requires larger ones."""
    if shape.low is None or shape.low[0] < LARGEST:
        shape = shape.at_most(LARGEST, False)
    if shape.high is None or shape.high[0] > -LARGEST:
        shape = shape.at_least(-LARGEST, False)
    return shape


class _Reader:
    """The steps of the automaton of a shape."""

    def __init__(self, shape: Number, budget: Budget) -> None:
        listed = [value for bound in (shape.low, shape.high) if bound for value in bound[:1]]
        budget.spend(sum(8 + value.denominator.bit_length() for value in (*listed, *shape.excluded)))
        if shape.is_whole is False:  # few enough digits for a float to preserve the fraction
            shape = shape.at_most(WHOLE_PART, True).at_least(-WHOLE_PART, True)
        if not shape.multiple and any(bound and abs(bound[0]) >= HUGE for bound in (shape.low, shape.high)):
            shape = _bounded(shape)
        least = max([Fraction(0), *(shape.low or ())[:1], *(-high for high in (shape.high or ())[:1])])
        self.multiples = Multiples(shape.multiple, least, budget) if shape.multiple else None
        self.has_exponent = shape.is_whole is not True and not self.multiples
        self.shape = shape
        self.bounds = {sign: self._bounds(sign) for sign in ("", "-")}
        num_bounds = max(len(bounds or ()) for bounds in self.bounds.values())
        self.cost = 3 + num_bounds // 2 + (1 + self.multiples.work // 8 if self.multiples else 0)
        limits = [bound.num_digits() for bounds in self.bounds.values() for bound in bounds or ()]
        self.most_digits = min(
            [ALWAYS_KEPT] * (shape.is_whole is False) + [n for n in limits if n is not None], default=None
        )

    def _bounds(self, sign: str) -> tuple[Bound, ...] | None:
        """The constraints on the magnitudes of numbers with one sign; None: there are none."""
        low, high = self.shape.low, self.shape.high
        if sign:
            low, high = (high and (-high[0], high[1])), (low and (-low[0], low[1]))
        if high and high[0] < 0:
            return None
        found = [
            Bound.of(abs(value), "<>")
            for value in sorted(self.shape.excluded)
            if value == 0 or (value < 0) == bool(sign)
        ]
        if low and low[0] >= 0 and low != (0, False):
            found.append(Bound.of(low[0], ">" if low[1] else "=>"))
        if high:
            found.append(Bound.of(high[0], "<" if high[1] else "<="))
        return tuple(found)

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        part, sign = state.part, state.sign
        if part == "start" and not sign and self.bounds["-"] is not None:
            yield "-", State("start", "-")
        bounds = self.bounds[sign]
        if bounds is None:
            return
        if part in ("start", "whole"):
            yield from self._read_whole(state, bounds)
        if part in ("whole", "zero", "fraction") and self.has_exponent:
            yield from self._begin_exponent(state, bounds)
        if part in ("whole", "zero") and self.shape.is_whole is not True:
            orders = tuple(bound.end_whole(order) for bound, order in zip(bounds, state.orders, strict=True))
            yield ".", state._replace(part="point", orders=orders, num_digits=0, left=self._num_left(state))
        if part in ("point", "fraction") and state.left != 0:
            yield from self._read_fraction(state, bounds)
        for characters, following in EXPONENTS.get(part, ()):
            for character in characters:
                yield character, State(following)

    def _num_left(self, state: State) -> int | None:
        """How many digits the fraction may have after a given whole part."""
        if not self.multiples:
            return self.most_digits
        left = min(self.multiples.num_decimals, max(self.multiples.num_digits - state.num_digits, 0))
        return left if self.most_digits is None else min(left, self.most_digits)

    def _read_fraction(self, state: State, bounds: tuple[Bound, ...]) -> Iterator[tuple[str, State]]:
        remainder, num_digits = 0, 0
        left = None if state.left is None else state.left - 1
        for number, digit in enumerate(ALL):
            if self.multiples:
                num_digits = state.num_digits + 1
                remainder = self.multiples.read_fraction(state.remainder, number, num_digits)
                if not self.multiples.can_end(remainder, num_digits):
                    continue
            orders = tuple(bound.read_fraction(order, digit) for bound, order in zip(bounds, state.orders, strict=True))
            has_fraction = self.shape.is_whole is False and (state.has_fraction or number > 0)
            following = State("fraction", state.sign, orders, remainder, state.is_short, has_fraction, num_digits, left)
            yield digit, following

    def _read_whole(self, state: State, bounds: tuple[Bound, ...]) -> Iterator[tuple[str, State]]:
        is_first = state.part == "start"
        before = state.orders or ((0, "="),) * len(bounds)
        remainder, num_digits = 0, 0
        if self.multiples and state.num_digits == self.multiples.num_digits:
            return
        for number, digit in enumerate(ALL):
            orders = tuple(bound.read_whole(order, digit) for bound, order in zip(bounds, before, strict=True))
            part = "zero" if is_first and number == 0 else "whole"
            if self.multiples:
                remainder = self.multiples.read_whole(state.remainder, number)
                num_digits = state.num_digits + (part == "whole")
            is_short = is_first and number > 0 and self.has_exponent
            yield digit, State(part, state.sign, orders, remainder, is_short, num_digits=num_digits)

    def _begin_exponent(self, state: State, bounds: tuple[Bound, ...]) -> Iterator[tuple[str, State]]:
        is_free = not bounds and self.shape.is_whole is None
        if is_free:
            part = "free" if state.is_short else "long"
            yield from (("e", State(part)), ("E", State(part)))
        elif state.is_short:
            tiny = all(bound.allows_tiny() for bound in bounds)
            huge = all(bound.allows_huge() for bound in bounds) and self.shape.is_whole is None
            if tiny or huge:
                yield "e", State("either" if tiny and huge else "tiny" if tiny else "huge")

    def is_end(self, state: State) -> bool:
        if state.part not in ("zero", "whole", "fraction"):
            return state.part in EXPONENT_ENDS
        orders, bounds = state.orders, self.bounds[state.sign] or ()
        if state.remainder or (self.shape.is_whole is False and not state.has_fraction):
            return False
        if state.part != "fraction":
            orders = tuple(bound.end_whole(order) for bound, order in zip(bounds, orders, strict=True))
        return all(bound.allows(order) for bound, order in zip(bounds, orders, strict=True))
