"""The cost of phase 2: the count of tokens computed, the baseline of every later phase."""

from pathlib import Path

import pytest

from phases.phase_02.engine import Engine
from shared.engine.config import EngineConfig
from tests.speed import ONE_ANSWER, one_answer, time_one_answer


@pytest.mark.measured
@pytest.mark.benchmark(group=ONE_ANSWER)
def test_generate(folder: Path, benchmark) -> None:
    time_one_answer(benchmark, Engine(EngineConfig(model=str(folder))))


def test_each_token_of_an_answer_computes_every_token_before_it(folder: Path) -> None:
    engine = Engine(EngineConfig(model=str(folder)))
    one_answer(engine)
    assert engine.num_tokens_computed == sum(range(32, 32 + 16)) == 632
