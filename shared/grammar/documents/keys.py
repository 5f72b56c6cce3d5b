"""The states that spell an object's keys. Introduced in phase 12.

The named keys form a trie. A key that leaves it is unnamed, and is read by the automaton of unnamed keys if
alternatives allow them. A guard refuses a byte that leads only to names that have been seen, so every key that begins
can be completed.
"""

from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shared.grammar.automata.assembler import Assembler, Entries
from shared.grammar.automata.automaton import ACTION_BITS, REFUSED, Action, entry
from shared.grammar.automata.dfa import DEAD
from shared.grammar.documents.clauses import Requirements
from shared.grammar.documents.texts import spell
from shared.grammar.limits import CELLS, ROW, Budget
from shared.grammar.schema.shapes import Value

QUOTE = ord('"')
Alive = tuple[tuple[int, int], ...]
"""(alternative, how many unneeded keys it may still have), sorted."""
Follower = tuple[int, int, Value]
"""An alternative that a key leaves alive, what remains for it, and the value that it expects."""


class Trie:
    """A rule's names as a trie: each node's children by byte, and the name that ends there."""

    def __init__(self, names: list[str], budget: Budget) -> None:
        self.children: list[dict[int, int]] = [{}]
        self.ends: list[str | None] = [None]
        for name in names:
            budget.spend(4 + 2 * len(name))
            node = 0
            for byte in spell(name) or b"":
                if byte not in self.children[node]:
                    self.children[node][byte] = len(self.children)
                    self.children.append({})
                    self.ends.append(None)
                node = self.children[node][byte]
            if spell(name) is not None:
                self.ends[node] = name


class KeyOwner(Protocol):
    """The rule of the objects that have these keys."""

    assembler: Assembler
    requirements: Requirements
    trie: Trie

    def follow_name(self, alive: Alive, key: str) -> tuple[Follower, ...]:
        """The alternatives that remain alive after a named key."""

    def follow_other(self, alive: Alive, bits: int) -> tuple[Follower, ...]:
        """The alternatives that remain alive after an unnamed key; ``bits`` are those that its automaton gives."""

    def end_key(self, followers: tuple[Follower, ...], bit: int, *, is_bounded: bool) -> int:
        """The quote that ends a key. A key with a bounded bit must not have been seen; ``bit`` may be 0."""


class KeyStates:
    """The states of keys while a given set of alternatives is alive.

    Attributes:
        mask: bits of the names that may follow.
        is_repeatable: whether a key without a bit may follow.
        is_possible: whether any key may follow.
    """

    def __init__(self, rule: KeyOwner, alive: Alive) -> None:
        self.rule, self.alive, self.assembler = rule, alive, rule.assembler
        self.requirements = rule.requirements
        named = {name: rule.follow_name(alive, name) for name in self.requirements.names}
        self.names = {name: followers for name, followers in named.items() if followers}
        unnamed = {bits: rule.follow_other(alive, bits) for bits in self.requirements.classes}
        self.others = {bits: followers for bits, followers in unnamed.items() if followers}
        bits = self.requirements.bits
        self.mask = sum(bits.get(name, 0) for name in self.names)
        self.trie = rule.trie
        self._next = self._live() if self.others else None
        self._masks: dict[int, tuple[int, bool]] = {}
        self.is_repeatable = self._has_other(0, 0) or any(name not in bits for name in self.names)
        self.is_possible = bool(self.names) or self.is_repeatable
        self._first_other: int | None = None

    def _live(self) -> NDArray[np.int32]:
        """int32 ``[S, 256]``: the automaton of unnamed keys, without states that lead to no allowed key."""
        dfa = self.requirements.other_dfa
        is_live = np.isin(dfa.accepts, list(self.others))
        self.assembler.budget.spend(len(dfa) * ROW)
        targets = dfa.next[:, dfa.columns]
        while True:
            self.assembler.budget.spend(8 + dfa.num_cells // CELLS)
            found = is_live | (is_live[dfa.next] & (dfa.next != DEAD)).any(axis=1)
            if (found == is_live).all():
                break
            is_live = found
        return np.where((targets != DEAD) & is_live[targets], targets, DEAD).astype(np.int32)

    def _has_other(self, node: int, state: int) -> bool:
        """Whether an unnamed key can be spelled, starting from this trie node and state."""
        if self._next is None or state == DEAD:
            return False
        self.assembler.budget.spend(4 + len(self.trie.children[node]))
        children = self.trie.children[node]
        accepts = int(self.requirements.other_dfa.accepts[state])
        if self.trie.ends[node] is None and accepts in self.others:
            return True
        row = self._next[state]
        leaving = row != DEAD
        leaving[list(children)] = False
        return bool(leaving.any()) or any(self._has_other(child, int(row[b])) for b, child in children.items())

    def _below(self, node: int) -> tuple[int, bool]:
        """The bits of the names at a node and below, and whether some of these names have no bit."""
        self.assembler.budget.spend(1)
        if node not in self._masks:
            mask, is_free = 0, False
            name = self.trie.ends[node]
            if name in self.names:
                mask = self.requirements.bits.get(name, 0)
                is_free = not mask
            for child in self.trie.children[node].values():
                more, is_more = self._below(child)
                mask, is_free = mask | more, is_free or is_more
            self._masks[node] = mask, is_free
        return self._masks[node]

    def first(self) -> int:
        """The state after the closing quote."""
        return self._named(0, 0 if self._next is not None else DEAD)

    def _named(self, node: int, state: int) -> int:
        """The state at a node of the trie, with the automaton of unnamed keys in a given state, or ``DEAD``."""
        number = self.assembler.state((id(self), node, state), lambda: self._spell(number, node, state))
        return number

    def _spell(self, number: int, node: int, state: int) -> Entries:
        entries: Entries = {}
        if state != DEAD and self._next is not None:
            self.assembler.add_rows(number, self._rows()[state : state + 1])
            entries |= dict.fromkeys([*self.trie.children[node], QUOTE], REFUSED)
            entries |= self._end_other(int(self.requirements.other_dfa.accepts[state]))
        mask, is_free = self._below(node)
        for byte, child in self.trie.children[node].items():
            following = int(self._next[state, byte]) if state != DEAD and self._next is not None else DEAD
            more, is_more = self._below(child)
            if self._has_other(child, following):
                entries[byte] = entry(Action.GOTO, self._named(child, following))
            elif more or is_more:
                target = self._named(child, DEAD)
                is_guarded = not is_more and (more != mask or is_free or state != DEAD)
                entries[byte] = self.assembler.guard(target, more) if is_guarded else entry(Action.GOTO, target)
        name = self.trie.ends[node]
        if name is not None:
            entries.pop(QUOTE, None)
            if state != DEAD:
                entries[QUOTE] = REFUSED
            if name in self.names:
                bit = self.requirements.bits.get(name, 0)
                entries[QUOTE] = self.rule.end_key(self.names[name], bit, is_bounded=True)
        return entries

    def _end_other(self, accepts: int) -> Entries:
        """The quote that ends an unnamed key."""
        followers = self.others.get(accepts)
        if not followers:
            return {}
        is_bounded = self.requirements.num_sums > 1 and any(left >= 0 for _, left, _ in followers)
        return {QUOTE: self.rule.end_key(followers, self.requirements.other_bit(accepts), is_bounded=is_bounded)}

    def _rows(self) -> NDArray[np.int32]:
        """int32 ``[S, 256]``: the entries after which a key is unnamed."""
        if self._first_other is None:
            targets = self._next
            assert targets is not None
            self.assembler.budget.spend(len(targets) * ROW)
            accepts = self.requirements.other_dfa.accepts.tolist()
            self._first_other = len(self.assembler.entries)
            for state, bits in enumerate(accepts):
                self.assembler.state((id(self), "other", state), partial(self._end_other, bits))
            shifted = (targets + self._first_other) << ACTION_BITS | Action.GOTO
            self._other_rows = np.where(targets == DEAD, REFUSED, shifted).astype(np.int32)
            self.assembler.add_rows(self._first_other, self._other_rows)
        return self._other_rows
