"""The tables of grammars on a device: one allocation, in which each automaton is a range. Introduced in phase 12.

Kernels read all grammars of a batch through one address, which a CUDA graph has captured, and each row has the offset
of its own grammar. A range is kept until its last request has ended, and then until its space is needed, so that
successive requests with the same schema upload it only once.

Invariant: ranges never overlap, and a range that a request holds neither moves nor changes.
"""

import weakref
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from shared.grammar.automata.automaton import ACTION_BITS, REFUSED, Action, Automaton, Integers
from shared.grammar.automata.plain import ACTION_MASK, free_loops
from shared.grammar.tokens.device import LONGEST
from shared.grammar.tokens.fsm import TokenFSM

HEADER = 16  # the numbers before the 256 columns: the row length of a state, and the start of each table
COLUMN_BYTES = 256
FREE_BITS = 2  # in a packed entry: the target state's kind of freedom
ENTRY_BITS = FREE_BITS + ACTION_BITS


def pack(automaton: Automaton, usable_bytes: NDArray[np.bool_]) -> Integers:
    """All tables of an automaton as int32 numbers; a 64-bit set takes two, the low half first.

    A state is identified by the offset of its row in the table. A row is ``depth << 3 | free << 1 | is_final``, then
    entries. The field ``free`` is 1 if a state is free (:mod:`shared.grammar.automata.plain`) by GOTO, 2 if by COUNT,
    and otherwise 0. If a table leads to a state, the entry also says whether that state is free, which saves the walk a
    lookup: an entry is ``argument << 5 | action << 2 | free``, and one of ``returns`` is ``state << 2 | free``.
    """
    loops = free_loops(automaton, usable_bytes)
    free = np.where(loops == REFUSED, 0, np.where(loops & ACTION_MASK == Action.COUNT, 2, 1))
    stride = 1 + automaton.table.shape[1]
    action, argument = automaton.table & ACTION_MASK, automaton.table >> ACTION_BITS
    leads = (automaton.table != REFUSED) & np.isin(action, (Action.GOTO, Action.COUNT))
    argument = np.where(leads | (action == Action.BLANK), argument * stride, argument)
    leads_to_free = np.where(leads, free[np.where(leads, automaton.table >> ACTION_BITS, 0)], 0)
    entries = argument << ENTRY_BITS | action << FREE_BITS | leads_to_free
    first_states = automaton.pushes[:, :1]
    keys, guards = (table.copy() for table in (automaton.keys, automaton.guards))
    keys[:, 0] *= np.uint64(stride)
    guards[:, 0] *= np.uint64(stride)
    tables = [
        np.column_stack(
            [
                automaton.depths << 3 | free << 1 | automaton.is_final,
                np.where(automaton.table == REFUSED, REFUSED, entries),
            ]
        ),
        np.column_stack([first_states * stride, automaton.pushes[:, 1:], free[first_states]]),
        np.where(
            automaton.returns == REFUSED, REFUSED, automaton.returns * stride << FREE_BITS | free[automaton.returns]
        ),
        automaton.pops,
        *(table.reshape(-1).view("<i4") for table in (automaton.clauses, keys, guards)),
    ]
    parts = [np.zeros(HEADER, np.int32), 1 + automaton.columns.astype(np.int32)]
    starts = np.cumsum([HEADER + COLUMN_BYTES, *(table.size for table in tables)])
    parts[0][0] = stride
    parts[0][1 : 1 + len(tables)] = starts[:-1]
    return np.concatenate([*parts, *(table.astype(np.int32).reshape(-1) for table in tables)])


@dataclass
class _Range:
    base: int
    size: int
    num_holders: int


class GrammarPool:
    """The allocation and its ranges.

    Attributes:
        tables: int32 ``[size]`` on the device; its address never changes. Uploads and all launches that read it run on
            one stream.
    """

    def __init__(self, num_bytes: int, device: torch.device | str) -> None:
        self.tables = torch.zeros(num_bytes // 4, dtype=torch.int32, device=device)
        self._ranges: OrderedDict[Hashable, _Range] = OrderedDict()  # in the order in which they were last released

    @classmethod
    def on(cls, device: torch.device, num_bytes: int) -> Self | None:
        """A pool on a GPU; None on a CPU, or with a size of 0; then masks are made on the host."""
        return cls(num_bytes, device) if device.type == "cuda" and num_bytes else None

    def hold(self, key: Hashable, fsm: TokenFSM, holder: object) -> int | None:
        """Acquire the range of a grammar for as long as ``holder`` exists.

        Args:
            key: equal for equal grammars.

        Returns:
            The offset of its tables; None if the pool is full, or a token of the vocabulary is too long for the
            kernels.
        """
        if fsm.vocabulary.longest > LONGEST:
            return None
        is_known = key in self._ranges
        base = self.acquire(key, None if is_known else pack(fsm.automaton, fsm.vocabulary.usable_bytes))
        if base is not None:
            weakref.finalize(holder, self.release, key).atexit = False
        return base

    def acquire(self, key: Hashable, packed: Integers | None) -> int | None:
        """Hold a grammar's range, and upload its tables if they are not in the pool.

        Args:
            packed: from :func:`pack`; not needed if the tables are in the pool.

        Returns:
            The offset of its tables; None if the pool is full; :meth:`release` frees space.
        """
        known = self._ranges.get(key)
        if known is not None:
            known.num_holders += 1
            return known.base
        assert packed is not None
        size = -(-len(packed) // HEADER) * HEADER
        base = self._find(size)
        if base is None:
            return None
        self._ranges[key] = _Range(base, size, 1)
        tables, span = torch.from_numpy(packed), self.tables[base : base + len(packed)]
        span.copy_(tables.pin_memory() if span.is_cuda else tables, non_blocking=True)
        return base

    def release(self, key: Hashable) -> None:
        """Release one hold; raises KeyError if there is none."""
        held = self._ranges[key]
        if held.num_holders == 0:
            raise KeyError(key)
        held.num_holders -= 1
        self._ranges.move_to_end(key)

    def _find(self, size: int) -> int | None:
        """The first gap of this size, after dropping as many unheld ranges as necessary, oldest first."""
        unheld = [key for key, one in self._ranges.items() if one.num_holders == 0]
        kept = sorted((one.base, one.size) for one in self._ranges.values() if one.num_holders)
        if _gap(kept, size, len(self.tables)) is None:
            return None  # dropping would not help
        while True:
            taken = sorted((one.base, one.size) for one in self._ranges.values())
            base = _gap(taken, size, len(self.tables))
            if base is not None:
                return base
            del self._ranges[unheld.pop(0)]


def _gap(taken: list[tuple[int, int]], size: int, end: int) -> int | None:
    at = 0
    for base, length in taken:
        if base - at >= size:
            return at
        at = base + length
    return at if end - at >= size else None
