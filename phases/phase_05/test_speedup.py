"""The gain from iteration-level scheduling: rows in use, steps, waits, and time; the tokens are the same."""

import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks.timing import SyntheticPrompts
from phases.phase_05.engine import Engine
from shared.checkpoints.make import make_checkpoint
from shared.engine.config import EngineConfig
from tests.speed import ONE_ANSWER, Served, serve, speedup, time_one_answer

SLOTS = 8
ANSWERS = [40, 2, 3, 2, 3, 2, 3, 2] * 6  # in each batch of eight one long output blocks seven rows
PROMPTS = [[7 + n] * 16 for n in range(len(ANSWERS))]
MODES = ("static", "continuous")


def engines(folder: Path, **config: Any) -> dict[str, Engine]:
    config |= {"max_batch_size": SLOTS}
    return {mode: Engine(EngineConfig(model=str(folder), batching_mode=mode, **config)) for mode in MODES}


def utilization(served: Served) -> float:
    """Share of the batch's rows, over all steps, that computed a token."""
    return sum(served.batch_sizes) / (served.num_steps * SLOTS)


@pytest.mark.measured
@pytest.mark.benchmark(group=ONE_ANSWER)
def test_generate(folder: Path, benchmark) -> None:
    time_one_answer(benchmark, Engine(EngineConfig(model=str(folder), max_batch_size=8)))


@pytest.mark.measured
@pytest.mark.benchmark(group="48 requests of 2 to 40 tokens, 8 places, tiny model")
@pytest.mark.parametrize("mode", MODES)
def test_mixed_lengths(folder: Path, benchmark, mode: str) -> None:
    benchmark.pedantic(serve, args=(engines(folder)[mode], PROMPTS, ANSWERS), rounds=3, warmup_rounds=1)


def test_rows_are_used_where_a_closed_batch_leaves_them_empty(folder: Path) -> None:
    static, continuous = (serve(engine, PROMPTS[:24], ANSWERS[:24]) for engine in engines(folder).values())
    assert static.num_steps == 3 * 40, "each of three batches lasts as long as its longest output"
    assert utilization(static) == pytest.approx(sum(ANSWERS[:24]) / (3 * 40 * SLOTS))
    assert continuous.num_steps < 0.5 * static.num_steps
    assert utilization(continuous) > 2 * utilization(static)
    assert continuous.num_tokens_computed == static.num_tokens_computed == 24 * 16 + sum(ANSWERS[:24]) - 24
    assert statistics.mean(continuous.waits) < 0.5 * statistics.mean(static.waits)
    assert max(continuous.waits) < 0.5 * max(static.waits)


def test_with_equal_lengths_there_is_nothing_to_win_or_to_lose(folder: Path) -> None:
    static, continuous = (serve(engine, PROMPTS[: 3 * SLOTS], 10) for engine in engines(folder).values())
    assert static.num_steps == continuous.num_steps == 30
    assert utilization(static) == utilization(continuous) == 1.0


@pytest.mark.measured
def test_mixed_lengths_are_served_faster(folder: Path) -> None:
    static, continuous = engines(folder).values()
    ratio = speedup(
        lambda: serve(static, PROMPTS, ANSWERS).seconds, lambda: serve(continuous, PROMPTS, ANSWERS).seconds
    )
    assert ratio >= 1.4


@pytest.mark.measured
@pytest.mark.gpu
def test_mixed_lengths_at_a_real_shape(tmp_path: Path) -> None:
    folder = make_checkpoint("llama-3.2-1b", tmp_path / "model", device="cuda")
    static, continuous = engines(folder, device="cuda", max_seq_len=1024).values()
    drawn = SyntheticPrompts(static.model.config.vocab_size, seed=0)
    prompts = [drawn.draw(128) for _ in ANSWERS]
    ratio = speedup(
        lambda: serve(static, prompts, ANSWERS).seconds, lambda: serve(continuous, prompts, ANSWERS).seconds, trials=2
    )
    assert ratio >= 1.3
