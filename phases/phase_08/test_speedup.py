"""The gain from prefix caching: a common prefix is computed once, and the next turn of a conversation finds it."""

import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.timing import SyntheticPrompts
from phases.phase_07.engine import Engine as Chunked
from phases.phase_08.engine import Engine
from shared.checkpoints.make import make_checkpoint
from shared.engine.config import EngineConfig
from shared.sampling.params import SamplingParams
from tests.mixed_requests import GREEDY
from tests.speed import ONE_ANSWER, serve, speedup, time_one_answer


def first_token(engine: Any, prompt: list[int]) -> float:
    """Seconds to the first token of a request that runs alone."""
    begin = time.perf_counter()
    for _ in engine.generate(prompt, SamplingParams(**GREEDY, max_new_tokens=1)):
        pass
    return time.perf_counter() - begin


@pytest.mark.measured
@pytest.mark.benchmark(group=ONE_ANSWER)
def test_generate(folder: Path, benchmark) -> None:
    time_one_answer(benchmark, Engine(EngineConfig(model=str(folder), max_batch_size=8)))


def test_requests_that_arrive_together_compute_their_prefix_once(folder: Path) -> None:
    """Eight requests with 256 common tokens and 8 of their own, two tokens each."""
    drawn = SyntheticPrompts(250, seed=0)
    common = drawn.draw(256)
    prompts = [common + drawn.draw(8) for _ in range(8)]
    config = EngineConfig(model=str(folder), max_seq_len=512, prefill_chunk_size=128)
    without, cached = (serve(phase(config), prompts, 2) for phase in (Chunked, Engine))
    assert without.num_tokens_computed == 8 * (256 + 8 + 1)
    assert cached.num_tokens_computed == 256 + 8 * (8 + 1)
    assert cached.num_steps <= without.num_steps + 2, "waiting for the first request costs the steps of the prefix"


def test_the_tokens_computed_for_each_turn_stay_level(tiny_checkpoints: dict[str, Path]) -> None:
    """Ten turns of 40 tokens, each answered by 8."""
    engine = Engine(EngineConfig(model=str(tiny_checkpoints["qwen3"]), max_seq_len=512))
    drawn, history, computed = SyntheticPrompts(250, seed=0), list[int](), list[int]()
    for _ in range(10):
        history += drawn.draw(40)
        before = engine.runner.num_tokens_computed
        answer = list(engine.generate(history, SamplingParams(**GREEDY, max_new_tokens=8)))
        history += [output.token_id for output in answer]
        computed.append(engine.runner.num_tokens_computed - before)
    assert max(computed) <= 40 + 8 + 16, f"a turn, its answer, and less than a block: {computed}"


@pytest.mark.measured
def test_the_first_token_of_a_cached_prompt_comes_sooner(folder: Path) -> None:
    """Prompts of 1,024 common tokens and 8 others, with and without the cache, interleaved."""
    folder, drawn = str(folder), SyntheticPrompts(250, seed=0)
    cached, without = (
        Engine(EngineConfig(model=folder, max_seq_len=2048, use_prefix_caching=is_on)) for is_on in (True, False)
    )
    common = drawn.draw(1024)
    ratio = speedup(
        lambda: first_token(without, common + drawn.draw(8)),
        lambda: first_token(cached, common + drawn.draw(8)),  # the first, a warm-up, fills the cache
        trials=7,
    )
    assert ratio >= 4


@pytest.mark.measured
@pytest.mark.gpu
def test_8192_cached_tokens_shorten_the_time_to_the_first_token(tmp_path: Path) -> None:
    folder = make_checkpoint("llama-3.2-1b", tmp_path / "model", device="cuda")
    options: dict[str, Any] = {"device": "cuda", "max_seq_len": 8448, "num_gpu_blocks": 2048}
    engine, drawn = Engine(EngineConfig(model=str(folder), **options)), SyntheticPrompts(100_000, seed=0)
    first_token(engine, drawn.draw(8224))  # compiles
    common = drawn.draw(8192)
    cold = first_token(engine, common + drawn.draw(32))
    warm = [first_token(engine, common + drawn.draw(32)) for _ in range(8)]
    assert statistics.median(warm) <= 0.2 * cold, (warm, cold)
