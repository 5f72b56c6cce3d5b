"""The cost of phase 2: the count of tokens computed, the baseline of every later phase."""

from pathlib import Path

import pytest

from phases.phase_02.engine import Engine
from shared.engine.config import EngineConfig
from shared.sampling.params import SamplingParams


@pytest.mark.benchmark(group="decode 16 tokens after 32, tiny model")
def test_generate(tiny_checkpoints: dict[str, Path], benchmark) -> None:
    engine = Engine(EngineConfig(model=str(tiny_checkpoints["llama"])))
    params = SamplingParams(temperature=0.0, max_new_tokens=16, ignore_eos=True)
    benchmark.pedantic(lambda: list(engine.generate([7] * 32, params)), rounds=5, warmup_rounds=1)
    before = engine.num_tokens_computed
    list(engine.generate([7] * 32, params))
    assert engine.num_tokens_computed - before == sum(range(32, 48)), "each answer recomputes every prefix"
