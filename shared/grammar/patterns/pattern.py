"""The syntax of regular expressions, as trees. Introduced in phase 12.

The syntax is that of ECMA 262, as in JSON Schema, except for features that a finite automaton cannot have
(backreferences) or that look back (lookbehind, word boundaries); these are refused with their position. Laziness of a
quantifier changes which match is found, not whether there is one.
"""

import re
from dataclasses import dataclass, field

from shared.grammar.patterns.characters import Characters, complement
from shared.grammar.patterns.escapes import LINE_ENDS, CharacterReader

MAX_REPEATS = 10_000
BOUNDS = re.compile(r"\{([0-9]+)(?:(,)([0-9]*))?\}")


@dataclass(frozen=True)
class Members:
    """One character of a set."""

    characters: Characters


@dataclass(frozen=True)
class Concatenation:
    parts: "tuple[Node, ...]"


@dataclass(frozen=True)
class Alternatives:
    parts: "tuple[Node, ...]"


@dataclass(frozen=True)
class Repeat:
    """``most`` None: unbounded."""

    part: "Node"
    least: int
    most: int | None
    span: tuple[int, int] = field(default=(0, 0), compare=False)  # of its quantifier, in the pattern


@dataclass(frozen=True)
class Anchor:
    """The beginning of the text, or its end."""

    is_begin: bool


@dataclass(frozen=True)
class Lookahead:
    """Whether the rest of the text begins with the part, or must not begin with it."""

    part: "Node"
    holds: bool


Node = Members | Concatenation | Alternatives | Repeat | Anchor | Lookahead


class Parser(CharacterReader):
    """Reads the parts of a pattern."""

    depth = 0  # of groups

    def parse(self) -> Node:
        """The tree of the whole pattern. Raises GrammarError."""
        node = self.alternatives()
        if self.place < len(self.pattern):
            raise self.error("has a closing parenthesis without an opening one")
        return node

    def alternatives(self) -> Node:
        parts = [self.concatenation()]
        while self.take("|"):
            parts.append(self.concatenation())
        return parts[0] if len(parts) == 1 else Alternatives(tuple(parts))

    def concatenation(self) -> Node:
        parts: list[Node] = []
        while self.place < len(self.pattern) and not self.peek("|") and not self.peek(")"):
            parts.append(self.repeat())
        return parts[0] if len(parts) == 1 else Concatenation(tuple(parts))

    def repeat(self) -> Node:
        node = self.atom()
        place = self.place
        bounds = self.quantifier()
        if bounds is None:
            return node
        if isinstance(node, (Anchor, Lookahead)):
            raise self.error("repeats an anchor or a lookahead", place)
        least, most = bounds
        if most is not None and most < least:
            raise self.error(f"has the bounds {least} and {most} in the wrong order", place)
        if max(least, most or 0) > MAX_REPEATS:
            raise self.error(f"repeats more than {MAX_REPEATS} times", place)
        self.take("?")  # lazy
        end = self.place
        if self.quantifier() is not None:
            raise self.error("has a quantifier after a quantifier", place)
        return Repeat(node, least, most, (place, end))

    def quantifier(self) -> tuple[int, int | None] | None:
        """The bounds of a quantifier, if one is next."""
        for text, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.take(text):
                return bounds
        found = BOUNDS.match(self.pattern, self.place)
        if found:
            self.place = found.end()
            least, comma, most = found.groups()
            return _number(least), _number(most) if most else None if comma else _number(least)
        return None

    def atom(self) -> Node:
        place = self.place
        character = self.character()
        match character:
            case "(":
                return self.group(place)
            case "[":
                return Members(self.bracket(place))
            case ".":
                return Members(complement(LINE_ENDS))
            case "^" | "$":
                return Anchor(character == "^")
            case "\\":
                return Members(self.escape())
            case "*" | "+" | "?":
                raise self.error("has a quantifier with nothing to repeat", place)
        return Members(self.one(ord(character), place))

    def group(self, place: int) -> Node:
        holds = None
        if self.take("?"):
            if self.peek("<=") or self.peek("<!"):
                raise self.error("has a lookbehind, which is not supported,", place)
            if self.take("=") or self.take("!"):
                holds = self.pattern[self.place - 1] == "="
            elif self.take("<") or self.take("P<"):
                self.until(">")
            elif not self.take(":"):
                raise self.error("has a group of an unknown kind", place)
        self.depth += 1
        if self.depth > 100:
            raise self.error("nests more than 100 groups", place)
        node = self.alternatives()
        self.depth -= 1
        if not self.take(")"):
            raise self.error("has an opening parenthesis without a closing one", place)
        if holds is not None:
            return Lookahead(node, holds)
        return Concatenation((node,)) if isinstance(node, (Anchor, Lookahead)) else node  # may be repeated


def _number(digits: str) -> int:
    """The number in a bound; a number that is too large if it has too many digits."""
    return int(digits) if len(digits) <= 9 else MAX_REPEATS + 1
