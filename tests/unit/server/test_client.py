"""Between the server's threads: what the client makes of an engine's events, and what the engine's loop publishes."""

import asyncio
import contextlib
import dataclasses
import logging
import queue
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shared.engine.output import StepOutput
from shared.engine.record import EngineLoad
from shared.errors import QueueFullError, RankError, RequestError, UnknownSegmentError
from shared.sampling.params import SamplingParams
from shared.server.answers.answer import Answer
from shared.server.answers.answer_stream import AnswerStream
from shared.server.engine.client import EngineClient
from shared.server.engine.loop import (
    Abort,
    Add,
    Answered,
    Ask,
    Crashed,
    EngineLoop,
    Idle,
    NewRequest,
    Question,
    Refused,
    Stepped,
    Stop,
)
from shared.server.errors import ApiError
from shared.server.http.middleware import RequestRecord, _log_request
from shared.server.metrics import ServerMetrics
from shared.server.settings import ServerConfig
from shared.text.stopping import FinishReason
from tests.unit.server.echo import EchoEngine


def make_client(**settings: Any) -> tuple[EngineClient, list[Any]]:
    """Of an engine that does nothing, and the commands that it was sent."""
    sent: list[Any] = []
    limits = {"max_seq_len": 20, "request_capacity": 20, "model_config": SimpleNamespace(vocab_size=9)}
    config = SimpleNamespace(max_waiting_requests=4)
    facts = SimpleNamespace(**limits, config=config, load=EngineLoad(0, 0, 0.0, 0))
    handle: Any = SimpleNamespace(facts=facts, send=sent.append, is_alive=True)
    return EngineClient(handle, ServerMetrics("m"), ServerConfig("m", **settings)), sent


def test_requests_wait_from_when_they_are_submitted() -> None:
    """Before the engine has seen them; so no more are sent to it than may wait."""
    client, sent = make_client()
    requests = [NewRequest(str(n), [1], SamplingParams(max_new_tokens=1)) for n in range(5)]
    for prompt_ids in ([9], [], [1] * 20):
        with pytest.raises(ApiError):
            client.submit(
                "z", [requests[0], dataclasses.replace(requests[1], prompt_ids=prompt_ids)], n=1, param="prompt"
            )
    assert (sent, client.load.num_waiting, client.num_open_requests) == ([], 0, 0), "all are checked before any is sent"
    client.submit("a", requests[:3], n=3, param="prompt")
    with pytest.raises(ApiError, match="3 requests wait"):
        client.submit("b", requests[3:], n=2, param="prompt")
    client.submit("c", requests[4:], n=1, param="prompt")
    assert (client.load.num_waiting, len(sent), client.num_open_requests) == (4, 2, 4)
    client._handle_event(Idle(), EngineLoad(1, 2, 0.0, 0), 3)
    assert client.load.num_waiting == 3, "the engine has not seen the last one"


def test_the_times_of_an_answer_are_those_of_its_steps(caplog: pytest.LogCaptureFixture) -> None:
    """Of the first choice, in the log; of each, in the metrics. What is prefilled again was scheduled before."""
    client, _ = make_client()
    requests = [NewRequest(name, [1, 2], SamplingParams(max_new_tokens=4), ("s",), 3) for name in ("0", "1")]
    answer = client.submit("a", requests, n=2, param="prompt")
    for choice in answer.choices:
        choice.arrived = 10.0

    def token(request_id: str, **more: Any) -> StepOutput:
        return StepOutput(request_id, 1, "x", **more)

    async def run() -> None:
        failed = StepOutput("0", None, "", FinishReason.ERROR, error="It broke.")
        for started, ended, prefilled, outputs in (
            (11.0, 12.0, ("0", "aborted"), []),
            (12.0, 15.0, ("0", "1"), [token("0")]),
            (16.0, 19.0, ("0",), [token("1"), token("0")]),
            (20.0, 27.0, (), [token("0"), token("1", finish_reason=FinishReason.EOS)]),
            (27.0, 30.0, (), [failed]),
        ):
            client._deliver(Stepped(started, ended, outputs, prefilled, 1))

    asyncio.run(run())
    found = {
        sample.name.removeprefix("infer:"): sample.value
        for family in client._metrics.registry.collect()
        for sample in family.samples
        if sample.name.endswith(("_seconds_sum", "_seconds_count")) and sample.name.startswith("infer:")
    }
    sums = {
        "time_to_first_token": 5.0 + 9.0,
        "inter_token_latency": (4.0 + 8.0) + 8.0,
        "e2e_request_latency": 20.0 + 17.0,
        "request_queue_time": 1.0 + 2.0,
        "request_prefill_time": 4.0 + 7.0,
        "request_decode_time": 12.0 + 8.0,
    }
    counts = dict.fromkeys(sums, 2) | {"inter_token_latency": 3}
    assert found == {f"{name}_seconds_sum": value for name, value in sums.items()} | {
        f"{name}_seconds_count": value for name, value in counts.items()
    }
    record = RequestRecord("r", "/v1/completions", 200, answer, is_streaming=True)
    with caplog.at_level(logging.INFO, "infer"):
        _log_request({"method": "POST"}, record, "completions", 21.0)
    fields: Any = caplog.records[-1].__dict__["fields"]
    assert (fields["queue_s"], fields["ttft_s"], fields["duration_s"]) == (1.0, 5.0, 21.0)
    assert (fields["completion_tokens"], fields["prompt_tokens"], fields["error"]) == (5, 2 + 3, "engine_error")
    assert 'infer:prompt_tokens_total{model_name="m"} 10.0' in client._metrics.exposition().decode()


ENDS = ["token", "token", "eos", "stop", "length", "error", "queue_full", "invalid", "unknown", "bug", "cancel"]


HAPPENED = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 2), st.sampled_from([None, "segments", "chunks"])),
    st.tuples(st.sampled_from(ENDS), st.integers(0, 3), st.none()),
    st.tuples(st.sampled_from(["ask", "answer", "crash", "lost rank", "stop"]), st.just(0), st.none()),
)


REFUSED: dict[str, tuple[Any, ...]] = {
    "queue_full": (QueueFullError("Full."), 503, "queue_full", None),
    "invalid": (RequestError("In use."), 422, "invalid_value", "prompt"),
    "unknown": (UnknownSegmentError("None."), 404, "segment_not_found", "prompt"),
    "bug": (None, 500, "engine_error", None),
}


"""Late refusals of the engine, and the status, code and field of their errors."""


@settings(max_examples=300)
@given(happened=st.lists(HAPPENED, max_size=14))
@example(happened=[("submit", 1, "segments"), ("unknown", 0, None)])
@example(happened=[("submit", 2, "chunks"), ("unknown", 1, None), ("lost rank", 0, None)])
def test_a_request_ends_exactly_once_whatever_happens_to_the_engine(happened: list[tuple[str, int, Any]]) -> None:
    """With its own error, aborted and counted once; a question ends too, and a stopped engine has not crashed."""

    async def run() -> None:
        client, sent = make_client(max_unread_bytes=400)
        ended_server: list[None] = []
        client.end_server = lambda: ended_server.append(None)
        client._handle.join = lambda timeout: None  # type: ignore[method-assign]
        answers: list[Answer] = []
        streams: list[AnswerStream] = []
        fields: list[str | None] = []
        groups: list[range] = []
        ends: dict[int, tuple[Any, ...]] = {}  # of each stream: reason, status, code and param of the error
        commands: list[Any] = []
        counted, num_unread = Counter[str](), Counter[int]()
        asked: list[asyncio.Task[Any]] = []
        crash, is_stopped, num_waiting, num_lost = None, False, 0, 0

        def end(index: int, reason: str, *error: Any, is_gone: bool = False, is_counted: bool = True) -> None:
            if index in ends:
                return
            ends[index] = (reason, *error)
            counted.update(["stop" if reason == "eos" else reason] * is_counted)
            if reason == "abort" and not is_gone:
                commands.append(Abort(str(index)))
            for other in next(group for group in groups if index in group) if error else ():
                end(other, "abort", is_gone=is_gone)

        for event, count, field in happened:
            is_alive, index = crash is None and not is_stopped, count
            told: Any = None
            if event == "submit":
                group = range(len(streams), len(streams) + count)
                requests = [NewRequest(str(one), [1], SamplingParams(max_new_tokens=1)) for one in group]
                is_taken = is_alive and num_waiting + count <= 4
                refused = pytest.raises(ApiError, match="requests wait" if is_alive else "engine has stopped")
                with contextlib.nullcontext() if is_taken else refused:
                    answers.append(client.submit("a", requests, n=count, param="prompt", segment_field=field))
                    streams += answers[-1].choices
                if is_taken:
                    fields += [field] * count
                    groups.append(group)
                    commands.append(Add(tuple(requests)))
                    num_waiting += count
            elif event == "ask":
                asked.append(asyncio.create_task(client.describe()))
                number = sum(isinstance(one, Ask) for one in commands)
                commands += [Ask(number, Question.DESCRIPTION)] * is_alive
                await asyncio.sleep(0)
            elif event == "stop":
                for index in range(len(streams)):
                    end(index, "abort", 503, "engine_stopped", None)
                is_stopped = True
                commands.append(Stop())
                await client.stop()
            elif event == "answer":
                told = Answered(0, {"audit": []})
            elif event in ("crash", "lost rank"):
                told = Crashed(event, event == "lost rank")
                if not is_stopped:
                    crash, num_lost = crash or event, num_lost + (event == "lost rank")
                    for index in range(len(streams)):
                        end(index, "error", 500, "engine_error", None, is_gone=True)
            elif index >= len(streams):
                continue
            elif event == "cancel":
                answer, group = next(each for each in zip(answers, groups, strict=True) if index in each[1])
                answer.cancel("left")
                for one in group:
                    end(one, "abort")
            elif event in REFUSED:
                refusal, *error = REFUSED[event]
                if event == "unknown" and (name := fields[index]) is not None:
                    error[1:] = f"{name[:-1]}_not_found", name
                told = Refused(str(index), refusal)
                end(index, "error", *error, is_counted=False)
            else:
                reason = None if event == "token" else FinishReason(event)
                token_id = None if event == "error" else 1
                told = Stepped(1.0, 2.0, [StepOutput(str(index), token_id, "x", reason)], (), 0)
                if index not in ends:
                    num_unread[index] += 1
                if event == "error":
                    end(index, "error", 500, "engine_error", None)
                elif event == "token" and num_unread[index] > 1:
                    end(index, "abort", 408, "slow_reader", None)
                elif reason is not None:
                    end(index, event)
            if told is not None:
                client._handle_event(told, EngineLoad(1, 0, 0.5, 0), len(streams))
                num_waiting = 0
            assert (client.load.num_waiting, client.crash, len(ended_server)) == (num_waiting, crash, num_lost)
            assert client.is_alive == (crash is None and not is_stopped)
            found = {index: (str(one.finish_reason), one.error) for index, one in enumerate(streams) if not one.is_open}
            assert ends == {
                index: (reason, *([] if failure is None else [failure.status_code, failure.code, failure.param]))
                for index, (reason, failure) in found.items()
            }
            for answer, group in zip(answers, groups, strict=True):
                failures = [streams[one].error for one in group if streams[one].error is not None]
                assert (answer.is_open, answer.error) == (any(one not in ends for one in group), *(failures or [None]))
            assert client.num_open_requests == len(streams) - len(ends)
        await asyncio.sleep(0)
        assert sorted(map(repr, sent)) == sorted(map(repr, commands))
        metrics = client._metrics.registry.collect()
        ours = [one for family in metrics for one in family.samples if one.name == "infer:request_success_total"]
        assert {one.labels["finished_reason"]: one.value for one in ours if one.value} == counted
        for task in asked:
            assert task.done() or crash is None
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        assert not client._questions

    asyncio.run(run())


def run_loop(engine: EchoEngine, commands: Sequence[Any]) -> tuple[list[Any], list[bool]]:
    """What the loop publishes for these commands, with the load and the number of requests, and when it would block.

    None among the commands: there are no others now.
    """
    told, blocks, left = list[Any](), list[bool](), iter(commands)

    def get(block: bool = True) -> Any:
        blocks.append(block)
        if (command := next(left)) is None:
            raise queue.Empty
        return command

    def publish(event: Any, load: EngineLoad, num_added: int) -> None:
        if isinstance(event, Stepped):
            assert event.started <= event.ended
            event = [(each.request_id, each.finish_reason) for each in event.outputs], event.prefilled
        elif isinstance(event, Refused):
            event = event.request_id, str(event.refusal)
        told.append((event, load.num_running, load.num_waiting, num_added))

    EngineLoop(engine, SimpleNamespace(get=get), publish).run()
    return told, blocks


def test_a_loop_publishes_what_follows_from_its_commands(folder: Path) -> None:
    """A refusal and a bug are told apart; of requests of which one is refused none is added; it blocks without work."""
    refusal, bug = UnknownSegmentError("There is no segment."), ZeroDivisionError("a bug")

    def question(error: Exception | None) -> Any:
        def answer(engine: EchoEngine) -> int:
            if error is not None:
                raise error
            return 7

        return SimpleNamespace(answer=answer)

    a, b, c = (NewRequest(name, [70, 71], SamplingParams(max_new_tokens=2)) for name in "abc")
    asked = [Ask(number, question(error)) for number, error in enumerate((None, refusal, bug))]
    first, second, third = (Add((a, b)), *asked, None), (Abort("b"), Add((c, a)), None), (Abort("z"), None)
    told, blocks = run_loop(EchoEngine(folder), [*first, *second, *third, Stop()])
    assert told == [
        (Answered(0, 7), 0, 2, 2),
        (Answered(1, None, refusal=refusal), 0, 2, 2),
        (Answered(2, None, "ZeroDivisionError: a bug"), 0, 2, 2),
        (([("a", None), ("b", None)], ("a", "b")), 2, 0, 2),
        (("a", "The id a is in use."), 1, 0, 4),
        (([("a", FinishReason.LENGTH)], ()), 0, 0, 4),
        (Idle(), 0, 0, 4),
    ]
    assert [number for number, block in enumerate(blocks) if block] == [
        0,
        len(first + second),
        len(first + second + third),
    ]
    for error, crashed in ((RankError("Lost."), Crashed("Lost.", True)), (bug, Crashed("ZeroDivisionError: a bug"))):
        engine = EchoEngine(folder)
        engine.bug = error
        assert run_loop(engine, first)[0][3:] == [(crashed, 0, 2, 2)], "the load is the last one that was known"
