"""Assembles an automaton's tables while its rules discover each other. Introduced in phase 12.

A rule (for objects, arrays or strings) does not know its callers, and its callers know the colours of its exits only
once all its states are built. So states, exits and call sites are numbered as they appear, and each exit is reported to
each site. When nothing new appears, the numbers become tables.

Invariant: every state of the finished automaton can be reached, can reach an end, and records how many frames reaching
an end takes.
"""

from collections.abc import Callable, Hashable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shared.grammar.automata.automaton import REFUSED, UNBOUNDED, Action, Automaton, entry
from shared.grammar.automata.endings import Endings
from shared.grammar.limits import CELLS, ROW, Budget, GrammarError

Entries = dict[int, int]
"""What a state does with a byte; bytes that are missing are refused."""
ClauseRow = tuple[int, int, int, int, int]
"""A row of ``Automaton.clauses``."""
MAX_CLASSES = 10
PIECE = 4096
"""Number of table rows that are widened at a time."""


class Continuation(Protocol):
    """What follows a value."""

    def after(self, bits: int) -> int:
        """The state after a value that is accepted by these groups, given as bits; there is at least one."""


class Rule:
    """A rule that is pushed and popped: its exits, and the sites that call it."""

    def __init__(self, assembler: "Assembler") -> None:
        self.assembler = assembler
        self.first = -1
        self.exits: list[int] = []  # by colour: the accepting groups, as bits; 0 is not an exit
        self.sites: list[Site] = []
        self._blocks: dict[tuple[int, tuple[int, ...]], int] = {}

    def leave(self, always: int, classes: tuple[int, ...] = ()) -> int:
        """The colour of an exit: some groups accept, and so does each further class unless a clause removes it."""
        block = always, classes
        if block not in self._blocks:
            if len(classes) > MAX_CLASSES:
                raise GrammarError("The schema has too many objects alive at once that differ in their required keys.")
            size = 1 << len(classes)
            self.assembler.budget.spend(size * (len(self.sites) + 1 + len(classes) // 4))
            base = -(-len(self.exits) // size) * size
            self.exits += [0] * (base - len(self.exits))
            self._blocks[block] = base
            self.exits += [always | sum_bits(classes, subset) for subset in range(size)]
            for site in self.sites:
                site.learn()
        return self._blocks[block] + (1 << len(classes)) - 1


class Site:
    """A call site of a rule: the states that follow it, by colour."""

    def __init__(self, rule: Rule, continuation: Continuation) -> None:
        self.rule, self.continuation = rule, continuation
        self.returns: list[int] = []
        self.frame = -1

    def learn(self) -> None:
        """Add the rule's new exits."""
        self.rule.assembler.budget.spend(len(self.rule.exits) - len(self.returns))
        while len(self.returns) < len(self.rule.exits):
            bits = self.rule.exits[len(self.returns)]
            self.returns.append(REFUSED)
            self.returns[-1] = self.continuation.after(bits) if bits else REFUSED


class Assembler:
    """The states, rows and numbers of an automaton under construction. State 0 is the first."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.entries: list[Entries] = []
        self.blocks: list[tuple[int, NDArray[np.int32]]] = []
        self.final: set[int] = set()
        self._states: dict[Hashable, int] = {}
        self._unbuilt: dict[int, Callable[[], Entries]] = {}
        self._sites: dict[tuple[int, Continuation], Site] = {}
        self._pushes: dict[tuple[Site, int, int], int] = {}
        self._pops: dict[tuple[int, tuple[ClauseRow, ...], int, tuple[int, ...]], int] = {}
        self._keys: dict[tuple[int, int, bool], int] = {}
        self._guards: dict[tuple[int, int, int, int], int] = {}

    def state(self, key: Hashable, build: Callable[[], Entries]) -> int:
        """The number of a state; ``build`` is called later, once per key."""
        number = self._states.get(key)
        if number is None:
            number = self._states[key] = len(self.entries)
            self.entries.append({})
            self._unbuilt[number] = build
            self.budget.check(number + 1)
        return number

    def add_rows(self, first: int, rows: NDArray[np.int32]) -> None:
        """Rows of entries, int32 ``[N, 256]``, for the states from ``first`` on; the entries that the states build are
        added to them."""
        self.blocks.append((first, rows))

    def entries_of(self, state: int) -> Entries:
        """The entries of a state; builds the state if necessary."""
        build = self._unbuilt.pop(state, None)
        if build is not None:
            self.entries[state] = build()
            self.budget.spend(1 + len(self.entries[state]))
        return self.entries[state]

    def build(self) -> None:
        """Build all states, including those that appear on the way."""
        while self._unbuilt:
            self.entries_of(next(reversed(self._unbuilt)))

    # Entries

    def push(self, rule: Rule, continuation: Continuation, fewest: int = 0, most: int = UNBOUNDED) -> int:
        site = self._sites.get((id(rule), continuation))
        if site is None:
            self.budget.spend(4)
            site = self._sites[id(rule), continuation] = Site(rule, continuation)
            rule.sites.append(site)
            site.learn()
        return entry(Action.PUSH, self._pushes.setdefault((site, fewest, most), len(self._pushes)))

    def pop(self, colour: int, clauses: tuple[ClauseRow, ...] = (), depth: int = 0) -> int:
        """``depth``: the number of frames that satisfying the clauses may take."""
        return entry(Action.POP, self._pops.setdefault((colour, clauses, depth, ()), len(self._pops)))

    def choose(self, clauses: tuple[ClauseRow, ...], targets: tuple[int, ...]) -> int:
        """Go to one of several states, chosen by the colours that the clauses leave; no colour gives ``REFUSED``."""
        self.budget.spend(len(targets) + 2 * len(clauses))
        key = (len(targets) - 1, clauses, 0, targets)
        return entry(Action.CHOOSE, self._pops.setdefault(key, len(self._pops)))

    def key(self, state: int, keys: int, *, is_bounded: bool) -> int:
        return entry(Action.KEY, self._keys.setdefault((state, keys, is_bounded), len(self._keys)))

    def guard(self, state: int, keys: int) -> int:
        """Refused once all keys have been seen."""
        return entry(Action.GUARD, self._guards.setdefault((state, keys, 0, keys.bit_count()), len(self._guards)))

    # Tables

    def finish(self) -> Automaton:
        """The automaton, once all states are built. Raises GrammarError if it accepts nothing, or its tables are too
        large.
        """
        self.build()
        columns, table = self._table()
        pushes, returns, frames = self._calls()
        clause_rows: list[ClauseRow] = []
        spans: dict[tuple[ClauseRow, ...], int] = {}
        pops = []
        for colour, clauses, _, targets in self._pops:
            first = spans.setdefault(clauses, len(clause_rows))
            if first == len(clause_rows):
                clause_rows += clauses
            pops.append((colour, first, first + len(clauses), frames.get(targets, 0)))
        is_final = np.zeros(len(table), np.bool_)
        is_final[list(self.final)] = True
        automaton = Automaton(
            columns=columns,
            table=table,
            is_final=is_final,
            depths=np.zeros(len(table), np.int32),
            pushes=pushes,
            returns=returns,
            pops=np.array(pops, np.int32).reshape(-1, 4),
            clauses=np.array(clause_rows, np.uint64).reshape(-1, 5),
            keys=np.array(list(self._keys), np.uint64).reshape(-1, 3),
            guards=np.array(list(self._guards), np.uint64).reshape(-1, 4),
        )
        sites = [(site.frame, len(site.returns)) for site, _, _ in self._pushes]
        self.budget.spend((table != REFUSED).sum().item() // 4 + 2 * len(table) + table.size // CELLS)
        pop_depths, choices = [depth for _, _, depth, _ in self._pops], [targets for *_, targets in self._pops]
        automaton = Endings(automaton, sites, pop_depths, choices).settle()
        if automaton.num_bytes > (most := self.budget.limits.bytes):
            raise GrammarError(f"The grammar's tables take {automaton.num_bytes} bytes, more than {most}.")
        return automaton

    def _table(self) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
        """The rows of all states, with one column for bytes that no state distinguishes."""
        size = len(self.entries)
        self.budget.spend(size * ROW)
        table = np.full((size, 256), REFUSED, np.int32)
        for first, rows in self.blocks:
            table[first : first + len(rows)] = rows
        self.blocks.clear()
        states = np.repeat(np.arange(size), [len(entries) for entries in self.entries])
        places = [byte for entries in self.entries for byte in entries]
        table[states, places] = [value for entries in self.entries for value in entries.values()]
        factors = np.random.default_rng(0).integers(1, 2**63, size, np.uint64) * 2 + 1
        names = np.zeros(256, np.uint64)
        for first in range(0, size, PIECE):
            piece = slice(first, first + PIECE)
            names += (table[piece].astype(np.uint64) * factors[piece, None]).sum(axis=0, dtype=np.uint64)
        _, firsts, columns = np.unique(names, return_index=True, return_inverse=True)
        if len(firsts) == 256:
            return np.arange(256, dtype=np.uint8), table
        return columns.astype(np.uint8), np.ascontiguousarray(table[:, firsts])

    def _calls(self) -> tuple[NDArray[np.int32], NDArray[np.int32], dict[tuple[int, ...], int]]:
        """Pushes, returns, and the index in ``returns`` at which the states of each site or choice begin."""
        returns: list[int] = []
        frames: dict[tuple[int, ...], int] = {}
        pushes = []
        for site, fewest, most in self._pushes:
            key = tuple(site.returns)
            self.budget.spend(2 + len(key) // 4)
            site.frame = frames.setdefault(key, len(returns))
            if site.frame == len(returns):
                returns += key
            pushes.append((site.rule.first, site.frame, fewest, most, 0))
        for *_, targets in self._pops:
            self.budget.spend(1 + len(targets) // 4)
            if targets and frames.setdefault(targets, len(returns)) == len(returns):
                returns += targets
        return np.array(pushes, np.int32).reshape(-1, 5), np.array(returns, np.int32), frames


def sum_bits(masks: tuple[int, ...], bits: int) -> int:
    """The union of the masks selected by bits."""
    found = 0
    for number, mask in enumerate(masks):
        found |= mask if bits >> number & 1 else 0
    return found
