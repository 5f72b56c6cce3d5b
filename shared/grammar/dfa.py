"""Deterministic automata over bytes: how they are made, combined and made small. Introduced in phase 12.

A ``DFA`` accepts with a set of bits, so that one automaton can tell apart several languages: two automata that run side
by side are their union, intersection and difference, depending on which bits are kept.

Invariants: state 0 is the first; every state can be reached, and can reach an end (an empty language has one state that
does not accept); bytes that no state tells apart share a column.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shared.grammar.limits import Budget

DEAD = -1


@dataclass(frozen=True, eq=False)
class DFA:
    """S states, C columns.

    Attributes:
        columns: uint8 ``[256]``, the column of each byte.
        next: int32 ``[S, C]``, the next state, or ``DEAD``.
        accepts: int64 ``[S]``, the set of languages as bits to which a text that ends here belongs.
    """

    columns: NDArray[np.uint8]
    next: NDArray[np.int32]
    accepts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.next)

    @property
    def is_empty(self) -> bool:
        """Whether it accepts no text."""
        return not self.accepts.any()

    def run(self, text: bytes) -> int:
        """The bits with which the text is accepted; 0 if it is not."""
        state = 0
        for byte in text:
            state = int(self.next[state, self.columns[byte]])
            if state == DEAD:
                return 0
        return int(self.accepts[state])


@dataclass
class NFA:
    """An automaton under construction: edges by ranges of bytes, and edges that read nothing.

    ``begins`` are edges that may be taken at the beginning of a text alone, ``ends`` at its end alone. ``absorbing`` is
    a state from which every text is accepted, if there is one. ``ranks`` gives states a group and a number: of two in a
    group, what the lower one accepts the higher one accepts too, so in a set with both the lower one is left out. A
    search for ``c{500,}`` would otherwise have sets with up to 500 numbers of characters read.
    """

    edges: list[list[tuple[int, int, int]]] = field(default_factory=list)  # (first byte, last byte, target) by state
    free: list[list[int]] = field(default_factory=list)
    begins: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, list[int]] = field(default_factory=dict)
    accepts: dict[int, int] = field(default_factory=dict)
    absorbing: int | None = None
    ranks: dict[int, tuple[int, int]] = field(default_factory=dict)

    def state(self) -> int:
        """A new state."""
        self.edges.append([])
        self.free.append([])
        return len(self.edges) - 1

    def closure(self, states: Iterable[int], *, is_begin: bool = False, is_end: bool = False) -> frozenset[int]:
        """The states that are reached from these without reading a byte."""
        found = set(states)
        waiting = list(found)
        while waiting:
            state = waiting.pop()
            more = self.free[state]
            if is_begin and state in self.begins:
                more = more + self.begins[state]
            if is_end and state in self.ends:
                more = more + self.ends[state]
            for other in more:
                if other not in found:
                    found.add(other)
                    waiting.append(other)
        if self.absorbing in found:
            return frozenset([self.absorbing])
        if self.ranks:
            highest: dict[int, int] = {}
            for group, rank in map(self.ranks.get, found & self.ranks.keys()):  # type: ignore[misc]
                highest[group] = max(rank, highest.get(group, rank))
            found = {state for state in found if state not in self.ranks or self._is_highest(state, highest)}
        return frozenset(found)

    def _is_highest(self, state: int, highest: dict[int, int]) -> bool:
        group, rank = self.ranks[state]
        return highest[group] == rank


def determinize(nfa: NFA, budget: Budget) -> DFA:
    """The DFA of an NFA whose first state is 0: a state of it is a set of states of the NFA (Rabin and Scott, 1959).

    Raises GrammarError as :class:`Budget` does.
    """
    columns, firsts = _byte_classes(nfa)
    num_columns = len(firsts)
    spans = [[(columns[low], columns[high], target) for low, high, target in edges] for edges in nfa.edges]
    closures: dict[frozenset[int], frozenset[int]] = {}
    start = nfa.closure([0], is_begin=True)
    numbers: dict[tuple[frozenset[int], bool], int] = {(start, True): 0}
    sets = [start]
    rows: list[list[int]] = []
    accepts: list[int] = []
    for number, states in enumerate(sets):  # which grows
        budget.check(len(sets))
        bits = 0
        for state in nfa.closure(states, is_begin=number == 0, is_end=True) if nfa.ends else states:
            bits |= nfa.accepts.get(state, 0)
        accepts.append(bits)
        # exercise 12x2: one step of the subset construction
        # hint: spans[state] holds (first column, last column, target) of each edge of a state
        # hint: collect for each column the set of all targets; an empty set leads to DEAD
        # hint: closures[targets] holds nfa.closure(targets), which is slow to compute: fill it as you need it
        # hint: a set that is new gets the next number and is appended to sets; False: it is not the beginning
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


def _byte_classes(nfa: NFA) -> tuple[NDArray[np.uint8], list[int]]:
    """The column of each byte, and the first byte of each column: they change where an edge begins or ends."""
    borders = {0}
    for edges in nfa.edges:
        for low, high, _ in edges:
            borders |= {low, high + 1}
    firsts = sorted(borders - {256})
    columns = np.zeros(256, np.uint8)
    columns[firsts[1:]] = 1
    return columns.cumsum(dtype=np.uint8), firsts


def trim(dfa: DFA) -> DFA:
    """Without states that cannot be reached, or cannot reach an end, in the order of a search from the first."""
    size = len(dfa)
    sources, _ = np.nonzero(dfa.next != DEAD)
    targets = dfa.next[dfa.next != DEAD]
    order = np.argsort(targets, kind="stable")
    sources, starts = sources[order], np.searchsorted(targets[order], np.arange(size + 1))
    is_alive = dfa.accepts != 0
    waiting = np.flatnonzero(is_alive).tolist()
    while waiting:
        state = waiting.pop()
        for source in sources[starts[state] : starts[state + 1]].tolist():
            if not is_alive[source]:
                is_alive[source] = True
                waiting.append(source)
    numbers = np.full(size + 1, DEAD, np.int32)  # the last place is that of DEAD
    numbers[0], reached = 0, [0]
    rows = dfa.next.tolist()
    for state in reached:  # which grows
        for target in rows[state]:
            if target != DEAD and is_alive[target] and numbers[target] == DEAD:
                numbers[target] = len(reached)
                reached.append(target)
    return DFA(dfa.columns, numbers[dfa.next[reached]], dfa.accepts[reached])


def minimize(dfa: DFA, budget: Budget) -> DFA:
    """The smallest DFA of the same languages: one state for each set of states that no text tells apart.

    Where no cycle is, a state is decided by its successors, so one pass from the ends is enough (Revuz, 1992): long
    chains, such as those of bounded repeats, would otherwise take a round for each of their states. Only the states
    between two cycles, or on one, are split round by round.

    Raises GrammarError as :class:`Budget` does.
    """
    dfa = trim(dfa)
    if dfa.is_empty:
        return DFA(np.zeros(256, np.uint8), np.full((1, 1), DEAD, np.int32), np.zeros(1, np.int64))
    size = len(dfa)
    before, _ = np.nonzero(dfa.next != DEAD)
    before, after = np.divmod(np.unique(before * size + dfa.next[dfa.next != DEAD]), size)
    last = _ordered(after, before, size)
    first = _ordered(before, after, size)[::-1]  # so that successors come first here too
    classes = np.full(size + 1, DEAD, np.int64)  # the last place is that of DEAD
    known: dict[bytes, int] = {}

    def classify(states: Iterable[int]) -> None:
        for number, state in enumerate(states):
            if number % 256 == 0:
                budget.check(len(known))
            key = classes[dfa.next[state]].tobytes() + dfa.accepts[state].tobytes()
            classes[state] = known.setdefault(key, len(known))

    classify(last)
    is_middle = np.ones(size, bool)
    is_middle[last], is_middle[first] = False, False
    middle = np.flatnonzero(is_middle)
    if len(middle):
        _split(dfa, middle, classes, _distances(dfa, before, after), budget)
        _, representatives = np.unique(classes[middle], return_index=True)
        classify(middle[representatives])  # which have the next classes, in this order
    classify(state for state in first if classes[state] == DEAD)
    _, firsts, groups = np.unique(classes[:-1], return_index=True, return_inverse=True)
    order = np.argsort(firsts)  # groups by their first state, so that state 0 stays the first
    numbers = np.empty(len(firsts) + 1, np.int32)
    numbers[order], numbers[-1] = np.arange(len(firsts)), DEAD
    kept = firsts[order]
    return _merge_columns(DFA(dfa.columns, numbers[np.append(groups, -1)[dfa.next[kept]]], dfa.accepts[kept]))


def _ordered(before: NDArray[np.int64], after: NDArray[np.int64], size: int) -> list[int]:
    """The states that no cycle of these edges leads to, each behind those with an edge to it (Kahn, 1962)."""
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
    """Set the classes of the middle states, whose other successors have theirs: split until no byte tells two of a
    class apart (Moore, 1956). States with other distances to an end are apart from the beginning, which saves most
    rounds where a chain is part of a cycle.

    A class has a random number of 64 bits for a name, and the signature of a state is a sum of the names of its class
    and its successors, so two signatures are equal by chance once in about 2⁶⁴ pairs.
    """
    chance = np.random.default_rng(0)
    factors = chance.integers(1, 2**63, dfa.next.shape[1] + 1, np.uint64) * 2 + 1
    known = int(classes.max()) + 1
    _, groups = np.unique(np.column_stack([dfa.accepts, distances])[middle], axis=0, return_inverse=True)
    groups = groups.reshape(-1)
    count = int(groups.max()) + 1
    while True:
        budget.check(known + count)
        classes[middle] = known + groups
        names = chance.integers(0, 2**63, known + count + 1, np.uint64)  # the last is that of DEAD
        by_state = names[classes]
        signatures = by_state[middle] * factors[-1] + (by_state[dfa.next[middle]] * factors[:-1]).sum(
            axis=1, dtype=np.uint64
        )
        found, groups = np.unique(signatures, return_inverse=True)
        if len(found) == count:
            return
        count = len(found)


def _merge_columns(dfa: DFA) -> DFA:
    _, firsts, inverse = np.unique(dfa.next, axis=1, return_index=True, return_inverse=True)
    order = np.argsort(firsts)
    numbers = np.empty(len(firsts), np.uint8)
    numbers[order] = np.arange(len(firsts))
    return DFA(numbers[inverse.reshape(-1)[dfa.columns]], np.ascontiguousarray(dfa.next[:, firsts[order]]), dfa.accepts)


def restrict(dfa: DFA, is_usable: NDArray[np.bool_]) -> DFA:
    """The texts that are made of usable bytes alone, bool ``[256]``."""
    if is_usable.all():
        return dfa
    numbers = np.where(is_usable, dfa.columns, dfa.next.shape[1])  # those of the others are in a column of their own
    dead = np.full((len(dfa), 1), DEAD, np.int32)
    used, columns = np.unique(numbers, return_inverse=True)
    return trim(DFA(columns.astype(np.uint8), np.append(dfa.next, dead, axis=1)[:, used], dfa.accepts))


def combine(dfas: Sequence[DFA], budget: Budget, keep: Callable[[int], int] = lambda bits: bits) -> DFA:
    """All of them run side by side: bit i accepts where the i-th accepts (with any bit).

    Args:
        keep: the bits of the result for those; ``lambda bits: bits == 3`` is the intersection of two.

    Raises GrammarError as :class:`Budget` does.
    """
    _, firsts, inverse = np.unique(
        np.stack([dfa.columns for dfa in dfas]), axis=1, return_index=True, return_inverse=True
    )
    columns = inverse.reshape(-1).astype(np.uint8)
    tables = [np.append(dfa.next[:, dfa.columns[firsts]], np.full((1, len(firsts)), DEAD), axis=0) for dfa in dfas]
    ends = [np.append(dfa.accepts != 0, False) for dfa in dfas]
    sizes = np.array([len(dfa) + 1 for dfa in dfas])
    sized = list(zip(tables, sizes.tolist(), strict=True))
    weights = np.append(1, sizes[:-1].cumprod())  # a combination of states as one number; DEAD is the last of each
    numbers: dict[int, int] = {0: 0}
    combined = np.zeros((1, len(dfas)), np.int64)
    blocks: list[NDArray[np.int32]] = []
    accepts: list[int] = []
    while len(combined):
        bits = np.stack([end[combined[:, i]].astype(np.int64) << i for i, end in enumerate(ends)]).sum(axis=0)
        accepts += [keep(each) for each in bits.tolist()]
        targets = np.stack([table[combined[:, i]] % size for i, (table, size) in enumerate(sized)])
        keys = np.tensordot(weights, targets, 1)  # [states, columns]
        dead = int((weights * (sizes - 1)).sum())
        new, places = np.unique(keys, return_index=True)
        fresh = [i for i, key in enumerate(new.tolist()) if key != dead and key not in numbers]
        for i in fresh:
            numbers[int(new[i])] = len(numbers)
        budget.check(len(numbers))
        found = np.array([DEAD if key == dead else numbers[key] for key in new.tolist()], np.int32)
        blocks.append(found[np.searchsorted(new, keys)])
        combined = targets.reshape(len(dfas), -1)[:, places[fresh]].T
    return minimize(DFA(columns, np.concatenate(blocks).astype(np.int32), np.array(accepts, np.int64)), budget)


def union(dfas: Sequence[DFA], budget: Budget) -> DFA:
    """The texts that any of them accepts, with bit 0."""
    return dfas[0] if len(dfas) == 1 else combine(dfas, budget, lambda bits: int(bits != 0))


def intersection(dfas: Sequence[DFA], budget: Budget) -> DFA:
    """The texts that all of them accept, with bit 0."""
    everything = (1 << len(dfas)) - 1
    return dfas[0] if len(dfas) == 1 else combine(dfas, budget, lambda bits: int(bits == everything))


def difference(dfa: DFA, others: Sequence[DFA], budget: Budget) -> DFA:
    """The texts that ``dfa`` accepts and none of the others, with bit 0."""
    return combine([dfa, *others], budget, lambda bits: int(bits == 1)) if others else dfa


def words(texts: Iterable[bytes], budget: Budget, bits: Iterable[int] | None = None) -> DFA:
    """The smallest DFA of some texts, made from their sorted list word by word (Daciuk and others, 2000).

    Args:
        bits: with which each is accepted; None: all with bit 0.

    Raises GrammarError as :class:`Budget` does.
    """
    chosen = dict(zip(texts, bits, strict=True)) if bits is not None else dict.fromkeys(texts, 1)
    known: dict[tuple, int] = {}
    rows: list[dict[int, int]] = [{}]
    accepts = [0]
    path: list[tuple[int, int, int]] = []  # (state, byte, its child) along the last text, whose states may still change

    def settle(length: int) -> None:
        while len(path) > length:
            state, byte, child = path.pop()
            rows[state][byte] = known.setdefault((accepts[child], *rows[child].items()), child)

    previous = b""
    for text in sorted(chosen):
        common = 0
        while common < min(len(text), len(previous)) and text[common] == previous[common]:
            common += 1
        settle(common)
        state = path[-1][2] if path else 0
        for byte in text[common:]:
            rows.append({})
            accepts.append(0)
            path.append((state, byte, len(rows) - 1))
            state = len(rows) - 1
        accepts[state] |= chosen[text]
        budget.check(len(known))
        previous = text
    settle(0)
    used = [0]
    numbers = {0: 0}
    for state in used:  # which grows
        for child in rows[state].values():
            if child not in numbers:
                numbers[child] = len(used)
                used.append(child)
    used_bytes = sorted({byte for state in used for byte in rows[state]})
    columns = np.full(256, len(used_bytes), np.uint8) if len(used_bytes) < 256 else np.zeros(256, np.uint8)
    columns[used_bytes] = range(len(used_bytes))
    table = np.full((len(used), min(len(used_bytes) + 1, 256)), DEAD, np.int32)
    for number, state in enumerate(used):
        for byte, child in rows[state].items():
            table[number, columns[byte]] = numbers[child]
    return _merge_columns(DFA(columns, table, np.array([accepts[state] for state in used], np.int64)))
