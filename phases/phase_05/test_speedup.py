"""The gain from iteration-level scheduling: rows in use, steps, waits, and time; the tokens are the same."""

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.timing import SyntheticPrompts
from phases.phase_05.engine import Engine
from shared.checkpoints.make import make_checkpoint
from shared.engine.config import EngineConfig
from shared.sampling.params import SamplingParams

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
SLOTS = 8
ANSWERS = [40, 2, 3, 2, 3, 2, 3, 2] * 6  # in each batch of eight one long output blocks seven rows
MODES = ("static", "continuous")


@dataclass(frozen=True)
class Served:
    """The measurements of one run over a workload. A request's wait is the number of steps before its prefill."""

    seconds: float
    steps: int
    forwards: int
    tokens_computed: int
    used_places: int
    waits: list[int]

    @property
    def utilization(self) -> float:
        """Share of the batch's rows, over all steps, that computed a token."""
        return self.used_places / (self.steps * SLOTS)


def serve(engine: Any, prompts: list[list[int]], answers: list[int]) -> Served:
    started = time.perf_counter()
    before = engine.runner.num_forwards, engine.runner.num_tokens_computed
    for prompt, n in zip(prompts, answers, strict=True):
        engine.add_request(prompt, SamplingParams(**GREEDY, max_new_tokens=n))
    steps = used = 0
    waits = []
    while engine.has_work():
        engine.step()
        waits += [steps] * len(engine.last_step.prefilled)
        steps += 1
        used += len(engine.last_step.prefilled) + len(engine.last_step.decoded)
    return Served(
        time.perf_counter() - started,
        steps,
        engine.runner.num_forwards - before[0],
        engine.runner.num_tokens_computed - before[1],
        used,
        waits,
    )


def engines(folder: Path, **config: Any) -> dict[str, Engine]:
    return {mode: Engine(EngineConfig(model=str(folder), batching_mode=mode, **config)) for mode in MODES}


@pytest.mark.benchmark(group="decode 16 tokens after 32, tiny model")
def test_generate(tiny_checkpoints: dict[str, Path], benchmark) -> None:
    engine = Engine(EngineConfig(model=str(tiny_checkpoints["llama"]), max_batch_size=8))
    params = SamplingParams(**GREEDY, max_new_tokens=16)
    benchmark.pedantic(lambda: list(engine.generate([7] * 32, params)), rounds=5, warmup_rounds=1)
    before = engine.runner.num_tokens_computed
    list(engine.generate([7] * 32, params))
    assert engine.runner.num_tokens_computed - before == 32 + 15, "each answer computes every token once"


@pytest.mark.benchmark(group="48 requests of 2 to 40 tokens, 8 places, tiny model")
@pytest.mark.parametrize("mode", MODES)
def test_mixed_lengths(tiny_checkpoints: dict[str, Path], benchmark, mode: str) -> None:
    engine = engines(tiny_checkpoints["llama"], max_batch_size=SLOTS)[mode]
    prompts = [[7 + n] * 16 for n in range(len(ANSWERS))]
    benchmark.pedantic(serve, args=(engine, prompts, ANSWERS), rounds=3, warmup_rounds=1)


def test_rows_are_used_where_a_closed_batch_leaves_them_empty(tiny_checkpoints: dict[str, Path]) -> None:
    both = engines(tiny_checkpoints["llama"], max_batch_size=SLOTS)
    prompts = [[7 + n] * 16 for n in range(len(ANSWERS))]
    runs: dict[str, list[Served]] = {mode: [] for mode in MODES}
    for engine in both.values():
        serve(engine, prompts[:SLOTS], [3] * SLOTS)
    for _ in range(3):
        for mode, engine in both.items():
            runs[mode].append(serve(engine, prompts, ANSWERS))
    static, continuous = runs["static"][0], runs["continuous"][0]
    assert static.steps == 6 * 40, "each of six batches lasts as long as its longest output"
    assert static.utilization == pytest.approx(sum(ANSWERS) / (6 * 40 * SLOTS))
    assert continuous.steps < 0.5 * static.steps
    assert continuous.utilization > 2 * static.utilization
    assert continuous.tokens_computed == static.tokens_computed == 48 * 16 + sum(ANSWERS) - 48
    assert statistics.mean(continuous.waits) < 0.5 * statistics.mean(static.waits)
    assert max(continuous.waits) < 0.5 * max(static.waits)
    seconds = {mode: statistics.median(run.seconds for run in runs[mode]) for mode in MODES}
    assert seconds["static"] / seconds["continuous"] >= 1.4, seconds


def test_with_equal_lengths_there_is_nothing_to_win_or_to_lose(tiny_checkpoints: dict[str, Path]) -> None:
    both = engines(tiny_checkpoints["llama"], max_batch_size=SLOTS)
    prompts = [[7 + n] * 16 for n in range(3 * SLOTS)]
    runs = {mode: serve(engine, prompts, [10] * (3 * SLOTS)) for mode, engine in both.items()}
    assert runs["static"].steps == runs["continuous"].steps == 30
    assert runs["static"].utilization == runs["continuous"].utilization == 1.0


@pytest.mark.gpu
def test_mixed_lengths_at_a_real_shape(tmp_path: Path) -> None:
    folder = make_checkpoint("llama-3.2-1b", tmp_path / "model", device="cuda")
    both = engines(folder, device="cuda", max_seq_len=1024, max_batch_size=SLOTS)
    drawn = SyntheticPrompts(both["static"].model.config.vocab_size, seed=0)
    prompts = [drawn.draw(128) for _ in ANSWERS]
    for engine in both.values():
        serve(engine, prompts[:SLOTS], [3] * SLOTS)
    seconds = {mode: min(serve(engine, prompts, ANSWERS).seconds for _ in range(2)) for mode, engine in both.items()}
    assert seconds["static"] / seconds["continuous"] >= 1.3, seconds
