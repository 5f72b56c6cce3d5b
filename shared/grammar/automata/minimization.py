"""The smallest automaton of a language. Introduced in phase 12."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from shared.grammar.automata.dfa import DEAD, DFA, merge_columns, trim
from shared.grammar.limits import CELLS, Budget


def minimize(dfa: DFA, budget: Budget) -> DFA:
    """The smallest DFA of the same languages: one state for each set of states that no text distinguishes.

    Without cycles, a state's successors determine its class, so one pass from the ends is enough (Revuz, 1992).
    Otherwise long chains, such as those of bounded repeats, would take one round for each of their states. Only states
    on a cycle or between two cycles are split round by round.

    Raises GrammarError as :class:`Budget` does.
    """
    budget.spend(200 + dfa.num_cells // 16 + len(dfa))
    dfa = trim(dfa)
    if dfa.is_empty:
        return DFA(np.zeros(256, np.uint8), np.full((1, 1), DEAD, np.int32), np.zeros(1, np.int64))
    size = len(dfa)
    before, _ = np.nonzero(dfa.next != DEAD)
    before, after = np.divmod(np.unique(before * size + dfa.next[dfa.next != DEAD]), size)
    budget.spend(2 * len(before) + 4 * size + dfa.num_cells // CELLS)
    last = _ordered(after, before, size)
    first = _ordered(before, after, size)[::-1]  # so that successors come first
    classes = np.full(size + 1, DEAD, np.int64)  # the last entry is DEAD's
    known: dict[bytes, int] = {}

    def classify(states: Iterable[int]) -> None:
        for state in states:
            key = classes[dfa.next[state]].tobytes() + dfa.accepts[state].tobytes()
            classes[state] = known.setdefault(key, len(known))

    classify(last)
    is_middle = np.ones(size, bool)
    is_middle[last], is_middle[first] = False, False
    middle = np.flatnonzero(is_middle)
    if len(middle):
        _split(dfa, middle, classes, _distances(dfa, before, after), budget)
        _, representatives = np.unique(classes[middle], return_index=True)
        classify(middle[representatives])  # with the next classes, in this order
    classify(state for state in first if classes[state] == DEAD)
    _, firsts, groups = np.unique(classes[:-1], return_index=True, return_inverse=True)
    order = np.argsort(firsts)  # classes are ordered by their first state, so that state 0 stays first
    numbers = np.empty(len(firsts) + 1, np.int32)
    numbers[order], numbers[-1] = np.arange(len(firsts)), DEAD
    kept = firsts[order]
    return merge_columns(DFA(dfa.columns, numbers[np.append(groups, -1)[dfa.next[kept]]], dfa.accepts[kept]))


def _ordered(before: NDArray[np.int64], after: NDArray[np.int64], size: int) -> list[int]:
    """The states that no cycle of these edges leads to, each after those that have an edge to it (Kahn, 1962)."""
    order = np.argsort(before, kind="stable")
    starts, targets = np.searchsorted(before[order], np.arange(size + 1)).tolist(), after[order].tolist()
    num_waiting = np.bincount(after, minlength=size).tolist()
    found = [state for state in range(size) if num_waiting[state] == 0]
    for state in found:  # which grows
        for target in targets[starts[state] : starts[state + 1]]:
            num_waiting[target] -= 1
            if num_waiting[target] == 0:
                found.append(target)
    return found


def _distances(dfa: DFA, before: NDArray[np.int64], after: NDArray[np.int64]) -> NDArray[np.int64]:
    """The length of the shortest text that each state accepts, given the edges of a trimmed DFA."""
    order = np.argsort(after, kind="stable")
    starts, sources = np.searchsorted(after[order], np.arange(len(dfa) + 1)).tolist(), before[order].tolist()
    distances = np.where(dfa.accepts != 0, 0, -1).tolist()
    found = [state for state, distance in enumerate(distances) if distance == 0]
    for state in found:  # which grows
        for source in sources[starts[state] : starts[state + 1]]:
            if distances[source] < 0:
                distances[source] = distances[state] + 1
                found.append(source)
    return np.array(distances)


def _split(
    dfa: DFA, middle: NDArray[np.int64], classes: NDArray[np.int64], distances: NDArray[np.int64], budget: Budget
) -> None:
    """Set the classes of the middle states, whose other successors already have classes: split until no byte
    distinguishes two states of a class (Moore, 1956). States with different distances to an end are separated from the
    start, which saves most rounds if a chain is part of a cycle.

    A class is named by a random 64-bit number, and a state's signature is a sum of the names of its class and of its
    successors' classes, so two signatures collide for about one pair in 2⁶⁴.
    """
    chance = np.random.default_rng(0)
    factors = chance.integers(1, 2**63, dfa.next.shape[1] + 1, np.uint64) * 2 + 1
    known = int(classes.max()) + 1
    _, groups = np.unique(np.column_stack([dfa.accepts, distances])[middle], axis=0, return_inverse=True)
    groups = groups.reshape(-1)
    count = int(groups.max()) + 1
    while True:
        budget.check(known + count)
        budget.spend(50 + len(middle) // 8 + len(middle) * dfa.next.shape[1] // CELLS)
        classes[middle] = known + groups
        names = chance.integers(0, 2**63, known + count + 1, np.uint64)  # the last one belongs to DEAD
        by_state = names[classes]
        signatures = by_state[middle] * factors[-1] + (by_state[dfa.next[middle]] * factors[:-1]).sum(
            axis=1, dtype=np.uint64
        )
        found, groups = np.unique(signatures, return_inverse=True)
        if len(found) == count:
            return
        count = len(found)
