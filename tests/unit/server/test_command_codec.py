"""Commands to the engine's process: a grammar's automaton is sent once, and a failed step's cause is kept."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.output import StepOutput
from shared.engine.record import EngineLoad
from shared.grammar.grammar import Grammar
from shared.grammar.limits import Limits
from shared.sampling.params import SamplingParams
from shared.server.engine.client import EngineClient
from shared.server.engine.command_codec import CommandCodec
from shared.server.engine.loop import Abort, Add, Crashed, Event, NewRequest
from shared.server.engine.process import EngineProcess
from tests.unit.server.echo import EchoEngine, serving, wait_until
from tests.unit.server.exchange import completion

ALL_BYTES = np.ones(256, np.bool_)
GRAMMARS = [Grammar.regex(f"(ab|cd){{{n}}}").compiled(ALL_BYTES, Limits()) for n in (40, 60, 80, 100)]


def size(grammar: Grammar) -> int:
    assert grammar.automaton is not None
    return grammar.automaton.num_bytes


def add(*grammars: Grammar | None) -> Add:
    requests = (NewRequest(str(n), [1], SamplingParams(structured_output=one)) for n, one in enumerate(grammars))
    return Add(tuple(requests))


def test_an_automaton_is_sent_with_the_first_request_that_uses_it() -> None:
    sender, receiver = CommandCodec(), CommandCodec()
    first, *rest = GRAMMARS[:2]
    messages = [sender.dumps(add(first, first)), sender.dumps(add(replace(first))), sender.dumps(add(*rest, first))]
    assert len(messages[0]) > size(first)
    assert len(messages[1]) < 1000, "an equal description is the same grammar"
    assert size(rest[0]) < len(messages[2]) < size(rest[0]) + size(first)
    commands = [receiver.loads(message) for message in messages]
    received = [new.params.structured_output for command in commands for new in command.requests]  # type: ignore[union-attr]
    assert received == [first, first, first, rest[0], first]
    kept = received[0]
    assert isinstance(kept, Grammar)
    assert all(one is kept for one in received if one == first)
    assert np.array_equal(kept.automaton.table, first.automaton.table)  # type: ignore[union-attr]


@given(steps=st.lists(st.lists(st.none() | st.sampled_from(GRAMMARS), max_size=3), max_size=20), most=st.integers(0, 3))
def test_both_ends_remember_the_same(steps: list[list[Grammar | None]], most: int) -> None:
    most_bytes = sum(map(size, GRAMMARS[:most]))
    sender, receiver = CommandCodec(most_bytes), CommandCodec(most_bytes)
    for grammars in steps:
        command = add(*grammars)
        assert receiver.loads(sender.dumps(command)) == command
        assert receiver.loads(sender.dumps(Abort("x"))) == Abort("x")
        assert list(receiver.numbers.items()) == list(sender.numbers.items())
        assert sender.num_bytes == receiver.num_bytes == sum(map(size, sender.numbers))
        assert sender.num_bytes <= most_bytes or len(sender.numbers) == 1
        assert sorted(receiver.grammars) == sorted(sender.numbers.values())


class FailingEngine(EchoEngine):
    """Whose first step raises."""

    def step(self) -> list[StepOutput]:
        raise ValueError("the cause")


def test_health_names_the_step_that_failed_and_not_the_process_that_then_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    causes: list[str] = []
    handle_event = EngineClient._handle_event

    def noting(client: EngineClient, event: Event, load: EngineLoad, num_added: int) -> None:
        handle_event(client, event, load, num_added)
        if isinstance(event, Crashed):
            causes.append(event.cause)

    monkeypatch.setattr(EngineClient, "_handle_event", noting)
    with (
        serving(EchoEngine(folder), EngineProcess(partial(FailingEngine, folder))) as running,
        running.client() as client,
    ):
        assert client.post("/v1/completions", json=completion()).status_code == 500
        wait_until(lambda: len(causes) == 2)
        assert "ended with exit code 0" in causes[1]
        assert "ValueError: the cause" in client.get("/health").json()["message"]
