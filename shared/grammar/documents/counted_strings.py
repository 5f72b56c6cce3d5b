"""Strings of an automaton whose length a counter limits, in blocks of a few characters. Introduced in phase 12.

A counter that may stop a string at any point could stop it in the middle of ``%20``. So the counter counts slack
instead of characters: how many of the remaining characters the string can spare and still end. A character costs slack
unless it brings the end closer: ``a`` costs 1 in a URI, ``%`` costs 3, and the two digits after it cost nothing. The
counter counts down by 1, so it counts blocks as large as the most expensive byte, and the state holds the remainder of
the current block. That takes block-size copies of each state, whatever the length.

Invariant: a string can end at any point within its length.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.grammar.automata.counting import character_steps
from shared.grammar.automata.dfa import DEAD, DFA
from shared.grammar.limits import CELLS, Budget

MOST_UNCOUNTED = 1_000
"""The maximum of states times characters up to which states alone count the characters."""


@dataclass(frozen=True, eq=False)
class Counted:
    """An automaton, and the transitions that its push's counters count.

    Attributes:
        counts: bool ``[S, C]``: whether the transition counts.
        fewest, most: the counters at the beginning.
    """

    dfa: DFA
    counts: NDArray[np.bool_]
    fewest: int
    most: int


def in_blocks(dfa: DFA, most: int, budget: Budget) -> tuple[DFA, NDArray[np.bool_], int] | None:
    """The strings of at most ``most`` characters: an automaton, what it counts, and up to which limit; None if the
    automaton has no string that short, or if plain states count the characters just as well.
    """
    size, (before, columns) = len(dfa), np.nonzero(dfa.next != DEAD)
    if size * (most + 1) <= MOST_UNCOUNTED or dfa.is_empty:
        return None
    after = dfa.next[before, columns]
    budget.spend(len(before) // 8)
    begins = np.zeros(size, np.int64)
    begins[list(character_steps(dfa, budget))] = 1
    missing = _missing(dfa, before, after, begins, budget)
    costs = begins[before] + missing[after] - missing[before]  # at least 0
    block, slack = max(1, int(costs.max(initial=0))), most - int(missing[0])
    if slack < 0 or block > most:
        return None
    budget.check(size * block)
    budget.spend(size * block * (2 + dfa.next.shape[1] // CELLS))
    table = np.full((size, block, dfa.next.shape[1]), DEAD, np.int64)
    counts = np.zeros(table.shape, np.bool_)
    for left in range(block):
        table[before, left, columns] = after * block + (left - costs) % block
        counts[before, left, columns] = costs > left
    return *_reachable(table.reshape(size * block, -1), counts, slack % block, dfa, block, budget), slack // block


def _missing(
    dfa: DFA, before: NDArray[np.int64], after: NDArray[np.int32], begins: NDArray[np.int64], budget: Budget
) -> NDArray[np.int64]:
    """The minimum number of characters that must begin after each state before a string can end."""
    order = np.argsort(after, kind="stable")
    sources, starts = before[order].tolist(), np.searchsorted(after[order], np.arange(len(dfa) + 1)).tolist()
    weights = begins.tolist()
    missing = np.where(dfa.accepts != 0, 0, -1).tolist()
    level, count = [state for state, known in enumerate(missing) if known == 0], 0
    while level:
        further: list[int] = []
        for state in level:  # extended by the states at this distance
            for source in sources[starts[state] : starts[state + 1]]:
                if missing[source] < 0 and weights[source] == 0:
                    missing[source] = count
                    level.append(source)
                elif missing[source] < 0:
                    further.append(source)
        budget.spend(1 + (len(level) + len(further)) // 4)
        count += 1
        level = [state for state in dict.fromkeys(further) if missing[state] < 0]
        for state in level:
            missing[state] = count
    return np.array(missing)


def _reachable(
    table: NDArray[np.int64], counts: NDArray[np.bool_], first: int, dfa: DFA, block: int, budget: Budget
) -> tuple[DFA, NDArray[np.bool_]]:
    """The states reachable from the first one, which becomes state 0."""
    numbers = np.full(len(table) + 1, DEAD, np.int32)  # the last entry is DEAD's
    numbers[first], reached = 0, [first]
    rows = [np.unique(row[row != DEAD]).tolist() for row in table]
    for state in reached:  # which grows
        budget.spend(1 + len(rows[state]))
        for target in rows[state]:
            if numbers[target] == DEAD:
                numbers[target] = len(reached)
                reached.append(target)
    found = DFA(dfa.columns, numbers[table[reached]], np.repeat(dfa.accepts, block)[reached])
    return found, counts.reshape(len(table), -1)[reached]
