"""Random walks through an automaton, which must always find an end."""

import random

from shared.grammar.automata.automaton import START, Automaton, Configuration

MAX_SEARCH = 20_000


def byte_classes(automaton: Automaton) -> list[list[int]]:
    """The bytes of each column."""
    classes: dict[int, list[int]] = {}
    for byte in range(256):
        classes.setdefault(int(automaton.columns[byte]), []).append(byte)
    return list(classes.values())


def random_text(automaton: Automaton, chance: random.Random, classes: list[list[int]]) -> bytes:
    """A text of the grammar: some random bytes, then the shortest way to an end. Fails where there is none."""
    now, text = START, bytearray()
    for _ in range(chance.choice([0, 5, 20, 60, 150])):
        if automaton.is_end(now) and chance.random() < 0.3:
            return bytes(text)
        if chance.random() < 0.03 and not automaton.is_end(now):
            path = way_out(automaton, now, classes)
        else:
            candidates = [bytes([chance.choice(members)]) for members in classes]
            chance.shuffle(candidates)
            path = next((each for each in candidates if automaton.walk(now, each) is not None), b"")
            assert path or automaton.is_end(now), f"dead end after {bytes(text)!r}"
        now, text = _advance(automaton, now, path), text + path
    while not automaton.is_end(now):
        path = way_out(automaton, now, classes)
        assert path, f"dead end after {bytes(text)!r}"
        now, text = _advance(automaton, now, path), text + path
        assert len(text) < 20_000, f"no end after {bytes(text)!r}"
    return bytes(text)


def _advance(automaton: Automaton, now: Configuration, path: bytes) -> Configuration:
    following = automaton.walk(now, path)
    assert following is not None
    return following


def way_out(automaton: Automaton, now: Configuration, classes: list[list[int]]) -> bytes:
    """The way to the end of the innermost rule; else to a key that is needed; else into a rule. Empty: none."""
    needed = 0
    for _, _, keys, _, _ in automaton.clauses.tolist():
        needed |= keys
    origins: dict[Configuration, tuple[Configuration, int] | None] = {now: None}
    waiting, towards_key, inwards = [now], None, None
    for here in waiting:
        for byte in (members[0] for members in classes):
            there = automaton.walk(here, bytes([byte])) if byte not in b" \t\n" else None
            if there is None or there in origins:
                continue
            origins[there] = here, byte
            if len(there.stack) < len(now.stack) or automaton.is_end(there):
                return _path(origins, there)
            if len(there.stack) > len(now.stack):
                inwards = inwards or there
                continue
            if there.seen & needed & ~now.seen:
                towards_key = towards_key or there
            waiting.append(there)
        if len(waiting) > MAX_SEARCH:
            break
    best = towards_key or inwards
    return _path(origins, best) if best else b""


def _path(origins: dict[Configuration, tuple[Configuration, int] | None], end: Configuration) -> bytes:
    found = bytearray()
    origin = origins[end]
    while origin is not None:
        found.append(origin[1])
        origin = origins[origin[0]]
    return bytes(reversed(found))
