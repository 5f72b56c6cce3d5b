"""Compiles a regular expression to an automaton over bytes. Introduced in phase 12.

The tree of a pattern becomes an NFA (Thompson, 1968), and the NFA a minimal DFA.
"""

from functools import cache

from shared.grammar.automata.automaton import Automaton
from shared.grammar.automata.dfa import DFA
from shared.grammar.automata.languages import words
from shared.grammar.automata.nfa import NFA, determinize
from shared.grammar.limits import Budget, GrammarError, Remembered
from shared.grammar.patterns.characters import ANY, Characters, Range, Sequence, Spelling, spelled
from shared.grammar.patterns.escapes import shown
from shared.grammar.patterns.lookahead import Condition, determinize_runs, full_states
from shared.grammar.patterns.pattern import (
    Alternatives,
    Anchor,
    Concatenation,
    Lookahead,
    Members,
    Node,
    Parser,
    Repeat,
)


def compile_regex(pattern: str, budget: Budget, *, search: bool = False, spelling: Spelling = Spelling.UTF8) -> DFA:
    """The DFA of the texts that match a pattern, in bytes; ``spelling`` says how they are written; in JSON, without the
    quotes.

    With ``search`` the pattern may match anywhere in the text, as in JSON Schema; otherwise it matches the whole text.
    Raises GrammarError if the pattern is invalid, unsupported, too large, or matches nothing.
    """
    tree = Parser(pattern, budget).parse()
    if search:
        tree = _without_needless_bounds(tree)
    dfa = _determinized(tree, Builder(budget, spelling), search=(search, search))
    if dfa.is_empty:
        raise GrammarError(f"The pattern {shown(pattern)} matches no text; give one that matches at least one.")
    return dfa


@cache
def _any_text(spelling: Spelling) -> DFA:
    return compile_regex(r"[\s\S]*", Budget(), spelling=spelling)


def _without_needless_bounds(tree: Node) -> Node:
    """Drops the upper bound of a character's repeat if any text may precede or follow it."""
    parts = list(tree.parts) if isinstance(tree, Concatenation) else [tree]
    for index in (0, -1):
        match parts[index : index + 1 or None]:
            case [Repeat(Members() as members, least, int(most))] if least < most:
                parts[index] = Repeat(members, least, None)
    return Concatenation(tuple(parts))


def _determinized(tree: Node, builder: "Builder", *, search: tuple[bool, bool]) -> DFA:
    """The DFA of a tree; ``search``: whether other text may precede and follow the match."""
    nfa, budget = builder.nfa, builder.budget
    start, end = nfa.state(), nfa.state()
    begin, matched = start, end
    if search[0]:
        builder.add(Repeat(Members(ANY), 0, None), start, begin := nfa.state())
    if search[1]:
        matched = nfa.state()
        nfa.free[matched].append(end)
        builder.add(Members(ANY), end, end)
        nfa.absorbing = end
    builder.add(tree, begin, matched)
    nfa.accepts[end] = 1
    return determinize_runs(nfa, builder.conditions, budget) if nfa.asks else determinize(nfa, budget)


def compile_choice(texts: "list[str] | tuple[str, ...]", budget: Budget) -> DFA:
    """The DFA of the given texts. Raises GrammarError if there are none, or as :class:`Budget` does."""
    if not texts:
        raise GrammarError("The choice is empty; give at least one text.")
    return words([text.encode() for text in texts], budget)


def automaton_of(dfa: DFA) -> Automaton:
    """The grammar of a DFA, which has no stack."""
    return Automaton.of_states(dfa.columns, dfa.next, dfa.accepts != 0)


class Builder:
    """Adds the parts of a pattern to an NFA. ``is_inside``: texts begin inside other texts, so ``^`` never matches.
    ``made`` holds the conditions of lookaheads, by node and ``is_inside``; all builders of a pattern share it.
    """

    def __init__(
        self,
        budget: Budget,
        spelling: Spelling,
        *,
        is_inside: bool = False,
        made: dict[tuple[int, bool], Condition] | None = None,
    ) -> None:
        self.nfa, self.budget, self.spelling, self.is_inside = NFA(budget=budget), budget, spelling, is_inside
        self.num_nodes = 0
        self.conditions: list[Condition] = []
        self._numbers: dict[tuple[int, bool], int] = {}
        self._made: dict[tuple[int, bool], Condition] = {} if made is None else made

    def add(self, node: Node, start: int, end: int) -> None:
        """Add paths from ``start`` to ``end`` that read the node's matches."""
        nfa = self.nfa
        self.num_nodes += 1
        self.budget.spend(4)
        if self.num_nodes % 64 == 0:
            self.budget.check(len(nfa.edges) // 16)  # a DFA has fewer; the exact number is known later
        match node:
            case Members(members):
                key = members, self.spelling
                fragment = _fragments.get(key, lambda: _fragment(*key, self.budget), self.budget)
                self.budget.spend(len(members) // 16 + sum(map(len, fragment)))
                states = [start, *(nfa.state() for _ in fragment[1:]), end]
                for state, edges in zip(states, fragment, strict=False):
                    nfa.edges[state] += [(low, high, states[target]) for low, high, target in edges]
            case Concatenation(parts):
                for part in parts[:-1]:
                    self.add(part, start, start := nfa.state())
                if parts:
                    self.add(parts[-1], start, end)
                else:
                    nfa.free[start].append(end)
            case Alternatives(parts):
                for part in parts:
                    begin = nfa.state()
                    nfa.free[start].append(begin)
                    self.add(part, begin, end)
            case Repeat(part, least, most):
                first = len(nfa.edges)
                for number in range(least):
                    copy = len(nfa.edges)
                    self.add(part, start, start := nfa.state())
                    if most is None:  # a later copy accepts whatever an earlier one does, since fewer must follow
                        self.budget.spend(len(nfa.edges) - copy)
                        for state in range(copy, len(nfa.edges)):
                            nfa.ranks.setdefault(state, (first + state - copy, number))
                if most is None:
                    loop, back = nfa.state(), nfa.state()
                    nfa.free[start].append(loop)
                    self.add(part, loop, back)
                    nfa.free[back].append(loop)
                    nfa.free[loop].append(end)
                else:
                    for _ in range(most - least):
                        nfa.free[start].append(end)
                        self.add(part, start, start := nfa.state())
                    nfa.free[start].append(end)
            case Lookahead():
                inside = self._condition(node, is_inside=True)
                at_begin = inside if self.is_inside else self._condition(node, is_inside=False)
                nfa.asks.setdefault(start, []).append((at_begin, inside, end))
            case Anchor(is_begin) if not (is_begin and self.is_inside):
                (nfa.begins if is_begin else nfa.ends).setdefault(start, []).append(end)

    def _condition(self, node: Lookahead, *, is_inside: bool) -> int:
        """The number of a lookahead's condition at the beginning of the text, or inside it."""
        key = id(node), is_inside
        if key not in self._made:
            builder = Builder(self.budget, self.spelling, is_inside=is_inside, made=self._made)
            dfa = _determinized(node.part, builder, search=(False, True))
            full = full_states(dfa, _any_text(self.spelling), self.budget)
            self._made[key] = Condition(dfa, node.holds, full)
        if key not in self._numbers:
            self._numbers[key] = len(self.conditions)
            self.conditions.append(self._made[key])
        return self._numbers[key]


Fragment = list[list[tuple[int, int, int]]]
_fragments: Remembered[Fragment] = Remembered(256)


def _fragment(members: Characters, spelling: Spelling, budget: Budget) -> Fragment:
    """Each state's edges in an automaton that reads one of the characters; the end is the state after the last.
    Spellings share prefixes and suffixes, which matters where a character is repeated 500 times.
    """
    budget.spend(4 * len(members))
    rests = [tuple(spelled(members, spelling))]  # of the spellings that have led to each state
    numbers: dict[tuple[Sequence, ...], int] = {}
    fragment: list[list[tuple[int, int, int]]] = []
    for rest in rests:  # which grows
        after: dict[Range, list[Sequence]] = {}
        for first, *others in rest:
            after.setdefault(first, []).append(tuple(others))
        edges = []
        for (low, high), left in after.items():
            key = tuple(left)
            if key != ((),) and key not in numbers:
                numbers[key] = len(rests)
                rests.append(key)
            edges.append((low, high, numbers.get(key, -1)))
        fragment.append(edges)
    return fragment
