"""What the rules of objects, arrays and strings share: the values that may stand in them. Introduced in phase 12."""

from typing import Protocol

from shared.grammar.assembler import Assembler, Continuation, Entries
from shared.grammar.members import Members
from shared.grammar.shapes import Value
from shared.grammar.texts import Texts

BLANKS = b" \n\t"
Alive = tuple[tuple[int, int], ...]
"""Alternatives, and for each a number that its rule counts, sorted."""


class ValueRules(Protocol):
    """The values of one document; :class:`shared.grammar.values.Values`."""

    assembler: Assembler
    members: Members
    texts: Texts

    def entries(self, wanted: tuple[Value, ...], continuation: Continuation) -> Entries:
        """The bytes with which a value of any of the groups begins."""
        ...
