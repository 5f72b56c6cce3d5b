"""Multiples of a divisor, compared with exact arithmetic."""

import random
from fractions import Fraction

import pytest

from shared.grammar.automata.automaton import Automaton
from shared.grammar.documents.json_schema import compile_schema
from shared.grammar.numbers.multiples import DECIMAL_DIGITS, MOST_STATES, Multiples, common_multiple, num_decimals
from tests.grammars import budget

DIVISORS = [0.01, 0.05, 0.25, 0.5, 2.5, 0.1, 1.5, 12.34, 0.0078125, 1e-8, 0.3, 3, 7, 60, 997, 360, 1024, 86400, 49999]
BOUNDS = [{}, {"minimum": 0}, {"type": "integer"}, {"minimum": -3.7, "exclusiveMaximum": 1000.25}, {"minimum": 10**9}]


def decimal(value: Fraction) -> str:
    """The number as a decimal, without an exponent."""
    digits = num_decimals(value)
    scaled = str(abs(int(value * 10**digits))).rjust(digits + 1, "0")
    text = f"{scaled[:-digits]}.{scaled[-digits:]}" if digits else scaled
    return "-" * (value < 0) + text


def shortest(automaton: Automaton) -> str:
    """A shortest text."""
    texts = {0: ""}
    for state in (waiting := [0]):  # which grows
        if automaton.is_final[state]:
            return texts[state]
        for byte in b"-.0123456789":
            value = int(automaton.table[state, automaton.columns[byte]])
            if value >= 0 and value >> 3 not in texts:
                texts[value >> 3] = texts[state] + chr(byte)
                waiting.append(value >> 3)
    raise AssertionError("no text")


@pytest.mark.parametrize("divisor", DIVISORS)
def test_a_number_is_accepted_if_it_is_a_multiple(divisor: float) -> None:
    """None is accepted that is not; and few enough digits of one that is are."""
    chance, exact = random.Random(0), Fraction(str(divisor))
    for bounds in BOUNDS:
        automaton = compile_schema({"type": "number", "multipleOf": divisor, **bounds}, budget())
        low, high = (
            Fraction(str(bounds.get("minimum", -(10**18)))),
            Fraction(str(bounds.get("exclusiveMaximum", 10**18))),
        )
        assert low <= Fraction(shortest(automaton)) < high
        num_found = 0
        for _ in range(300):
            most = chance.choice([2, 20, 100, 10**5])
            value = exact * chance.randint(-most, most) + (low > 1) * (low // exact * exact)
            if chance.random() < 0.3:
                value += Fraction(chance.randint(-9, 9), 10 ** chance.randint(0, 3))
            text = decimal(value)
            is_valid = low <= value < high and value % exact == 0
            is_valid &= bounds.get("type") != "integer" or value.denominator == 1
            is_accepted = automaton.accepts(text.encode())
            assert is_accepted <= is_valid, text
            is_short = (
                abs(value - low * (low > 1)) <= 90 * exact and len(text.strip("-").replace(".", "")) <= DECIMAL_DIGITS
            )
            assert is_accepted or not (is_valid and is_short), text
            num_found += is_accepted
        assert num_found > 0


@pytest.mark.parametrize("divisor", [*range(1, 60), 64, 75, 96, 120, 125, 250, 1000])
def test_remainders_that_no_digits_tell_apart_are_one(divisor: int) -> None:
    """As many as the smallest automaton has, and each number is divided rightly."""
    multiples = Multiples(Fraction(divisor), Fraction(0), budget())
    reached = [0]
    for remainder in reached:  # which grows
        reached += {multiples.read_whole(remainder, digit) for digit in range(10)} - set(reached)
    assert len(reached) == multiples._num_remainders()
    for number in range(0, 20_000, 7):
        remainder = 0
        for digit in str(number):
            remainder = multiples.read_whole(remainder, int(digit))
        assert (remainder == 0) == (number % divisor == 0), number


def test_remainders_are_kept_within_a_number_of_states() -> None:
    for divisor in DIVISORS:
        multiples = Multiples(Fraction(str(divisor)), Fraction(0), budget())
        assert multiples.num_digits * multiples._num_remainders() <= MOST_STATES
        automaton = compile_schema({"multipleOf": divisor, "type": "number"}, budget())
        assert automaton.num_states < 3 * MOST_STATES


def test_common_multiples() -> None:
    assert common_multiple(Fraction(2, 5), Fraction(3, 50)) == Fraction(6, 5)
    assert common_multiple(Fraction(4), Fraction(6)) == 12
    assert common_multiple(Fraction(3, 2), Fraction(1)) == 3
