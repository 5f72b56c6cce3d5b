"""The cost of masks: compared with the same requests without a grammar, and for requests without one in the same
batch."""

import time
from pathlib import Path

import pytest

from phases.phase_12.engine import Engine
from shared.engine.config import EngineConfig
from shared.grammar.grammar import Grammar
from shared.sampling.params import SamplingParams
from tests.speed import ONE_ANSWER, speedup, time_one_answer

LINES = Grammar.regex(r"([A-Z][a-z ]{10,40}\.\n){8,}")


@pytest.mark.measured
@pytest.mark.benchmark(group=ONE_ANSWER)
def test_generate(folder: Path, benchmark) -> None:
    time_one_answer(benchmark, Engine(EngineConfig(model=str(folder), max_batch_size=8)))


def test_rows_without_a_grammar_have_no_mask(folder: Path) -> None:
    engine = Engine(EngineConfig(model=str(folder)))
    for grammar in (None, LINES, None):
        engine.add_request([7] * 8, SamplingParams(temperature=0.0, max_new_tokens=16, structured_output=grammar))
    while engine.has_work():
        engine.step()
    assert engine.stats()["masks applied"] == 16
    fsm = engine.constraints.grammars.get(LINES)
    assert fsm.masks.num_walks <= 16


@pytest.mark.measured
@pytest.mark.demo
def test_a_grammar_slows_decoding_little(demo_folder: Path) -> None:
    """Measured: with a grammar, 0.93 to 1.0 times the speed without one."""
    engine = Engine(EngineConfig(str(demo_folder), max_seq_len=256, max_batch_size=1))

    def seconds_a_token(grammar: Grammar | None) -> float:
        params = SamplingParams(temperature=0.0, max_new_tokens=48, structured_output=grammar)
        begin = time.perf_counter()
        num_tokens = len(list(engine.generate("The lighthouse", params)))
        return (time.perf_counter() - begin) / num_tokens

    assert speedup(lambda: seconds_a_token(None), lambda: seconds_a_token(LINES)) > 0.8
