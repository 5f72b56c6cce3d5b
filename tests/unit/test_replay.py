"""A run is repeated from its record, whatever the clock does."""

import random
import time
from pathlib import Path
from typing import Any

import pytest

from phases.phase_11.engine import Engine
from shared.engine.config import EngineConfig
from shared.errors import ConfigError
from shared.sampling.params import SamplingParams
from shared.scheduling.step_costs import StepCosts, identity, save
from tests.replay import RecordedRun, RunRecorder, replay

WORDS = [5, 6, 7, 8] * 6
LIKELY = dict.fromkeys((5, 6, 7, 8), 8.0)  # so that lookups find something, which is right at times
ABORTED = {9: "2", 14: "5", 15: "nothing"}
CLOCKS = ("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time", "time_ns", "process_time")


def make(folder: Path, kind: str, **settings: Any) -> Engine:
    """The draft model is the model, which is rounded itself, so that some of its drafts are rejected."""
    drafts: dict[str, Any] = {"drafter": "ngram"}
    if kind == "model":
        drafts = {"draft_model": str(folder), "quantization": "fp8"}
    sizes: dict[str, Any] = {"max_seq_len": 96, "block_size": 4, "num_gpu_blocks": 60, "prefill_chunk_size": 10}
    sizes |= {"max_batch_size": 4, "acceptance_method": "rejection", "overlap_scheduling": True, "seed": 3}
    return Engine(EngineConfig(str(folder), use_speculative_decoding=True, **drafts, **sizes | settings))


def record(engine: Engine) -> RecordedRun:
    """Nine requests, sampled at temperature 1, that arrive and are aborted before given steps."""
    recorder, coming = RunRecorder(engine), [(3 * n, n) for n in range(9)]
    while coming or recorder.has_work():
        while coming and coming[0][0] <= len(recorder.steps):
            n = coming.pop(0)[1]
            drawn: dict[str, Any] = {"temperature": 1.0, "seed": n if n % 2 else None, "logit_bias": LIKELY}
            params = SamplingParams(**drawn, max_new_tokens=20 + n, ignore_eos=True)
            recorder.add_request([n + 1, *WORDS], params)
        if len(recorder.steps) in ABORTED:
            recorder.abort(ABORTED[len(recorder.steps)])
        recorder.step()
    return recorder.run()


def let_clocks_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading is another number, forwards or back by up to hours."""
    chance = random.Random(0)
    for name in CLOCKS:
        draw = (lambda: chance.randrange(10**13)) if name.endswith("_ns") else (lambda: chance.uniform(0, 10**4))
        monkeypatch.setattr(time, name, draw)


@pytest.mark.parametrize("kind", ["ngram", "model"])
def test_a_run_is_repeated_from_its_record(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    """Schedule by schedule and token by token, with rejection sampling and lengths that adapt."""
    folder = tiny_checkpoints["qwen3"]
    monkeypatch.setenv("INFER_STEP_COSTS", str(tmp_path))
    if kind == "model":  # as if it were large
        save(StepCosts((1, 64), (0.01, 0.03), wait=1e-3, source="measured", of=identity(make(folder, kind).model)))
    found = record(make(folder, kind))
    drafts = [num_drafts for schedule in found.schedules for *_, num_drafts in schedule]
    assert len(set(drafts)) > 2, "lengths adapt"
    assert sum(accepted for step in found.steps for _, accepted, _ in step.verified) > 0
    assert sum(rejected for step in found.steps for _, _, rejected in step.verified) > 0
    let_clocks_jump(monkeypatch)
    again = replay(found, make(folder, kind, seed=4))  # the seeds that the first engine chose are recorded
    monkeypatch.undo()
    for number, (mine, theirs) in enumerate(zip(again.schedules, found.schedules, strict=True)):
        assert mine == theirs, f"schedule {number}"
    for number, (ours, other) in enumerate(zip(again.outputs, found.outputs, strict=True)):
        assert ours == other, f"outputs of step {number}"
    assert again == found


def test_other_costs_give_other_steps_and_are_refused(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("INFER_STEP_COSTS", str(tmp_path))
    folder = tiny_checkpoints["qwen3"]
    found = record(engine := make(folder, "ngram"))
    save(StepCosts((1, 8), (1.0, 8.0), source="measured", of=identity(engine.model)))
    with pytest.raises(ConfigError, match=f"decided by the step costs {found.step_costs}, and the engine has"):
        replay(found, make(folder, "ngram"))
    dear = record(make(folder, "ngram"))
    assert dear.step_costs != found.step_costs
    assert [len(schedule) for schedule in dear.schedules] != [len(schedule) for schedule in found.schedules]
    assert not any(num_drafts for schedule in dear.schedules for *_, num_drafts in schedule), "none would pay"
    with pytest.raises(ConfigError, match="record a run from an engine's start"):
        RunRecorder(engine)
