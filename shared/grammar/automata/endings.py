"""How each state reaches an end, and the removal of states that do not. Introduced in phase 12.

The depths are a least fixpoint. A state needs as many frames as the best of its bytes. A byte that pushes needs one
frame more than its rule, or what the states after the rule need. States are settled in order of depth, each level by a
backward search. A CHOOSE may lead to any of its states, so it needs as many frames as the worst of them.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shared.grammar.automata.automaton import ACTION_BITS, MAX_DEPTH, REFUSED, Action, Automaton
from shared.grammar.limits import GrammarError

NEVER = 2**30


class Endings:
    """Computes the depths of an automaton.

    Args:
        frames: for each push, its first index in ``returns`` and the number of colours.
        pop_depths: for each pop, the number of frames that satisfying its clauses may take.
        choices: for each row of ``pops``, the states to which a CHOOSE may lead.
    """

    def __init__(
        self,
        automaton: Automaton,
        frames: Sequence[tuple[int, int]],
        pop_depths: Sequence[int],
        choices: Sequence[Sequence[int]],
    ) -> None:
        self.automaton = automaton
        self.depths = np.full(automaton.num_states, NEVER, np.int64)
        table = automaton.table
        sources, columns = np.nonzero(table != REFUSED)
        values = table[sources, columns]
        actions, arguments = values & (1 << ACTION_BITS) - 1, values >> ACTION_BITS
        targets = arguments.astype(np.int64)
        for action, rows in ((Action.KEY, automaton.keys), (Action.GUARD, automaton.guards)):
            chosen = actions == action
            targets[chosen] = rows[arguments[chosen], 0].astype(np.int64)
        is_step = ~np.isin(actions, (Action.PUSH, Action.POP, Action.CHOOSE))
        pairs = np.unique(targets[is_step] * len(table) + sources[is_step])
        self.sources = (pairs % len(table)).tolist()
        self.starts = np.searchsorted(pairs // len(table), np.arange(len(table) + 1)).tolist()
        self.firsts = automaton.pushes[:, 0]  # the rest are choices, which open no rule
        self.needs = np.full(len(automaton.pushes) + len(choices), NEVER, np.int64)
        self.followers = [
            sorted({state for state in states if state != REFUSED})
            for states in (*(automaton.returns[frame : frame + count].tolist() for frame, count in frames), *choices)
        ]
        self.levels: list[list[int]] = [[] for _ in range(MAX_DEPTH + 1)]
        self.levels[0] += np.flatnonzero(automaton.is_final).tolist()
        pops = np.unique(sources[actions == Action.POP] * max(len(pop_depths), 1) + arguments[actions == Action.POP])
        for state, pop in zip(*(part.tolist() for part in np.divmod(pops, max(len(pop_depths), 1))), strict=True):
            if pop_depths[pop] <= MAX_DEPTH:
                self.levels[pop_depths[pop]].append(state)
        self.callers: list[list[int]] = [[] for _ in self.needs]
        opened = np.where(actions == Action.CHOOSE, arguments + len(automaton.pushes), arguments)
        is_opening = np.isin(actions, (Action.PUSH, Action.CHOOSE))
        for state, push in set(zip(sources[is_opening].tolist(), opened[is_opening].tolist(), strict=True)):
            self.callers[push].append(state)

    def settle(self) -> Automaton:
        """The automaton with its depths, without states that cannot reach an end. Raises GrammarError if it accepts
        nothing."""
        automaton = self.automaton
        while self._settle_levels() or self._resolve_cycle():
            pass
        if self.depths[0] == NEVER:
            raise GrammarError("The schema accepts nothing; give one that a value can satisfy.")
        pushes = automaton.pushes.copy()
        pushes[:, 4] = np.minimum(self.needs[: len(pushes)], MAX_DEPTH + 1)
        returns = automaton.returns.copy()
        is_open = returns != REFUSED
        returns[is_open] = np.where(self.depths[returns[is_open]] == NEVER, REFUSED, returns[is_open])
        depths = np.minimum(self.depths, MAX_DEPTH + 1).astype(np.int32)
        return replace(automaton, pushes=pushes, returns=returns, depths=depths)

    def _settle_levels(self) -> bool:
        """Settle what follows from known depths, level by level; returns whether anything was settled."""
        found = False
        for depth, level in enumerate(self.levels):
            while level:
                found = True
                self._search(depth)
                for push in self._open_pushes():
                    known = self._follower_depths(push)
                    if known and max(known) < NEVER:
                        self._resolve(push, known)
        return found

    def _resolve_cycle(self) -> bool:
        """Settle the cheapest push whose following states wait for that same push; returns whether there was one."""
        waiting: dict[int, list[tuple[int, list[int]]]] = {}
        for push in self._open_pushes():
            known = [depth for depth in self._follower_depths(push) if depth < NEVER]
            if known:
                waiting.setdefault(max(self._own_need(push), *known), []).append((push, known))
        for push, known in waiting[min(waiting)] if waiting else ():
            self._resolve(push, known)
        return bool(waiting)

    def _open_pushes(self) -> list[int]:
        is_open = self.needs == NEVER
        is_open[: len(self.firsts)] &= self.depths[self.firsts] < NEVER
        return np.flatnonzero(is_open).tolist()

    def _own_need(self, push: int) -> int:
        """The number of frames that a rule needs, including its own; a choice opens none."""
        return 1 + int(self.depths[self.firsts[push]]) if push < len(self.firsts) else 0

    def _follower_depths(self, push: int) -> list[int]:
        return [int(self.depths[state]) for state in self.followers[push]]

    def _resolve(self, push: int, known: list[int]) -> None:
        need = max(self._own_need(push), *known)
        self.needs[push] = need
        if need <= MAX_DEPTH:
            self.levels[need] += self.callers[push]

    def _search(self, depth: int) -> None:
        """Settle the states of one depth, and all states that lead to them."""
        waiting = self.levels[depth]
        while waiting:
            state = waiting.pop()
            if self.depths[state] == NEVER:
                self.depths[state] = depth
                waiting += self.sources[self.starts[state] : self.starts[state + 1]]
