"""The profiler: what it counts, and that nothing of it stays."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shared.sampling.params import SamplingParams
from shared.tracing.profiler import ProfiledStep, Profiler
from shared.tracing.recorder import Recorder
from tests.unit.tracing.recording import SPECULATING, make_engine

PARAMS = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)


def test_a_profile_counts_tokens_lengths_forwards_and_drafts(folder: Path) -> None:
    engine = make_engine(folder, "11", max_batch_size=2, **SPECULATING)
    before = len(list(engine.generate("one two three one", PARAMS)))  # another acceptance than the profiled run's
    parts = engine.scheduler, engine.runner, engine
    own = [set(vars(part)) for part in parts]
    num_forwards, counts = engine.runner.num_forwards, list(engine.scheduler.num_accepted_by_position)
    num_drafts = list(engine.scheduler.num_drafts_by_position)
    with Profiler(engine) as profile:
        outputs = list(engine.generate("one two one two", PARAMS))
    assert len(outputs) == before == 40
    assert [set(vars(part)) for part in parts] == own, "nothing of it stays"
    steps = profile.steps
    assert sum(step.num_tokens for step in steps) == 40
    assert sum(step.forward_seconds > 0 for step in steps) == engine.runner.num_forwards - num_forwards < 40
    lengths = [length for step in steps for length in step.lengths]
    assert lengths == sorted(lengths)
    accepted = sum(count for step in steps for _, count, _ in step.record.verified)
    assert accepted == sum(engine.scheduler.num_accepted_by_position) - sum(counts) > 0
    scheduler = engine.scheduler
    ours, all_ours = scheduler.num_accepted_by_position, scheduler.num_drafts_by_position
    changes = [(ours[n] - counts[n], all_ours[n] - num_drafts[n]) for n in range(len(counts))]
    assert profile.acceptance == tuple(count / drafts for count, drafts in changes)
    stats = profile.stats()
    assert stats["tokens of a decode step"] == pytest.approx(39 / (len(steps) - 1))
    assert stats["longest sequence (tokens)"] == lengths[-1]
    assert stats["acceptance at position 0"] == profile.acceptance[0]
    list(engine.generate("one", PARAMS))
    assert profile.steps == steps, "the context is closed"


def test_a_decode_step_computes_no_prompt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[tuple[tuple[str, ...], tuple[str, ...], int, float]] = [
        ((), ("a",), 1, 0.9),
        (("a",), (), 3, 0.002),
        (("a",), ("b",), 9, 0.8),
    ]
    steps = [
        ProfiledStep(cast(Any, SimpleNamespace(decoded=decoded, prefilled=prompts)), count, (5,), seconds)
        for decoded, prompts, count, seconds in kinds
    ]
    monkeypatch.setattr(Profiler, "steps", steps)
    found = Profiler(make_engine(folder, "10", max_batch_size=2)).stats()
    assert (found["tokens of a decode step"], found["forward, median ms"]) == (3, 2)


def test_a_profile_and_a_trace_of_one_run_agree(folder: Path) -> None:
    engine = make_engine(folder, "10", max_batch_size=2)
    recorder = Recorder(engine)
    with Profiler(engine) as profile:
        for name in ("a", "b"):
            recorder.add_request("one two", PARAMS, name)
        while engine.has_work():
            recorder.step()
    trace = recorder.trace("x")
    assert [step.record.decoded for step in profile.steps] == [step.record.decoded for step in trace.steps]
    assert sum(step.num_tokens for step in profile.steps) == trace.totals.num_tokens == 80
    assert max(len(step.lengths) for step in profile.steps) == 2
    assert "step" not in vars(engine)
    assert "acceptance at position 0" not in profile.stats()
    with Profiler(engine) as prompts:
        list(engine.generate("one two", SamplingParams(max_new_tokens=1)))
    assert prompts.stats()["tokens of a decode step"] == 1, "of a run that decodes nothing"
    with Profiler(engine) as unused:
        pass
    assert unused.stats() == {}
