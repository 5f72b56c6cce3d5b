"""The gain from the KV cache: the count of tokens computed explains it, the clock confirms it."""

import statistics
from pathlib import Path

import pytest

from benchmarks.contenders import Turns, load_engine, load_transformers
from benchmarks.setup import Setup
from benchmarks.timing import SyntheticPrompts, in_turns, run, torch_threads
from phases.phase_02.engine import Engine as Uncached
from phases.phase_03.engine import Engine
from shared.engine.config import EngineConfig
from shared.lessons import find_lesson
from shared.models.packed import SUPPORTED_ENGINES
from tests.speed import ONE_ANSWER, time_one_answer


@pytest.mark.measured
@pytest.mark.benchmark(group=ONE_ANSWER)
def test_generate(folder: Path, benchmark) -> None:
    time_one_answer(benchmark, Engine(EngineConfig(model=str(folder))))


@pytest.mark.measured
@pytest.mark.demo
def test_decode_against_phase_2(demo_folder: Path) -> None:
    """Seconds per token after a context; both phases are interleaved, and the shortest trial of each counts.

    One thread: on a busy machine two threads wait for each other, far longer than a token takes.
    """
    config = EngineConfig(model=str(demo_folder), max_seq_len=128 + 8)
    with torch_threads(1):
        engines = {"02": Uncached(config), "03": Engine(config)}
        prompts = SyntheticPrompts(engines["02"].model.config.vocab_size, seed=0)
        for context, at_least in ((64, 2.0), (128, 3.0)):
            calls = {
                name: lambda engine=engine, context=context: run(engine, prompts.draw(context), 2).intervals[0]
                for name, engine in engines.items()
            }
            seconds = in_turns(calls, trials=2)
            before, after = min(seconds["02"]), min(seconds["03"])
            assert before / after >= at_least, f"{before / after:.1f} times at {context} tokens of context"


@pytest.mark.measured
@pytest.mark.demo
def test_decode_beside_transformers(demo_folder: Path) -> None:
    """Ratios of decode speeds within a trial, plain and packed; remeasured, at most twice, on a busy machine."""
    setup = Setup(str(demo_folder), dtype="float32", threads=1)
    wanted = {"plain": 0.95} | ({"packed": 1.2} if "fbgemm" in SUPPORTED_ENGINES else {})  # FBGEMM exists only on x86
    best = dict.fromkeys(wanted, 0.0)
    with setup.running(num_steps=0) as steps:
        turns = Turns(setup, steps)
        for name in wanted:
            config = setup.config(max_seq_len=16 + 8, pack_weights=name == "packed")
            turns.load(name, lambda name=name, config=config: {name: load_engine(find_lesson("03"), config)["03"]})
        turns.load("transformers", lambda: load_transformers(["transformers_eager"], setup))
        turns.warm_up(prompt_tokens=16, new_tokens=2)
        for _ in range(3):
            runs = turns.trials(3, prompt_tokens=16, new_tokens=8)
            for name in wanted:
                pairs = list(zip(runs[name], runs["transformers_eager"], strict=True))
                assert all(ours.token_ids == theirs.token_ids for ours, theirs in pairs)
                shares = [ours.decode_tokens_per_second / theirs.decode_tokens_per_second for ours, theirs in pairs]
                best[name] = max(best[name], statistics.median(shares))
            if all(best[name] >= wanted[name] for name in wanted):
                break
    assert all(best[name] >= wanted[name] for name in wanted), f"{best} of transformers' speed; wanted {wanted}"
