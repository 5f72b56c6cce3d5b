"""Lookahead in patterns, such as ``(?!x$)``. Introduced in phase 12.

The text after a position must, or must not, match a part of the pattern. So a run of the NFA carries conditions on the
rest of the text; each condition is the state of a DFA that reads along with it (an alternating automaton: Chandra,
Kozen and Stockmeyer, 1981). A state of the resulting DFA is a set of runs. A condition that always holds is dropped,
and a run ends once a condition cannot hold.

Invariant: of two runs in one state of the NFA, neither has all conditions of the other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shared.grammar.automata.dfa import DEAD, DFA, shared_columns
from shared.grammar.automata.minimization import minimize
from shared.grammar.automata.nfa import NFA, byte_classes
from shared.grammar.limits import CELLS, Budget

Held = frozenset[tuple[int, int]]
"""Conditions of a run: (number of the condition, state of its DFA)."""
Run = tuple[int, Held]
"""A state of the NFA, and the conditions."""


@dataclass(frozen=True, eq=False)
class Condition:
    """What the rest of a text must or must not match; the DFA's last state means that the DFA has refused the text.

    Attributes:
        dfa: the DFA of the texts that match.
        holds: whether the rest must match.
        full: states of the DFA that accept every text from there on.
    """

    dfa: DFA
    holds: bool
    full: frozenset[int]

    def is_settled(self, state: int) -> bool | None:
        """Whether the condition holds for every continuation; None if that depends on the continuation."""
        if state == DEAD:
            return not self.holds
        return self.holds if state in self.full else None

    def is_met(self, state: int) -> bool:
        """Whether it holds if the text ends here."""
        return (state != DEAD and bool(self.dfa.accepts[state])) == self.holds


def full_states(dfa: DFA, text: DFA, budget: Budget) -> frozenset[int]:
    """The states from which a DFA accepts everything that ``text``, the DFA of all texts, accepts."""
    pairs = np.unique(np.stack([text.columns, dfa.columns]), axis=1).T.tolist()
    texts, rows = text.next.tolist(), dfa.next.tolist()
    found = set()
    for state in np.flatnonzero(dfa.accepts).tolist():
        seen = {(0, state)}
        waiting = list(seen)
        while waiting:
            here, there = waiting.pop()
            budget.spend(1 + len(pairs) // 8)
            following = {(texts[here][one], rows[there][other]) for one, other in pairs if texts[here][one] != DEAD}
            if any(after == DEAD or (before == 0 and after != state) for before, after in following):
                break
            waiting += following - seen
            seen |= following
        else:
            found.add(state)
    return frozenset(found)


def determinize_runs(nfa: NFA, conditions: Sequence[Condition], budget: Budget) -> DFA:
    """Like :func:`determinize`, for an NFA with conditions. Raises GrammarError as :class:`Budget` does."""
    columns, firsts = shared_columns([byte_classes(nfa)[0], *(each.dfa.columns for each in conditions)])
    budget.spend(sum(map(len, nfa.edges)) + sum(len(each.dfa) * len(firsts) for each in conditions) // CELLS)
    tables = [each.dfa.next[:, each.dfa.columns[firsts]].tolist() for each in conditions]
    bytes_of = firsts.tolist()
    closures = _Closures(nfa, conditions, budget)
    known: dict[frozenset[Run], frozenset[Run]] = {}
    start = closures.of([(0, frozenset())], is_begin=True)
    numbers: dict[tuple[frozenset[Run], bool], int] = {(start, True): 0}
    sets = [start]
    rows: list[list[int]] = []
    accepts: list[int] = []
    for number, runs in enumerate(sets):  # which grows
        budget.check(len(sets))
        budget.spend(len(firsts) + sum((len(nfa.edges[state]) + len(held)) * len(firsts) // 8 for state, held in runs))
        ends = closures.of(runs, is_begin=number == 0, is_end=True) if nfa.ends else runs
        accepts.append(
            any(
                state in nfa.accepts and all(conditions[which].is_met(state) for which, state in held)
                for state, held in ends
            )
        )
        row = []
        for column, byte in enumerate(bytes_of):
            found: set[Run] = set()
            for state, held in runs:
                targets = [target for low, high, target in nfa.edges[state] if low <= byte <= high]
                if targets:
                    after = [(which, DEAD if state == DEAD else tables[which][state][column]) for which, state in held]
                    found.update((target, frozenset(after)) for target in targets)
            key = frozenset(found)
            if key not in known:
                known[key] = closures.of(key)
            reached = known[key]
            if reached and (reached, False) not in numbers:
                numbers[reached, False] = len(sets)
                sets.append(reached)
            row.append(numbers[reached, False] if reached else DEAD)
        rows.append(row)
    return minimize(DFA(columns, np.array(rows, np.int32), np.array(accepts, np.int64)), budget)


class _Closures:
    """The runs reachable from some runs without reading a byte."""

    def __init__(self, nfa: NFA, conditions: Sequence[Condition], budget: Budget) -> None:
        self.nfa, self.conditions, self.budget = nfa, conditions, budget

    def of(self, runs: Iterable[Run], *, is_begin: bool = False, is_end: bool = False) -> frozenset[Run]:
        nfa = self.nfa
        found = {run for each in runs if (run := self._settled(each)) is not None}
        waiting = list(found)
        while waiting:
            state, held = waiting.pop()
            more = [(target, held) for target in nfa.free[state]]
            if is_begin:
                more += [(target, held) for target in nfa.begins.get(state, ())]
            if is_end:
                more += [(target, held) for target in nfa.ends.get(state, ())]
            for at_begin, elsewhere, target in nfa.asks.get(state, ()):
                more.append((target, held | {(at_begin if is_begin else elsewhere, 0)}))
            self.budget.spend(1 + sum(1 + len(held) for _, held in more))
            for each in more:
                run = self._settled(each)
                if run is not None and run not in found:
                    found.add(run)
                    waiting.append(run)
        return self._least(found)

    def _settled(self, run: Run) -> Run | None:
        """The run with only those conditions that depend on the rest of the text; None if one of them cannot hold."""
        state, held = run
        left = []
        for which, at in held:
            is_settled = self.conditions[which].is_settled(at)
            if is_settled is False:
                return None
            if is_settled is None:
                left.append((which, at))
        return state, frozenset(left)

    def _least(self, runs: set[Run]) -> frozenset[Run]:
        """The runs without those that have all conditions of another run in the same state."""
        if self.nfa.absorbing is not None and (self.nfa.absorbing, frozenset()) in runs:
            return frozenset({(self.nfa.absorbing, frozenset())})
        by_state: dict[int, list[Held]] = {}
        for state, held in runs:
            by_state.setdefault(state, []).append(held)
        self.budget.spend(sum(len(some) ** 2 for some in by_state.values()))
        return frozenset(
            (state, held)
            for state, some in by_state.items()
            for held in some
            if not any(other < held for other in some)
        )
