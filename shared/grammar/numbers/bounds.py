"""Compares a number with a bound while its digits are read. Introduced in phase 12.

The state of a comparison is the number of digits read, of the whole part or the fraction, and whether they are less
than, equal to or greater than the bound's.
"""

import math
from fractions import Fraction
from typing import NamedTuple

TINY, HUGE = Fraction(1, 10_000), Fraction(10**16)
MOST_DIGITS = 20
"""Maximum digits of a fraction near an excluded bound."""


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
        """``state``: the number of digits so far, and how they compare with as many digits of the bound."""
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
        """The number of digits of a fraction with which a float can certainly be distinguished from an excluded bound;
        None: it does not matter."""
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
