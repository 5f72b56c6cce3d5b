"""What host and GPU do in a step: the parts in the order of each phase's loop, in both files, and the GPU's times."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from shared.tracing.activity import ActivityRecorder, StepActivity
from shared.tracing.chrome import chrome_text
from shared.tracing.recorder import Recorder
from shared.tracing.timeline_page import page
from shared.tracing.trace import Span, Trace
from shared.tracing.workload import run
from shared.tracks.ranks.channel import NUM_TIMED
from tests.unit.tracing.recording import arrivals, make_engine, recorded
from tests.unit.tracing.written import check_events, embedded, table

LAUNCH, FINISH = ("schedule", "batch", "launch"), ("wait", "commit")


def parts(trace: Trace) -> list[tuple[str, ...]]:
    return [tuple(span.name for span in step.host) for step in trace.steps]


@pytest.fixture(scope="module")
def overlapped(folder: Path) -> Trace:
    return recorded(make_engine(folder, "09", overlap_scheduling=True), arrivals(3))


def test_a_step_that_waits_finishes_what_it_sampled(folder: Path) -> None:
    for phase, settings in (("08", {}), ("09", {"overlap_scheduling": False})):
        trace = recorded(make_engine(folder, phase, **settings), arrivals(3))
        assert parts(trace) == 3 * [(*LAUNCH, "sample", *FINISH)]
    two_batches = recorded(make_engine(folder, "05", max_batch_size=2), arrivals(3, 2, steps=(0, 1)))
    assert parts(two_batches)[1] == (*LAUNCH, "sample", *LAUNCH[1:], "sample", *FINISH, *FINISH)


def test_a_step_that_overlaps_finishes_the_one_before_and_samples_last(overlapped: Trace) -> None:
    first, *others, last = parts(overlapped)
    assert first == (*LAUNCH, "sample"), "nothing is in flight yet"
    assert others == 2 * [(*LAUNCH, *FINISH, "sample")]
    assert last == ("schedule", *FINISH), "nothing is left to launch"
    for step in overlapped.steps:
        assert step.host[0].started_ns == step.started_ns
        assert all(before.ended_ns == after.started_ns for before, after in itertools.pairwise(step.host))
        assert step.host[-1].ended_ns <= step.ended_ns
        assert step.gpu == (), "on a CPU a forward is computed while it is launched"


def test_the_engine_is_left_as_it_was(folder: Path) -> None:
    engine = make_engine(folder, "09")
    commit = engine.scheduler.commit
    engine.scheduler.commit = own = lambda *args: commit(*args)  # an attribute of the object, as a test may set it
    before = [set(vars(part)) for part in (engine.scheduler, engine.runner)]
    recorded(engine, arrivals(2))
    assert engine.scheduler.commit is own
    assert [set(vars(part)) for part in (engine.scheduler, engine.runner)] == before


def on_gpu(trace: Trace) -> Trace:
    """The trace as of a machine where the GPU runs each step while the host is in the next."""
    following = itertools.pairwise([*trace.steps, trace.steps[-1]])
    steps = [replace(step, gpu=(Span("forward", step.ended_ns, after.ended_ns - 5),)) for step, after in following]
    return replace(trace, steps=(*steps[:-1], replace(steps[-1], gpu=())))


def test_both_files_have_a_lane_of_the_host_and_one_of_the_gpu(overlapped: Trace) -> None:
    for trace, has_gpu in ((overlapped, False), (on_gpu(overlapped), True)):
        events = json.loads(chrome_text([trace]))["traceEvents"]
        check_events(events)
        threads = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
        assert list(threads) == ["steps", "host", *(["GPU"] if has_gpu else []), "request a"]
        for name, lane in (("host", "host"), ("GPU", "gpu"))[: 1 + has_gpu]:
            found = [
                (e["name"], e["ts"], e["args"]["step"])
                for e in events
                if (e.get("tid"), e["ph"]) == (threads[name], "X")
            ]
            spans = [(span, n) for n, step in enumerate(trace.steps) for span in getattr(step, lane)]
            assert found == [(span.name, span.started_ns / 1000, n) for span, n in spans]
        html = page([trace], "x")
        steps = embedded(html)["traces"][0]["steps"]
        assert [[span["name"] for span in step["gpu"]] for step in steps] == [
            [s.name for s in t.gpu] for t in trace.steps
        ]
        row = table(html, "Steps, here")[1]
        told = ", ".join(f"{span.name} {(span.ended_ns - span.started_ns) / 1e6:.2f}" for span in trace.steps[1].host)
        assert row[-1 - has_gpu] == told
        assert row[-1] == (
            f"forward {(trace.steps[2].ended_ns - trace.steps[1].ended_ns - 5) / 1e6:.2f}" if has_gpu else told
        )


def test_a_rank_has_no_times_of_messages_before_the_step() -> None:
    times = np.zeros((3, NUM_TIMED, 2), np.int64)
    times[1:, :2] = [[[120, 130], [140, 150]], [[40, 50], [141, 151]]]  # the first message's of rank 2 are old
    recorder = ActivityRecorder.__new__(ActivityRecorder)
    recorder.group, recorder.offset_ns = SimpleNamespace(board=SimpleNamespace(times=times)), 1000
    activity = StepActivity(lambda: 0, 0, [Span("schedule", 1100, 1110)], messages=range(NUM_TIMED, NUM_TIMED + 2))
    first, second = Span("forward", 1120, 1130), Span("forward", 1140, 1150)
    assert recorder.rank_spans(activity) == ((first, second), (Span("forward", 1141, 1151),))


@pytest.mark.gpu
def test_the_gpu_runs_a_step_between_its_launch_and_the_wait_for_it(folder: Path) -> None:
    engine = make_engine(folder, "09", device="cuda", max_batch_size=2)
    run(Recorder(engine), arrivals(3, 3))  # compiles
    recorder = Recorder(engine)
    run(recorder, arrivals(9, 9))
    trace = recorder.trace("here")
    spans = [span for step in trace.steps for span in step.gpu]
    assert [span.name for span in spans] == ["forward", "sample"] * 9
    assert all(before.ended_ns <= after.started_ns for before, after in itertools.pairwise(spans))
    slack = 50_000  # the two clocks are compared once
    for step, after in itertools.pairwise(trace.steps):
        forward, sample = step.gpu
        launch = next(span for span in step.host if span.name == "launch")
        wait = next(span for span in after.host if span.name == "wait")
        assert launch.started_ns - slack <= forward.started_ns < forward.ended_ns
        assert sample.ended_ns <= wait.ended_ns + slack
