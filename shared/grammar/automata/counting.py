"""Counts characters with a counter next to an automaton of strings, where that creates no dead end. Introduced in phase
12.

Allowing a thousand characters by states takes thousands of states; a counter takes none. But a counter may stop a
string at any point, so it is used only with automata in which a string may end anywhere.
"""

from functools import lru_cache

import numpy as np

from shared.grammar.automata.dfa import DEAD, DFA
from shared.grammar.limits import Budget
from shared.grammar.patterns.characters import Spelling
from shared.grammar.patterns.regex import compile_regex


@lru_cache(1)
def any_text() -> DFA:
    """All strings, between their quotes. State 0 is between two characters."""
    return compile_regex(r"[\s\S]*", Budget(), spelling=Spelling.JSON)


def character_steps(dfa: DFA, budget: Budget) -> dict[int, set[int]]:
    """For each state between two characters, the states that one character leads to; state 0 is the first."""
    text = any_text()
    pairs = np.unique(np.stack([text.columns, dfa.columns]), axis=1).T.tolist()
    following, other = text.next.tolist(), dfa.next.tolist()
    steps: dict[int, set[int]] = {}
    waiting = [0]
    while waiting:
        state = waiting.pop()
        if state in steps:
            continue
        steps[state] = set()
        inside, seen = [(0, state)], set()
        while inside:
            place, here = inside.pop()
            budget.spend(1 + len(pairs) // 8)
            for column, column_of_dfa in pairs:
                there = following[place][column], other[here][column_of_dfa]
                if DEAD in there or there in seen:
                    continue
                seen.add(there)
                if there[0] == 0:
                    steps[state].add(there[1])
                else:
                    inside.append(there)
        waiting += steps[state]
    return steps


def is_free_to_count(dfa: DFA, fewest: int, most: int, budget: Budget) -> bool:
    """Whether an automaton's strings may be counted: from each state they can end at once, or continue if necessary.
    The initial characters, to which no path returns, may need more characters to end, if these are within ``most``.
    """
    steps = character_steps(dfa, budget)
    budget.spend(sum(1 + len(targets) for targets in steps.values()))
    if dfa.is_empty or (fewest and not all(steps.values())):
        return False
    missing = _missing(dfa, steps)
    longest = _longest_ways(steps)
    return all(missing[state] == 0 or longest.get(state, most) + missing[state] <= most for state in steps)


def _missing(dfa: DFA, steps: dict[int, set[int]]) -> dict[int, int]:
    """The minimum number of characters that each state needs to end."""
    sources: dict[int, list[int]] = {state: [] for state in steps}
    for state, targets in steps.items():
        for target in targets:
            sources[target].append(state)
    found = {state: 0 for state in steps if dfa.accepts[state]}
    waiting = list(found)
    for state in waiting:  # which grows
        for source in sources[state]:
            if source not in found:
                found[source] = found[state] + 1
                waiting.append(source)
    return found


def _longest_ways(steps: dict[int, set[int]]) -> dict[int, int]:
    """The maximum number of characters that lead to each state, if bounded."""
    ways = dict.fromkeys(steps, 0)
    for targets in steps.values():
        for target in targets:
            ways[target] += 1
    found = {0: 0} if not ways[0] else {}
    waiting = list(found)
    for state in waiting:  # which grows
        for target in steps[state]:
            found[target] = max(found.get(target, 0), found[state] + 1)
            ways[target] -= 1
            if not ways[target]:
                waiting.append(target)
    return {state: found[state] for state in waiting}
