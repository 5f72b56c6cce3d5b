"""What the rules of arrays, objects and strings ask of the values inside them. Introduced in phase 12."""

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
    """Of values of a key that are wanted only while an alternative of theirs is alive.

    Attributes:
        dead: of each value the keys of the object, all of which are seen when it is not wanted.
        is_opened: of each value whether its arrays and objects are surely wanted; else none of these is.
        is_spelled: whether strings are spelled out in the object, so that their bytes are guarded too.
    """

    dead: tuple[int, ...]
    is_opened: tuple[bool, ...]
    is_spelled: bool

    def guard(self, groups: int) -> int:
        """The keys all of which are seen when none of some values, as bits, is wanted."""
        return sum_bits(self.dead, groups)


def blanks(state: int) -> Entries:
    """The blanks between two parts of a document, which lead to a state."""
    return dict.fromkeys(b" \n\t", entry(Action.BLANK, state))


class ValueSource(Protocol):
    """The values of one document; see :class:`shared.grammar.documents.values.Values`."""

    assembler: Assembler
    members: Members
    texts: Texts

    def entries(self, wanted: tuple[Value, ...], continuation: Continuation, guards: Guards | None = None) -> Entries:
        """The bytes with which a value of any of the groups begins."""

    def spelled(self, dfa: DFA, key: Hashable, guard: Callable[[int], int], after: Callable[[int], int]) -> int:
        """The quote that opens a string that is spelled out where it stands."""
