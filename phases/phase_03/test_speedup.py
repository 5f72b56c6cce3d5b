"""The gain from the KV cache: the count of tokens computed explains it, the clock confirms it."""

import statistics
from pathlib import Path

import pytest

from benchmarks.contenders import Turns, load_engine
from benchmarks.generation.peers import load_transformers
from benchmarks.setup import Setup
from benchmarks.timing import SyntheticPrompts, run, torch_threads
from phases.phase_02.engine import Engine as Uncached
from phases.phase_03.engine import Engine
from shared.engine.config import EngineConfig
from shared.lessons import find_lesson
from shared.models.packed import SUPPORTED_ENGINES
from shared.sampling.params import SamplingParams


@pytest.mark.benchmark(group="decode 16 tokens after 32, tiny model")
def test_generate(tiny_checkpoints: dict[str, Path], benchmark) -> None:
    engine = Engine(EngineConfig(model=str(tiny_checkpoints["llama"])))
    params = SamplingParams(temperature=0.0, max_new_tokens=16, ignore_eos=True)
    benchmark.pedantic(lambda: list(engine.generate([7] * 32, params)), rounds=5, warmup_rounds=1)
    before = engine.num_tokens_computed
    list(engine.generate([7] * 32, params))
    assert engine.num_tokens_computed - before == 32 + 15, "each answer computes every token once"


@pytest.mark.demo
@pytest.mark.parametrize(("context", "at_least"), [(64, 2.0), (256, 3.0)])
def test_decode_against_phase_2(demo_folder: Path, context: int, at_least: float) -> None:
    """Milliseconds per token after ``context`` tokens, both phases interleaved, median of the trials."""
    config = EngineConfig(model=str(demo_folder), max_seq_len=context + 8)
    with torch_threads(2):
        engines = {"02": Uncached(config), "03": Engine(config)}
        prompts = SyntheticPrompts(engines["02"].model.config.vocab_size, seed=0)
        warm_up = prompts.draw(8)
        for engine in engines.values():
            run(engine, warm_up, 2)
        intervals: dict[str, list[float]] = {"02": [], "03": []}
        computed = {"02": 0, "03": 0}
        for _ in range(2):
            prompt = prompts.draw(context)
            for name, engine in engines.items():
                answer = run(engine, prompt, new_tokens=2)
                intervals[name] += answer.intervals
                computed[name] += answer.tokens_computed
    assert computed["02"] == 2 * (2 * context + 1)
    assert computed["03"] == 2 * (context + 1)
    speedup = statistics.median(intervals["02"]) / statistics.median(intervals["03"])
    assert speedup >= at_least, f"{speedup:.1f} times at {context} tokens of context"


def best_beside_transformers(folder: Path, wanted: float, pack_weights: bool) -> float:
    """The ratio of decode speeds, measured again, twice at most, while a busy machine keeps it below ``wanted``."""
    setup, ratios = Setup(str(folder), dtype="float32", threads=2), [0.0]
    with setup.running(num_steps=0) as steps:
        turns = Turns(setup, steps)
        config = setup.config(max_seq_len=64 + 12, pack_weights=pack_weights)
        turns.load("03", lambda: load_engine(find_lesson("03"), config))
        turns.load("transformers", lambda: load_transformers(["transformers_eager"], setup))
        turns.warm_up(prompt_tokens=64, new_tokens=4)
        while max(ratios) < wanted and len(ratios) <= 3:
            runs = turns.trials(3, prompt_tokens=64, new_tokens=12)
            pairs = list(zip(runs["03"], runs["transformers_eager"], strict=True))
            assert all(ours.token_ids == theirs.token_ids for ours, theirs in pairs)
            speeds = [(ours.decode_tokens_per_second, theirs.decode_tokens_per_second) for ours, theirs in pairs]
            ratios.append(statistics.median(ours / theirs for ours, theirs in speeds))
    return max(ratios)


@pytest.mark.demo
def test_decode_beside_transformers(demo_folder: Path) -> None:
    assert best_beside_transformers(demo_folder, 0.95, pack_weights=False) >= 0.95


@pytest.mark.demo
@pytest.mark.skipif("fbgemm" not in SUPPORTED_ENGINES, reason="packed weights need FBGEMM, which exists only on x86")
def test_packed_decode_beside_transformers(demo_folder: Path) -> None:
    assert best_beside_transformers(demo_folder, 1.2, pack_weights=True) >= 1.2
