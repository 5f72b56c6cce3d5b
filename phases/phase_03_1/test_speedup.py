"""The gain from fusion: launch counts, and on a GPU the time; on a CPU no loss."""

from pathlib import Path

import pytest

from phases.phase_03.engine import Engine as Unfused
from phases.phase_03_1.engine import Engine
from shared.checkpoints.make import make_checkpoint
from shared.engine.config import EngineConfig
from tests.speed import ONE_ANSWER, seconds_a_token, speedup, time_one_answer


@pytest.mark.measured
@pytest.mark.benchmark(group=ONE_ANSWER)
def test_generate(folder: Path, benchmark) -> None:
    time_one_answer(benchmark, Engine(EngineConfig(model=str(folder))))


@pytest.mark.measured
def test_on_a_cpu_a_token_costs_no_more_than_in_phase_3(folder: Path) -> None:
    config = EngineConfig(model=str(folder))
    unfused, fused = Unfused(config), Engine(config)
    assert speedup(lambda: seconds_a_token(unfused), lambda: seconds_a_token(fused), trials=5) >= 1 / 1.2


@pytest.mark.measured
@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["llama-3.2-1b", "qwen3-1.7b", "gemma-3-1b"])
def test_decode_against_phase_3(shape: str, tmp_path: Path) -> None:
    folder = make_checkpoint(shape, tmp_path / "model", device="cuda")
    config = EngineConfig(model=str(folder), device="cuda", max_seq_len=512)
    unfused, fused = Unfused(config), Engine(config)
    assert speedup(lambda: seconds_a_token(unfused, 256, 64), lambda: seconds_a_token(fused, 256, 64)) >= 1.8
