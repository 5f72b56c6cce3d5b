"""Phase 5 gives every request the same output as it has alone, whatever the batch and the policy."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from phases.phase_03_1.engine import Engine as Single
from phases.phase_05.engine import Engine
from shared.engine.config import SCHEDULER_POLICIES, EngineConfig
from shared.engine.output import StepOutput
from shared.engine.sampling.sampler import SamplerOutput
from shared.kernels.launch import LAUNCHES
from shared.sampling.params import SamplingParams
from tests import mixed_requests
from tests.as_transformers import ASKED, ASKED_OF_DEMO, assert_served
from tests.comparison import assert_equal
from tests.mixed_requests import EARLY as MIXED
from tests.mixed_requests import EARLY_ARRIVALS as ARRIVALS
from tests.mixed_requests import GREEDY, Requests, ends, tokens
from tests.random_loads import assert_failures_stay_apart, break_off, serve_through
from tests.reference_tokens import ReferenceTokens


def make(folder: Path, **config: Any) -> Engine:
    return Engine(EngineConfig(model=str(folder), max_seq_len=256, **config))


def serve(engine: Any, requests: Requests, arrivals: Sequence[int] | None = None) -> list[list[StepOutput]]:
    """Each request's outputs, in the order of the requests; ``arrivals`` holds the step before which each arrives."""
    return mixed_requests.serve(engine, requests, arrivals)[0]


def test_each_answer_in_a_changing_batch_is_as_if_alone(model_folder: Path) -> None:
    single = Single(EngineConfig(model=str(model_folder), max_seq_len=256))
    expected = [list(single.generate(prompt, SamplingParams(**params))) for prompt, params in MIXED]
    for config in (
        *({"scheduler_policy": policy, "max_decode_interval": 3} for policy in SCHEDULER_POLICIES),
        {"batching_mode": "static"},
    ):
        engine = make(model_folder, max_batch_size=4, max_num_batched_tokens=100, **config)
        for (prompt, params), ours, theirs in zip(MIXED, serve(engine, MIXED, ARRIVALS), expected, strict=True):
            assert tokens(ours) == tokens(theirs), (config, prompt, params)
            assert ends(ours) == ends(theirs), (config, prompt, params)


def test_greedy_tokens_equal_those_of_transformers(model_folder: Path, reference_tokens: ReferenceTokens) -> None:
    engine = make(model_folder, max_batch_size=2)
    assert_served(engine, reference_tokens, ASKED, [0, 2, 5])


@pytest.mark.demo
def test_the_demo_model_answers_as_transformers_does(demo_folder: Path, reference_tokens: ReferenceTokens) -> None:
    engine = make(demo_folder, max_batch_size=2)
    assert_served(engine, reference_tokens, ASKED_OF_DEMO, [0, 3])


def test_generate_answers_beside_requests_that_run(folder: Path) -> None:
    expected = [tokens(answer) for answer in serve(make(folder), MIXED[:2])]
    engine = make(folder)
    first = engine.generate(MIXED[0][0], SamplingParams(**MIXED[0][1]))
    got = [next(first)]
    assert tokens(list(engine.generate(MIXED[1][0], SamplingParams(**MIXED[1][1])))) == expected[1]
    assert tokens(got + list(first)) == expected[0]


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


@pytest.mark.failing_forwards
def test_requests_that_fail_and_are_aborted_leave_the_others_alone(tiny_checkpoints: dict[str, Path]) -> None:
    folder = tiny_checkpoints["qwen3"]
    single = Single(EngineConfig(model=str(folder), max_seq_len=256))
    engine = make(folder, max_batch_size=6, max_num_batched_tokens=60)
    assert_failures_stay_apart(
        engine, lambda requests: [tokens(list(single.generate(ids, SamplingParams(**p)))) for ids, p in requests]
    )


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


@pytest.mark.parametrize("place", ["forward", "wait", "commit"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, NotImplementedError])
def test_a_step_that_is_broken_off_loses_no_output(
    folder: Path, error: type[BaseException], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if a prompt's token was committed, and was its last, before the decode was interrupted."""
    requests: Requests = [([7 + n] * 4, GREEDY | {"max_new_tokens": 5 if n == 0 else 1}) for n in range(4)]
    expected = [tokens(answer) for answer in serve(make(folder), requests)]
    engine = make(folder)
    owner, name = {
        "forward": (engine, "decode"),
        "wait": (SamplerOutput, "wait"),  # of the prompt, of the decode, of the prompt ...
        "commit": (engine.pool, "commit"),  # as well
    }[place]
    break_off(owner, name, error, lambda number: number % (2 if place == "forward" else 3) == 1, monkeypatch)
    answers, num_broken_off, _ = serve_through(engine, requests, error)
    assert num_broken_off >= 3
    assert answers == expected


@pytest.mark.gpu
@pytest.mark.parametrize("policy", SCHEDULER_POLICIES)
def test_tokens_on_the_gpu_equal_those_of_the_cpu(model_folder: Path, policy: str) -> None:
    config = {"scheduler_policy": policy, "max_batch_size": 4, "max_num_batched_tokens": 100}
    on_cpu = serve(make(model_folder, **config), MIXED, ARRIVALS)
    on_gpu = serve(make(model_folder, device="cuda", dtype="float32", **config), MIXED, ARRIVALS)
    assert [tokens(answer) for answer in on_gpu] == [tokens(answer) for answer in on_cpu]


@pytest.mark.gpu
def test_beside_a_prompt_all_decoding_requests_share_their_launches(model_folder: Path) -> None:
    engine = make(model_folder, device="cuda", dtype="bfloat16")
    for n in range(7):
        engine.add_request([7] * (20 + n), SamplingParams(**GREEDY, max_new_tokens=8))
    engine.step()
    engine.add_request([7] * 33, SamplingParams(**GREEDY, max_new_tokens=8))
    before = LAUNCHES.copy()
    engine.step()
    made, layers = LAUNCHES - before, engine.model.config.num_layers
    assert made["kv_write_kernel"] == 2 * layers, "one for the prompt, one for the seven"
    assert made["decode_attention_kernel"] == layers
