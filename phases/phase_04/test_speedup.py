"""The gain from batching: forward passes, and time; a single request loses nothing."""

import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.timing import SyntheticPrompts, run
from phases.phase_03_1.engine import Engine as Single
from phases.phase_04.engine import Engine
from shared.checkpoints.make import make_checkpoint
from shared.engine.config import EngineConfig
from shared.sampling.params import SamplingParams

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def serve(engine: Any, prompts: list[list[int]], new_tokens: int) -> float:
    """Serve all prompts at once; returns seconds."""
    started = time.perf_counter()
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(**GREEDY, max_new_tokens=new_tokens))
    while engine.has_work():
        engine.step()
    return time.perf_counter() - started


def one_by_one(engine: Any, prompts: list[list[int]], new_tokens: int) -> float:
    started = time.perf_counter()
    for prompt in prompts:
        run(engine, prompt, new_tokens)
    return time.perf_counter() - started


@pytest.mark.benchmark(group="decode 16 tokens after 32, tiny model")
def test_generate(tiny_checkpoints: dict[str, Path], benchmark) -> None:
    engine = Engine(EngineConfig(model=str(tiny_checkpoints["llama"]), max_batch_size=8))
    params = SamplingParams(**GREEDY, max_new_tokens=16)
    benchmark.pedantic(lambda: list(engine.generate([7] * 32, params)), rounds=5, warmup_rounds=1)
    before = engine.runner.num_tokens_computed
    list(engine.generate([7] * 32, params))
    assert engine.runner.num_tokens_computed - before == 32 + 15, "each answer computes every token once"


@pytest.mark.benchmark(group="8 requests, 16 tokens after 32, tiny model")
@pytest.mark.parametrize("is_batched", [False, True], ids=["one by one", "static batch"])
def test_eight_requests(tiny_checkpoints: dict[str, Path], benchmark, is_batched: bool) -> None:
    engine = Engine(EngineConfig(model=str(tiny_checkpoints["llama"]), max_batch_size=8))
    prompts = [[7 + n] * 32 for n in range(8)]
    work = serve if is_batched else one_by_one
    benchmark.pedantic(work, args=(engine, prompts, 16), rounds=3, warmup_rounds=1)


def test_a_batch_of_eight_takes_an_eighth_of_the_forward_passes(tiny_checkpoints: dict[str, Path]) -> None:
    config = EngineConfig(model=str(tiny_checkpoints["llama"]), max_batch_size=8)
    engine = Engine(config)
    prompts = [[7 + n] * 32 for n in range(8)]
    serve(engine, prompts, 4)
    one_by_one(engine, prompts, 4)
    seconds: dict[str, list[float]] = {"batch": [], "one by one": []}
    forwards: dict[str, list[int]] = {"batch": [], "one by one": []}
    computed: dict[str, list[int]] = {"batch": [], "one by one": []}
    for _ in range(5):
        for name, work in (("batch", serve), ("one by one", one_by_one)):
            before = engine.runner.num_forwards, engine.runner.num_tokens_computed
            seconds[name].append(work(engine, prompts, 16))
            forwards[name].append(engine.runner.num_forwards - before[0])
            computed[name].append(engine.runner.num_tokens_computed - before[1])
    assert forwards["batch"] == [16] * 5, "one for the prompts, and one for each further token of all eight"
    assert forwards["one by one"] == [8 * 16] * 5
    assert computed["batch"] == computed["one by one"] == [8 * (32 + 15)] * 5, "the same tokens, none twice, no padding"
    speedup = statistics.median(seconds["one by one"]) / statistics.median(seconds["batch"])
    assert speedup >= 1.5, f"{speedup:.2f} times"


def test_alone_a_request_costs_little_more_than_in_phase_3_1(tiny_checkpoints: dict[str, Path]) -> None:
    """On the smallest model, where the overhead of scheduling is the largest share."""
    config = EngineConfig(model=str(tiny_checkpoints["llama"]))
    engines = {"03.1": Single(config), "04": Engine(config)}
    intervals: dict[str, list[float]] = {"03.1": [], "04": []}
    for engine in engines.values():
        run(engine, [7] * 32, 4)
    for _ in range(5):
        for name, engine in engines.items():
            intervals[name] += run(engine, [7] * 32, 16).intervals
    ratio = statistics.median(intervals["04"]) / statistics.median(intervals["03.1"])
    assert ratio <= 1.6, f"{ratio:.2f} times the time of a token"


@pytest.mark.gpu
def test_sixteen_requests_against_one_after_another(tmp_path: Path) -> None:
    folder = make_checkpoint("llama-3.2-1b", tmp_path / "model", device="cuda")
    engine = Engine(EngineConfig(model=str(folder), device="cuda", max_seq_len=512, max_batch_size=16))
    drawn = SyntheticPrompts(engine.model.config.vocab_size, seed=0)
    prompts = [drawn.draw(256) for _ in range(16)]
    serve(engine, prompts, 8)
    one_by_one(engine, prompts[:2], 8)
    torch.cuda.synchronize()
    together = min(serve(engine, prompts, 64) for _ in range(2))
    apart = one_by_one(engine, prompts, 64)
    assert apart / together >= 4, f"{apart / together:.2f} times"
