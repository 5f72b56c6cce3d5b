"""The gain from chunks: decoding requests do not wait for long prompts, and a step's tokens share one forward."""

import dataclasses
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.timing import SyntheticPrompts
from phases.phase_06_1.engine import Engine as Planned
from phases.phase_07.engine import Engine
from shared.checkpoints.make import make_checkpoint
from shared.engine.config import EngineConfig
from shared.sampling.params import SamplingParams
from tests.mixed_requests import GREEDY
from tests.speed import ONE_ANSWER, speedup, time_one_answer

ONE_CHUNK: dict[str, Any] = {"prefill_chunk_size": 32, "max_prefill_chunks_per_step": 1}


@dataclass
class Waits:
    """Gaps between two tokens of the decoding requests, while long prompts arrive."""

    tokens: list[int] = field(default_factory=list)  # computed by the steps in the gap
    seconds: list[float] = field(default_factory=list)
    num_forwards: int = 0
    num_tokens: int = 0


def beside_long_prompts(engine: Any, num_decoding: int, lengths: list[int], new_tokens: int) -> Waits:
    """``num_decoding`` requests decode, and a prompt of each length arrives every few steps."""
    drawn = SyntheticPrompts(engine.model.config.vocab_size, seed=0)
    params = SamplingParams(**GREEDY, max_new_tokens=new_tokens)
    num_forwards, num_tokens = engine.runner.num_forwards, engine.runner.num_tokens_computed
    first = {engine.add_request(drawn.draw(8), params) for _ in range(num_decoding)}
    waits, begun = Waits(), set[str]()
    while begun < first:
        begun |= {output.request_id for output in engine.step()}
    since_tokens, since_time = 0, time.perf_counter()
    for step in range(10**6):
        if not engine.has_work():
            break
        if step % 4 == 0 and lengths[step // 4 : step // 4 + 1]:
            engine.add_request(drawn.draw(lengths[step // 4]), SamplingParams(**GREEDY, max_new_tokens=2))
        computed = engine.runner.num_tokens_computed
        outputs = engine.step()
        since_tokens += engine.runner.num_tokens_computed - computed
        if any(output.request_id in first for output in outputs):
            waits.tokens.append(since_tokens)
            waits.seconds.append(time.perf_counter() - since_time)
            since_tokens, since_time = 0, time.perf_counter()
    waits.num_forwards = engine.runner.num_forwards - num_forwards
    waits.num_tokens = engine.runner.num_tokens_computed - num_tokens
    return waits


@pytest.mark.measured
@pytest.mark.benchmark(group=ONE_ANSWER)
def test_generate(folder: Path, benchmark) -> None:
    time_one_answer(benchmark, Engine(EngineConfig(model=str(folder), max_batch_size=8)))


def test_a_decoding_request_waits_for_a_chunk_and_not_for_a_prompt(folder: Path) -> None:
    folder, options = str(folder), {"max_seq_len": 512, "max_batch_size": 8}
    prompts, waits = [400, 300, 400], {}
    engines = {
        "phase 6.1": Planned(EngineConfig(model=folder, **options)),
        "whole prompts": Engine(EngineConfig(model=folder, **options, use_chunked_prefill=False)),
        "chunks": Engine(EngineConfig(model=folder, **options, **ONE_CHUNK)),
    }
    for name, engine in engines.items():
        waits[name] = beside_long_prompts(engine, 4, prompts, new_tokens=60)
    assert max(waits["phase 6.1"].tokens) >= max(waits["whole prompts"].tokens) >= 400
    assert max(waits["chunks"].tokens) <= 32 + 8, "a chunk and the batch"
    totals = {name: found.num_tokens for name, found in waits.items()}
    assert len(set(totals.values())) == 1, f"no token is computed twice: {totals}"
    assert waits["whole prompts"].num_forwards < waits["phase 6.1"].num_forwards, (
        "prompts share a forward with decoding"
    )


@pytest.mark.measured
def test_the_longest_wait_is_a_fraction_beside_long_prompts(tiny_checkpoints: dict[str, Path]) -> None:
    """Whole prompts and chunks, interleaved in one process; the median over trials of each trial's longest wait."""
    folder, options = str(tiny_checkpoints["qwen3"]), {"max_seq_len": 2048, "max_batch_size": 8}
    whole = Engine(EngineConfig(model=folder, **options, use_chunked_prefill=False))
    chunks = Engine(EngineConfig(model=folder, **options, **ONE_CHUNK | {"prefill_chunk_size": 128}))

    def longest_wait(engine: Engine) -> float:
        return max(beside_long_prompts(engine, 4, [2000], new_tokens=24).seconds)

    assert speedup(lambda: longest_wait(whole), lambda: longest_wait(chunks)) >= 2


@pytest.mark.measured
@pytest.mark.gpu
def test_tokens_come_evenly_beside_prompts_of_8192_tokens(tmp_path: Path) -> None:
    """The 99th percentile of the time between tokens, one chunk of 512 per step, compared with decoding alone."""
    folder = make_checkpoint("llama-3.2-1b", tmp_path / "model", device="cuda")
    engine = Engine(
        EngineConfig(
            model=str(folder),
            device="cuda",
            max_seq_len=8448,
            max_batch_size=40,
            num_gpu_blocks=8192,
            max_prefill_chunks_per_step=1,
        )
    )
    beside_long_prompts(engine, 32, [8192], new_tokens=20)  # compiles
    alone = beside_long_prompts(engine, 32, [], new_tokens=120)
    beside = beside_long_prompts(engine, 32, [8192] * 4, new_tokens=120)
    assert max(beside.tokens) <= 512 + 40
    p99 = [statistics.quantiles(found.seconds, n=100)[98] for found in (alone, beside)]
    whole = Engine(dataclasses.replace(engine.config, use_chunked_prefill=False, max_prefill_chunks_per_step=None))
    stalls = beside_long_prompts(whole, 32, [8192] * 4, new_tokens=120)
    assert statistics.quantiles(stalls.seconds, n=100)[98] >= 3 * p99[1], (p99, max(stalls.seconds))
