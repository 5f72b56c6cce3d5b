"""Random requests, arrivals and aborts; requests that fail, and steps that are interrupted."""

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from shared.engine.config import EngineConfig
from shared.engine.output import StepOutput
from shared.sampling.params import SamplingParams
from shared.text.stopping import FinishReason
from tests.mixed_requests import ALIKE, Requests, serve, serve_with_aborts, tokens

MAX_SEQ_LEN = 96
Answers = Sequence[Sequence[StepOutput]]
Load = tuple[list[int], set[int], int]
"""The step before which each request arrives, the requests that are aborted, and the step before which they are."""
SIZES: dict[str, st.SearchStrategy[Any]] = {
    "block_size": st.sampled_from([1, 2, 5, 16]),
    "prefill_chunk_size": st.integers(1, 40),
    "max_batch_size": st.integers(2, 8),
}


@functools.cache
def answers_alone(phase: Any, folder: Path) -> Answers:
    """The answers of a phase's engine to the requests of ALIKE, which it serves one after another."""
    engine = phase(EngineConfig(model=str(folder), max_seq_len=MAX_SEQ_LEN))
    return [serve(engine, [request])[0][0] for request in ALIKE]


@st.composite
def loads(draw: st.DrawFn) -> Load:
    count = len(ALIKE)
    arrivals = draw(st.lists(st.integers(0, 14), min_size=count, max_size=count))
    return arrivals, draw(st.sets(st.integers(0, count - 1), max_size=2)), draw(st.integers(1, 20))


@st.composite
def sizes(draw: st.DrawFn, most_spare: int = 80, **more: st.SearchStrategy[Any]) -> dict[str, Any]:
    """Settings of an engine whose blocks hold one whole sequence and up to ``most_spare`` tokens more."""
    options = {name: draw(strategy) for name, strategy in (SIZES | more).items()}
    num_blocks = (MAX_SEQ_LEN + draw(st.integers(0, most_spare))) // options["block_size"] + 1
    return options | {"max_seq_len": MAX_SEQ_LEN, "num_gpu_blocks": num_blocks}


def assert_as_alone(engine: Any, load: Load, alone: Answers, requests: Requests = ALIKE) -> None:
    """Each request that is not aborted has the tokens that it has ``alone``; nothing leaks, and no forward raises."""
    computes_at_once(engine)
    outputs, aborted = serve_with_aborts(engine, requests, *load)
    for n, expected in enumerate(map(tokens, alone)):
        assert outputs[n] == (expected[: len(outputs[n])] if n in aborted else expected), f"request {n}"


def computes_at_once(engine: Any) -> None:
    """From now on, a forward that raises fails the test, instead of being run again in parts."""
    compute = engine.runner.compute

    def computing(batch: Any) -> Any:
        try:
            return compute(batch)
        except Exception as error:
            pytest.fail(f"a forward of {len(batch)} requests raised {error!r}")

    engine.runner.compute = computing


def raise_for(engine: Any, token_id: int) -> None:
    """From now on, a forward of this token raises."""
    forward = engine.model.forward

    def raising(step: Any, *memory: Any) -> torch.Tensor:
        if token_id in step.ids.tolist():
            raise RuntimeError("injected")
        result: torch.Tensor = forward(step, *memory)
        return result

    engine.model.forward = raising


def assert_failures_stay_apart(engine: Any, alone: Callable[[Requests], list[list[int | None]]]) -> None:
    """Of forty random requests some are aborted at random moments, and some make the model raise; the others have the
    tokens that they have ``alone``.
    """
    chance, culprit = random.Random(0), 511  # no prompt has it; an answer that has it fails at its next token
    requests: Requests = [
        (
            [chance.randrange(20, 500) for _ in range(chance.randrange(1, 30))],
            {"seed": n, "temperature": chance.choice([0.0, 0.8]), "max_new_tokens": chance.randrange(1, 12)},
        )
        for n in range(40)
    ]
    expected = alone(requests)
    for n in (3, 17, 18):
        requests[n][0][-1] = culprit  # type: ignore[index]
    raise_for(engine, culprit)
    got: dict[str, list[StepOutput]] = {
        engine.add_request(prompt, SamplingParams(**params), str(n)): [] for n, (prompt, params) in enumerate(requests)
    }
    aborted = set[str]()
    while engine.has_work():
        for output in engine.step():
            assert output.request_id not in aborted
            got[output.request_id].append(output)
        if chance.random() < 0.3 and engine.abort(name := str(chance.randrange(40))):
            aborted.add(name)
        assert len(engine.pool.audit()) == len(engine.scheduler.running)
    assert engine.pool.audit() == []
    assert len(aborted) >= 3
    for n, (name, outputs) in enumerate(got.items()):
        ids = [output.token_id for output in outputs if output.token_id is not None]
        if n not in (3, 17, 18):
            assert ids == expected[n][: len(ids)], n
        if name in aborted:
            continue
        if n in (3, 17, 18) or culprit in expected[n][:-1]:
            assert outputs[-1].finish_reason is FinishReason.ERROR, n
        else:
            assert ids == expected[n], n


def serve_through(
    engine: Any, requests: Requests, error: type[BaseException]
) -> tuple[list[list[int | None]], int, int]:
    """The tokens of requests of which one arrives before each step, although ``error`` breaks steps off.

    Returns also how many steps were broken off, and how many of these had preempted a request.
    """
    outputs: dict[str, list[int | None]] = {str(n): [] for n in range(len(requests))}
    coming, num_broken_off, num_preempting = list(enumerate(requests)), 0, 0
    while coming or engine.has_work():
        if coming:
            n, (prompt, params) = coming.pop(0)
            engine.add_request(prompt, SamplingParams(**params), str(n))
        before = engine.load().num_preemptions
        try:
            for output in engine.step():
                outputs[output.request_id].append(output.token_id)
        except error:
            num_broken_off += 1
            num_preempting += engine.load().num_preemptions > before
        assert len(engine.pool.audit()) == len(engine.scheduler.running)
        assert num_broken_off < 200, "the same step is broken off again and again"
    assert engine.pool.audit() == []
    return list(outputs.values()), num_broken_off, num_preempting


def break_off(
    owner: Any, name: str, error: type[BaseException], is_broken: Callable[[int], bool], patch: pytest.MonkeyPatch
) -> None:
    """Make the calls of a method raise whose number, counted from 0, ``is_broken`` accepts."""
    method, numbers = getattr(owner, name), itertools.count()

    def breaking(*args: Any) -> Any:
        if is_broken(next(numbers)):
            raise error
        return method(*args)

    patch.setattr(owner, name, breaking)


class Interrupt(BaseException):
    """As KeyboardInterrupt, which pytest would take as its own."""


def interrupt(engine: Any, broken: str, monkeypatch: pytest.MonkeyPatch) -> list[Interrupt]:
    """Interrupt steps before and after calls of the method ``broken`` of a part of the engine, such as
    ``runner.forward``; an interrupted step is repeated. Returns a list that gets the interrupts.
    """
    owner, name = broken.split(".")
    call, step = getattr(getattr(engine, owner), name), engine.step
    calls, interrupts = list[Any](), list[Interrupt]()

    def interrupted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) % 7 == 2:
            raise Interrupt
        result = call(*args)
        if len(calls) % 7 == 5:
            raise Interrupt
        return result

    def persistent() -> list[StepOutput]:
        while True:
            try:
                return step()
            except Interrupt as error:
                interrupts.append(error)
                assert getattr(engine, "in_flight", None) is None

    monkeypatch.setattr(getattr(engine, owner), name, interrupted)
    monkeypatch.setattr(engine, "step", persistent)
    return interrupts
