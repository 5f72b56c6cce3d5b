"""The loop with one step in flight, as overlapped scheduling will run it: tokens come a step late, and the answers
are those of the loop that waits."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from phases.phase_08.engine import Engine
from shared.engine.batch import Batch
from shared.engine.config import EngineConfig
from shared.engine.output import StepOutput
from shared.engine.runner import Launched, Runner
from shared.engine.sampler import SampledTokens, SamplerOutput
from shared.sampling.params import SamplingParams
from shared.scheduling.schedule import Schedule
from shared.text.stopping import FinishReason


class LateOutput:
    """Tokens that cannot be had before the forward of the next step was launched."""

    def __init__(self, output: SamplerOutput, runner: "LateRunner") -> None:
        self.output, self.runner, self.launched = output, runner, runner.num_launched

    def wait(self) -> SampledTokens:
        assert self.runner.num_launched > self.launched or self.runner.is_last, "waited before the next step ran"
        return self.output.wait()


class LateRunner(Runner):
    """Counts forwards, and how many batches began with an id that the host did not know."""

    num_launched = num_pending = 0
    is_last = False  # nothing else is left to launch

    def forward(self, batch: Batch) -> Launched:
        self.num_launched += 1
        self.num_pending += len(batch.pending)
        assert (batch.token_ids[batch.pending] == 0).all()
        return super().forward(batch)

    def sample(self, launched: Launched, rows: Any) -> Any:
        return LateOutput(super().sample(launched, rows), self)


class Overlapped(Engine):
    """One forward a step, and the step before is finished while it runs."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.runner: LateRunner = LateRunner(self.model, self.view, self.pool.max_sequences)
        self.in_flight: tuple[Schedule, Any] | None = None

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        schedule = self.scheduler.schedule()
        launched = self.runner.forward(Batch.of(schedule, self.pool)) if schedule else None
        self.runner.is_last = launched is None
        if self.in_flight is not None:
            self.finish(*self.in_flight)
        self.in_flight = None
        if launched is not None:
            self.in_flight = schedule, self.runner.sample(launched, schedule.sampling_rows())
        return self.output_processor.take()

    def has_work(self) -> bool:
        return self.in_flight is not None or super().has_work()


def crowd(seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Greedy and drawn, short, long and empty, with penalties, stop strings and log-probabilities; many begin alike."""
    chance = random.Random(seed)
    stem = [chance.randrange(20, 500) for _ in range(16)]
    lengths = [0 if n % 8 == 7 else chance.randrange(1, 14) for n in range(24)]
    return [
        (
            stem[: chance.choice([0, 9, 16])] + [chance.randrange(20, 500) for _ in range(chance.randrange(1, 14))],
            SamplingParams(
                seed=n,
                temperature=chance.choice([0.0, 0.8]),
                max_new_tokens=num_new,
                repetition_penalty=chance.choice([1.0, 1.3]),
                frequency_penalty=chance.choice([0.0, 0.8]),
                min_tokens=min(num_new, 2),
                prompt_logprobs=None if num_new > 3 else 2,
                logprobs=chance.choice([None, 2]),
                stop=chance.choice([(), ("a",)]),
            ),
        )
        for n, num_new in enumerate(lengths)
    ]


def serve(engine: Engine, requests: list[tuple[list[int], SamplingParams]], abort: str = "") -> list[list[StepOutput]]:
    """Requests come three a step; ``abort`` is one that is given up when its second output is there."""
    outputs: dict[str, list[StepOutput]] = {str(n): [] for n in range(len(requests))}
    coming = list(enumerate(requests))
    while coming or engine.has_work():
        for n, (prompt, params) in coming[:3]:
            engine.add_request(prompt, params, str(n))
        del coming[:3]
        for output in engine.step():
            outputs[output.request_id].append(output)
            if output.request_id == abort and len(outputs[abort]) == 2:
                assert engine.abort(abort)
                engine.add_request([9] * 5, SamplingParams(seed=99, max_new_tokens=3, ignore_eos=True), abort)
    assert engine.pool.audit() == []
    assert engine.pool.free_tokens == engine.pool.capacity_tokens
    return list(outputs.values())


@pytest.mark.parametrize(("family", "seed"), [("llama", 0), ("gemma3_text", 1)])
@pytest.mark.parametrize(
    "config",
    [
        {"num_gpu_blocks": 14, "block_size": 4, "max_batch_size": 6},
        {"num_gpu_blocks": 64, "scheduler_policy": "decode_round_robin", "max_batch_size": 4},
        {"kv_cache_backend": "contiguous", "scheduler_policy": "prefill_first", "max_batch_size": 5},
        {"batching_mode": "static", "max_batch_size": 4},
    ],
    ids=lambda config: next(iter(config)),
)
def test_answers_are_those_of_the_loop_that_waits(
    tiny_checkpoints: dict[str, Path], config: dict[str, Any], family: str, seed: int
) -> None:
    settings = EngineConfig(model=str(tiny_checkpoints[family]), max_seq_len=48, dtype="float32", **config)
    expected = serve(Engine(settings), crowd(seed))
    engine = Overlapped(settings)
    got = serve(engine, crowd(seed))
    for mine, theirs in zip(got, expected, strict=True):
        assert [(o.token_id, o.text, o.finish_reason) for o in mine] == [
            (o.token_id, o.text, o.finish_reason) for o in theirs
        ]
        assert [o.logprobs is None for o in mine] == [o.logprobs is None for o in theirs]
        assert [len(o.prompt_logprobs or ()) for o in mine] == [len(o.prompt_logprobs or ()) for o in theirs]
    assert engine.runner.num_pending > 50
    if config.get("num_gpu_blocks") == 14:
        assert engine.load().num_preemptions > 0
        assert engine.scheduler.num_prefix_hits > 0


def test_what_a_step_in_flight_computes_for_an_ended_request_is_dropped(folder: Path) -> None:
    """Aborted while its next token is in flight, and its id used again at once."""
    settings = EngineConfig(model=str(folder), max_seq_len=48, num_gpu_blocks=24, block_size=4, max_batch_size=6)
    requests = [([7 + n] * 6, SamplingParams(seed=n, max_new_tokens=9, ignore_eos=True)) for n in range(5)]
    expected = serve(Engine(settings), requests, abort="1")
    got = serve(Overlapped(settings), requests, abort="1")
    assert [[o.token_id for o in answer] for answer in got] == [[o.token_id for o in answer] for answer in expected]
    assert [o.finish_reason for o in got[1]] == [None, None, None, None, FinishReason.LENGTH]


def test_no_step_is_run_for_a_token_beyond_the_longest_answer(folder: Path) -> None:
    """Lengths are counts, so the scheduler knows of that end while the last token is in flight."""
    settings = EngineConfig(model=str(folder), max_seq_len=48, num_gpu_blocks=24, block_size=4)
    requests = [([7] * 6, SamplingParams(temperature=0.0, max_new_tokens=n, ignore_eos=True)) for n in (1, 5, 3)]
    engines = Engine(settings), Overlapped(settings)
    for engine in engines:
        serve(engine, requests)
    assert engines[1].runner.num_tokens_computed == engines[0].runner.num_tokens_computed
