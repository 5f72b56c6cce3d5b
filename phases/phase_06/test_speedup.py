"""The gain from blocks: more running requests in the same memory; and the cost of reading through block tables.

On a CPU W2, the mixed workload of ``benchmarks.workloads.serving``, runs at a quarter of its size: prompts, outputs,
blocks and regions alike, so the unused share is as at full length.
"""

import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.workloads.serving import FULL, Workload, make_trace
from phases.phase_06.engine import Engine
from shared.checkpoints.make import make_checkpoint
from shared.engine.config import EngineConfig
from shared.sampling.params import SamplingParams

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
WIDE, TIGHT = 4096, FULL.w2.longest  # tokens of a region: a server's default, and the most that W2 needs
SCALE = 4


def w2(num_requests: int, scale: int) -> Workload:
    """``num_requests`` requests of W2, with lengths divided by ``scale``."""
    (prompt_low, prompt_high), (new_low, new_high) = FULL.w2.prompt_tokens, FULL.w2.new_tokens
    prompt_tokens, new_tokens = (prompt_low // scale, prompt_high // scale), (new_low // scale, new_high // scale)
    return replace(FULL.w2, num_requests=num_requests, prompt_tokens=prompt_tokens, new_tokens=new_tokens)


@dataclass(frozen=True)
class Served:
    """The measurements of one run over a workload."""

    seconds: float
    answers: list[list[int | None]]
    peak: int  # maximum number of requests in one step
    tokens_computed: int
    preemptions: int


def serve(engine: Any, workload: Workload) -> Served:
    """All requests at once, in the queue."""
    trace = make_trace(workload, engine.model.config.vocab_size, seed=0)
    started, computed = time.perf_counter(), engine.runner.num_tokens_computed
    preemptions = engine.load().num_preemptions
    names = [
        engine.add_request(request.prompt_ids, SamplingParams(**GREEDY, max_new_tokens=request.new_tokens))
        for request in trace.requests
    ]
    answers: dict[str, list[int | None]] = {name: [] for name in names}
    peak = 0
    while engine.has_work():
        outputs = engine.step()
        peak = max(peak, len(outputs))
        for output in outputs:
            assert output.error is None, "none failed"
            answers[output.request_id].append(output.token_id)
    assert engine.pool.audit() == []
    for request, answer in zip(trace.requests, answers.values(), strict=True):
        assert len(answer) == request.new_tokens, "each has its whole answer"
    return Served(
        time.perf_counter() - started,
        [*answers.values()],
        peak,
        engine.runner.num_tokens_computed - computed,
        engine.load().num_preemptions - preemptions,
    )


def with_regions(folder: Path, num_regions: int, region_tokens: int, **config: Any) -> Engine:
    about: dict[str, Any] = {
        "max_batch_size": num_regions,
        "max_seq_len": region_tokens,
        "kv_cache_backend": "contiguous",
    }
    return Engine(EngineConfig(model=str(folder), **about, **config))


def with_blocks(folder: Path, num_tokens: int, max_seq_len: int, block_size: int, places: int, **config: Any) -> Engine:
    about: dict[str, Any] = {"num_gpu_blocks": num_tokens // block_size, "block_size": block_size}
    about |= {"max_batch_size": places, "max_seq_len": max_seq_len}
    return Engine(EngineConfig(model=str(folder), **about, **config))


@pytest.mark.benchmark(group="decode 16 tokens after 32, tiny model")
def test_generate(tiny_checkpoints: dict[str, Path], benchmark) -> None:
    engine = Engine(EngineConfig(model=str(tiny_checkpoints["llama"]), max_batch_size=8))
    params = SamplingParams(**GREEDY, max_new_tokens=16)
    benchmark.pedantic(lambda: list(engine.generate([7] * 32, params)), rounds=5, warmup_rounds=1)
    before = engine.runner.num_tokens_computed
    list(engine.generate([7] * 32, params))
    assert engine.runner.num_tokens_computed - before == 32 + 15, "each answer computes every token once"


@pytest.mark.benchmark(group="8 requests, 16 tokens after 32, tiny model")
@pytest.mark.parametrize("memory", ["regions", "blocks"])
def test_eight_requests(tiny_checkpoints: dict[str, Path], benchmark, memory: str) -> None:
    backend = {"regions": "contiguous", "blocks": "paged"}[memory]
    engine = Engine(EngineConfig(model=str(tiny_checkpoints["llama"]), max_batch_size=8, kv_cache_backend=backend))
    workload = replace(FULL.w2, num_requests=8, prompt_tokens=(32, 32), new_tokens=(16, 16))
    benchmark.pedantic(serve, args=(engine, workload), rounds=3, warmup_rounds=1)


def test_as_much_memory_holds_more_requests_in_blocks_than_in_regions(tiny_checkpoints: dict[str, Path]) -> None:
    """The memory of four regions of 4,096 tokens, which is that of twelve of 1,280 and a bit more; all divided by 4."""
    folder, few, many = tiny_checkpoints["llama"], w2(8, SCALE), w2(40, SCALE)  # the few are the first of the many
    memory, wide, tight = 4 * WIDE // SCALE, WIDE // SCALE, TIGHT // SCALE
    engines = {
        "blocks": with_blocks(folder, memory, wide, 16 // SCALE, places=64),
        "wide": with_regions(folder, memory // wide, wide),
        "tight": with_regions(folder, memory // tight, tight),
    }
    assert [engine.pool.capacity_tokens for engine in engines.values()] == [memory, memory, memory - memory % tight]
    served = {name: serve(engine, few if name == "wide" else many) for name, engine in engines.items()}
    assert (served["wide"].peak, served["tight"].peak) == (4, 12), "regions are full"
    assert served["blocks"].peak >= 5 * memory / wide
    assert served["blocks"].peak >= 1.6 * memory / tight
    assert served["blocks"].answers == served["tight"].answers
    assert served["blocks"].answers[:8] == served["wide"].answers
    assert served["tight"].preemptions == 0
    once = served["tight"].tokens_computed
    assert once <= served["blocks"].tokens_computed <= 1.5 * once, "recomputation after preemption is bounded"


def test_at_as_many_requests_a_step_through_tables_takes_at_most_twice_as_long(
    tiny_checkpoints: dict[str, Path],
) -> None:
    folder, workload = tiny_checkpoints["llama"], w2(16, SCALE)
    tight, places = TIGHT // SCALE, FULL.max_batch_size
    engines = {
        "regions": with_regions(folder, places, tight),
        "blocks": with_blocks(folder, places * tight, tight, 16, places),
    }
    for engine in engines.values():
        serve(engine, w2(4, SCALE))
    runs: dict[str, list[Served]] = {name: [] for name in engines}
    for _ in range(3):
        for name, engine in engines.items():
            runs[name].append(serve(engine, workload))
    regions, blocks = runs["regions"][0], runs["blocks"][0]
    assert (blocks.peak, blocks.tokens_computed, blocks.preemptions) == (regions.peak, regions.tokens_computed, 0)
    assert blocks.answers == regions.answers
    seconds = {name: statistics.median(run.seconds for run in found) for name, found in runs.items()}
    assert seconds["regions"] / seconds["blocks"] >= 0.5, seconds


@pytest.mark.gpu
def test_at_a_real_shape_more_requests_at_a_time_are_more_tokens_a_second(tmp_path: Path) -> None:
    """W2 at full length, all at once, in the memory of sixteen regions of 4,096 tokens."""
    folder = make_checkpoint("llama-3.2-1b", tmp_path / "model", device="cuda")
    workload, memory = w2(160, 1), 16 * WIDE
    engines = {
        "regions": with_regions(folder, 16, WIDE, device="cuda"),
        "blocks": with_blocks(folder, memory, WIDE, 16, places=160, device="cuda"),
    }
    assert engines["regions"].view.num_bytes == engines["blocks"].view.num_bytes
    for engine in engines.values():
        serve(engine, w2(48, 1))
    served = {name: serve(engine, workload) for name, engine in engines.items()}
    assert served["regions"].peak == 16
    assert served["blocks"].peak >= 5 * 16
    speeds = {name: sum(map(len, run.answers)) / run.seconds for name, run in served.items()}
    assert speeds["blocks"] / speeds["regions"] >= 1.5, speeds
