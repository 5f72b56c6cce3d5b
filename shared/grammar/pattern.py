"""Regular expressions as trees: the syntax. Introduced in phase 12.

The syntax is that of ECMA 262, as JSON Schema has it, without what no finite automaton can do (backreferences) and what
would need several at once (lookaround, word borders): these are refused with their place. Whether a quantifier is lazy
changes which match is found, and not what matches.
"""

import re
import sys
import unicodedata
from dataclasses import dataclass
from functools import cache
from itertools import groupby

from shared.grammar.characters import MAX_CHARACTER, Characters, Range, characters, complement
from shared.grammar.limits import Budget, GrammarError

MAX_REPEATS = 10_000
MAX_RANGES = 20_000
"""Of one class."""
DIGITS = characters([(ord("0"), ord("9"))])
WORD = characters([*DIGITS, (ord("A"), ord("Z")), (ord("a"), ord("z")), (ord("_"), ord("_"))])
SPACE = characters(
    [(0x2000, 0x200A), *((ord(c), ord(c)) for c in "\t\n\v\f\r \u00a0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff")]
)
LINE_ENDS = characters([(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)])
CLASSES: dict[str, Characters] = {
    "d": DIGITS,
    "w": WORD,
    "s": SPACE,
    "D": complement(DIGITS),
    "W": complement(WORD),
    "S": complement(SPACE),
}
BOUNDS = re.compile(r"\{([0-9]+)(?:(,)([0-9]*))?\}")
CONTROLS = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11, "0": 0}


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
    """``most`` None: without a bound."""

    part: "Node"
    least: int
    most: int | None


@dataclass(frozen=True)
class Anchor:
    """The beginning of the text, or its end."""

    is_begin: bool


Node = Members | Concatenation | Alternatives | Repeat | Anchor


class Parser:
    """Reads a pattern from left to right, in a time that grows with its length; ``budget`` bounds it."""

    def __init__(self, pattern: str, budget: Budget) -> None:
        self.pattern, self.place, self.budget = pattern, 0, budget
        self.depth = 0

    def parse(self) -> Node:
        """The tree of the whole pattern. Raises GrammarError."""
        node = self.alternatives()
        if self.place < len(self.pattern):
            raise self.error("has a closing parenthesis without an opening one")
        return node

    def error(self, what: str, place: int | None = None) -> GrammarError:
        at = self.place if place is None else place
        return GrammarError(f"The pattern {shown(self.pattern)} {what} at position {at}.")

    def peek(self, text: str) -> bool:
        return self.pattern.startswith(text, self.place)

    def take(self, text: str) -> bool:
        """Whether the text stands here; then it is read."""
        found = self.peek(text)
        self.place += len(text) if found else 0
        return found

    def until(self, mark: str) -> str:
        """The text before the mark, which is read too; the rest of the pattern if there is none."""
        begin, found = self.place, self.pattern.find(mark, self.place)
        self.place = len(self.pattern) if found < 0 else found + len(mark)
        return self.pattern[begin : self.place if found < 0 else found]

    def character(self) -> str:
        self.budget.spend(2)
        if self.place == len(self.pattern):
            raise self.error("ends too early")
        self.place += 1
        return self.pattern[self.place - 1]

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
        if isinstance(node, Anchor):
            raise self.error("repeats an anchor", place)
        least, most = bounds
        if most is not None and most < least:
            raise self.error(f"has the bounds {least} and {most} in the wrong order", place)
        if max(least, most or 0) > MAX_REPEATS:
            raise self.error(f"repeats more than {MAX_REPEATS} times", place)
        self.take("?")  # lazy
        if self.quantifier() is not None:
            raise self.error("has a quantifier behind a quantifier", place)
        return Repeat(node, least, most)

    def quantifier(self) -> tuple[int, int | None] | None:
        """The bounds of a quantifier, if one stands here."""
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
        if self.take("?"):
            if any(map(self.peek, ("=", "!", "<=", "<!"))):
                raise self.error("has a lookaround, which is not supported,", place)
            if self.take("<") or self.take("P<"):
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
        return Concatenation((node,)) if isinstance(node, Anchor) else node  # which may be repeated

    def bracket(self, place: int) -> Characters:
        is_negated = self.take("^")
        ranges: list[tuple[int, int]] = []
        while not self.take("]"):
            at = self.place
            if len(ranges) > MAX_RANGES:
                raise self.error(f"has a class of more than {MAX_RANGES} ranges", place)
            first = self.member(place)
            if self.peek("-") and not self.peek("-]"):
                self.take("-")
                last = self.member(place)
                if _is_single(first) and _is_single(last):
                    low, high = first[0][0], last[0][0]
                    if high < low:
                        raise self.error(f"has the range {chr(low)}-{chr(high)} in the wrong order", at)
                    ranges.append((low, high))
                else:  # a hyphen beside a class stands for itself
                    ranges += [*first, (ord("-"), ord("-")), *last]
            else:
                ranges += first
        self.budget.spend(len(ranges))
        members = characters(ranges)
        return complement(members) if is_negated else members

    def member(self, place: int) -> Characters:
        if self.place == len(self.pattern):
            raise self.error("has an opening bracket without a closing one", place)
        at = self.place
        character = self.character()
        if character != "\\":
            return self.one(ord(character), at)
        if self.take("b"):
            return characters([(8, 8)])
        if self.take("-"):
            return characters([(ord("-"), ord("-"))])
        return self.escape()

    def one(self, character: int, place: int) -> Characters:
        found = characters([(character, character)])
        if not found:
            raise self.error(f"has the surrogate U+{character:04X}, which is no character,", place)
        return found

    def escape(self) -> Characters:
        """What stands behind a backslash."""
        place = self.place - 1
        character = self.character()
        if character in CLASSES:
            return CLASSES[character]
        if character in "bB":
            raise self.error(f"has the word border \\{character}, which is not supported,", place)
        if character in "123456789k":
            raise self.error("has a backreference, which no automaton can follow,", place)
        if character in CONTROLS:
            return characters([(CONTROLS[character],) * 2])
        if character == "c" and self.place < len(self.pattern) and self.pattern[self.place].isascii():
            return characters([(ord(self.character()) % 32,) * 2])
        if character == "x":
            return self.one(self.hexadecimal(2, place), place)
        if character == "u":
            return self.one(self.unicode(place), place)
        if character in "pP" and self.take("{"):
            name = self.until("}")
            members = _categories().get(name.removeprefix("General_Category=").removeprefix("gc="))
            if members is None:
                raise self.error(f"names the property {shown(name)}, which is not a general category,", place)
            if character == "p":
                return members
            self.budget.spend(len(members))
            return complement(members)
        if character.isascii() and character.isalpha():
            raise self.error(f"has the unknown escape \\{character}", place)
        return self.one(ord(character), place)

    def unicode(self, place: int) -> int:
        if self.take("{"):
            digits = self.until("}")
            try:
                code = int(digits, 16)
            except ValueError:
                code = MAX_CHARACTER + 1
            if code > MAX_CHARACTER:
                raise self.error("has an escape without a code point", place)
            return code
        code = self.hexadecimal(4, place)
        if 0xD800 <= code < 0xDC00 and self.take("\\u"):  # a pair is one character
            low = self.hexadecimal(4, place)
            if 0xDC00 <= low < 0xE000:
                return 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
            raise self.error(f"has the surrogate U+{code:04X}, which is no character,", place)
        return code

    def hexadecimal(self, count: int, place: int) -> int:
        digits = self.pattern[self.place : self.place + count]
        self.place += count
        try:
            return int(digits, 16) if len(digits) == count else int("")
        except ValueError:
            raise self.error(f"has an escape without {count} hexadecimal digits", place) from None


def _is_single(members: Characters) -> bool:
    return len(members) == 1 and members[0][0] == members[0][1]


def _number(digits: str) -> int:
    """Of a bound; a number that is too large if it has too many digits for one."""
    return int(digits) if len(digits) <= 9 else MAX_REPEATS + 1


@cache
def _categories() -> dict[str, Characters]:
    """The characters of each general category such as ``Lu`` or ``L``; takes about 0.3 s, once."""
    found: dict[str, list[Range]] = {}
    for kind, group in groupby(range(sys.maxunicode + 1), lambda code: unicodedata.category(chr(code))):
        first, *others = group
        for name in (kind, kind[0]):
            found.setdefault(name, []).append((first, others[-1] if others else first))
    sets = {name: members for name, ranges in found.items() if (members := characters(ranges))}
    return sets | {"Letter": sets["L"], "Number": sets["N"], "Punctuation": sets["P"]}


def shown(text: str) -> str:
    """The text as a message quotes it."""
    return repr(text if len(text) <= 60 else text[:57] + "...")
