"""Numbers by their value: automata over the digits of JSON numbers. Introduced in phase 12.

A number is compared with a bound while its digits are read: how many digits the whole part has had, whether it is less,
equal or greater so far, and then the digits of the fraction. Divisors keep a remainder.

A number is written with an exponent only where its size is then known: freely where its value does not matter, else as
Python writes the shortest form of a float, below 1e-4 or from 1e16 on. A whole number has neither a fraction nor an
exponent. Exponents stop at 307, and after more than one digit at 99. The number of digits is bounded too: by
``MAX_DIGITS`` of the automaton, for a multiple that has few remainders by ``MULTIPLE_DIGITS``, and beside a large bound
by ``LARGEST``. So no number overflows the range of a float (``1E400`` is refused); multiples with many remainders do.

Readers round a number to a float, so a fraction has no more digits than tell it from an excluded bound.

Invariant: every text that is accepted has an accepted value, and every state can reach an end.
"""

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from shared.grammar.limits import CELLS, Budget, Remembered
from shared.grammar.machines import Machine, explore, spell_all
from shared.grammar.shapes import Literal, Number

MOST_REMEMBERED = 512
TINY, HUGE = Fraction(1, 10_000), Fraction(10**16)
WHOLE_PART = Fraction(10**9)
ALWAYS_KEPT = 6
"""Digits of a fraction that a float keeps behind a whole part below ``WHOLE_PART``."""
MOST_DIGITS = 20
LARGEST = Fraction(10**308)
"""Below it every number is a float."""
MULTIPLE_DIGITS = 20
MOST_REMAINDERS = 10
"""Of a multiple whose digits are bounded: each remainder has states for each number of digits."""
ALL = "0123456789"
EXPONENTS = {
    "free": (("-", "minus"), ("+", "plus"), ("012", "two more"), ("3", "3"), ("456789", "one more")),
    "long": (("-", "minus"), ("+", "last but one"), (ALL, "one more")),
    "minus": ((ALL, "two more"),),
    "last but one": ((ALL, "one more"),),
    "plus": (("012", "two more"), ("3", "3"), ("456789", "one more")),
    "two more": ((ALL, "one more"),),
    "one more": ((ALL, "no more"),),
    "3": (("0", "30"), ("123456789", "no more")),
    "30": (("01234567", "no more"),),
    "either": (("-", "-"), ("+", "+")),
    "tiny": (("-", "-"),),
    "huge": (("+", "+"),),
    "-": (("0", "-0"), ("12", "-1"), ("3", "+3"), ("456789", "last")),
    "-0": (("56789", "no more"),),
    "-1": ((ALL, "one more"),),
    "+": (("1", "+1"), ("2", "+2"), ("3", "+3"), ("456789", "last")),
    "+1": (("6789", "one more"), ("012345", "last")),
    "+2": ((ALL, "one more"),),
    "+3": (("0", "30"), ("123456789", "no more")),
    "last": ((ALL, "no more"),),
}
EXPONENT_ENDS = ("two more", "one more", "no more", "3", "30")


class Bound(NamedTuple):
    """A comparison of a magnitude with a decimal number; ``allowed`` is a part of ``"<=>"``."""

    whole: str
    fraction: str
    allowed: str
    value: Fraction

    @classmethod
    def of(cls, value: Fraction, allowed: str) -> "Bound":
        whole, rest = divmod(value, 1)
        digits = ""
        while rest:
            digit, rest = divmod(rest * 10, 1)
            digits += str(digit)
        return cls(str(whole), digits, allowed, value)

    def read_whole(self, state: tuple[int, str], digit: str) -> tuple[int, str]:
        """``state``: the number of digits so far, and how they compare to as many digits of the bound."""
        count, order = state
        if count >= len(self.whole):
            return len(self.whole) + 1, ">"
        if order == "=":
            order = _order(digit, self.whole[count])
        return count + 1, order

    def end_whole(self, state: tuple[int, str]) -> tuple[int, str]:
        """The state before the first digit of the fraction."""
        count, order = state
        if count != len(self.whole):
            order = "<" if count < len(self.whole) else ">"
        return (0, order) if order == "=" else (-1, order)

    def read_fraction(self, state: tuple[int, str], digit: str) -> tuple[int, str]:
        count, order = state
        if order != "=":
            return state
        order = _order(digit, self.fraction[count] if count < len(self.fraction) else "0")
        return (min(count + 1, len(self.fraction)), "=") if order == "=" else (-1, order)

    def allows(self, state: tuple[int, str]) -> bool:
        """Whether a number may end here, in its fraction."""
        count, order = state
        if order == "=" and count < len(self.fraction):
            order = "<"
        return order in self.allowed

    def num_digits(self) -> int | None:
        """How many digits of a fraction a float surely tells from an excluded bound; None: it does not matter."""
        if "=" in self.allowed:
            return None
        if not self.value:
            return MOST_DIGITS
        try:
            bound = float(self.value)
        except OverflowError:  # beyond every float
            return 0
        spacing = math.ulp(bound if ">" in self.allowed else math.nextafter(bound, 0))
        is_exact = Fraction(bound) == self.value
        return min(max(math.ceil(-math.log10(spacing / 2 if is_exact else spacing)) - 1, 0), MOST_DIGITS)

    def allows_tiny(self) -> bool:
        """Whether all numbers between 0 and ``TINY`` are allowed."""
        return (">" if self.value == 0 else "<" if self.value >= TINY else "no") in self.allowed

    def allows_huge(self) -> bool:
        """Whether all numbers from ``HUGE`` on are allowed."""
        return self.value < HUGE and ">" in self.allowed


def _order(one: str, other: str) -> str:
    return "=" if one == other else "<" if one < other else ">"


class State(NamedTuple):
    """Where a number stands: its part, its sign, a state of each bound, the remainder, and what its digits were."""

    part: str = "start"
    sign: str = ""
    orders: tuple[tuple[int, str], ...] = ()
    remainder: int = 0
    is_short: bool = False  # one digit that is not 0 before the point
    has_fraction: bool = False  # a digit that is not 0 behind the point
    num_digits: int = 0  # behind the point, where they are limited


_machines: Remembered[Machine] = Remembered(MOST_REMEMBERED)


def machine(shape: Number | Literal, budget: Budget) -> Machine:
    """The automaton of a shape's texts; the last few hundred are remembered. Raises GrammarError as ``Budget`` does."""
    return _machines.get(shape, lambda: _build(shape, budget), budget)


def _build(shape: Number | Literal, budget: Budget) -> Machine:
    if isinstance(shape, Literal):
        return spell_all([shape.text], budget)
    if shape.values is not None:
        budget.spend(8 * len(shape.values))
        return spell_all([text for value in sorted(shape.values) for text in _texts(value, shape.is_whole)], budget)
    reader = _Reader(shape, budget)
    return explore(State(), reader.steps, reader.is_end, budget, reader.cost)


def _texts(value: Fraction, is_whole: bool | None) -> Iterator[str]:
    """How Python and people write a number."""
    try:
        text = repr(float(value))
    except OverflowError:  # readers have no such number
        return
    if value.denominator == 1:
        yield str(value)
        if value == 0:
            yield "-0"
        if is_whole or abs(value) < HUGE:  # an integer, as its readers expect it
            return
    if Fraction(text) == value:
        yield text


def _bounded(shape: Number, most: Fraction) -> Number:
    """The numbers of a shape below ``most`` and above its opposite, unless it asks for larger ones."""
    if shape.low is None or shape.low[0] < most:
        shape = shape.at_most(most, True)
    if shape.high is None or shape.high[0] > -most:
        shape = shape.at_least(-most, True)
    return shape


class _Reader:
    """The steps of the automaton of a shape."""

    def __init__(self, shape: Number, budget: Budget) -> None:
        listed = [value for bound in (shape.low, shape.high) if bound for value in bound[:1]]
        budget.spend(sum(8 + value.denominator.bit_length() for value in (*listed, *shape.excluded)))
        if shape.is_whole is False:  # few enough digits for a float to keep the fraction
            shape = shape.at_most(WHOLE_PART, True).at_least(-WHOLE_PART, True)
        if 1 < shape.multiple <= MOST_REMAINDERS:  # a run that may end anywhere could end where the remainder is not 0
            shape = _bounded(shape, Fraction(10**MULTIPLE_DIGITS))
        if any(bound and abs(bound[0]) >= HUGE for bound in (shape.low, shape.high)):
            shape = _bounded(shape, LARGEST)
        self.shape = shape
        self.bounds = {sign: self._bounds(sign) for sign in ("", "-")}
        num_bounds = max(len(bounds or ()) for bounds in self.bounds.values())
        self.cost = 3 + num_bounds // 2 + shape.multiple.bit_length() // CELLS
        limits = [bound.num_digits() for bounds in self.bounds.values() for bound in bounds or ()]
        self.most_digits = min(
            [ALWAYS_KEPT] * (shape.is_whole is False) + [n for n in limits if n is not None], default=None
        )

    def _bounds(self, sign: str) -> tuple[Bound, ...] | None:
        """What holds for the magnitudes of the numbers of one sign; None: there are none."""
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
        if part in ("whole", "zero", "fraction") and self.shape.is_whole is not True:
            yield from self._begin_exponent(state, bounds)
        if part in ("whole", "zero") and self.shape.is_whole is not True:
            orders = tuple(bound.end_whole(order) for bound, order in zip(bounds, state.orders, strict=True))
            yield ".", state._replace(part="point", orders=orders)
        if part in ("point", "fraction"):
            if state.num_digits == self.most_digits:
                return
            num_digits = state.num_digits + (self.most_digits is not None)
            for digit in ALL:
                orders = tuple(b.read_fraction(order, digit) for b, order in zip(bounds, state.orders, strict=True))
                has_fraction = self.shape.is_whole is False and (state.has_fraction or digit != "0")
                yield digit, State("fraction", sign, orders, 0, state.is_short, has_fraction, num_digits)
        for characters, following in EXPONENTS.get(part, ()):
            for character in characters:
                yield character, State(following)

    def _read_whole(self, state: State, bounds: tuple[Bound, ...]) -> Iterator[tuple[str, State]]:
        is_first = state.part == "start"
        before = state.orders or ((0, "="),) * len(bounds)
        for number, digit in enumerate(ALL):
            orders = tuple(bound.read_whole(order, digit) for bound, order in zip(bounds, before, strict=True))
            remainder = (state.remainder * 10 + number) % self.shape.multiple
            is_short = is_first and number > 0 and self.shape.is_whole is not True
            part = "zero" if is_first and number == 0 else "whole"
            yield digit, State(part, state.sign, orders, remainder, is_short)

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
        if state.part != "fraction":
            orders = tuple(bound.end_whole(order) for bound, order in zip(bounds, orders, strict=True))
            if self.shape.is_whole is False or state.remainder:
                return False
        elif self.shape.is_whole is False and not state.has_fraction:
            return False
        return all(bound.allows(order) for bound, order in zip(bounds, orders, strict=True))
