"""Turns repeats of one character into lengths: ``^[\\p{L} '-]{1,50}$`` is ``^[\\p{L} '-]*$`` of 1 to 50 characters.

A length needs one counter; a repeat needs states for each character. This is exact if every other part of the pattern
matches only texts of one length, so that the repeat has the remaining characters. Introduced in phase 12.
"""

from shared.grammar.automata.automaton import UNBOUNDED
from shared.grammar.limits import Budget, GrammarError
from shared.grammar.patterns.pattern import (
    Alternatives,
    Anchor,
    Concatenation,
    Lookahead,
    Members,
    Node,
    Parser,
    Repeat,
)

FEWEST = 16
"""Maximum characters of a repeat that states alone count."""


def as_length(pattern: str, budget: Budget) -> tuple[str, int, int] | None:
    """The pattern without the bounds of its long repeat, and the minimum and maximum number of characters of a text;
    None if it has no such repeat, or is invalid.
    """
    try:
        tree = Parser(pattern, budget).parse()
    except GrammarError:  # compiling the pattern reports this with its position
        return None
    parts = tree.parts if isinstance(tree, Concatenation) else ()
    if len(parts) < 3 or parts[0] != Anchor(True) or parts[-1] != Anchor(False):
        return None
    long = [part for part in parts if isinstance(part, Repeat) and max(part.least, part.most or 0) >= FEWEST]
    if len(long) != 1 or _length(long[0].part, budget) != 1:
        return None
    repeat = long[0]
    lengths = [_length(part, budget) for part in parts if part is not repeat]
    others = [length for length in lengths if length is not None]
    if len(others) < len(lengths):
        return None
    begin, end = repeat.span
    most = UNBOUNDED if repeat.most is None else repeat.most + sum(others)
    return f"{pattern[:begin]}*{pattern[end:]}", repeat.least + sum(others), most


def _length(node: Node, budget: Budget) -> int | None:
    """The number of characters in every text that a node matches, if it is always the same."""
    budget.spend(1)
    match node:
        case Members():
            return 1
        case Anchor() | Lookahead():
            return 0
        case Repeat(part, least, most):
            length = _length(part, budget) if least == most else None
            return None if length is None else length * least
        case Concatenation(parts) | Alternatives(parts):
            lengths = [_length(part, budget) for part in parts]
            if None in lengths:
                return None
            known = [length for length in lengths if length is not None]
            if isinstance(node, Concatenation):
                return sum(known)
            return known[0] if len(set(known)) == 1 else None
