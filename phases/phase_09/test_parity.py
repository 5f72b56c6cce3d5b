"""Phase 9 gives the outputs of phase 8, although each token comes a step late."""

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from phases.phase_08.engine import Engine as Waiting
from phases.phase_09.engine import Engine
from shared.engine.batch import Batch
from shared.engine.config import EngineConfig
from shared.engine.executor.last_ids import LastIds
from shared.engine.output import StepOutput
from shared.engine.runner import Launched, Runner
from shared.engine.sampling.sampler import SampledTokens, SamplerOutput
from shared.errors import ConfigError
from shared.sampling.params import SamplingParams
from shared.text.stopping import FinishReason
from tests.as_transformers import ASKED_OF_DEMO, assert_served
from tests.mixed_requests import ALIKE, ARRIVALS, ARRIVE, LONG, MIXED, SMALL, Requests, seen, serve, small_pools, tokens
from tests.random_loads import Interrupt, Load, answers_alone, assert_as_alone, interrupt, loads, sizes
from tests.reference_tokens import ReferenceTokens


class LateOutput:
    """Tokens that are not available before the forward of the next step is launched."""

    def __init__(self, output: SamplerOutput, runner: "LateRunner") -> None:
        self.output, self.runner, self.launched = output, runner, runner.num_launched

    def wait(self) -> SampledTokens:
        assert self.runner.num_launched > self.launched or self.runner.is_last, "waited before the next step ran"
        return self.output.wait()


class LateRunner(Runner):
    """Counts forwards, and how many batches began with an id that the host did not know."""

    num_launched = num_pending = 0
    is_last = False  # nothing is left to launch, or a request would be preempted

    def forward(self, batch: Batch) -> Launched:
        self.num_launched += 1
        self.num_pending += len(batch.pending)
        assert (batch.token_ids[batch.pending] == 0).all()
        return super().forward(batch)

    def sample(self, launched: Launched, rows: Any) -> Any:
        return LateOutput(super().sample(launched, rows), self)


class Late(Engine):
    """Tokens arrive late, and a step in flight cannot be awaited before the next one is launched."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.runner: LateRunner = LateRunner(self.model, self.view, self.pool.max_sequences, last_ids=LastIds)
        schedule = self.scheduler.schedule

        def scheduling() -> Any:
            planned = schedule()
            self.runner.is_last = not planned
            return planned

        self.scheduler.schedule = scheduling  # type: ignore[method-assign]


def make(folder: Path, phase: Any = Late, **config: Any) -> Any:
    if phase is not Waiting:
        config = {"overlap_scheduling": True} | config
    return phase(EngineConfig(model=str(folder), **config))


def test_outputs_are_those_of_phase_8(model_folder: Path) -> None:
    """In a pool for little more than one long request: blocks are shared and evicted, requests preempted."""
    requests, arrivals = [*ALIKE, *MIXED], [*ARRIVE, *ARRIVALS]
    expected = seen(serve(make(model_folder, Waiting, **SMALL), requests, arrivals)[0])
    for pool in small_pools(model_folder):
        engine = make(model_folder, **SMALL | pool)
        for _ in range(2):
            assert seen(serve(engine, requests, arrivals)[0]) == expected, pool
        assert engine.runner.num_pending > 200
        assert engine.scheduler.num_prefix_hits > 0
        assert engine.load().num_preemptions > 0 or pool["block_size"] == 16
        assert engine.load().kv_usage == 0


def crowd(seed: int) -> Requests:
    """Greedy and sampled, short, long and empty, with penalties, stop strings and logprobs; many share prefixes."""
    chance = random.Random(seed)
    stem = [chance.randrange(20, 500) for _ in range(16)]
    lengths = [0 if n % 8 == 7 else chance.randrange(1, 14) for n in range(24)]
    return [
        (
            stem[: chance.choice([0, 9, 16])] + [chance.randrange(20, 500) for _ in range(chance.randrange(1, 14))],
            {
                "seed": n,
                "temperature": chance.choice([0.0, 0.8]),
                "max_new_tokens": num_new,
                "repetition_penalty": chance.choice([1.0, 1.3]),
                "frequency_penalty": chance.choice([0.0, 0.8]),
                "min_tokens": min(num_new, 2),
                "prompt_logprobs": None if num_new > 3 else 2,
                "logprobs": chance.choice([None, 2]),
                "stop": chance.choice([(), ("a",)]),
            },
        )
        for n, num_new in enumerate(lengths)
    ]


@pytest.mark.parametrize(
    ("family", "seed", "config"),
    [
        ("gemma3_text", 0, {"num_gpu_blocks": 14, "block_size": 4, "max_batch_size": 6}),
        ("llama", 1, {"num_gpu_blocks": 64, "scheduler_policy": "decode_round_robin", "max_batch_size": 4}),
        ("gemma3_text", 2, {"use_chunked_prefill": False, "max_batch_size": 5}),
        ("llama", 3, {"kv_cache_backend": "contiguous", "scheduler_policy": "prefill_first", "max_batch_size": 5}),
        ("gemma3_text", 4, {"batching_mode": "static", "max_batch_size": 4}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_every_memory_and_mode_gives_the_same_outputs(
    tiny_checkpoints: dict[str, Path], family: str, seed: int, config: dict[str, Any]
) -> None:
    folder, options = tiny_checkpoints[family], config | {"max_seq_len": 48}
    arrivals = [n // 3 for n in range(24)]
    expected = serve(make(folder, Waiting, **options), crowd(seed), arrivals)[0]
    engine = make(folder, **options)
    for mine, theirs in zip(serve(engine, crowd(seed), arrivals)[0], expected, strict=True):
        assert [(o.token_id, o.text, o.finish_reason) for o in mine] == [
            (o.token_id, o.text, o.finish_reason) for o in theirs
        ]
        assert [o.logprobs is None for o in mine] == [o.logprobs is None for o in theirs]
        assert [len(o.prompt_logprobs or ()) for o in mine] == [len(o.prompt_logprobs or ()) for o in theirs]
    assert engine.runner.num_pending > 50
    if config.get("num_gpu_blocks") == 14:
        assert engine.load().num_preemptions > 0
        assert engine.scheduler.num_prefix_hits > 0


@settings(max_examples=8, deadline=None)
@given(options=sizes(), load=loads())
def test_whatever_the_sizes_arrivals_and_aborts(
    tiny_checkpoints: dict[str, Path], options: dict[str, Any], load: Load
) -> None:
    folder = tiny_checkpoints["gemma3_text"]
    assert_as_alone(make(folder, **options), load, answers_alone(Waiting, folder))


def test_the_loop_of_phase_8_is_one_setting_away(tiny_checkpoints: dict[str, Path]) -> None:
    """Also the default without a GPU."""
    folder, options = tiny_checkpoints["qwen3"], {"max_seq_len": 128, "max_batch_size": 3}
    expected, steps = serve(make(folder, Waiting, **options), ALIKE)
    for overlap in (False, None):
        engine = make(folder, Engine, **options, overlap_scheduling=overlap)
        answers, records = serve(engine, ALIKE)
        assert (answers, records) == (expected, steps)
        assert engine.in_flight is None


def test_what_was_computed_for_an_aborted_request_is_dropped_and_its_id_is_free_at_once(folder: Path) -> None:
    """Aborted with a token in flight, in a row of the pool that the next request takes."""
    options = {"max_seq_len": 48, "num_gpu_blocks": 24, "block_size": 4}
    params = [SamplingParams(seed=n, max_new_tokens=9, ignore_eos=True) for n in range(5)]
    found = []
    for phase in (Waiting, Late):
        engine = make(folder, phase, **options)
        outputs: dict[str, list[StepOutput]] = {str(n): [] for n in range(5)}
        for name in outputs:
            engine.add_request([7 + int(name)] * 6, params[int(name)], name)
        while engine.has_work():
            for output in engine.step():
                outputs[output.request_id].append(output)
                if output.request_id == "1" and len(outputs["1"]) == 2:
                    assert engine.abort("1")
                    engine.add_request([9] * 5, SamplingParams(seed=99, max_new_tokens=3, ignore_eos=True), "1")
        assert engine.pool.audit() == []
        found.append([tokens(answer) for answer in outputs.values()])
    assert found[0] == found[1]
    assert [o.finish_reason for o in outputs["1"]] == [None, None, None, None, FinishReason.LENGTH]


@pytest.mark.parametrize(
    "broken",
    [
        "runner.forward",
        "runner.sample",
        "scheduler.schedule",
        "scheduler.commit",
        "scheduler.finish",
        "output_processor.process",
        "pool.layout",
    ],
)
def test_an_interrupted_step_is_repeated_and_loses_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Before and after each call of the step, with a step in flight and another launched."""
    options = SMALL | {"max_batch_size": 4}
    expected = seen(serve(make(folder, Waiting, **options), ALIKE, ARRIVE)[0])
    engine = make(folder, Engine, **options)
    interrupts = interrupt(engine, broken, monkeypatch)
    assert seen(serve(engine, ALIKE, ARRIVE)[0]) == expected
    assert len(interrupts) > 5


def test_an_end_is_not_lost_between_the_text_and_the_scheduler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted once, just before requests are retired."""
    engine = make(folder, Engine, **SMALL)
    finish, step, ended = engine.scheduler.finish, engine.step, set[str]()

    def interrupted(requests: Any) -> None:
        names = {request.request_id for request in requests}
        if names - ended:
            ended.update(names)
            raise Interrupt
        finish(requests)

    def persistent() -> list[StepOutput]:
        while True:
            with contextlib.suppress(Interrupt):
                return step()

    monkeypatch.setattr(engine.scheduler, "finish", interrupted)
    monkeypatch.setattr(engine, "step", persistent)
    answers, _ = serve(engine, ALIKE, ARRIVE)
    assert [answer[-1].finish_reason is not None for answer in answers] == [True] * len(ALIKE)
    assert len(ended) == len(ALIKE)
    assert engine.load().num_running == 0


def test_graphs_need_blocks_plans_and_a_gpu(folder: Path) -> None:
    for other, says in (
        ({"kv_cache_backend": "contiguous"}, "kv_cache_backend = 'paged'"),
        ({"batching_mode": "static"}, "batching_mode = 'continuous'"),
        ({"attention_backend": "flash"}, "attention_backend = 'planned'"),
    ):
        with pytest.raises(ConfigError, match=f"use_cuda_graphs is True and .* requires {says}"):
            EngineConfig(use_cuda_graphs=True, **other)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"use_cuda_graphs is True and the device is cpu"):
        make(folder, Engine, use_cuda_graphs=True)


@pytest.mark.demo
def test_the_demo_model_continues_as_transformers_does(demo_folder: Path, reference_tokens: ReferenceTokens) -> None:
    engine = make(demo_folder, max_seq_len=256, max_batch_size=2)
    assert_served(engine, reference_tokens, ASKED_OF_DEMO)


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"overlap_scheduling": False},
        {"use_cuda_graphs": False},
        {"use_cuda_graphs": False, "overlap_scheduling": True},
    ],
    ids=str,
)
def test_tokens_on_the_gpu_equal_those_of_the_cpu(model_folder: Path, settings: dict[str, Any]) -> None:
    options: dict[str, Any] = {"max_seq_len": 640, "max_batch_size": 8, "prefill_chunk_size": 100}
    requests, arrivals = [*ALIKE, *LONG], [*ARRIVE, 9, *ARRIVALS, 10]
    expected = serve(make(model_folder, Waiting, dtype="float32", **options), requests, arrivals)[0]
    engine = make(model_folder, Engine, device="cuda", dtype="float32", **options, **settings)
    for _ in range(2):
        answers = serve(engine, requests, arrivals)[0]
        assert [tokens(answer) for answer in answers] == [tokens(answer) for answer in expected]
    assert (engine.runner.num_replays > 50) == engine.config.is_on("use_cuda_graphs")
