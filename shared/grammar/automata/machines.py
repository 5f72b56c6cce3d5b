"""Small automata used inside rules: numbers, literals and listed values. Introduced in phase 12.

Invariant: every state can reach an end, except the first one of an automaton that accepts nothing.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from shared.grammar.limits import Budget


@dataclass(frozen=True, eq=False)
class Machine:
    """A small automaton, one dictionary per state; state 0 is the first."""

    rows: list[dict[int, int]]
    ends: list[bool]

    @property
    def is_empty(self) -> bool:
        return not any(self.ends)


def explore(
    first: Hashable,
    steps: Callable[..., Iterator[tuple[str, Hashable]]],
    is_end: Callable[..., bool],
    budget: Budget,
    cost: int = 3,
) -> Machine:
    """The automaton reachable from a state, without states that cannot reach an end; ``cost`` is a step's units of
    work.
    """
    numbers = {first: 0}
    states = [first]
    rows: list[dict[int, int]] = []
    for state in states:  # which grows
        row = {}
        for text, following in steps(state):
            if following not in numbers:
                numbers[following] = len(states)
                states.append(following)
            row[ord(text)] = numbers[following]
        budget.spend(cost * (1 + len(row)))
        rows.append(row)
        budget.check(len(states))
    return _trim(rows, [is_end(state) for state in states])


def _trim(rows: list[dict[int, int]], ends: list[bool]) -> Machine:
    sources: list[list[int]] = [[] for _ in rows]
    for state, row in enumerate(rows):
        for target in row.values():
            sources[target].append(state)
    alive = {state for state, is_end in enumerate(ends) if is_end}
    waiting = list(alive)
    while waiting:
        for source in sources[waiting.pop()]:
            if source not in alive:
                alive.add(source)
                waiting.append(source)
    numbers = {state: number for number, state in enumerate(sorted(alive | {0}))}
    kept = [{byte: numbers[target] for byte, target in rows[state].items() if target in alive} for state in numbers]
    return Machine(kept, [ends[state] for state in numbers])


def spell_all(texts: list[str], budget: Budget) -> Machine:
    """The automaton of some texts, as a trie."""
    budget.spend(sum(2 + 2 * len(text) for text in texts))
    rows: list[dict[int, int]] = [{}]
    ends = [False]
    for text in texts:
        state = 0
        for byte in text.encode():
            if byte not in rows[state]:
                rows[state][byte] = len(rows)
                rows.append({})
                ends.append(False)
            state = rows[state][byte]
        ends[state] = True
    return Machine(rows, ends)
