"""What the rules of arrays, objects and strings ask of the values inside them. Introduced in phase 12."""

from typing import Protocol

from shared.grammar.assembler import Assembler, Continuation, Entries
from shared.grammar.members import Members
from shared.grammar.shapes import Value
from shared.grammar.texts import Texts


class ValueSource(Protocol):
    """The values of one document; see :class:`shared.grammar.values.Values`."""

    assembler: Assembler
    members: Members
    texts: Texts

    def entries(self, wanted: tuple[Value, ...], continuation: Continuation, guards: tuple[int, ...] = ()) -> Entries:
        """The bytes with which a value of any of the groups begins."""

    def is_listed(self, value: Value) -> bool:
        """Whether a value is one of scalars and listed strings."""
