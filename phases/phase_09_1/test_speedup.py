"""The gain from segments: the documents of a prompt are not computed again; without segments nothing is lost."""

import time
from pathlib import Path

import pytest

from phases.phase_09_1.engine import Engine
from shared.engine.config import EngineConfig
from shared.sampling.params import SamplingParams
from tests.mixed_requests import GREEDY
from tests.speed import ONE_ANSWER, time_one_answer

DOCUMENTS = [[(n * k) % 200 + 5 for k in range(256)] for n in (3, 7, 11, 13)]
QUESTION = list(range(20, 52))


@pytest.mark.measured
@pytest.mark.benchmark(group=ONE_ANSWER)
def test_generate(folder: Path, benchmark) -> None:
    time_one_answer(benchmark, Engine(EngineConfig(model=str(folder), max_batch_size=8)))


def ask(engine: Engine, segment_ids: list[str], prompt: list[int]) -> tuple[int, float]:
    """Computed tokens and seconds until an answer's first token."""
    before, started = engine.runner.num_tokens_computed, time.perf_counter()
    engine.add_request(prompt, SamplingParams(**GREEDY, max_new_tokens=1), segment_ids=segment_ids)
    while engine.has_work():
        engine.step()
    return engine.runner.num_tokens_computed - before, time.perf_counter() - started


def test_only_the_question_is_computed_whatever_the_order(folder: Path) -> None:
    engine = Engine(EngineConfig(model=str(folder), max_seq_len=1200, max_batch_size=2))
    names = [engine.register(document) for document in DOCUMENTS]
    assert ask(engine, names, QUESTION)[0] == 4 * 256 + 32
    for order in ([3, 1, 2, 0], [2], [0, 0, 0, 0]):
        assert ask(engine, [names[n] for n in order], QUESTION)[0] == 32
    assert engine.stats()["segments in the cache"] == 4


@pytest.mark.measured
@pytest.mark.demo
def test_the_first_token_of_the_demo_model_comes_many_times_sooner(demo_folder: Path) -> None:
    """4 documents of 256 tokens; docs/PHASE_09_1.md has more measurements."""
    config = EngineConfig(model=str(demo_folder), max_seq_len=1200, max_batch_size=2, use_prefix_caching=False)
    engine = Engine(config)
    names = [engine.register(document) for document in DOCUMENTS]
    ask(engine, names, QUESTION)
    reused = min(ask(engine, names, QUESTION)[1] for _ in range(2))
    _, plain = ask(engine, [], [token_id for document in DOCUMENTS for token_id in document] + QUESTION)
    assert plain >= 6 * reused, (plain, reused)
