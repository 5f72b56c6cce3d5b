"""How each state comes to an end, and the removal of states that do not. Introduced in phase 12.

The depths are a least fixpoint: a state needs no more frames than the best of its bytes; a byte that pushes needs one
frame more than its rule, or what the states behind the rule need. States are settled in the order of their depths, each
level by a search backwards.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shared.grammar.automaton import ACTION_BITS, MAX_DEPTH, REFUSED, Action, Automaton
from shared.grammar.limits import GrammarError

NEVER = 2**30


class Endings:
    """Computes the depths of an automaton.

    Args:
        frames: of each push, its first index in ``returns`` and the number of colours.
        pop_depths: of each pop, the frames that it may take to satisfy its clauses.
    """

    def __init__(self, automaton: Automaton, frames: Sequence[tuple[int, int]], pop_depths: Sequence[int]) -> None:
        self.automaton, self.frames = automaton, frames
        self.depths = np.full(automaton.num_states, NEVER, np.int64)
        table = automaton.table
        sources, columns = np.nonzero(table != REFUSED)
        values = table[sources, columns]
        actions, arguments = values & (1 << ACTION_BITS) - 1, values >> ACTION_BITS
        targets = arguments.astype(np.int64)
        for action, rows in ((Action.KEY, automaton.keys), (Action.GUARD, automaton.guards)):
            chosen = actions == action
            targets[chosen] = rows[arguments[chosen], 0].astype(np.int64)
        is_step = (actions != Action.PUSH) & (actions != Action.POP)
        pairs = np.unique(targets[is_step] * len(table) + sources[is_step])
        self.sources = (pairs % len(table)).tolist()
        self.starts = np.searchsorted(pairs // len(table), np.arange(len(table) + 1)).tolist()
        self.levels: list[list[int]] = [[] for _ in range(MAX_DEPTH + 1)]
        self.levels[0] += np.flatnonzero(automaton.is_final).tolist()
        pops = np.unique(sources[actions == Action.POP] * max(len(pop_depths), 1) + arguments[actions == Action.POP])
        for state, pop in zip(*(part.tolist() for part in np.divmod(pops, max(len(pop_depths), 1))), strict=True):
            if pop_depths[pop] <= MAX_DEPTH:
                self.levels[pop_depths[pop]].append(state)
        self.callers: list[list[int]] = [[] for _ in automaton.pushes]
        for state, push in set(
            zip(sources[actions == Action.PUSH].tolist(), arguments[actions == Action.PUSH].tolist(), strict=True)
        ):
            self.callers[push].append(state)

    def settle(self) -> Automaton:
        """The automaton with its depths, without what never ends. Raises GrammarError if it accepts nothing."""
        automaton = self.automaton
        needs = np.full(len(automaton.pushes), NEVER, np.int64)
        firsts = automaton.pushes[:, 0]
        followers = [
            sorted({state for state in automaton.returns[frame : frame + count].tolist() if state != REFUSED})
            for frame, count in self.frames
        ]
        for depth in range(MAX_DEPTH + 1):
            while self.levels[depth]:
                self._search(depth)
                for push in np.flatnonzero((needs == NEVER) & (self.depths[firsts] < NEVER)).tolist():
                    known = [int(self.depths[state]) for state in followers[push]]
                    if known and max(known) < NEVER:
                        needs[push] = max(1 + int(self.depths[firsts[push]]), *known)
                        if needs[push] <= MAX_DEPTH:
                            self.levels[needs[push]] += self.callers[push]
        if self.depths[0] == NEVER:
            raise GrammarError("The schema accepts nothing; give one that a value can satisfy.")
        pushes = automaton.pushes.copy()
        pushes[:, 4] = np.minimum(needs, MAX_DEPTH + 1)
        automaton = replace(automaton, pushes=pushes, depths=np.minimum(self.depths, MAX_DEPTH + 1).astype(np.int32))
        return automaton

    def _search(self, depth: int) -> None:
        """Settle the states of a depth, and all that lead to them."""
        waiting = self.levels[depth]
        while waiting:
            state = waiting.pop()
            if self.depths[state] == NEVER:
                self.depths[state] = depth
                waiting += self.sources[self.starts[state] : self.starts[state + 1]]
