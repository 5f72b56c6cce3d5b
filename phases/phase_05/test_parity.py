"""Phase 5 gives every request the same output as alone, whatever the batch and the policy."""

from pathlib import Path
from typing import Any

import pytest

from phases.phase_03_1.engine import Engine as Single
from phases.phase_05.engine import Engine
from shared.engine.config import SCHEDULER_POLICIES, EngineConfig
from shared.engine.sampler import SamplerOutput
from shared.sampling.params import SamplingParams
from tests.comparison import assert_equal
from tests.mixed_requests import EARLY as MIXED
from tests.mixed_requests import EARLY_ARRIVALS as ARRIVALS
from tests.mixed_requests import GREEDY, ends, serve, tokens


def make(folder: Path, **config: Any) -> Engine:
    return Engine(EngineConfig(model=str(folder), max_seq_len=256, **config))


def test_each_answer_in_a_changing_batch_is_as_if_alone(model_folder: Path) -> None:
    single = Single(EngineConfig(model=str(model_folder), max_seq_len=256))
    expected = [list(single.generate(prompt, SamplingParams(**params))) for prompt, params in MIXED]
    for config in (
        *({"scheduler_policy": policy, "max_decode_interval": 3} for policy in SCHEDULER_POLICIES),
        {"batching_mode": "static"},
    ):
        engine = make(model_folder, max_batch_size=4, max_num_batched_tokens=100, **config)
        answers, _ = serve(engine, MIXED, ARRIVALS)
        for (prompt, params), ours, theirs in zip(MIXED, answers, expected, strict=True):
            assert tokens(ours) == tokens(theirs), (config, prompt, params)
            assert ends(ours) == ends(theirs), (config, prompt, params)


def test_a_free_row_is_filled_in_the_next_step(folder: Path) -> None:
    engine = make(folder, max_batch_size=2)
    for name, n in (("a", 2), ("b", 4), ("c", 1)):
        engine.add_request([7] * 5, SamplingParams(**GREEDY, max_new_tokens=n), name)
    records = []
    while engine.has_work():
        engine.step()
        records.append(engine.last_step)
    assert_equal(
        [(r.prefilled, r.decoded, r.finished) for r in records if r],
        [
            ((("a", 5), ("b", 5)), (), ()),
            ((), ("a", "b"), ("a",)),
            ((("c", 5),), ("b",), ("c",)),
            ((), ("b",), ("b",)),
        ],
        "prefilled, decoded and finished",
        ("step", "column"),
    )
    assert_equal([r.step for r in records if r], [0, 1, 2, 3], "steps", ("step",))


def test_both_forwards_are_under_way_before_a_token_is_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, seen = make(folder), list[str]()
    forward, wait = engine.runner.forward, SamplerOutput.wait
    monkeypatch.setattr(engine.runner, "forward", lambda batch: seen.append("forward") or forward(batch))
    monkeypatch.setattr(SamplerOutput, "wait", lambda output: seen.append("wait") or wait(output))
    for prompt in ([7], [8]):
        engine.add_request(prompt, SamplingParams(**GREEDY, max_new_tokens=3))
        seen.clear()
        engine.step()
    assert seen == ["forward", "forward", "wait", "wait"]
