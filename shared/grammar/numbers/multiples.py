"""Multiples of a divisor, found while the decimal digits of a number are read. Introduced in phase 12.

The arithmetic is decimal, so 19.99 is a multiple of 0.01. A number is represented by its remainder after division,
scaled by the power of ten that makes the divisor whole. Remainders that no further digits distinguish are merged
(Alexeev, 2004): of the 1,024 remainders of the divisor 1,024, 159 are left; of the 1,000 of 1,000, four.

Invariant: a remainder is 0 exactly if the number read so far is a multiple.
"""

import math
from fractions import Fraction

from shared.grammar.limits import CELLS, Budget

WHOLE_DIGITS = 20
"""Maximum digits of a whole multiple."""
DECIMAL_DIGITS = 15
"""Maximum digits of a multiple of a fraction: a float preserves this many, so a reader gets the same number."""
MOST_STATES = 1_000
"""Of remainders times digits."""
MOST_LISTED = 100
"""Number of multiples listed for a divisor that has more remainders."""


def common_multiple(one: Fraction, other: Fraction) -> Fraction:
    """The least positive number that is a multiple of both."""
    return Fraction(math.lcm(one.numerator, other.numerator), math.gcd(one.denominator, other.denominator))


def num_decimals(value: Fraction) -> int:
    """The digits of the fraction of a decimal number."""
    rest, counts = value.denominator, []
    for prime in (2, 5):
        counts.append(0)
        while rest % prime == 0:
            rest //= prime
            counts[-1] += 1
    return max(counts)


class Multiples:
    """The remainders of one divisor, a decimal number.

    Attributes:
        num_decimals: the maximum number of digits that the fraction of a multiple needs.
        num_digits: how many digits a multiple may have; 0 if there are too many remainders to keep.
        work: units of work per remainder found.
    """

    def __init__(self, divisor: Fraction, least: Fraction, budget: Budget) -> None:
        """``least``: the smallest requested size of a number; there are multiples of that size."""
        bits = divisor.denominator.bit_length() + divisor.numerator.bit_length()
        budget.spend(bits * (1 + bits // CELLS) // 2)
        self.num_decimals = num_decimals(divisor)
        self.scale: int = 10**self.num_decimals
        self.modulus = int(divisor * self.scale)
        length = _length(int(divisor))
        self.work = length * (1 + bits // CELLS) if self.num_decimals == 0 else 1
        self._powers = [10**count for count in range(length + 1)] if self.num_decimals == 0 else []
        self._kept: dict[int, int] = {}
        self._firsts: dict[tuple[int, ...], int] = {}
        self._budget = budget
        num_remainders, fewest = self._num_remainders(), max(length, _length(math.ceil(least))) + 1
        if self.num_decimals:
            self.num_digits = max(DECIMAL_DIGITS, fewest)
            in_fraction = min(self.modulus, num_remainders * (self.scale // self.modulus + 1))
            if self.num_digits * num_remainders + self.num_decimals * in_fraction > MOST_STATES:
                self.num_digits = 0
        else:
            most = min(max(WHOLE_DIGITS, fewest), MOST_STATES // num_remainders)
            self.num_digits = most if most >= fewest else 0

    def _num_remainders(self) -> int:
        """The number of remainders that the whole part of a number can have."""
        if self.num_decimals:
            return self.modulus // math.gcd(self.modulus, self.scale)
        shares = [math.gcd(self.modulus, power) for power in self._powers]
        sizes = [power // share for power, share in zip(self._powers, shares, strict=True)]
        return min(self.modulus // share + sum(sizes[:count]) for count, share in enumerate(shares))

    def read_whole(self, remainder: int, digit: int) -> int:
        """The remainder after a further digit of the whole part."""
        found = (remainder * 10 + digit * self.scale) % self.modulus
        return found if self.num_decimals else self._class(found)

    def read_fraction(self, remainder: int, digit: int, count: int) -> int:
        """The remainder after the given digit of the fraction, counted from 1."""
        return (remainder + digit * 10 ** (self.num_decimals - count)) % self.modulus

    def can_end(self, remainder: int, count: int) -> bool:
        """Whether further digits of the fraction, after this many, can still make a multiple."""
        return -remainder % self.modulus < 10 ** (self.num_decimals - count)

    def _class(self, remainder: int) -> int:
        """The first remainder found that the same further digits turn into a multiple."""
        if remainder not in self._kept:
            self._budget.spend(self.work)
            missing = [(-remainder * power % self.modulus, power) for power in self._powers]  # which digits would
            signature = tuple(digits if digits < power else -1 for digits, power in missing)
            self._kept[remainder] = self._firsts.setdefault(signature, remainder)
        return self._kept[remainder]


def _length(number: int) -> int:
    """The minimum number of digits of a number; digits that take long to find are left out."""
    return number.bit_length() * 30_103 // 100_000 + 1
