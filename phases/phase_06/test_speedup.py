"""The gain from blocks: more running requests in the same memory. The cost: reading through block tables.

On a CPU W2, the mixed workload of ``benchmarks.workloads.serving``, runs at a quarter of its size (prompts, outputs,
blocks and regions), so the unused share is the same as at full length.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.workloads.serving import FULL, Workload, make_trace
from phases.phase_06.engine import Engine
from shared.checkpoints.make import make_checkpoint
from shared.engine.config import EngineConfig
from tests.speed import ONE_ANSWER, Served, serve, speedup, time_one_answer

WIDE, TIGHT = 4096, FULL.w2.longest  # tokens of a region: a server's default, and the maximum that W2 needs
SCALE = 4


def w2(num_requests: int, scale: int) -> Workload:
    """``num_requests`` requests of W2, with lengths divided by ``scale``."""
    (prompt_low, prompt_high), (new_low, new_high) = FULL.w2.prompt_tokens, FULL.w2.new_tokens
    prompt_tokens, new_tokens = (prompt_low // scale, prompt_high // scale), (new_low // scale, new_high // scale)
    return replace(FULL.w2, num_requests=num_requests, prompt_tokens=prompt_tokens, new_tokens=new_tokens)


def serve_workload(engine: Any, workload: Workload) -> Served:
    """All requests at once, in the queue."""
    requests = make_trace(workload, engine.model.config.vocab_size, seed=0).requests
    return serve(engine, [request.prompt_ids for request in requests], [request.new_tokens for request in requests])


def with_regions(folder: Path, num_regions: int, region_tokens: int, **config: Any) -> Engine:
    config |= {"max_batch_size": num_regions, "max_seq_len": region_tokens, "kv_cache_backend": "contiguous"}
    return Engine(EngineConfig(model=str(folder), **config))


def with_blocks(folder: Path, num_tokens: int, max_seq_len: int, block_size: int, places: int, **config: Any) -> Engine:
    config |= {"num_gpu_blocks": num_tokens // block_size, "block_size": block_size}
    config |= {"max_batch_size": places, "max_seq_len": max_seq_len}
    return Engine(EngineConfig(model=str(folder), **config))


def with_equal_room(folder: Path) -> list[Engine]:
    """Regions, and blocks, for as many requests as a batch may have."""
    tight, places = TIGHT // SCALE, FULL.max_batch_size
    return [with_regions(folder, places, tight), with_blocks(folder, places * tight, tight, 16, places)]


@pytest.mark.measured
@pytest.mark.benchmark(group=ONE_ANSWER)
def test_generate(folder: Path, benchmark) -> None:
    time_one_answer(benchmark, Engine(EngineConfig(model=str(folder), max_batch_size=8)))


@pytest.mark.measured
@pytest.mark.benchmark(group="8 requests, 16 tokens after 32, tiny model")
@pytest.mark.parametrize("memory", ["regions", "blocks"])
def test_eight_requests(folder: Path, benchmark, memory: str) -> None:
    backend = {"regions": "contiguous", "blocks": "paged"}[memory]
    engine = Engine(EngineConfig(model=str(folder), max_batch_size=8, kv_cache_backend=backend))
    benchmark.pedantic(serve, args=(engine, [[7 + n] * 32 for n in range(8)], 16), rounds=3, warmup_rounds=1)


def test_as_much_memory_holds_more_requests_in_blocks_than_in_regions(folder: Path) -> None:
    """The memory of four regions of 4,096 tokens, slightly more than twelve of 1,280; all divided by 4."""
    few, many = w2(8, SCALE), w2(40, SCALE)  # the few are the first of the many
    memory, wide, tight = 4 * WIDE // SCALE, WIDE // SCALE, TIGHT // SCALE
    engines = {
        "blocks": with_blocks(folder, memory, wide, 16 // SCALE, places=64),
        "wide": with_regions(folder, memory // wide, wide),
        "tight": with_regions(folder, memory // tight, tight),
    }
    assert [engine.pool.capacity_tokens for engine in engines.values()] == [memory, memory, memory - memory % tight]
    served = {name: serve_workload(engine, few if name == "wide" else many) for name, engine in engines.items()}
    peaks = {name: max(found.batch_sizes) for name, found in served.items()}
    assert (peaks["wide"], peaks["tight"]) == (4, 12), "regions are full"
    assert peaks["blocks"] >= 5 * memory / wide
    assert peaks["blocks"] >= 1.6 * memory / tight
    assert served["blocks"].answers == served["tight"].answers
    assert served["blocks"].answers[:8] == served["wide"].answers
    assert served["tight"].num_preemptions == 0
    once = served["tight"].num_tokens_computed
    assert once <= served["blocks"].num_tokens_computed <= 1.5 * once, "recomputation after preemption is bounded"


def test_with_equal_room_the_steps_are_the_same(folder: Path) -> None:
    regions, blocks = (serve_workload(engine, w2(6, SCALE)) for engine in with_equal_room(folder))
    assert (blocks.batch_sizes, blocks.num_preemptions) == (regions.batch_sizes, 0)
    assert blocks.num_tokens_computed == regions.num_tokens_computed
    assert blocks.answers == regions.answers


@pytest.mark.measured
def test_with_equal_room_a_step_through_tables_takes_at_most_twice_as_long(folder: Path) -> None:
    regions, blocks = with_equal_room(folder)
    workload = w2(8, SCALE)
    ratio = speedup(lambda: serve_workload(regions, workload).seconds, lambda: serve_workload(blocks, workload).seconds)
    assert ratio >= 0.5


@pytest.mark.measured
@pytest.mark.gpu
def test_at_a_real_shape_more_requests_at_a_time_are_more_tokens_a_second(tmp_path: Path) -> None:
    """W2 at full length, all at once, in the memory of sixteen regions of 4,096 tokens."""
    folder = make_checkpoint("llama-3.2-1b", tmp_path / "model", device="cuda")
    workload, memory = w2(160, 1), 16 * WIDE
    regions = with_regions(folder, 16, WIDE, device="cuda")
    blocks = with_blocks(folder, memory, WIDE, 16, places=160, device="cuda")
    assert regions.view.num_bytes == blocks.view.num_bytes
    served = []
    for engine in (regions, blocks):
        serve_workload(engine, w2(48, 1))
        served.append(serve_workload(engine, workload))
    assert max(served[0].batch_sizes) == 16
    assert max(served[1].batch_sizes) >= 5 * 16
    assert served[0].seconds / served[1].seconds >= 1.5, "the answers have as many tokens"
