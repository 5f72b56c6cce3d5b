"""Rules of strings: the bytes between the quotes, and the quote that ends the string. Introduced in phase 12."""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from shared.grammar.automata.assembler import Entries, Rule
from shared.grammar.automata.automaton import ACTION_BITS, REFUSED, Action
from shared.grammar.automata.dfa import DEAD, DFA
from shared.grammar.documents.counted_strings import Counted
from shared.grammar.documents.rules import ValueSource
from shared.grammar.limits import CELLS, ROW, Budget
from shared.grammar.schema.shapes import String

QUOTE = ord('"')
Groups = tuple[tuple[String, ...], ...]


class StringRule(Rule):
    """The rule of some groups' strings, or of a string whose length the push's counters limit."""

    def __init__(self, values: ValueSource, groups: Groups, counted: Counted | None = None) -> None:
        super().__init__(values.assembler)
        dfa = counted.dfa if counted else values.texts.groups(groups)
        self.assembler.budget.check(len(self.assembler.entries) + len(dfa))
        self.assembler.budget.spend(2 * len(dfa))
        first = len(self.assembler.entries)
        for state in range(len(dfa)):
            self.assembler.state((id(self), state), partial(self._build, int(dfa.accepts[state])))
        self.first = first
        self.assembler.add_rows(first, rows_of(dfa, first, self.assembler.budget, counted))

    def _build(self, bits: int) -> Entries:
        return {QUOTE: self.assembler.pop(self.leave(bits))} if bits else {}


def rows_of(dfa: DFA, first: int, budget: Budget, counted: Counted | None = None) -> NDArray[np.int32]:
    """int32 ``[S, 256]``: the entries of a DFA whose states are numbered from ``first`` on."""
    budget.spend(len(dfa) * ROW)
    targets = dfa.next[:, dfa.columns]
    counts = counted.counts[:, dfa.columns] if counted else False
    action = np.where(counts, Action.COUNT, Action.GOTO)
    return np.where(targets == DEAD, REFUSED, (targets + first) << ACTION_BITS | action).astype(np.int32)


def ends_of(dfa: DFA, budget: Budget) -> list[int]:
    """For each state, the bits with which some text from there on ends."""
    found = dfa.accepts
    while True:
        budget.spend(8 + dfa.num_cells // CELLS)
        steps = np.where(dfa.next == DEAD, 0, found[dfa.next])
        more = found | np.bitwise_or.reduce(steps, axis=1)
        if (more == found).all():
            return found.tolist()
        found = more
