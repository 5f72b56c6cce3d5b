"""What masks cost: beside the same requests without a grammar, and beside those that have none."""

import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from phases.phase_12.engine import Engine
from shared.engine.config import EngineConfig
from shared.grammar.grammar import Grammar
from shared.sampling.params import SamplingParams

LINES = Grammar.regex(r"([A-Z][a-z ]{10,40}\.\n){8,}")
GREEDY: dict[str, Any] = {"temperature": 0.0}


@pytest.mark.benchmark(group="decode 16 tokens after 32, tiny model")
def test_generate(tiny_checkpoints: dict[str, Path], benchmark) -> None:
    engine = Engine(EngineConfig(model=str(tiny_checkpoints["llama"]), max_batch_size=8))
    params = SamplingParams(**GREEDY, max_new_tokens=16, structured_output=LINES)
    benchmark.pedantic(lambda: list(engine.generate([7] * 32, params)), rounds=5, warmup_rounds=1)


def test_rows_without_a_grammar_have_no_mask(tiny_checkpoints: dict[str, Path]) -> None:
    engine = Engine(EngineConfig(model=str(tiny_checkpoints["llama"])))
    for grammar in (None, LINES, None):
        engine.add_request([7] * 8, SamplingParams(**GREEDY, max_new_tokens=16, structured_output=grammar))
    while engine.has_work():
        engine.step()
    assert engine.stats()["masks applied"] == 16
    fsm = engine.constraints.grammars.get(LINES)
    assert fsm.masks.num_walks <= 16


@pytest.mark.demo
@pytest.mark.measured
def test_a_grammar_slows_decoding_little(demo_folder: Path) -> None:
    """Measured: 0.93 to 1.0 times the speed without one."""
    engine = Engine(EngineConfig(str(demo_folder), max_seq_len=256, max_batch_size=1))
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for has_grammar in (True, False) * 4:
        params = SamplingParams(**GREEDY, max_new_tokens=48, structured_output=LINES if has_grammar else None)
        begin = time.perf_counter()
        answer = list(engine.generate("The lighthouse", params))
        seconds[has_grammar].append((time.perf_counter() - begin) / len(answer))
    masked, free = (statistics.median(seconds[key][1:]) for key in (True, False))
    assert free / masked > 0.8, seconds
