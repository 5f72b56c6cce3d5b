"""Reuses masks: tokens that another configuration's mask allows, copied as ranges. Introduced in phase 12.

After some letters, a walk may reach a state that loops on letters. There its tokens continue as they would from a
configuration that was in that state before the first letter. So they are copied from that configuration's mask, which
is computed once and cached.

Invariant: the other configuration has the same frames and keys; it differs in its state and counters.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.grammar.automata.automaton import Action, Configuration
from shared.grammar.automata.plain import Loop
from shared.grammar.tokens.byte_table import ByteTable, Reading
from shared.grammar.tokens.contexts import Contexts, Fact, less
from shared.grammar.tokens.plain_tokens import PlainTokens, ranges

MIN_TAKEN = 256
"""Minimum number of tokens for which another mask is computed so that they can be copied from it."""
Array = NDArray[Any]
Mask = tuple[NDArray[np.bool_], tuple[Fact, ...]]
"""A mask, and what it depends on besides the state, the counters and the free depth of the stack."""


class TakenTokens:
    """The ranges of sorted tokens that one mask copies, by the configuration that each is copied from.

    Args:
        other: the mask of another configuration, without the end ids.
    """

    def __init__(
        self, table: ByteTable, tokens: PlainTokens, contexts: Contexts, other: Callable[[Configuration], Mask]
    ) -> None:
        self.table, self.tokens, self.contexts, self.other = table, tokens, contexts, other
        self._ranges: dict[Configuration, list[tuple[int, int]]] = {}

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def allow(self, found: NDArray[np.bool_]) -> None:
        """Allow what the other masks allow in their ranges."""
        for base, taken in self._ranges.items():
            self._allow(found, base, taken)

    def take_children(self, about: Reading, node: int, context: int, children: bytes) -> bool:
        """Copy for those children of a node that a state and its model treat alike, if there are many."""
        first_child, is_whole, *_, first, count, own, chars, _ = self.tokens.views
        if about.model is None or not is_whole[node]:
            return False
        loop = self.table.loops.of(about.model)
        assert loop is not None
        is_inside = not self.tokens.symbols_of(node) & ~loop.symbols
        base = self._base(about.model, loop, context, chars[node]) if is_inside else None
        if base is None or (base not in self._ranges and count[node] < MIN_TAKEN):
            return False
        taken, start = self._ranges.setdefault(base, []), first[node] + own[node]
        for byte in children.translate(None, about.alike):
            child = first_child[node] + children.index(byte)
            taken.append((start, first[child]))
            start = first[child] + count[child]
        taken.append((start, first[node] + count[node]))
        return True

    def take_walks(self, state: int, loop: Loop, nodes: Array, contexts: Array) -> NDArray[np.bool_]:
        """Copy for the tokens below some nodes, whose walks reached ``state`` through characters of its loop.

        Returns:
            The configuration to copy from.
        """
        tokens, is_taken = self.tokens, np.zeros(len(nodes), np.bool_)
        kinds = contexts << 32 | tokens.chars[nodes]
        for kind in np.unique(kinds).tolist():
            base, same = self._base(state, loop, kind >> 32, kind & (1 << 32) - 1), kinds == kind
            first, count = tokens.first[nodes[same]], tokens.count[nodes[same]]
            if base is not None and (base in self._ranges or count.sum() >= MIN_TAKEN):
                self._ranges.setdefault(base, []).extend(zip(first.tolist(), (first + count).tolist(), strict=True))
                is_taken |= same
        return is_taken

    def _base(self, state: int, loop: Loop, context: int, chars: int) -> Configuration | None:
        """Where a walk started that reached its state after this many characters of the loop; None if its frames
        differ."""
        fewest, most, blanks, seen, stack = self.contexts.values[context]
        if blanks or seen != self.contexts.now.seen or stack != self.contexts.now.stack:
            return None
        if loop.action is Action.COUNT:
            fewest, most = fewest + chars if fewest else 0, less(most, -chars)
        return Configuration(state, fewest, most, 0, seen, stack)

    def _allow(self, found: NDArray[np.bool_], base: Configuration, taken: list[tuple[int, int]]) -> None:
        """Allow what the mask of ``base`` allows in some ranges of the sorted tokens."""
        other, examined = self.other(base)
        for fact in examined:
            self.contexts.note(fact)
        order, (first, last) = self.tokens.order, np.array(sorted(taken)).T
        if 2 * (last - first).sum() > len(order):  # the remaining ones are fewer
            ends = np.append(0, last)
            other[order[ranges(ends, np.append(first, len(order)) - ends)]] = False
            found |= other
        else:
            ids = order[ranges(first, last - first)]
            found[ids] |= other[ids]
