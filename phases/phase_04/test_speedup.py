"""The gain from batching: forward passes, and time; a single request loses nothing."""

import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.timing import SyntheticPrompts, run
from phases.phase_03_1.engine import Engine as Single
from phases.phase_04.engine import Engine
from shared.checkpoints.make import make_checkpoint
from shared.engine.config import EngineConfig
from tests.speed import ONE_ANSWER, seconds_a_token, serve, speedup, time_one_answer

PROMPTS = [[7 + n] * 32 for n in range(8)]


def together(engine: Any, prompts: list[list[int]], new_tokens: int) -> float:
    """Seconds of all requests in one batch."""
    return serve(engine, prompts, new_tokens).seconds


def one_by_one(engine: Any, prompts: list[list[int]], new_tokens: int) -> float:
    """Seconds of all requests, each arriving when the previous one has ended."""
    started = time.perf_counter()
    for prompt in prompts:
        run(engine, prompt, new_tokens)
    return time.perf_counter() - started


@pytest.mark.measured
@pytest.mark.benchmark(group=ONE_ANSWER)
def test_generate(folder: Path, benchmark) -> None:
    time_one_answer(benchmark, Engine(EngineConfig(model=str(folder), max_batch_size=8)))


@pytest.mark.measured
@pytest.mark.benchmark(group="8 requests, 16 tokens after 32, tiny model")
@pytest.mark.parametrize("work", [one_by_one, together], ids=["one by one", "static batch"])
def test_eight_requests(folder: Path, benchmark, work: Any) -> None:
    engine = Engine(EngineConfig(model=str(folder), max_batch_size=8))
    benchmark.pedantic(work, args=(engine, PROMPTS, 16), rounds=3, warmup_rounds=1)


def test_a_batch_of_eight_takes_an_eighth_of_the_forward_passes(folder: Path) -> None:
    engine = Engine(EngineConfig(model=str(folder), max_batch_size=8))
    batch = serve(engine, PROMPTS, 16)
    assert batch.num_forwards == 16, "one for the prompts, and one for each further token of all eight"
    assert batch.num_tokens_computed == 8 * (32 + 15), "none twice, no padding"
    one_by_one(engine, PROMPTS, 16)
    assert engine.runner.num_forwards == 16 + 8 * 16
    assert engine.runner.num_tokens_computed == 2 * 8 * (32 + 15)


@pytest.mark.measured
def test_a_batch_of_eight_is_faster_than_one_after_another(folder: Path) -> None:
    engine = Engine(EngineConfig(model=str(folder), max_batch_size=8))
    assert speedup(lambda: one_by_one(engine, PROMPTS, 16), lambda: together(engine, PROMPTS, 16), trials=5) >= 1.5


@pytest.mark.measured
def test_alone_a_request_costs_little_more_than_in_phase_3_1(folder: Path) -> None:
    """On the smallest model, where the overhead of scheduling is the largest share."""
    config = EngineConfig(model=str(folder))
    single, batched = Single(config), Engine(config)
    assert speedup(lambda: seconds_a_token(single), lambda: seconds_a_token(batched), trials=5) >= 1 / 1.6


@pytest.mark.measured
@pytest.mark.gpu
def test_sixteen_requests_against_one_after_another(tmp_path: Path) -> None:
    folder = make_checkpoint("llama-3.2-1b", tmp_path / "model", device="cuda")
    engine = Engine(EngineConfig(model=str(folder), device="cuda", max_seq_len=512, max_batch_size=16))
    drawn = SyntheticPrompts(engine.model.config.vocab_size, seed=0)
    prompts = [drawn.draw(256) for _ in range(16)]
    assert speedup(lambda: one_by_one(engine, prompts, 64), lambda: together(engine, prompts, 64), trials=2) >= 4
