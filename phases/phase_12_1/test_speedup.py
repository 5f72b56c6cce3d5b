"""The cost and gain of several ranks: one message per step and two sums per layer; on GPUs, faster tokens."""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from phases.phase_12.engine import Engine as Whole
from phases.phase_12_1.engine import Engine
from shared.checkpoints.make import make_checkpoint
from shared.engine.config import EngineConfig
from shared.sampling.params import SamplingParams
from shared.tracks.ranks.channel import CALLS, READ
from tests.mixed_requests import GREEDY
from tests.ranks import checkpoint_for_ranks
from tests.speed import ONE_ANSWER, time_one_answer

LEAST_GAINS = {2: (1.6, 1.5, 1.6), 4: (2.4, 2.3, 1.6)}
"""By ranks: one request that decodes, 64 of them, and a prompt of 8,192 tokens, of Qwen3-8B in bf16."""


@pytest.fixture(scope="module")
def group(session_folder: Path) -> Iterator[Engine]:
    folder = checkpoint_for_ranks("llama", session_folder)
    engine = Engine(EngineConfig(model=str(folder), max_batch_size=8, max_seq_len=512, tensor_parallel_size=2))
    yield engine
    engine.group.close()


@pytest.mark.measured
@pytest.mark.benchmark(group=ONE_ANSWER)
def test_generate(group: Engine, benchmark) -> None:
    time_one_answer(benchmark, group)


def test_a_step_is_one_message_and_two_sums_a_layer(group: Engine) -> None:
    counters = group.group.board.counters
    params = SamplingParams(**GREEDY, max_new_tokens=100)
    for _ in range(3):
        group.add_request([7] * 8, params)
    group.step()
    before = counters.copy()
    for _ in range(10):
        group.step()
    made = counters - before
    num_layers = group.model.config.num_layers
    assert made[0, CALLS] == 2 * 10 * (2 * num_layers + 2), "begins and ends; with the embedding's and the arg-max's"
    assert made[1, READ] == 10
    while group.has_work():
        group.step()


def seconds_of(engine: Any, num_requests: int, num_prompt: int, num_new: int) -> tuple[float, float]:
    """Median seconds of a decode step, and of the steps of the prompts."""
    for n in range(num_requests):
        engine.add_request([7 + n] * num_prompt, SamplingParams(**GREEDY, max_new_tokens=num_new))
    steps: list[tuple[bool, float]] = []
    while engine.has_work():
        torch.cuda.synchronize()
        started = time.perf_counter()
        engine.step()
        torch.cuda.synchronize()
        steps.append((len(engine.last_step.decoded) == num_requests, time.perf_counter() - started))
    engine.pool.drop_cached()
    decoding = [taken for is_decode, taken in steps if is_decode]
    return statistics.median(decoding[5:]), sum(taken for is_decode, taken in steps if not is_decode)


@pytest.mark.measured
@pytest.mark.gpu
@pytest.mark.several_gpus
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_are_faster_than_one_gpu(tmp_path: Path, size: int) -> None:
    """Random weights of true shape; one process compared with the ranks, in one run."""
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs, and this machine has {torch.cuda.device_count()}")
    folder = make_checkpoint("qwen3-8b", tmp_path / "model", device="cuda")
    options: dict[str, Any] = {"model": str(folder), "device": "cuda", "max_seq_len": 8448, "max_batch_size": 64}
    measured: list[tuple[float, float, float]] = []
    weights: list[int] = []
    for make, num_ranks in ((Whole, 1), (Engine, size)):
        engine = make(EngineConfig(**options, num_gpu_blocks=4096, tensor_parallel_size=num_ranks))
        seconds_of(engine, 64, 16, 8)  # compiles
        one, many = (seconds_of(engine, count, 128, 64)[0] for count in (1, 64))
        prompt = min(seconds_of(engine, 1, 8192, 8)[1] for _ in range(3))
        measured.append((one, many, prompt))
        weights.append(sum(parameter.nbytes for parameter in engine.model.parameters()))
        if num_ranks > 1:
            engine.group.close()
        del engine
        torch.cuda.empty_cache()
    gains = [alone / shared for alone, shared in zip(*measured, strict=True)]
    print(f"{size} ranks: {measured}, gains {gains}, weights {weights}")
    assert all(gain >= least for gain, least in zip(gains, LEAST_GAINS[size], strict=True)), gains
    assert weights[1] <= 1.1 * weights[0] / size
