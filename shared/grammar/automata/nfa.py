"""Nondeterministic automata, and their conversion to deterministic ones.

Introduced in phase 12.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shared.grammar.automata.dfa import DEAD, DFA
from shared.grammar.automata.minimization import minimize
from shared.grammar.limits import Budget


@dataclass
class NFA:
    """An automaton under construction: edges labelled with byte ranges, and edges that read nothing.

    The work of computing closures is charged to ``budget``.

    ``begins`` are edges that may be taken only at the beginning of a text, and ``ends`` only at its end. ``asks`` are
    edges that may be taken if the rest of the text meets a condition (:mod:`shared.grammar.patterns.lookahead`), as
    (condition at the beginning of a text, condition elsewhere, target). ``absorbing`` is a state that accepts every
    text from there on, if there is one. ``ranks`` gives states a group and a number: of two states in a group, the
    higher one accepts everything that the lower one does, so a set that has both omits the lower. Otherwise, a search
    for ``c{500,}`` would have sets with up to 500 different counts of characters read.
    """

    edges: list[list[tuple[int, int, int]]] = field(default_factory=list)  # (first byte, last byte, target) by state
    free: list[list[int]] = field(default_factory=list)
    begins: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, list[int]] = field(default_factory=dict)
    accepts: dict[int, int] = field(default_factory=dict)
    asks: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    absorbing: int | None = None
    ranks: dict[int, tuple[int, int]] = field(default_factory=dict)
    budget: Budget = field(default_factory=Budget)

    def state(self) -> int:
        """A new state."""
        self.edges.append([])
        self.free.append([])
        return len(self.edges) - 1

    def closure(self, states: Iterable[int], *, is_begin: bool = False, is_end: bool = False) -> frozenset[int]:
        """The states reachable from these without reading a byte."""
        found = set(states)
        waiting = list(found)
        work = len(found)
        while waiting:
            state = waiting.pop()
            more = self.free[state]
            if is_begin and state in self.begins:
                more = more + self.begins[state]
            if is_end and state in self.ends:
                more = more + self.ends[state]
            work += len(more)
            for other in more:
                if other not in found:
                    found.add(other)
                    waiting.append(other)
        self.budget.spend(work + len(found))
        if self.absorbing in found:
            return frozenset([self.absorbing])
        if self.ranks:
            highest: dict[int, int] = {}
            for group, rank in map(self.ranks.get, found & self.ranks.keys()):  # type: ignore[misc]
                highest[group] = max(rank, highest.get(group, rank))
            lower = {
                state for state in found & self.ranks.keys() if highest[self.ranks[state][0]] > self.ranks[state][1]
            }
            found -= lower
        return frozenset(found)


def determinize(nfa: NFA, budget: Budget) -> DFA:
    """The DFA of an NFA whose first state is 0; each of its states is a set of NFA states (Rabin and Scott, 1959).
    Raises GrammarError as :class:`Budget` does.
    """
    budget.spend(len(nfa.edges) + sum(map(len, nfa.edges)))
    columns, firsts = byte_classes(nfa)
    num_columns = len(firsts)
    column_of = columns.tolist()
    spans = [[(column_of[low], column_of[high], target) for low, high, target in edges] for edges in nfa.edges]
    widths = [1 + sum(high - low + 1 for low, high, _ in edges) // 8 for edges in spans]
    closures: dict[frozenset[int], frozenset[int]] = {}
    start = nfa.closure([0], is_begin=True)
    numbers: dict[tuple[frozenset[int], bool], int] = {(start, True): 0}
    sets = [start]
    rows: list[list[int]] = []
    accepts: list[int] = []
    for number, states in enumerate(sets):  # which grows
        budget.check(len(sets))
        budget.spend(num_columns // 2 + sum(widths[state] for state in states))
        bits = 0
        for state in nfa.closure(states, is_begin=number == 0, is_end=True) if nfa.ends else states:
            bits |= nfa.accepts.get(state, 0)
        accepts.append(bits)
        # exercise 12x2: one step of the subset construction
        # hint: spans[state] holds (first column, last column, target) of each edge of a state
        # hint: collect for each column the set of all targets; an empty set leads to DEAD
        # hint: closures[targets] holds nfa.closure(targets), which is slow to compute: fill it as you need it
        # hint: a set that is new gets the next number and is appended to sets; False: not at the beginning
        targets: list[set[int]] = [set() for _ in range(num_columns)]
        for state in states:
            for low, high, target in spans[state]:
                for column in range(low, high + 1):
                    targets[column].add(target)
        row = []
        for found in map(frozenset, targets):
            if found not in closures:
                closures[found] = nfa.closure(found)
            key = closures[found], False
            if found and key not in numbers:
                numbers[key] = len(sets)
                sets.append(closures[found])
            row.append(numbers[key] if found else DEAD)
        rows.append(row)
        # end exercise
    return minimize(DFA(columns, np.array(rows, np.int32), np.array(accepts, np.int64)), budget)


def byte_classes(nfa: NFA) -> tuple[NDArray[np.uint8], list[int]]:
    """The column of each byte, and the first byte of each column; columns change where an edge begins or ends."""
    borders = {0}
    for edges in nfa.edges:
        for low, high, _ in edges:
            borders |= {low, high + 1}
    firsts = sorted(borders - {256})
    columns = np.zeros(256, np.uint8)
    columns[firsts[1:]] = 1
    return columns.cumsum(dtype=np.uint8), firsts
