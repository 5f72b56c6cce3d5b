"""Languages of bytes made from languages: texts that all, some or none of several automata accept; and lists of texts.

Introduced in phase 12.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from operator import mul

import numpy as np
from numpy.typing import NDArray

from shared.grammar.automata.dfa import DEAD, DFA, merge_columns, shared_columns
from shared.grammar.automata.minimization import minimize
from shared.grammar.limits import CELLS, Budget

PIECE = 1024
"""Number of product states that numpy handles at a time."""
MOST_NUMBERED = 2**63 - 1
"""Maximum number of state combinations that fit numpy's integers."""


def combine(dfas: Sequence[DFA], budget: Budget, keep: Callable[[int], int] = lambda bits: bits) -> DFA:
    """All automata run side by side: bit i accepts where the i-th accepts (with any bit).

    ``keep`` maps these bits to the result's; ``lambda bits: bits == 3`` is the intersection of two. Raises
    GrammarError as :class:`Budget` does.
    """
    columns, firsts = shared_columns([dfa.columns for dfa in dfas])
    tables = [np.append(dfa.next[:, dfa.columns[firsts]], np.full((1, len(firsts)), DEAD), axis=0) for dfa in dfas]
    ends = [np.append(dfa.accepts != 0, False) for dfa in dfas]
    sizes = [len(dfa) + 1 for dfa in dfas]
    sized = list(zip(tables, sizes, strict=True))
    # a combination of states as a single number; the last state of each is DEAD
    products = [1, *accumulate(sizes, mul)]
    is_large = products.pop() > MOST_NUMBERED  # a Python integer from here on
    weights = np.array(products, object if is_large else np.int64)
    dead = sum(weight * (size - 1) for weight, size in zip(products, sizes, strict=True))
    numbers: dict[int, int] = {0: 0}
    waiting = [np.zeros((1, len(dfas)), np.int64)]
    blocks: list[NDArray[np.int32]] = []
    accepts: list[int] = []
    while waiting:
        combined = waiting.pop(0)
        cells = len(dfas) * len(firsts)
        budget.spend(80 + 4 * len(dfas) + len(combined) * (1 + (cells // 8 if is_large else cells // CELLS)))
        bits = np.stack([end[combined[:, i]].astype(np.int64) << i for i, end in enumerate(ends)]).sum(axis=0)
        accepts += [keep(each) for each in bits.tolist()]
        targets = np.stack([table[combined[:, i]] % size for i, (table, size) in enumerate(sized)])
        keys = np.tensordot(weights, targets, 1)  # [states, columns]
        new, places = np.unique(keys, return_index=True)
        budget.spend(len(new))
        fresh = [i for i, key in enumerate(new.tolist()) if key != dead and key not in numbers]
        for i in fresh:
            numbers[int(new[i])] = len(numbers)
        budget.check(len(numbers))
        found = np.array([DEAD if key == dead else numbers[key] for key in new.tolist()], np.int32)
        blocks.append(found[np.searchsorted(new, keys)])
        following = targets.reshape(len(dfas), -1)[:, places[fresh]].T
        waiting += [following[first : first + PIECE] for first in range(0, len(following), PIECE)]
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
    """The smallest DFA of some texts, made from their sorted list word by word (Daciuk et al., 2000). ``bits``: the
    bits with which each is accepted; None: all with bit 0. Raises GrammarError as :class:`Budget` does.
    """
    budget.spend(50)
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
        budget.spend(3 + 3 * len(text))  # one row per byte
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
    return merge_columns(DFA(columns, table, np.array([accepts[state] for state in used], np.int64)))
