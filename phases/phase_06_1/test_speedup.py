"""The gain from planning: no program waits for the longest sequence. Tokens counted for an H100; timed on a GPU."""

import heapq
import time
import timeit
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shared.kernels.attention.planned_tiling as tilings
from benchmarks.bench_kernels import measure_attention
from phases.phase_06.engine import Engine as Paged
from phases.phase_06_1.engine import Engine
from shared.attention.descriptor import AttentionPlan, Grid
from shared.attention.plan import plan_decode
from shared.checkpoints.make import make_checkpoint
from shared.engine.config import EngineConfig
from shared.kernels.attention.decode_attention import choose_splits
from shared.kernels.attention.planned_tiling import decode_tiling
from shared.kernels.launch import GENERATIONS
from shared.sampling.params import SamplingParams
from tests.mixed_requests import GREEDY
from tests.speed import ONE_ANSWER, counted_calls, speedup, time_one_answer

H100_MULTIPROCESSORS = 132
HEADS = (32, 8, 64)  # queries, keys, size: Llama 3.2 1B
MIXED = [256] * 16 + [16384] + [256] * 15
MOST_MICROSECONDS = 400  # on a slow, shared machine


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Grid]:
    """The launch grid of a decode plan of a number of sequences on an H100."""
    monkeypatch.setattr(tilings, "num_multiprocessors", lambda device: H100_MULTIPROCESSORS)
    monkeypatch.setattr(tilings, "generation", lambda device: GENERATIONS[9, 0])
    return lambda count: decode_tiling(count, *HEADS[1:], itemsize=2).grid(HEADS[1], torch.device("cpu"))


def tokens_of_items(plan: AttentionPlan, lengths: list[int]) -> list[int]:
    """Keys that each item reads."""
    split_size = int(plan.split_size[0])
    items = slice(0, int(plan.num_items[0]))
    return [
        min(split_size, lengths[request] - kv_tile * split_size)
        for request, kv_tile in zip(
            plan.request_indices[items].tolist(), plan.kv_tile_indices[items].tolist(), strict=True
        )
    ]


def makespan(items: list[int], programs: int) -> int:
    """Tokens that the busiest of ``programs`` programs reads: each takes the next item as soon as it is done."""
    loads = [0] * programs
    for item in items:
        heapq.heapreplace(loads, loads[0] + item)
    return max(loads)


@pytest.mark.parametrize(
    ("lengths", "longest", "num_items", "least_gain"),
    [
        (MIXED, 512, 63, 32.0),
        ([4096] * 32, 2048, 64, 2.0),  # all of one length: two programs for each
        ([16384], 512, 32, 32.0),
        ([2048] * 128, 2048, 128, 1.0),  # more sequences than programs, all of one length: no gain
        ([16384] + [256] * 255, 1248, 269, 12.0),  # more sequences than programs: the long sequence is still split
    ],
    ids=["mixed", "32x4096", "1x16384", "128x2048", "mixed-256"],
)
def test_the_longest_sequence_is_shared_out(
    h100: Callable[[int], Grid], lengths: list[int], longest: int, num_items: int, least_gain: float
) -> None:
    """With 8 KV heads, 528 programs run 66 items at once; 264 programs 33 of a single sequence."""
    grid = h100(len(lengths))
    plan = plan_decode(lengths, grid)
    items = tokens_of_items(plan, lengths)
    assert (max(items), len(items), sum(items)) == (longest, num_items, sum(lengths))
    assert makespan(lengths, grid.resident) / makespan(items, grid.resident) >= least_gain


def test_mixed_lengths_beside_phase_6(h100: Callable[[int], Grid]) -> None:
    """Phase 6 fixes the share of a program in advance, for the longest possible sequence."""
    splits = choose_splits(len(MIXED) * HEADS[1], max(MIXED), HEADS[2], H100_MULTIPROCESSORS)
    items = tokens_of_items(plan_decode(MIXED, h100(len(MIXED))), MIXED)
    assert max(MIXED) / splits >= 3 * max(items)


@pytest.mark.measured
@pytest.mark.benchmark(group=ONE_ANSWER)
def test_generate(folder: Path, benchmark) -> None:
    time_one_answer(benchmark, Engine(EngineConfig(model=str(folder), max_batch_size=8)))


@pytest.mark.parametrize("num_sequences", [1, 32, 256])
def test_a_plan_makes_no_call_for_a_sequence(h100: Callable[[int], Grid], num_sequences: int) -> None:
    """Python functions and built-in ones; NumPy does the work for all sequences in each."""
    lengths, grid = np.random.default_rng(0).integers(1, 8192, num_sequences), h100(num_sequences)
    calls = Counter[str]()
    counted_calls(lambda: plan_decode(lengths, grid), calls)
    assert 0 < calls["call"] + calls["c_call"] < 80, calls


@pytest.mark.measured
@pytest.mark.benchmark(group="plan of a decode step, H100")
@pytest.mark.parametrize("num_sequences", [1, 32, 256])
def test_planning_takes_no_time_that_a_step_would_notice(
    h100: Callable[[int], Grid], benchmark, num_sequences: int
) -> None:
    lengths, grid = np.random.default_rng(0).integers(1, 8192, num_sequences), h100(num_sequences)
    benchmark.pedantic(plan_decode, args=(lengths, grid), rounds=100, warmup_rounds=10)
    trials = np.array(timeit.repeat(lambda: plan_decode(lengths, grid), number=1, repeat=160)).reshape(4, 40)
    assert 1e6 * np.median(trials, axis=1).min() < MOST_MICROSECONDS


@pytest.mark.measured
@pytest.mark.gpu
def test_mixed_lengths_are_three_times_as_fast_as_unsplit() -> None:
    """One layer's attention, checked, then timed in a CUDA graph with inputs that are in no cache."""
    row = measure_attention(["mixed"], device="cuda", peers=()).results["shapes"]["mixed"]
    variants = row["variants"]
    assert [one["error"] for one in variants.values()] == [None] * len(variants)
    assert row["times_unsplit"] >= 3, row
    assert variants["planned"]["time_us"] < variants["paged"]["time_us"], row


@pytest.mark.measured
@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [MIXED, [1024] * 32], ids=["mixed", "equal"])
def test_a_decode_step_at_a_real_shape_is_not_slower_than_phase_6_s(tmp_path: Path, lengths: list[int]) -> None:
    folder = make_checkpoint("llama-3.2-1b", tmp_path / "model", device="cuda")
    config = EngineConfig(
        model=str(folder),
        device="cuda",
        max_seq_len=max(lengths) + 128,
        max_batch_size=len(lengths),
        num_gpu_blocks=2 * sum(lengths) // 16,
    )
    paged, planned = Paged(config), Engine(config)
    for engine in (paged, planned):
        for n, length in enumerate(lengths):
            engine.add_request([7 + n] * length, SamplingParams(**GREEDY, max_new_tokens=100))
        while engine.last_step is None or len(engine.last_step.decoded) < len(lengths):
            engine.step()
        for _ in range(10):  # the first ones compile
            engine.step()

    def seconds_of_a_step(engine: Any) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        engine.step()  # ends with the tokens on the host
        assert len(engine.last_step.decoded) == len(lengths)
        return time.perf_counter() - started

    assert speedup(lambda: seconds_of_a_step(paged), lambda: seconds_of_a_step(planned), trials=50) >= 1 / 1.05
