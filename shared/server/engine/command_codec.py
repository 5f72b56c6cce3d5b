"""Encodes commands so that a grammar's automaton crosses the pipe only once. Introduced in phase 12.

An automaton may have megabytes, and many requests use the same grammar. So both ends of the pipe remember the grammars
of recent commands, and a command refers to known ones by number.

Invariant: both ends see the same grammars in the same order and evict by the same rule, so they remember the same ones.
"""

import io
import pickle
from collections import OrderedDict
from typing import Any

from shared.grammar.grammar import Grammar
from shared.server.engine.loop import Command

MOST_BYTES = 256_000_000
"""Maximum bytes of the automata that one end remembers."""


class CommandCodec:
    """One end of a pipe: ``dumps`` at the end that sends commands, ``loads`` at the other."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes, self.num_bytes, self.num_seen = most_bytes, 0, 0
        self.numbers: OrderedDict[Grammar, int] = OrderedDict()  # least recently used first
        self.grammars: dict[int, Grammar] = {}

    def dumps(self, command: Command) -> bytes:
        """The command as bytes."""
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
        pickler.persistent_id = self._reference  # type: ignore[method-assign]
        pickler.dump(command)
        return buffer.getvalue()

    def loads(self, message: bytes) -> Command:
        """The command encoded in ``message``, which must be the next one from the other end."""
        unpickler = pickle.Unpickler(io.BytesIO(message))
        unpickler.persistent_load = self._referred  # type: ignore[method-assign]
        command: Command = unpickler.load()
        return command

    def _reference(self, value: object) -> tuple[Any, ...] | None:
        """Represents a compiled grammar: its number, and its parts if the other end does not have them."""
        if not isinstance(value, Grammar) or value.automaton is None:
            return None
        number = self.numbers.get(value)
        if number is not None:
            self.numbers.move_to_end(value)
            return (number,)
        self._remember(value)
        return self.numbers[value], value.kind, value.text, value.automaton

    def _referred(self, reference: tuple[Any, ...]) -> Grammar:
        number, *parts = reference
        if parts:
            self._remember(Grammar(*parts))
        grammar = self.grammars[number]
        self.numbers.move_to_end(grammar)
        return grammar

    def _remember(self, grammar: Grammar) -> None:
        self.numbers[grammar] = self.num_seen
        self.grammars[self.num_seen] = grammar
        self.num_seen += 1
        self.num_bytes += _size(grammar)
        while self.num_bytes > self.most_bytes and len(self.numbers) > 1:
            oldest, number = self.numbers.popitem(last=False)
            self.num_bytes -= _size(oldest)
            del self.grammars[number]


def _size(grammar: Grammar) -> int:
    assert grammar.automaton is not None
    return grammar.automaton.num_bytes
