"""Automata of grammars for tests: any JSON object, and random ones."""

import math
import random
from collections.abc import Iterable
from itertools import combinations

import numpy as np

from shared.grammar.automata.automaton import (
    MAX_DEPTH,
    REFUSED,
    SPACE_ENDED,
    START,
    UNBOUNDED,
    Action,
    Automaton,
    Configuration,
    entry,
)
from shared.grammar.automata.plain import PLAIN_SEQUENCES
from shared.grammar.documents.json_schema import compile_schema
from shared.grammar.limits import Budget, Limits

UNTIMED = Limits(seconds=math.inf)
"""The limits of a grammar without the one that depends on the clock."""

CONTINUATION = range(0x80, 0xC0)


def budget(states: int = UNTIMED.states) -> Budget:
    """A compilation that may make so many states, whatever the clock says."""
    return Budget(Limits(states=states, seconds=math.inf))


def assert_language(
    automaton: Automaton, accepted: Iterable[str | bytes], refused: Iterable[str | bytes], by: str = ""
) -> None:
    """An automaton accepts some texts and refuses others, and a push needs what its rule and all after it need."""
    ends = np.unique([*automaton.pushes[:, 1], *automaton.pops[:, 3], len(automaton.returns)])
    for first, frame, _, _, depth in automaton.pushes.tolist():
        after = automaton.returns[frame : ends[ends > frame][0]]
        needs = [1 + automaton.depths[first], *automaton.depths[after[after != REFUSED]]]
        assert depth == min(max(needs), MAX_DEPTH + 1), f"a push needs {depth} frames of {needs}"
    for texts, expected in ((accepted, True), (refused, False)):
        for text in texts:
            found = automaton.accepts(text.encode() if isinstance(text, str) else text)
            assert found == expected, f"{text!r} is {'accepted' if found else 'refused'}{by}"
            now: Configuration | None = START
            for byte in text.encode() if isinstance(text, str) else text:
                assert now is not None
                before, now = now, automaton.step(now, byte)
                if now is None:
                    steps = filter(None, (automaton.step(before, other) for other in range(256)))
                    goes_on = any(not 0 < step.blanks <= SPACE_ENDED for step in steps)  # blanks alone are no way on
                    assert goes_on or automaton.is_end(before), f"{text!r} has a dead end{by}"
                    break


class Table:
    """Rows of a table over all 256 bytes, under construction."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []

    def state(self) -> int:
        self.rows.append([REFUSED] * 256)
        return len(self.rows) - 1

    def put(self, state: int, symbols, action: Action, argument: int) -> None:
        for byte in symbols:
            self.rows[state][byte] = entry(action, argument)

    def characters(self, state: int, action: Action, *, counts_last: bool = False) -> None:
        """Every plain character leads from the state back to it; also U+2028 and U+2029.

        The action is at the first byte of a character, or at the last.
        """
        lead, tail = (Action.GOTO, action) if counts_last else (action, Action.GOTO)
        tails = [self.state() for _ in range(3)]
        self.put(tails[0], CONTINUATION, tail, state)
        self.put(tails[1], CONTINUATION, Action.GOTO, tails[0])
        self.put(tails[2], CONTINUATION, Action.GOTO, tails[1])
        for sequence in PLAIN_SEQUENCES:
            (first, last), rest = sequence[0], sequence[1:]
            symbols = range(first, last + 1)
            if not rest:
                self.put(state, symbols, action, state)
            elif len(rest) > 1 and rest[0] not in ((0x80, 0xBF), (0x80, 0x80), (0x81, 0xBF)):
                special = self.state()
                self.put(special, range(rest[0][0], rest[0][1] + 1), Action.GOTO, tails[len(rest) - 2])
                self.put(state, symbols, lead, special)
            else:
                self.put(state, symbols, lead, tails[len(rest) - 1])


def any_json(fewest: int = 0, most: int = UNBOUNDED) -> Automaton:
    """Any JSON object; strings that are values have ``fewest`` to ``most`` characters."""
    lengths = {"minLength": fewest} | ({} if most == UNBOUNDED else {"maxLength": most})
    members = {"additionalProperties": {"$ref": "#/$defs/value"}, "items": {"$ref": "#/$defs/value"}}
    return compile_schema({"$defs": {"value": lengths | members}, "type": "object"} | members, budget())


KEY_SETS = [sum(1 << place for place in places) for n in range(4) for places in combinations((0, 31, 61), n)]
"""Sets of keys in both halves of a set, and at their ends."""
ALPHABET = b'"[]{}a7, \n\t\\\xc3\xa9\xe2\x80\xa8\x00'


def random_automaton(chance: random.Random) -> Automaton:
    """Three rules that push each other at random, of all actions; only pushed rules pop."""
    num_rules, size = 3, 4
    table = Table()
    rules = [[table.state() for _ in range(size)] for _ in range(num_rules)]
    num_clauses, num_pops = 3, 4

    def bits() -> int:
        return chance.choice(KEY_SETS)

    pushes, returns, of_rule = [], [], []
    for states in rules:
        frame = len(returns)
        returns += [chance.choice([REFUSED, *states, *states]) for _ in range(4)]
        of_rule.append(range(len(pushes), len(pushes) + 3))
        for _ in range(3):
            bounds = chance.choice([(0, UNBOUNDED), (chance.randrange(3), chance.randrange(2, 6))])
            first = chance.choice(rules[chance.randrange(1, num_rules)])
            pushes.append((first, frame, *bounds, chance.choice([0, 1, 1, 2, 40])))
    frames = [index * 4 for index in range(num_rules)]
    ranges = [sorted((chance.randrange(num_clauses + 1), chance.randrange(num_clauses + 1))) for _ in range(num_pops)]
    keys, guards = [], []
    free = {chance.choice(rules[1]): chance.choice([Action.GOTO, Action.COUNT])} if chance.random() < 0.6 else {}
    for rule, states in enumerate(rules):
        for state in states:
            if state in free:
                table.characters(state, free[state], counts_last=chance.random() < 0.3)
            for byte in ALPHABET:
                if state in free and byte >= 0x20 and byte not in b'"\\':
                    continue
                action = chance.choice([None, *Action, Action.GOTO, Action.COUNT])
                if byte in b" \n\t7" and chance.random() < 0.4:
                    action = Action.BLANK
                elif byte not in b" \n\t7" and action is Action.BLANK:
                    action = Action.GOTO
                if byte in b"[{" and chance.random() < 0.7:
                    action = Action.PUSH
                elif byte not in b'[{"' and action is Action.PUSH:  # so that no token holds too many frames open
                    action = Action.POP
                if action is None or (action is Action.POP and rule == 0):
                    continue
                argument = chance.choice(states)
                if action is Action.PUSH:
                    argument = chance.choice(of_rule[rule])
                elif action is Action.POP:
                    argument = chance.randrange(num_pops)
                elif action is Action.CHOOSE:  # after those that pop, one for each rule, whose states it chooses from
                    argument = num_pops + rule
                elif action is Action.KEY:
                    keys.append((argument, bits(), chance.random() < 0.8))
                    argument = len(keys) - 1
                elif action is Action.GUARD:
                    guards.append((argument, bits(), bits(), chance.randrange(1, 4)))
                    argument = len(guards) - 1
                table.put(state, [byte], action, argument)
    rows = np.array(table.rows, np.int32)
    return Automaton(
        columns=np.arange(256, dtype=np.uint8),
        table=rows,
        is_final=np.array([chance.random() < 0.3 for _ in rows]),
        depths=np.array([chance.choice([0, 0, 1, 30]) for _ in rows], np.int32),
        pushes=np.array(pushes, np.int32),
        returns=np.array(returns, np.int32),
        pops=np.array(
            [
                *([chance.randrange(4), *bounds, 0] for bounds in ranges),
                *([chance.randrange(1, 4), *chance.choice(ranges), frame] for frame in frames),
            ],
            np.int32,
        ),
        clauses=np.array(
            [[chance.randrange(4), bits(), bits(), chance.randrange(3), bits()] for _ in range(num_clauses)], np.uint64
        ),
        keys=np.array(keys, np.uint64).reshape(-1, 3),
        guards=np.array(guards, np.uint64).reshape(-1, 4),
    )


def random_tokens(chance: random.Random, size: int = 120, longest: int = 7) -> list[bytes]:
    """Each byte of the alphabet, and random strings of them and of plain characters; some twice, some empty."""
    pieces = [bytes([byte]) for byte in ALPHABET] + ["é".encode(), "\u2028".encode(), "字".encode(), b"x"]
    tokens = [bytes([byte]) for byte in ALPHABET] + [b"", b"a", b"[" * 3, b"[{[", b"[" * 4, b"{" * 20]
    tokens += [b"".join(chance.choices(pieces, k=chance.randint(1, longest))) for _ in range(size)]
    chance.shuffle(tokens)
    return tokens


def random_walk(automaton: Automaton, chance: random.Random, size: int = 30) -> list:
    """Configurations along random bytes from the start, and some with a stack that is nearly full."""
    now, found = START, [START]
    symbols = bytes(range(256))
    for _ in range(size):
        after = [end for byte in symbols if (end := automaton.walk(now, [byte])) is not None]
        if not after:
            now = START
            continue
        now = chance.choice(after)
        found.append(now)
        if now.stack and chance.random() < 0.2:
            deep = now.stack[:1] * chance.choice([10, MAX_DEPTH - 5]) + now.stack
            if len(deep) + automaton.depths[now.state] <= MAX_DEPTH:
                found.append(now._replace(stack=deep))
    return found
