"""Reads one call, ``{"name": …, "arguments": {…}}``, one character at a time. Introduced in phase 12.

The arguments are passed on while they are generated, so they are not parsed: the reader tracks brackets and strings
only to find the end, and the client validates the content. Text written without a grammar is read leniently. Members
may come in any order; arguments that precede the name are held until the name is known; and unknown members, which
models add, are skipped. If a grammar spells calls, only that spelling is a call; anything else is free text, whose
arguments follow no schema.

Invariant: a call is known (``name``) only once its name is a function's and its arguments are an object; from then on
it counts, even if the text breaks off inside its arguments.
"""

import json
from collections.abc import Collection, Generator

ARGUMENT_KEYS = ("arguments", "parameters")
_BLANKS = " \t\r\n"
_CLOSERS = {"{": "}", "[": "]"}
_SCALARS = frozenset("0123456789+-.eEtrufalsn")
Reading = Generator[None, str, str]
"""Takes characters; returns the first one that it does not need."""


class BrokenCallError(Exception):
    """The character is not allowed here."""


class CallReader:
    """Reads one object.

    Attributes:
        name: the function's name; None until the call is known.
        named: the same, but set as soon as the name has been read.
        has_others: the object has members that a call does not need.
        is_done: the last brace has been read.

    Args:
        spelling: the text before and after the name, if a grammar spells calls; None: the text is read leniently.
    """

    def __init__(self, names: Collection[str], spelling: tuple[str, str] | None = None) -> None:
        self.name: str | None = None
        self.named: str | None = None
        self.has_others = False
        self.is_done = False
        self._names = names
        self._arguments: list[str] = []
        self._reading = self._call() if spelling is None else self._spelled(*spelling)
        next(self._reading)

    def read(self, character: str) -> None:
        """Read one more. Raises BrokenCallError, and leaves it unread, if the text is no longer a call."""
        try:
            self._reading.send(character)
        except StopIteration:
            self.is_done = True

    def take(self) -> str:
        """The arguments of a known call that have been read since the last call of this method."""
        if self.name is None:
            return ""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def _spelled(self, head: str, middle: str) -> Generator[None, str, None]:
        yield from _literal(head)
        name = ""
        while (character := (yield)) != '"':
            name += character
            _require(any(known.startswith(name) for known in self._names))
        _require(name in self._names)
        self.named = name
        yield from _literal(middle[1:])
        _require((yield) == "{")
        self.name = name
        _require((yield from _value("{", self._arguments)) == "}")

    def _call(self) -> Generator[None, str, None]:
        name, has_arguments = None, False
        _require((yield from _behind_blanks((yield))) == "{")
        character = ","
        while character == ",":
            key: list[str] = []
            yield from _string((yield from _behind_blanks((yield))), key)
            _require((yield from _behind_blanks((yield))) == ":")
            character = yield from _behind_blanks((yield))
            match _decoded(key):
                case "name" if name is None:
                    value: list[str] = []
                    yield from _string(character, value)
                    name = _decoded(value)
                    _require(name in self._names)
                    self.named = name
                    self.name = name if has_arguments else None
                    character = yield
                case known if known in ARGUMENT_KEYS and not has_arguments:
                    _require(character == "{")
                    self.name, has_arguments = name, True
                    character = yield from _value(character, self._arguments)
                case _:
                    self.has_others = True
                    character = yield from _value(character, [])
            character = yield from _behind_blanks(character)
        _require(character == "}" and name is not None)
        if not has_arguments:
            self._arguments.append("{}")
        self.name = name


def _literal(text: str) -> Generator[None, str, None]:
    for expected in text:
        _require((yield) == expected)


def _value(character: str, read: list[str]) -> Reading:
    """Read a value that begins with this character, and append its text to ``read``."""
    if character not in '"{[':
        _require(character in _SCALARS)
        while character in _SCALARS:
            read.append(character)
            character = yield
        return character
    closers: list[str] = []
    while True:
        if character == '"':
            yield from _string(character, read)
        else:
            if character in _CLOSERS:
                closers.append(_CLOSERS[character])
            elif character in "]}":
                _require(closers.pop() == character)
            else:
                _require(character in _SCALARS or character in _BLANKS or character in ":,")
            read.append(character)
        character = yield
        if not closers:
            return character


def _string(character: str, read: list[str]) -> Generator[None, str, None]:
    """Read a string, with its quotes."""
    _require(character == '"')
    is_open = True
    while is_open:
        read.append(character)
        if character == "\\":
            read.append((yield))
        character = yield
        is_open = character != '"'
    read.append(character)


def _behind_blanks(character: str) -> Reading:
    while character in _BLANKS:
        character = yield
    return character


def _decoded(read: list[str]) -> str:
    try:
        text: str = json.loads("".join(read), strict=False)
    except ValueError:
        raise BrokenCallError from None
    return text


def _require(is_so: bool) -> None:
    if not is_so:
        raise BrokenCallError
