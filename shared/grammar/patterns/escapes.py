"""Characters and character classes in patterns: escapes, brackets and properties. Introduced in phase 12."""

from shared.grammar.limits import Budget, GrammarError
from shared.grammar.patterns.characters import MAX_CHARACTER, Characters, characters, complement
from shared.grammar.patterns.properties import property_members

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
CONTROLS = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11, "0": 0}


class CharacterReader:
    """Reads a pattern from left to right, in time linear in its length; ``budget`` bounds it."""

    def __init__(self, pattern: str, budget: Budget) -> None:
        self.pattern, self.place, self.budget = pattern, 0, budget

    def error(self, what: str, place: int | None = None) -> GrammarError:
        at = self.place if place is None else place
        return GrammarError(f"The pattern {shown(self.pattern)} {what} at position {at}.")

    def peek(self, text: str) -> bool:
        return self.pattern.startswith(text, self.place)

    def take(self, text: str) -> bool:
        """Whether the text comes next; if so, it is consumed."""
        found = self.peek(text)
        self.place += len(text) if found else 0
        return found

    def until(self, mark: str) -> str:
        """The text before the mark, which is consumed too; the rest of the pattern if there is no mark."""
        begin, found = self.place, self.pattern.find(mark, self.place)
        self.place = len(self.pattern) if found < 0 else found + len(mark)
        return self.pattern[begin : self.place if found < 0 else found]

    def character(self) -> str:
        self.budget.spend(2)
        if self.place == len(self.pattern):
            raise self.error("ends too early")
        self.place += 1
        return self.pattern[self.place - 1]

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
                else:  # a hyphen next to a class is literal
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
        """What follows a backslash."""
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
            members = property_members(name)
            if members is None:
                raise self.error(f"names the property {shown(name)}, which is no category and no known script,", place)
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
        if 0xD800 <= code < 0xDC00 and self.take("\\u"):  # a surrogate pair is one character
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


def shown(text: str) -> str:
    """The text as quoted in a message."""
    return repr(text if len(text) <= 60 else text[:57] + "...")
