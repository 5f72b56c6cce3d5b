"""Computes a mask: all tokens of a vocabulary are walked from one configuration. Introduced in phase 12.

All prefixes of tokens are walked at once, level by level of the trie; a walk is a node, a state, and the number of a
*context*, the rest of a configuration. Many walks are held in arrays, so a level costs a few numpy operations; a few
walks are stepped one by one. A walk ends where the automaton refuses, so most masks need few steps. Five shortcuts
leave few tokens to walk:

- A state that loops on letters, as inside a string, allows all tokens of such characters. The others walk from the
  first other character on (:mod:`shared.grammar.tokens.plain_tokens`).
- Letters may lead a walk to such a state, as after the first letter of a key. Since the state loops on letters, the
  tokens that reach it are those that it allows itself: they are copied from its mask
  (:mod:`shared.grammar.tokens.taken_tokens`).
- Elsewhere, where a state is free, the tokens that are plain from there on are allowed.
- Walks in the same configuration whose tokens continue with the same bytes are one walk: those of the
  digits 1 to 9, or of all tokens that end with ``",``.
- In a run of blanks, a walk ends where every token continues with a line break, since a run begins with its only one.

Invariant: the mask is that of :meth:`shared.grammar.tokens.fsm.TokenFSM.allowed_tokens`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.grammar.automata.automaton import ACTION_BITS, MAX_DEPTH, REFUSED, UNBOUNDED, Action, Configuration
from shared.grammar.automata.plain import ACTION_MASK, NOT_ASCII, Loop
from shared.grammar.tokens.byte_table import ByteTable
from shared.grammar.tokens.contexts import BLANK, COUNT, NINE, ZERO, Contexts, less
from shared.grammar.tokens.plain_tokens import BLANKS, ranges
from shared.grammar.tokens.taken_tokens import Mask, TakenTokens
from shared.grammar.tokens.vocabulary import GrammarVocabulary

FEW = 48
"""Maximum number of walks that are stepped one by one: this many take as long as a level of arrays."""
MANY = 1000
"""The same, if most of the tokens they lead to are copied."""
MOST_ALIKE = 200
"""Maximum number of tokens below a node whose walk is compared with others: one walk represents all those that continue
alike, such as those of nine digits."""
MIN_MORE = 16
"""Minimum number of tokens below a node for which it pays to find out what a state refuses and what can be copied."""
KINDS = np.arange(256)
KINDS[ZERO : NINE + 1] = ZERO
"""Maps each digit to '0', since all digits count the same in a run; other bytes map to themselves."""
Array = NDArray[Any]
EVERY: Any = slice(None)


class TokenWalk:
    """Walks all tokens from a configuration.

    Args:
        other: the mask of another configuration, without the end ids.
    """

    def __init__(
        self,
        table: ByteTable,
        vocabulary: GrammarVocabulary,
        now: Configuration,
        other: Callable[[Configuration], Mask],
    ) -> None:
        self.table, self.vocabulary, self.tokens = table, vocabulary, vocabulary.plain
        self.automaton, self.now = table.automaton, now
        self.loop = None if now.blanks else table.loops.of(now.state)
        self.known_symbols = self.loop.symbols if self.loop and self.loop.symbols & NOT_ASCII else 0
        self.alive: list[Array] = []  # nodes at which a token may end
        self.few: list[int] = []  # the same, for walks that are stepped one by one
        # nodes with plain continuations, and the maximum number of characters of these
        self.plain: list[tuple[Array | int, Array | int]] = []
        self.copies: list[Array] = []  # two rows of ids: each id in the second is allowed if the one in the first is
        self.node: Array = np.zeros(1, np.int32)
        self.state: Array = np.full(1, now.state, np.int32)
        self.context: Array = np.zeros(1, np.intp)
        self.contexts = Contexts(table, now)
        self.taken = TakenTokens(table, self.tokens, self.contexts, other)

    def run(self) -> NDArray[np.bool_]:
        """bool ``[V]``, without the end ids."""
        found = np.zeros(len(self.vocabulary), np.bool_) if self.loop is None else self._leave_loop(self.loop)
        if self.loop is None:
            self._leave()
        else:
            self._read()
        while len(self.node):
            if len(self.node) <= (MANY if self.taken else FEW):
                self._step_few()
            else:
                self._expand()
                self._read()
        self.taken.allow(found)
        if self.plain:
            nodes, most = (
                np.concatenate([np.atleast_1d(part) for part in parts]) for parts in zip(*self.plain, strict=True)
            )
            found[self.tokens.below(nodes, most)] = True
        found[self.tokens.ending_at(np.concatenate([*self.alive, np.array(self.few, np.int32)]))] = True
        for source, target in reversed(self.copies):
            found[target] |= found[source]
        return found

    def _leave_loop(self, loop: Loop) -> NDArray[np.bool_]:
        """Go to the nodes at which tokens leave the first state's loop; tokens that do not leave it are allowed."""
        now, of_set = self.now, self.tokens.of_set(loop.symbols)
        self.copies.append(of_set.copies)
        is_taken = np.zeros(257, np.bool_)
        is_taken[:256] = self.automaton.table[now.state, self.automaton.columns] != REFUSED
        chosen = np.flatnonzero(is_taken)
        chosen_exits = ranges(of_set.starts[chosen], of_set.starts[chosen + 1] - of_set.starts[chosen])
        nodes = of_set.exits[chosen_exits]
        is_counted = loop.action is Action.COUNT and (now.fewest > 0 or now.most < self.vocabulary.longest)
        most = now.most if is_counted else UNBOUNDED
        # the last character of these may not have been counted yet
        last = of_set.inside[self.tokens.chars[of_set.inside] > most]
        fits = len(now.stack) + self.table.max_depth <= MAX_DEPTH
        if not fits:  # also inside a character
            last = of_set.inside
        nodes = np.append(nodes, last)
        chars = np.append(of_set.chars[chosen_exits], self.tokens.chars[last] - 1)
        numbers = np.zeros(1, np.intp)
        if is_counted:
            nodes, chars = nodes[chars <= most], chars[chars <= most]
            contexts = [
                now._replace(fewest=max(now.fewest - n, 0), most=less(now.most, n))[1:]
                for n in range(chars.max(initial=0) + 1)
            ]
            numbers = np.array([self.contexts.number(context) for context in contexts])
        self.node, self.state = nodes, np.full(len(nodes), now.state, np.int32)
        self.context = numbers[chars] if is_counted else np.zeros(len(nodes), np.intp)
        if len(now.stack) + self.table.depths[now.state] > MAX_DEPTH:
            return np.zeros(len(self.vocabulary), np.bool_)
        found = of_set.is_within & (self.tokens.token_chars <= most) if is_counted else of_set.is_within.copy()
        return found if fits else found & self.tokens.is_whole[self.tokens.node_of]

    def _step_few(self) -> None:
        """Step walks one by one, level by level, until none are left, or too many."""
        table, vocabulary, tokens = self.table, self.vocabulary, self.tokens
        first_child, is_whole, latest, depth, is_ragged, _, count, *_, is_last = tokens.views
        entries, columns, depths = table.entries, table.columns_by_byte, table.depths
        text, is_free, step, heights = vocabulary.text, table.is_free, self.contexts.step, self.contexts.heights
        walks = list(zip(self.node.tolist(), self.state.tolist(), self.context.tolist(), strict=True))
        begun: list[tuple[int, int, int, int, int]] = []
        while walks:
            begun = []
            for node, state, context in walks:
                first, last = first_child[node], first_child[node + 1]
                if first == last:
                    continue
                children = kept = text[first:last]
                if count[node] >= MIN_MORE:
                    about = table.reading(state)
                    is_taken = not self.loop and self.taken.take_children(about, node, context, children)
                    kept = children.translate(None, about.passed if is_taken else about.refused)
                is_plain, is_inside = is_free(state) and is_whole[node], self._is_inside(node)
                for byte in kept:
                    value, child = entries[state, columns[byte]], first + children.index(byte)
                    is_known = (is_plain and latest[child] < depth[child]) or (is_inside and not is_ragged[child])
                    if value != REFUSED and not is_known:
                        begun.append((child, state, context, byte, value))
            if len(begun) > FEW:
                break
            walks = []
            same: dict[tuple[int, int, int], list[int]] = {}
            for node, *walk in begun:
                state, context = step(*walk)
                if context == REFUSED:
                    continue
                byte, value = walk[2:]
                fits = heights[context] + depths[state] <= MAX_DEPTH
                if fits:
                    self.few.append(node)
                if is_last[node] and byte in BLANKS and value & ACTION_MASK == BLANK and table.is_run(state):
                    continue
                if 1 < count[node] <= MOST_ALIKE:
                    alike = same.setdefault((tokens.ends(node), state, context), [])
                    alike.append(node)
                    if len(alike) > 1:
                        continue
                walks.append((node, state, context))
                if fits and is_free(state) and is_whole[node]:
                    counts = table.loops.of(state).action is Action.COUNT  # type: ignore[union-attr]
                    self.plain.append((node, self.contexts.values[context][1] if counts else UNBOUNDED))
            self._copy([nodes for nodes in same.values() if len(nodes) > 1])
        self.node, self.state, self.context = np.array([walk[:3] for walk in begun], np.intp).reshape(-1, 3).T
        if begun:
            self._read()

    def _copy(self, alike: list[list[int]]) -> None:
        """Allow tokens below the nodes of a list like those below its first node, the only one whose walk continues."""
        if alike:
            pairs = np.array([(nodes[0], node) for nodes in alike for node in nodes[1:]], np.int32)
            self.copies.append(np.stack([self.tokens.ids_below(nodes) for nodes in pairs.T]))

    def _is_inside(self, node: int) -> bool:
        """Whether a node is inside a character of the loop that tokens leave; for whole characters the result is
        known."""
        symbols, tokens = self.known_symbols, self.tokens
        return bool(symbols) and not tokens.is_whole[node] and not tokens.symbols_of(node) & ~symbols

    def _leave(self) -> None:
        """End walks whose tokens are known from elsewhere, and allow plain tokens where states are free."""
        loops, can_loop = self.table.loops, self.table.loops.can_loop[self.state]
        if not can_loop.any():
            return
        is_known = np.zeros(len(self.node), np.bool_)
        for state in distinct(self.state[can_loop]):
            loop = loops.of(state)
            assert loop is not None
            chosen = np.flatnonzero(self.state == state)
            if self.loop is None:
                inside = chosen[self.tokens.within(self.node[chosen], loop.symbols)]
                is_known[inside] = self.taken.take_walks(state, loop, self.node[inside], self.context[inside])
            if loops.is_free(state):
                free = chosen[self.tokens.is_whole[self.node[chosen]] & ~is_known[chosen] & self._fits(chosen)]
                most = np.array([context[1] for context in self.contexts.values])[self.context[free]]
                self.plain.append(
                    (self.node[free], most if loop.action is Action.COUNT else np.full_like(most, UNBOUNDED))
                )
        self._keep(~is_known)

    def _fits(self, chosen: Array | slice) -> NDArray[np.bool_]:
        """Whether each of these walks can reach an end within the maximum depth of the stack."""
        heights = np.array(self.contexts.heights)[self.context[chosen]]
        found: NDArray[np.bool_] = heights + self.automaton.depths[self.state[chosen]] <= MAX_DEPTH
        return found

    def _expand(self) -> None:
        """Go from each node to its children; where plain tokens have been allowed, go only to those with other tokens
        below."""
        first = self.vocabulary.first_child[self.node]
        counts = self.vocabulary.first_child[self.node + 1] - first
        parents, children = np.arange(len(counts)).repeat(counts), ranges(first, counts)
        is_free = np.zeros(len(counts), np.bool_)
        for state in distinct(self.state[self.table.loops.can_loop[self.state]]):
            if self.table.loops.is_free(state):
                is_free |= (self.state == state) & self.tokens.is_whole[self.node]
        if is_free.any():
            is_needed = ~is_free[parents] | (self.tokens.last_plain_from[children] >= self.tokens.depth[children])
            parents, children = parents[is_needed], children[is_needed]
        if self.known_symbols:
            is_inside = self.tokens.within(self.node, self.known_symbols, is_whole=False)
            is_needed = ~is_inside[parents] | self.tokens.is_ragged[children]
            parents, children = parents[is_needed], children[is_needed]
        self.node, self.state, self.context = children, self.state[parents], self.context[parents]

    def _keep(self, kept: NDArray[np.bool_]) -> None:
        if not kept.all():
            chosen = np.flatnonzero(kept)
            self.node, self.state, self.context = self.node[chosen], self.state[chosen], self.context[chosen]

    def _read(self) -> None:
        """Read each node's byte, and keep the walks that the automaton does not refuse."""
        byte = self.vocabulary.byte_of[self.node]
        entries = self.automaton.table[self.state, self.table.columns[byte]]
        is_read = entries != REFUSED
        self._keep(is_read)
        entries, states, contexts = entries[is_read], self.state, self.context
        actions, self.state = entries & ACTION_MASK, entries >> ACTION_BITS
        if len(self.contexts.values) > 1:
            self.context = np.array(self.contexts.unblanked, np.intp)[contexts]
        counting, others = np.flatnonzero(actions == COUNT), np.flatnonzero(actions > COUNT)
        if len(counting):
            numbers = distinct(contexts[counting])
            after_each = np.zeros(numbers[-1] + 1, np.intp)
            after_each[numbers] = [self.contexts.count(number) for number in numbers]
            self.context[counting] = after_each[contexts[counting]]
        if len(others):
            byte = byte[is_read][others]
            if len(others) <= FEW:
                asked, firsts, same = others, EVERY, EVERY
            else:
                keys = contexts[others] << 40 | entries[others].astype(np.int64) << 8 | KINDS[byte]
                _, firsts, same = np.unique(keys, return_index=True, return_inverse=True)
                asked = others[firsts]
            walks = (part.tolist() for part in (states[asked], contexts[asked], byte[firsts], entries[asked]))
            after = np.array(list(map(self.contexts.step, *walks)))
            self.state[others], self.context[others] = after[same].T
        if len(counting) or len(others):
            self._keep(self.context >= 0)
        if len(self.node):
            fits = max(self.contexts.heights) + self.table.max_depth <= MAX_DEPTH
            self.alive.append(self.node if fits else self.node[self._fits(slice(None))])
            self._leave()


def distinct(numbers: Array) -> list[int]:
    """The distinct values among small numbers; ``np.unique`` takes longer."""
    found: list[int] = np.flatnonzero(np.bincount(numbers)).tolist()
    return found
