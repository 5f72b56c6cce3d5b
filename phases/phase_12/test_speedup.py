"""The cost of masks: compared with the same requests without a grammar, and for requests without one in the same
batch."""

import time
from collections import Counter
from pathlib import Path

import pytest
import torch

import shared.engine.sampling.grammar_rows as grammar_rows
from phases.phase_12.engine import Engine
from shared.engine.config import EngineConfig
from shared.grammar.grammar import Grammar
from shared.grammar.tokens.pool import GrammarPool
from shared.sampling.params import SamplingParams
from tests.speed import ONE_ANSWER, counted_calls, speedup, time_one_answer

MOST_CALLS = 168  # of 8 rows; measured: 153, and 165 with grammars
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


def calls_of_a_step(folder: Path, num_sequences: int, grammar: Grammar | None) -> float:
    """Functions of Python that a step calls without its forward and its draw, which a GPU replays; the mean of 16."""
    pool, calls = GrammarPool(1_000_000, "cpu"), Counter[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrammarPool, "on", lambda *_: pool)
        engine = Engine(EngineConfig(str(folder), max_batch_size=24, overlap_scheduling=True))
        logits, ids = torch.zeros(24, engine.model.config.vocab_size), torch.full((24,), ord("a"))
        for kernel in ("grammar_advance", "grammar_mask", "remove_refused"):
            patch.setattr(grammar_rows, kernel, lambda *_: None)
        engine.runner.sampler.draw = lambda edited, rows: ids[: len(rows)]
        params = SamplingParams(temperature=0.6, max_new_tokens=40, structured_output=grammar, ignore_eos=not grammar)
        for n in range(num_sequences):
            engine.add_request([n + 5] * 6, params)
        for _ in range(4):
            engine.step()
        engine.runner.executor = lambda batch, *_: (logits, logits[: len(batch)])
        for _ in range(16):
            counted_calls(engine.step, calls)
    assert len(engine.last_step.decoded) == num_sequences
    return calls["call"] / 16


@pytest.mark.parametrize(("grammar", "most"), [(None, MOST_CALLS), (LINES, MOST_CALLS + 13)], ids=["no", "lines"])
def test_the_host_makes_few_calls_for_a_step_and_almost_none_for_a_row(
    folder: Path, grammar: Grammar | None, most: int
) -> None:
    """A row costs what it costs to fill a block, one in sixteen."""
    few, many = (calls_of_a_step(folder, num_sequences, grammar) for num_sequences in (8, 24))
    assert few < most, (few, many)
    assert (many - few) / 16 < 1.5, (few, many)


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
