"""The engine in a process of its own: the same answers, and what becomes of either when the other dies."""

import asyncio
import contextlib
import multiprocessing
import os
import pickle
import queue
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import uvloop

from shared.engine.output import StepOutput
from shared.engine.record import EngineLoad
from shared.engine.request import TokenLogprobs
from shared.errors import ConfigError
from shared.sampling.params import SamplingParams
from shared.server.engine.command_codec import CommandCodec
from shared.server.engine.loop import (
    Abort,
    Add,
    Answered,
    Ask,
    Command,
    Crashed,
    Event,
    Idle,
    NewRequest,
    Question,
    Refused,
    Stepped,
    Stop,
)
from shared.server.engine.process import MAX_EVENTS, EngineProcess, PipeInbox, readiness
from shared.server.engine.thread import EngineThread
from shared.text.stopping import FinishReason
from tests.forks import FORKS
from tests.unit.server.echo import EchoEngine, serving
from tests.waiting import PATIENCE, wait_until

FATAL = "\x02"
Told = tuple[Event, int]
"""An event, and the number of requests that had been added."""


class MortalEngine(EchoEngine):
    """Takes its process with it when a prompt begins with FATAL; a file has as many bytes as it made steps."""

    def __init__(self, folder: Path, counter: Path) -> None:
        super().__init__(folder, max_batch_size=2)
        self.counter = counter

    def step(self) -> list[StepOutput]:
        with self.counter.open("ab") as file:
            file.write(b".")
        first = self.tokenizer.encode(FATAL, add_special_tokens=False)[0]
        if any(first in request.prompt_ids for request in self.waiting.values()):
            os._exit(7)
        return super().step()


def refuse() -> Any:
    raise ConfigError("There is no such model; choose another.")


def die() -> Any:
    os._exit(3)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork each process, since a spawned one takes seconds for its imports.

    The fork server writes an exit code before it closes the sentinel, so while the handle's reader takes the code, a
    process that has ended may seem alive for a moment.
    """
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: FORKS)


@pytest.fixture
def counter(tmp_path: Path) -> Path:
    (tmp_path / "steps").touch()
    return tmp_path / "steps"


@pytest.fixture
def handle(folder: Path, counter: Path) -> Iterator[EngineProcess]:
    made = EngineProcess(partial(MortalEngine, folder, counter))
    yield made
    made._process.kill()
    made._process.join()


def answer(running: Any, prompt: str) -> list[str]:
    """The lines of a stream, without the ids and times of requests."""
    with running.client() as client:
        body = {"model": "echo", "prompt": prompt, "max_tokens": 5}
        lines = client.post("/v1/completions", json=body).text.splitlines()
    return [line.partition('"model"')[2] or line for line in lines]


def test_a_process_answers_as_a_thread_does(folder: Path, handle: EngineProcess) -> None:
    engine = EchoEngine(folder)
    assert handle._process.pid is not None
    assert handle.facts.request_capacity == EngineThread(engine).facts.request_capacity
    with serving(engine) as there, serving(engine, handle) as here:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(handle._process.pid, number)  # which are the server's affair
        assert answer(here, "hello") == answer(there, "hello")
        assert answer(here, "\x01") == answer(there, "\x01")  # a request that fails
        with here.client() as client:
            state = client.get("/debug/engine").json()
            assert (state["audit"], state["num_open_requests"]) == ([], 0)
            assert client.get("/debug/memory").json()["holdings"] == []
            assert client.get("/health").json()["status"] == "ok"
    wait_until(lambda: not handle.is_alive)


def follow(
    handle: EngineProcess, commands: Sequence[Command], before: Callable[[], object] = lambda: None
) -> Iterator[Told]:
    """The events that follow these commands, from an event loop that does nothing else after ``before``."""
    told: list[Told] = []
    loop = uvloop.new_event_loop()  # as a server has it: it makes pipes that it watches non-blocking

    async def start() -> None:
        handle.start(lambda event, _, num_added: told.append((event, num_added)))
        for command in commands:
            handle.send(command)
        before()

    with contextlib.closing(loop):
        loop.run_until_complete(start())
        deadline = time.perf_counter() + PATIENCE
        while time.perf_counter() < deadline:
            loop.run_until_complete(asyncio.sleep(0.005))
            yield from told
            told.clear()
    raise TimeoutError


@pytest.mark.usefixtures("forked")
def test_commands_are_answered_between_two_steps_and_in_their_order(handle: EngineProcess) -> None:
    add = Add((NewRequest("a", [40], SamplingParams(max_new_tokens=4000)),))
    events: list[Event] = []
    counts: list[int] = []
    for event, num_added in follow(handle, (add, add, Ask(7, Question.DESCRIPTION))):
        events.append(event)
        counts.append(num_added)
        if isinstance(event, Stepped) and any(isinstance(before, Answered) for before in events):
            break
    (refused,) = (event for event in events if isinstance(event, Refused))
    assert (refused.request_id, str(refused.refusal)) == ("a", "The id a is in use.")
    assert counts == sorted(counts)
    assert counts[events.index(refused)] == counts[-1] == 2
    (answered,) = (event for event in events if isinstance(event, Answered))
    assert answered.number == 7
    assert answered.answer["audit"] in ([], ["a holds memory"])
    steps = [event for event in events if isinstance(event, Stepped)]
    assert all(before.ended <= after.started for before, after in pairwise(steps))
    assert steps[-1].ended < time.perf_counter()  # one clock for both processes
    handle.send(Stop())
    handle.join(PATIENCE)
    wait_until(lambda: not handle.is_alive)


@pytest.mark.usefixtures("forked")
def test_a_full_pipe_loses_no_command(handle: EngineProcess) -> None:
    """An engine that reads nothing for a while gets all that was sent to it, in its order."""
    assert handle._process.pid is not None
    os.kill(handle._process.pid, signal.SIGSTOP)
    commands = [Abort(f"request {n}" + 1000 * " ") for n in range(2000)]
    go_on = partial(os.kill, handle._process.pid, signal.SIGCONT)
    for event, _ in follow(handle, (*commands, Ask(7, Question.DESCRIPTION)), before=lambda: (time.sleep(1), go_on())):
        if isinstance(event, Answered):
            break
    assert event.number == 7


@pytest.mark.usefixtures("forked")
def test_what_cannot_be_loaded_is_said_in_the_server() -> None:
    with pytest.raises(ConfigError, match="no such model"):
        EngineProcess(refuse)
    with pytest.raises(RuntimeError, match="exit code 3"):
        EngineProcess(die)


@pytest.mark.usefixtures("forked")
def test_when_the_process_dies_requests_end_and_health_says_so(folder: Path, handle: EngineProcess) -> None:
    with serving(EchoEngine(folder), handle) as running:
        assert '"code":"engine_error"' in "".join(answer(running, FATAL))
        assert running.app.state.client.crash == "the engine's process ended with exit code 7"
        with running.client() as client:
            assert client.get("/health").status_code == 503
            assert client.post("/v1/completions", json={"model": "echo", "prompt": "x"}).status_code == 503


@pytest.mark.usefixtures("forked")
def test_it_ends_when_the_server_is_gone(handle: EngineProcess) -> None:
    handle._pipe.close()
    handle.join(PATIENCE)
    assert not handle.is_alive


@pytest.mark.usefixtures("forked")
def test_an_engine_ahead_of_the_server_waits_and_the_end_of_its_pipe_is_the_last_event(
    handle: EngineProcess, counter: Path
) -> None:
    """An engine that waits makes no more steps than fit into its pipe, however long the server reads nothing."""

    ahead = [0]

    def read_nothing() -> None:
        wait_until(lambda: counter.stat().st_size > 10)
        while counter.stat().st_size != ahead[-1]:
            ahead.append(counter.stat().st_size)
            time.sleep(0.5)

    steps = 0
    add = Add((NewRequest("a", [40], SamplingParams(max_new_tokens=4000)),))
    for event, _ in follow(handle, (add,), before=read_nothing):
        if isinstance(event, Crashed):
            break
        steps += isinstance(event, Stepped)
        if steps == 3000:
            handle._process.kill()
    assert event == Crashed("the engine's process ended with exit code -9")
    assert ahead[-1] < 3000


def test_an_inbox_waits_for_a_command_if_it_may() -> None:
    ours, theirs = multiprocessing.Pipe()
    inbox = PipeInbox(ours)
    with pytest.raises(queue.Empty):
        inbox.get(block=False)
    with ThreadPoolExecutor(1) as aside:
        waiting = aside.submit(inbox.get)
        wait_until(waiting.running)
        time.sleep(0.1)
        theirs.send_bytes(CommandCodec().dumps(Abort("a")))
        assert waiting.result(PATIENCE) == Abort("a")
    theirs.close()
    assert inbox.get(block=False) == Stop()


def test_what_was_read_is_handled_before_more_is_read() -> None:
    handle, told = EngineProcess.__new__(EngineProcess), list[int]()
    handle._pipe, theirs = multiprocessing.Pipe()
    handle._has_more = readiness(handle._pipe)
    for number in range(2 * MAX_EVENTS + 1):
        theirs.send((Idle(), EngineLoad(0, 0, 0.0, 0), number))
    for read in (MAX_EVENTS, 2 * MAX_EVENTS, 2 * MAX_EVENTS + 1):
        handle._read(lambda event, load, num_added: told.append(num_added))
        assert told == list(range(read))


def test_a_step_is_the_same_behind_the_pipe() -> None:
    logprobs = TokenLogprobs(-0.5, ((1, -0.5), (2, -1.5)))
    outputs = [
        StepOutput("a", 1, "x"),
        StepOutput("b", 2, "é\u2028", FinishReason.STOP, "é", logprobs, (None, logprobs), 3, 4, 5),
        StepOutput("c", None, "", FinishReason.ERROR, error="It broke."),
    ]
    for step in (Stepped(1.0, 2.0, outputs, ("a",), 1), Stepped(1.0, 2.0, [], (), 0)):
        after = pickle.loads(pickle.dumps(step))
        assert after == step
        assert all(type(output) is StepOutput for output in after.outputs)
