"""What the shapes of arrays and objects say about their parts, and which parts nothing can satisfy. Introduced in phase
12.

A part that nothing satisfies is dropped: a property becomes a forbidden key, and an item the end of its array. The same
search finds the minimum number of stack frames that a value needs.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace

import numpy as np

from shared.grammar.automata.automaton import UNBOUNDED
from shared.grammar.automata.counting import any_text
from shared.grammar.automata.dfa import DEAD, DFA, trim
from shared.grammar.automata.languages import combine, words
from shared.grammar.documents.texts import Texts, spell
from shared.grammar.limits import ROW, Budget, GrammarError
from shared.grammar.numbers.digits import machine
from shared.grammar.schema.disjuncts import Disjuncts, Unresolved
from shared.grammar.schema.document import SchemaDocument, escape
from shared.grammar.schema.shapes import ANYTHING, NEVER, Array, Object, Shape, String, Value, Wrong

SUM_SHIFT = 48
NUM_SUMS = 31
"""A prime, the modulus of the checksums that distinguish keys."""
OF_OTHERS = ("additionalProperties", "patternProperties")
"""Keywords about unnamed properties."""


class Members:
    """The parts of arrays and objects of one document."""

    def __init__(self, document: SchemaDocument, texts: Texts) -> None:
        self.document, self.texts = document, texts
        self.disjuncts = Disjuncts(document, self)
        self._depths: dict[Value, int] = {}
        self._active: set[Value] = set()
        self._is_provisional = False
        self._num_guesses = 0
        self._name_dfas: dict[tuple[object, ...], DFA] = {}
        self._groups: dict[Value, tuple[Shape, ...]] = {}
        self._numbers: dict[Shape, int] = {}
        self._patterns_of: dict[Object, list[str]] = {}
        self._only: dict[Object, frozenset[str | None] | None] = {}

    def number(self, shape: Shape) -> int:
        """The shapes in the order in which they were met, which does not depend on hashes."""
        return self._numbers.setdefault(shape, len(self._numbers))

    def shapes(self, value: Value) -> tuple[Shape, ...]:
        """The satisfiable shapes of a value, by their numbers."""
        if value in self._groups:
            return self._groups[value]
        num_guesses = self._num_guesses
        possible = [shape for shape in self.disjuncts.shapes(value) if self._shape_depth(shape) < NEVER]
        found = tuple(sorted(possible, key=self.number))
        if num_guesses == self._num_guesses:
            self._groups[value] = found
        return found

    def depth(self, value: Value) -> int:
        """The number of frames that a value needs; ``NEVER`` if nothing satisfies it. A value inside itself counts as
        ``NEVER``; results that rely on this are kept only for the outermost value.
        """
        self.document.budget.spend(1)
        if value in self._depths:
            return self._depths[value]
        if value in self._active:
            self._is_provisional = True
            return NEVER
        is_outermost, num_guesses = not self._active, self._num_guesses
        self._active.add(value)
        try:
            depth = min(map(self._shape_depth, self.disjuncts.shapes(value)), default=NEVER)
        except Unresolved:  # while alternatives are compared: assume that it can be satisfied
            self._num_guesses += 1
            return 0
        finally:
            self._active.remove(value)
        is_certain = is_outermost or depth < NEVER or not self._is_provisional
        if is_certain and num_guesses == self._num_guesses:
            self._depths[value] = depth
        if is_outermost:
            self._is_provisional = False
        return depth

    def known_depth(self, value: Value) -> int:
        """Like ``depth``, as a separate query: values under examination count as satisfied, not as ``NEVER``."""
        others = self._active, self._is_provisional
        self._active, self._is_provisional = set(), False
        try:
            return self.depth(value)
        finally:
            self._active, self._is_provisional = others

    def _shape_depth(self, shape: Shape) -> int:
        self.document.budget.spend(2)
        if isinstance(shape, String):
            return NEVER if self.texts.is_empty(shape) else 1
        if isinstance(shape, Array):
            return min(NEVER, 1 + self._items_depth(shape))
        if isinstance(shape, Object):
            return min(NEVER, 1 + self.closing_depth(shape))
        return NEVER if machine(shape, self.document.budget).is_empty else 0

    def _items_depth(self, shape: Array) -> int:
        self.document.budget.spend(len(shape.first))
        depths = [self.depth(shape.item(number)) for number in range(min(shape.fewest, len(shape.first) + 1))]
        some = [self.depth(shape.rest | value) for value in shape.some]
        if NEVER in some and not shape.first:
            return NEVER
        if some and (NEVER in some or len(some) > 3 or len(shape.first) + len(some) > self.most_items(shape)):
            raise self.document.error("#", "a negated items cannot be combined with what stands beside it")
        depths += some
        return max(depths, default=0)

    def most_items(self, shape: Array) -> int:
        """The maximum number of items of an array, which ends before an item that nothing satisfies."""
        self.document.budget.spend(1 + len(shape.first))
        for number in range(len(shape.first) + 1):
            if number >= shape.most or self.depth(shape.item(number)) == NEVER:
                return min(number, shape.most)
        return shape.most

    # Objects

    def patterns(self, shape: Object) -> list[str]:
        if shape not in self._patterns_of:
            nodes = sorted(shape.nodes | shape.judges)
            self._patterns_of[shape] = [pattern for node in nodes for pattern in self._patterns(node)]
            self.document.budget.spend(2 * (len(nodes) + len(self._patterns_of[shape])))
        return self._patterns_of[shape]

    def _patterns(self, node: int) -> Iterable[str]:
        found = self.document.schemas[node].get("patternProperties", ())
        for pattern in found:
            path = f"{self.document.paths[node]}/patternProperties/{escape(pattern)}"
            self.document.places.setdefault(("pattern", pattern), path)
        return found

    def named(self, shape: Object) -> list[str]:
        """The keys that an object's schemas mention, in the order of the schema."""
        nodes = sorted(shape.nodes), sorted(shape.judges)
        members = [[self.document.schemas[node].get("properties", ()) for node in some] for some in nodes]
        self.document.budget.spend(sum(1 + len(keys) for some in members for keys in some))
        self.document.budget.spend(sum(map(len, (shape.members, shape.required, shape.forbidden))))
        self.document.budget.spend(sum(2 + len(keys) for _, keys in shape.dependents))
        found = dict.fromkeys(key for keys in members[0] for key in keys)
        found.update(dict.fromkeys(sorted(key for key, _ in shape.members)))
        found.update(dict.fromkeys(key for keys in members[1] for key in keys))
        found.update(dict.fromkeys(sorted(shape.required | shape.forbidden)))
        for key, needed in sorted((key, sorted(keys)) for key, keys in shape.dependents):
            found.update(dict.fromkeys([key, *needed]))
        return list(found)

    def matches(self, shape: Object, key: str) -> frozenset[str]:
        """The patterns that a key matches."""
        patterns = self.patterns(shape)
        if not patterns:
            return frozenset()
        text = spell(key) or b""
        self.document.budget.spend(2 + len(patterns) * (1 + len(text) // 4))
        return frozenset(pattern for pattern in patterns if self.texts.pattern(pattern).run(text))

    def member(self, shape: Object, key: str | None, matched: frozenset[str]) -> Value:
        """The value of a key. None: a key that the schema does not name but that matches these patterns."""
        if self.document.is_closed and key not in self._closed_names(shape, key):
            return self.document.nothing
        return self._said(shape, key, matched)

    def judged(self, shape: Object, key: str) -> Value:
        """What an object's schemas say about a key, which they may still name if the object is closed."""
        return self._said(shape, key, self.matches(shape, key))

    def _said(self, shape: Object, key: str | None, matched: frozenset[str]) -> Value:
        self.document.budget.spend(2 + len(shape.members) // 8 + 2 * len(shape.nodes))
        literals = {literal for name, literal in shape.members if name == key}
        for node in shape.nodes:
            schema, path = self.document.schemas[node], self.document.paths[node]
            found = []
            if key is not None and key in schema.get("properties", ()):
                found.append((schema["properties"][key], f"{path}/properties/{escape(key)}"))
            for pattern, inner in schema.get("patternProperties", {}).items() if matched else ():
                if pattern in matched:
                    found.append((inner, f"{path}/patternProperties/{escape(pattern)}"))
            if not found and "additionalProperties" in schema:
                found.append((schema["additionalProperties"], f"{path}/additionalProperties"))
            literals |= {
                self.document.literal(inner, place) for inner, place in found if inner is not True and inner != {}
            }
        if key is None:
            literals |= {one.literal for one in shape.last if self.is_wrong(one, None, matched)}
        return frozenset(literals)

    def _closed_names(self, shape: Object, key: str | None) -> Collection[str | None]:
        """The keys of a closed object, from all schemas that apply to it, so those of ``allOf`` add up; otherwise just
        the requested key.
        """
        if shape not in self._only:
            schemas = [self.document.schemas[node] for node in shape.nodes]
            speaks = shape.judges or any(keyword in schema for schema in schemas for keyword in OF_OTHERS)
            is_closed = not speaks and any("properties" in schema for schema in schemas)
            self._only[shape] = frozenset(self.named(shape)) if is_closed else None
        names = self._only[shape]
        return (key,) if names is None else names

    def is_outside(self, node: int, key: str | None, matched: frozenset[str]) -> bool:
        """Whether a node describes neither a key nor a pattern that the key matches."""
        schema = self.document.schemas[node]
        return key not in schema.get("properties", ()) and not matched.intersection(schema.get("patternProperties", ()))

    def is_wrong(self, one: Wrong, key: str | None, matched: frozenset[str]) -> bool:
        """Whether a key is one of a set of keys, at least one of which must have a wrong value."""
        return self.is_outside(one.node, key, matched) if one.pattern is None else one.pattern in matched

    def is_name(self, shape: Object, key: str) -> bool:
        """Whether a key may be spelled, and is a string that ``propertyNames`` allows."""
        text = spell(key)
        if text is None or not shape.names:
            return text is not None
        shapes = self.shapes(shape.names)
        self.document.budget.spend(2 + len(shapes) * (1 + len(text) // 4))
        return any(isinstance(one, String) and self.texts.dfa(one).run(text) > 0 for one in shapes)

    def allowed(self, shape: Object, more: Iterable[str] = ()) -> dict[str, Value]:
        """The keys that an object may have, among those named here and ``more``, and their values."""
        found = {}
        for key in dict.fromkeys([*self.named(shape), *more]):
            self.document.budget.spend(4 + len(key) // 8)
            value = self.member(shape, key, self.matches(shape, key))
            if key not in shape.forbidden and self.is_name(shape, key) and self.depth(value) < NEVER:
                found[key] = value
        is_changed = True
        while is_changed:  # a key may not occur without its required companions
            self.document.budget.spend(sum(1 + len(keys) // 4 for _, keys in shape.dependents))
            dropped = [key for key, keys in shape.dependents if key in found and not keys <= found.keys()]
            for key in dropped:
                found.pop(key, None)
            is_changed = bool(dropped)
        return found

    def needed(self, shape: Object) -> frozenset[str]:
        """The required keys and their required companions."""
        self.document.budget.spend(len(shape.required) + sum(2 + len(keys) for _, keys in shape.dependents))
        others: dict[str, list[str]] = {}
        for key, keys in shape.dependents:
            others.setdefault(key, []).extend(keys)
        found = set(shape.required)
        waiting = list(found)
        while waiting:
            for key in others.pop(waiting.pop(), ()):
                if key not in found:
                    found.add(key)
                    waiting.append(key)
        return frozenset(found)

    def other_keys(self, shape: Object) -> list[tuple[frozenset[str], Value]]:
        """Certainly different keys that the schema does not name: the patterns that each matches, and its value."""
        dfa, bits = self.other_names([shape])
        if len(bits) > 1:
            named = words([text for key in self.named(shape) if (text := spell(key)) is not None], self.document.budget)
            parts = [replace(dfa, accepts=dfa.accepts & bit) for bit in bits.values()]
            kept = combine([*parts, named], self.document.budget)
            dfa = replace(kept, accepts=np.where(kept.accepts >> len(bits) & 1, 0, kept.accepts))
        found = []
        for accepted in set(with_sums(dfa, NUM_SUMS, self.document.budget).accepts.tolist()) - {0}:
            matched = frozenset(name for name, bit in bits.items() if isinstance(name, str) and accepted & bit)
            value = self.member(shape, None, matched)
            if accepted & bits[shape.names] and self.depth(value) < NEVER:
                found.append((matched, value))
        return found

    def other_names(self, shapes: list[Object]) -> tuple[DFA, dict[str | Value, int]]:
        """The texts of keys, with a bit for each matching pattern, and for each ``names`` of a shape that allows it.
        Raises GrammarError if there are more patterns than bits.
        """
        patterns = [pattern for shape in shapes for pattern in self.patterns(shape)]
        kinds: list[str | Value] = list(dict.fromkeys([ANYTHING, *(shape.names for shape in shapes), *patterns]))
        if len(kinds) > SUM_SHIFT:
            raise GrammarError(f"Objects that are alive at once have more than {SUM_SHIFT} patterns of keys.")
        key = tuple(kinds)
        if key not in self._name_dfas:
            dfas = [self.texts.pattern(kind) if isinstance(kind, str) else self._names(kind) for kind in kinds]
            self._name_dfas[key] = combine(dfas, self.document.budget) if len(dfas) > 1 else dfas[0]
        return self._name_dfas[key], {kind: 1 << number for number, kind in enumerate(kinds)}

    def _names(self, names: Value) -> DFA:
        """The texts of the keys that ``propertyNames`` allows."""
        if not names:
            return any_text()
        shapes = tuple(one for one in self.shapes(names) if isinstance(one, String))
        return self.texts.group(shapes) if shapes else words([], self.document.budget)

    def closing_depth(self, shape: Object) -> int:
        """The number of frames that giving an object all that it requires may need."""
        needed, allowed = self.needed(shape), self.allowed(shape)
        if len(needed) > shape.most or not needed <= allowed.keys():
            return NEVER
        depths = [self.depth(allowed[key]) for key in sorted(needed)]
        others: list[tuple[frozenset[str], Value]] = []
        if shape.fewest > len(needed) or shape.outside or shape.wrong:
            others = self.other_keys(shape)
        spare = sorted(self.depth(allowed[key]) for key in allowed if key not in needed)
        spare += [self.depth(value) for _, value in others]
        missing = max(shape.fewest - len(needed), 0)
        if missing > NUM_SUMS and others:
            raise self.document.error("#", f"minProperties above {NUM_SUMS} is not supported")
        if missing > len(spare):
            return NEVER
        depths += sorted(spare)[:missing]
        for node in shape.outside:
            self.document.budget.spend(2 * len(allowed))
            keys = [self.depth(allowed[key]) for key in allowed if self.is_outside(node, key, self.matches(shape, key))]
            keys += [self.depth(value) for matched, value in others if self.is_outside(node, None, matched)]
            depths.append(min(keys, default=NEVER))
        depths += [self._wrong_depth(shape, one, others) for one in shape.wrong]
        return max(depths, default=0)

    def _wrong_depth(self, shape: Object, one: Wrong, others: list[tuple[frozenset[str], Value]]) -> int:
        """The number of frames that a key's wrong value needs. An unnamed key must be able to have it: such a key may
        occur as often as necessary."""
        found = [self.depth(value | {one.literal}) for matched, value in others if self.is_wrong(one, None, matched)]
        depth = min(found, default=NEVER)
        if depth == NEVER:
            named = [key for key in self.allowed(shape) if self.is_wrong(one, key, self.matches(shape, key))]
            is_possible = any(self.depth(self.allowed(shape)[key] | {one.literal}) < NEVER for key in named)
        if len(shape.wrong) > 1 or (shape.most != UNBOUNDED if depth < NEVER else is_possible):
            keyword = "additionalProperties" if one.pattern is None else "patternProperties"
            path = f"{self.document.paths[one.node]}/{keyword}"
            raise self.document.error(path, "its opposite cannot be combined with what stands beside it")
        return depth

    def ending_depth(self, shape: Object) -> int:
        """The number of frames that ending an object may need, whatever keys it has, since some keys require others."""
        allowed = self.allowed(shape)
        others = {other for key, keys in shape.dependents if key in allowed for other in keys}
        return max([self.closing_depth(shape), *(self.depth(allowed[key]) for key in sorted(others))])


def with_sums(dfa: DFA, count: int, budget: Budget) -> DFA:
    """The automaton with the checksum of the bytes read, modulo ``count``, in the bits of its ends."""
    if count == 1:
        return dfa
    budget.spend(len(dfa) * count * 2 * ROW)
    size = len(dfa)
    targets = dfa.next[:, dfa.columns]  # [S, 256]
    sums = (np.arange(count)[:, None] + np.arange(256)) % count  # [count, 256]
    following = np.where(targets == DEAD, DEAD, sums[:, None, :] * size + targets).astype(np.int32)
    ends = np.where(dfa.accepts == 0, 0, dfa.accepts | (np.arange(count) << SUM_SHIFT)[:, None])
    return trim(DFA(np.arange(256, dtype=np.uint8), following.reshape(-1, 256), ends.reshape(-1)))
