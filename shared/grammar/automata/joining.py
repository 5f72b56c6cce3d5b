"""Joins automata: literal bytes before, between and after documents, each with its own schema.

A tool call is such a text: its opening, one of several names, arguments that follow that function's schema, its
closing. The literal part is a graph of states without a stack, in which some edges lead into documents. Introduced in
phase 12.

Invariants: the stack is empty when a document is entered and when it is left, so its depths are unchanged; only the
state after a whole document is replaced, by the graph state at which the text continues.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from shared.grammar.automata.automaton import ACTION_BITS, REFUSED, Action, Automaton
from shared.grammar.automata.dfa import shared_columns
from shared.grammar.automata.plain import ACTION_MASK
from shared.grammar.limits import GrammarError


@dataclass
class Graph:
    """States, numbered from 0, the first; ``rows`` has each state's next state for each byte, and ``final`` the states
    in which a text may end. A next state below 0 enters a document: -1 the first, -2 the second.
    """

    rows: list[dict[int, int]] = field(default_factory=list)
    final: set[int] = field(default_factory=set)

    def state(self, *, is_final: bool = False) -> int:
        self.rows.append({})
        if is_final:
            self.final.add(len(self.rows) - 1)
        return len(self.rows) - 1

    def word(self, state: int, text: bytes, end: int | None = None) -> int:
        """The state after a text, which shares its states with texts that begin the same way; ``end``, if that is
        given."""
        for index, byte in enumerate(text):
            if end is not None and index == len(text) - 1:
                self.rows[state][byte] = end
            state = self.rows[state].setdefault(byte, len(self.rows))
            if state == len(self.rows):
                self.state()
        return state


def document(number: int) -> int:
    """The value in a graph's row for the beginning of a document."""
    return -1 - number


def joined(
    graph: Graph,
    documents: Sequence[Automaton],
    behind: int,
    last: Automaton | None = None,
    beginnings: Sequence[int] = (),
) -> Automaton:
    """The automaton of a graph with documents, each followed by the text from the state ``behind`` on.

    ``documents``: texts that nothing can extend, such as objects. ``last``: the automaton of texts that end the whole.
    These may begin in the states ``beginnings`` of the graph; raises GrammarError if one may begin with a byte that
    also continues the graph there.
    """
    size = len(graph.rows)
    starts = np.cumsum([size, *(part.num_states for part in documents)]).tolist()
    literal = np.full((size, 256), REFUSED, np.int32)
    for state, row in enumerate(graph.rows):
        for byte, following in row.items():
            target = following if following >= 0 else starts[-1 - following]
            literal[state, byte] = target << ACTION_BITS | Action.GOTO
    _, literal_columns = np.unique(literal, axis=1, return_inverse=True)
    parts_of_all = [*documents, *([] if last is None else [last])]
    columns, firsts = shared_columns([literal_columns.reshape(-1), *(part.columns for part in parts_of_all)])
    is_final = np.isin(np.arange(size), list(graph.final))
    whole = Automaton(columns, literal[:, firsts], is_final, depths=np.zeros(size, np.int32))
    parts = [whole]
    counts = {name: len(getattr(whole, name)) for name in vars(whole)}
    for each in parts_of_all:
        part = _moved(each, counts, each.columns[firsts])
        if each is not last:
            assert (part.table[part.is_final] == REFUSED).all(), "the end of a document is the end of its text"
            part.table[part.is_final] = whole.table[behind]
            part = replace(part, is_final=part.is_final & whole.is_final[behind])
        parts.append(part)
        counts = {name: count + len(getattr(each, name)) for name, count in counts.items()}
    if last is not None:
        first, own = parts[-1].table[0], whole.table[beginnings]
        if ((first != REFUSED) & (own != REFUSED)).any():
            raise GrammarError(
                "The format of the answer can begin as what may stand before it does: a call, thoughts, or a line "
                "break after them. Let it begin with something else."
            )
        whole.table[beginnings] = np.where(own == REFUSED, first, own)
        whole.is_final[beginnings] |= last.is_final[0]
    tables = {name: np.concatenate([getattr(part, name) for part in parts]) for name in counts if name != "columns"}
    return Automaton(columns=whole.columns, **tables)


def _moved(part: Automaton, before: dict[str, int], columns: NDArray[np.uint8]) -> Automaton:
    """A document's tables, placed after others with ``before`` rows."""
    states = before["table"]
    shifts = np.zeros(1 << ACTION_BITS, np.int32)
    shifts[[Action.GOTO, Action.COUNT, Action.BLANK]] = states
    shifts[[Action.POP, Action.CHOOSE]] = before["pops"]
    shifts[[Action.PUSH, Action.KEY, Action.GUARD]] = before["pushes"], before["keys"], before["guards"]
    table = part.table[:, columns]
    table = np.where(table == REFUSED, REFUSED, table + (shifts[table & ACTION_MASK] << ACTION_BITS))
    return Automaton(
        columns=part.columns,
        table=table.astype(np.int32),
        is_final=part.is_final,
        depths=part.depths,
        pushes=part.pushes + np.array([states, before["returns"], 0, 0, 0], np.int32),
        returns=np.where(part.returns == REFUSED, REFUSED, part.returns + states).astype(np.int32),
        pops=part.pops + np.array([0, before["clauses"], before["clauses"], before["returns"]], np.int32),
        clauses=part.clauses,
        keys=part.keys + np.array([states, 0, 0], np.uint64),
        guards=part.guards + np.array([states, 0, 0, 0], np.uint64),
    )
