"""What the rules of arrays, objects and strings need from the values inside them. Introduced in phase 12."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

from shared.grammar.automata.assembler import Assembler, Continuation, Entries, sum_bits
from shared.grammar.automata.automaton import Action, entry
from shared.grammar.automata.dfa import DFA
from shared.grammar.documents.texts import Texts
from shared.grammar.schema.members import Members
from shared.grammar.schema.shapes import Value


@dataclass(frozen=True)
class Guards:
    """Guards for the values of a key that are expected only while one of their alternatives is alive.

    Attributes:
        dead: for each value, keys of the object; once all of them have been seen, the value is not expected.
        is_opened: for each value, whether its arrays and objects are certain to be expected; otherwise none of them is.
        is_spelled: whether strings are spelled out in the object, so that their bytes are guarded too.
    """

    dead: tuple[int, ...]
    is_opened: tuple[bool, ...]
    is_spelled: bool

    def guard(self, groups: int) -> int:
        """The keys after which none of some values, given as bits, are expected once all of the keys have been seen."""
        return sum_bits(self.dead, groups)


def blanks(state: int) -> Entries:
    """The blanks between two parts of a document, leading to a state."""
    return dict.fromkeys(b" \n\t", entry(Action.BLANK, state))


class ValueSource(Protocol):
    """The values of one document; see :class:`shared.grammar.documents.values.Values`."""

    assembler: Assembler
    members: Members
    texts: Texts

    def entries(self, wanted: tuple[Value, ...], continuation: Continuation, guards: Guards | None = None) -> Entries:
        """The bytes that begin a value of any of the groups."""

    def spelled(self, dfa: DFA, key: Hashable, guard: Callable[[int], int], after: Callable[[int], int]) -> int:
        """The quote that opens a string spelled out inline."""
