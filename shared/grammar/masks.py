"""The mask of a configuration: which tokens may follow, for the whole vocabulary. Introduced in phase 12.

All beginnings of tokens walk at once, level by level of the trie, as arrays: state, counters, and a stack as a linked
list, in which frames that several walks share exist once. A level costs some numpy operations, and a walk ends where
the automaton refuses, so most masks need few levels. Where all text may follow, as inside a string, the tokens that are
plain from there on are allowed without a walk (:mod:`shared.grammar.plain`).

A mask depends on little: the state, the counters as far as a token can use them up, and the frames that a token can
close. It is kept by these, within a bound of bytes.
"""

from collections import OrderedDict
from collections.abc import Iterator
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.grammar.automaton import (
    ACTION_BITS,
    DIGITS_ENDED,
    MAX_BLANKS,
    MAX_DEPTH,
    REFUSED,
    SPACE_ENDED,
    UNBOUNDED,
    Action,
    Automaton,
    Configuration,
)
from shared.grammar.plain import ACTION_MASK, free_loops
from shared.grammar.vocabulary import GrammarVocabulary

CACHE_BYTES = 8_000_000
SPACE, LINE_BREAK, TAB = b" \n\t"
Array = NDArray[Any]


class TokenMasks:
    """The masks of one grammar. Threads may share it.

    Args:
        cache_bytes: the most that kept masks may take.
    """

    def __init__(self, automaton: Automaton, vocabulary: GrammarVocabulary, *, cache_bytes: int = CACHE_BYTES) -> None:
        self.automaton, self.vocabulary = automaton, vocabulary
        self.num_walks = 0  # masks that were computed
        self.cache_bytes = cache_bytes
        self._most = max(1, cache_bytes // (len(vocabulary) // 8 + 200))
        self._masks: OrderedDict[tuple, NDArray[np.uint8]] = OrderedDict()
        self._examined: dict[tuple, set[tuple[int, ...]]] = {}  # the frames that masks of a place have depended on
        self._lock = Lock()
        self.loops = free_loops(automaton, vocabulary.usable_bytes)
        if (self.loops != REFUSED).any():
            _ = vocabulary.plain  # made now, not by the first step that needs it

    def mask(self, now: Configuration) -> NDArray[np.bool_]:
        """bool ``[V]``: the tokens that may follow; the end ids if the text may end here."""
        found = np.unpackbits(self._packed(now), count=len(self.vocabulary)).view(np.bool_)
        if self.automaton.is_end(now):
            found[list(self.vocabulary.end_ids)] = True
        return found

    def _packed(self, now: Configuration) -> NDArray[np.uint8]:
        longest = self.vocabulary.longest
        room = min(MAX_DEPTH - len(now.stack), longest + int(self.automaton.depths.max()) + 1)
        most = now.most if now.most == UNBOUNDED else min(now.most, longest)
        place = now.state, min(now.fewest, longest), most, now.blanks, room
        with self._lock:
            for examined in self._examined.get(place, ()):
                key = place, examined, _frames(now, examined)
                if key in self._masks:
                    self._masks.move_to_end(key)
                    return self._masks[key]
        walk = _Walk(self.automaton, self.vocabulary, self.loops, now)
        packed = np.packbits(walk.run())
        examined = tuple(sorted(walk.examined))
        with self._lock:
            self.num_walks += 1
            self._examined.setdefault(place, set()).add(examined)
            self._masks[place, examined, _frames(now, examined)] = packed
            while len(self._masks) > self._most:
                self._masks.popitem(last=False)
            if len(self._examined) > 4 * self._most:
                self._examined.clear()
                self._masks.clear()
        return packed


def _frames(now: Configuration, examined: tuple[int, ...]) -> tuple[int, ...]:
    """What stands at the examined places: 2 k is the set of seen keys k frames below, 2 k + 1 the frame itself."""
    seen = [now.seen, *(keys for _, keys in reversed(now.stack))]
    frames = [frame for frame, _ in reversed(now.stack)]
    found = ((frames if place % 2 else seen)[place // 2 :] for place in examined)
    return tuple(values[0] if values else REFUSED for values in found)


class _Walk:
    """All tokens of a vocabulary from one configuration.

    A walk has a ``top``, an index of the frames ``frame_of``, ``seen_below`` and ``below``; index 0 is the empty stack,
    and those up to the depth of the configuration are its own.
    """

    def __init__(
        self, automaton: Automaton, vocabulary: GrammarVocabulary, loops: NDArray[np.int32], now: Configuration
    ) -> None:
        self.automaton, self.vocabulary, self.loops = automaton, vocabulary, loops
        self.examined: set[int] = set()
        self.own = len(now.stack)  # frames
        self.frame_of = np.array([REFUSED, *(frame for frame, _ in now.stack)], np.int64)
        self.seen_below = np.array([0, *(seen for _, seen in now.stack)], np.uint64)
        self.below = np.arange(-1, self.own)
        self.depth_of = np.arange(self.own + 1)
        self.walks: dict[str, Array] = {
            "node": np.zeros(1, np.int32),
            "state": np.array([now.state]),
            "fewest": np.array([now.fewest]),
            "most": np.array([now.most]),
            "blanks": np.array([now.blanks]),
            "seen": np.array([now.seen], np.uint64),
            "top": np.array([self.own]),
        }

    def run(self) -> NDArray[np.bool_]:
        """bool ``[V]``, without the end ids."""
        is_alive = np.zeros(len(self.vocabulary.byte_of), np.bool_)
        has_room, depth = self._has_room(), 0
        while len(self.walks["node"]):
            self._expand(self._leave(is_alive, has_room, depth), depth)
            self._read()
            has_room, depth = self._has_room(), depth + 1
            is_alive[self.walks["node"][has_room]] = True
        return is_alive[self.vocabulary.node_of]

    def _has_room(self) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = (
            self.depth_of[self.walks["top"]] + self.automaton.depths[self.walks["state"]] <= MAX_DEPTH
        )
        return found

    def _leave(self, is_alive: NDArray[np.bool_], has_room: NDArray[np.bool_], depth: int) -> NDArray[np.bool_]:
        """The walks that are in a free state: the tokens below that are plain from here on need no further step."""
        node, loops = self.walks["node"], self.loops[self.walks["state"]]
        is_free: NDArray[np.bool_] = loops != REFUSED
        if is_free.any():
            is_free &= self.vocabulary.plain.is_whole[node]
            chosen = is_free & has_room
            if chosen.any():
                counts = loops[chosen] & ACTION_MASK == Action.COUNT
                most = np.where(counts, self.walks["most"][chosen], UNBOUNDED)
                is_alive[self.vocabulary.plain.below(node[chosen], depth, most)] = True
        return is_free

    def _expand(self, is_free: NDArray[np.bool_], depth: int) -> None:
        """Go from each node to its children; from one in a free state only to those with tokens that are not plain."""
        first_child, node = self.vocabulary.first_child, self.walks["node"]
        counts = first_child[node + 1] - first_child[node]
        parents = np.arange(len(node)).repeat(counts)
        starts = (first_child[node] - counts.cumsum() + counts).repeat(counts)
        children = starts + np.arange(len(parents), dtype=np.int32)
        if is_free.any():
            is_needed = ~is_free[parents] | (self.vocabulary.plain.last_plain_from[children] > depth)
            parents, children = parents[is_needed], children[is_needed]
        self.walks = {name: values[parents] for name, values in self.walks.items()}
        self.walks["node"] = children

    def _read(self) -> None:
        """Read the byte of each node, and keep the walks that the automaton does not refuse."""
        automaton = self.automaton
        byte = self.vocabulary.byte_of[self.walks["node"]]
        entries = automaton.table[self.walks["state"], automaton.columns[byte]]
        is_kept = entries != REFUSED
        if not is_kept.all():
            self.walks = {name: values[is_kept] for name, values in self.walks.items()}
            entries, byte = entries[is_kept], byte[is_kept]
        actions, arguments = entries & (1 << ACTION_BITS) - 1, entries >> ACTION_BITS
        if not actions.any():
            self.walks["state"], self.walks["blanks"] = arguments, np.zeros(len(arguments), np.int64)
            return
        parts = [self._act(Action(action), *each) for action, each in self._by_action(actions, arguments, byte)]
        self.walks = {name: np.concatenate([part[name] for part in parts]) for name in self.walks}

    def _by_action(
        self, actions: Array, arguments: Array, byte: Array
    ) -> Iterator[tuple[int, tuple[dict[str, Array], Array, Array]]]:
        for action in np.unique(actions).tolist():
            chosen = np.flatnonzero(actions == action)
            yield (
                action,
                ({name: values[chosen] for name, values in self.walks.items()}, arguments[chosen], byte[chosen]),
            )

    def _act(self, action: Action, walks: dict[str, Array], argument: Array, byte: Array) -> dict[str, Array]:
        """The walks behind an action; its specification is :meth:`Automaton.step`."""
        blanks, is_kept = np.zeros(len(argument), np.int64), np.ones(len(argument), np.bool_)
        match action:
            case Action.GOTO:
                walks["state"] = argument
            case Action.BLANK:
                is_digit = (byte >= ord("0")) & (byte <= ord("9"))
                digits = np.maximum(walks["blanks"], SPACE_ENDED) + 1
                run = np.where(walks["blanks"] > SPACE_ENDED, 0, walks["blanks"])
                opened = np.where(byte == SPACE, SPACE_ENDED, 1)
                is_blank = np.where(run == 0, byte != TAB, (run <= MAX_BLANKS) & (byte != LINE_BREAK))
                is_kept = np.where(is_digit, digits <= DIGITS_ENDED, is_blank)
                blanks = np.where(is_digit, digits, np.where(run == 0, opened, run + 1))
                walks["state"] = argument
            case Action.COUNT:
                is_kept = walks["most"] > 0
                walks["state"] = argument
                walks["fewest"] = np.maximum(walks["fewest"] - 1, 0)
                walks["most"] = np.where(walks["most"] == UNBOUNDED, UNBOUNDED, walks["most"] - 1)
            case Action.PUSH:
                is_kept = self._push(walks, argument)
            case Action.POP:
                is_kept = self._pop(walks, argument)
            case Action.KEY:
                self._examine_seen(walks["top"])
                state, keys, is_bounded = self.automaton.keys[argument].T
                missing = keys & ~walks["seen"]
                is_kept = (missing != 0) | (is_bounded == 0)
                walks["state"], walks["seen"] = state.astype(np.int64), walks["seen"] | missing & -missing
            case Action.GUARD:
                self._examine_seen(walks["top"])
                state, keys, preset, most = self.automaton.guards[argument].T
                is_kept = np.bitwise_count((walks["seen"] | preset) & keys) < most
                walks["state"] = state.astype(np.int64)
            case Action.CHOOSE:
                colour = self._judge(walks, argument)
                walks["state"] = self.automaton.returns[self.automaton.pops[argument, 3] + colour].astype(np.int64)
                is_kept = walks["state"] != REFUSED
        walks["blanks"] = blanks
        return walks if is_kept.all() else {name: values[is_kept] for name, values in walks.items()}

    def _push(self, walks: dict[str, Array], argument: Array) -> NDArray[np.bool_]:
        state, frame, fewest, most, depth = self.automaton.pushes[argument].T.astype(np.int64)
        is_kept: NDArray[np.bool_] = self.depth_of[walks["top"]] + depth <= MAX_DEPTH
        self.frame_of = np.append(self.frame_of, frame)
        self.seen_below = np.append(self.seen_below, walks["seen"])
        self.below = np.append(self.below, walks["top"])
        self.depth_of = np.append(self.depth_of, self.depth_of[walks["top"]] + 1)
        walks["top"] = np.arange(len(self.below) - len(argument), len(self.below))
        walks["state"], walks["fewest"], walks["most"] = state, fewest, most
        walks["seen"] = np.zeros(len(argument), np.uint64)
        return is_kept

    def _pop(self, walks: dict[str, Array], argument: Array) -> NDArray[np.bool_]:
        top, colour = walks["top"], self._judge(walks, argument)
        own = top[top <= self.own]
        if len(own):
            self.examined |= {2 * (self.own - place) + 1 for place in np.unique(own).tolist()}
        frame = self.frame_of[top] + colour
        state = self.automaton.returns[frame].astype(np.int64)
        walks["state"], walks["seen"], walks["top"] = state, self.seen_below[top], self.below[top]
        is_kept: NDArray[np.bool_] = (walks["fewest"] == 0) & (state != REFUSED)
        walks["fewest"], walks["most"] = np.zeros(len(top), np.int64), np.full(len(top), UNBOUNDED)
        return is_kept

    def _judge(self, walks: dict[str, Array], argument: Array) -> Array:
        """The colours of rows of ``pops`` behind their clauses, which may add to the seen keys."""
        colour, seen = self.automaton.pops[argument, 0].astype(np.int64), walks["seen"].copy()
        for pop in np.unique(argument).tolist():
            _, first, last, _ = self.automaton.pops[pop].tolist()
            chosen = argument == pop
            if last > first:
                self._examine_seen(walks["top"][chosen])
            for bits, trigger, keys, least, more in self.automaton.clauses[first:last]:
                now = seen[chosen]
                is_broken = (now & trigger == trigger) & (np.bitwise_count(now & keys) < least)
                colour[chosen] &= np.where(is_broken, ~np.int64(bits), np.int64(-1))
                seen[chosen] |= np.where(is_broken, more, np.uint64(0))
        walks["seen"] = seen
        return colour

    def _examine_seen(self, top: Array) -> None:
        """Note that the sets of seen keys of these walks matter, if they are the configuration's own."""
        self.examined |= {2 * (self.own - place) for place in np.unique(top[top <= self.own]).tolist()}
