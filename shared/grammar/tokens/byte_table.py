"""An automaton in the form in which token walks read it, byte by byte. Introduced in phase 12.

Walks repeatedly need two facts about a state: which bytes it refuses, and whether letters lead on from it as from
another state. Each is computed on first request.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.grammar.automata.automaton import ACTION_BITS, REFUSED, Action, Automaton, entry
from shared.grammar.automata.plain import ACTION_MASK, Loops
from shared.grammar.tokens.plain_tokens import BLANKS
from shared.grammar.tokens.vocabulary import GrammarVocabulary

PROBES = b"~qZ5"
"""Where one of these leads from a state, most characters probably lead too."""
ALL_BYTES = np.arange(256, dtype=np.uint8)


class Reading(NamedTuple):
    """What a walk needs to know about a state.

    Attributes:
        refused: the bytes that it refuses.
        model: a state with a loop that treats nearly all bytes the same way; None: none was found, or the state itself
            has a loop.
        alike: the bytes for which both have the same entry.
        passed: the bytes in ``refused`` or ``alike``.
    """

    refused: bytes
    model: int | None = None
    alike: bytes = b""
    passed: bytes = b""


class ByteTable:
    """An automaton in the form in which walks read it."""

    def __init__(self, automaton: Automaton, vocabulary: GrammarVocabulary) -> None:
        self.automaton = automaton
        self.loops = Loops(automaton, vocabulary.usable_bytes)
        self.can_loop: Any = memoryview(self.loops.can_loop)  # type: ignore[arg-type]
        self.columns = automaton.columns.astype(np.intp)
        self.entries: Any = memoryview(automaton.table)  # type: ignore[arg-type]  # single numbers are read faster
        self.columns_by_byte = automaton.columns.tolist()
        self.depths = automaton.depths.tolist()
        self.max_depth = max(self.depths)
        self._readings: dict[int, Reading] = {}
        self._runs: dict[int, bool] = {}

    def reading(self, state: int) -> Reading:
        """The facts about a state; computed on first request."""
        found = self._readings.get(state)
        if found is None:
            row, model = self.automaton.table[state], self._model(state)
            refused = self._bytes(row == REFUSED)
            found = Reading(refused)
            if model is not None:
                alike = self._bytes(row == self.automaton.table[model])
                found = found._replace(model=model, alike=alike, passed=refused + alike)
            self._readings[state] = found
        return found

    def is_free(self, state: int) -> bool:
        """Whether all plain characters lead from a state back to itself."""
        return self.can_loop[state] and self.loops.is_free(state)

    def is_run(self, state: int) -> bool:
        """Whether the blanks that a state reads belong to a run, and lead back to the state."""
        found = self._runs.get(state)
        if found is None:
            entries = {self.entries[state, self.columns_by_byte[byte]] for byte in BLANKS}
            found = self._runs[state] = entries <= {REFUSED, entry(Action.BLANK, state)}
        return found

    def _model(self, state: int) -> int | None:
        if self.can_loop[state]:
            return None
        for byte in PROBES:
            value = self.entries[state, self.columns_by_byte[byte]]
            if value != REFUSED and value & ACTION_MASK <= Action.COUNT and self.can_loop[value >> ACTION_BITS]:
                return int(value >> ACTION_BITS)
        return None

    def _bytes(self, chosen: NDArray[np.bool_]) -> bytes:
        """The bytes of some columns."""
        return ALL_BYTES[chosen[self.columns]].tobytes()
