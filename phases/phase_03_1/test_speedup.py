"""The gain from fusion: launch counts, and on a GPU the time; on a CPU no loss."""

from pathlib import Path

import pytest
import torch

from phases.phase_03.engine import Engine as Unfused
from phases.phase_03_1.engine import Engine
from shared.checkpoints.make import make_checkpoint
from shared.engine.config import EngineConfig
from shared.kernels.launch import LAUNCHES
from shared.sampling.params import SamplingParams
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


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "a_layer"), [("llama", 6), ("qwen3", 6), ("gemma3_text", 8)])
def test_launches_of_a_decoded_token(tiny_checkpoints: dict[str, Path], family: str, a_layer: int) -> None:
    """A Llama or Qwen layer launches QKV, write, attend, O, gate and up, down. A Gemma layer has two more norms."""
    engine = Engine(EngineConfig(model=str(tiny_checkpoints[family]), device="cuda", dtype="bfloat16"))
    params = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
    outputs = engine.generate([7] * 32, params)
    next(outputs)
    torch.cuda.synchronize()
    before = LAUNCHES.total()
    next(outputs)
    head_and_draw = 2
    assert LAUNCHES.total() - before == a_layer * engine.model.config.num_layers + head_and_draw
    assert LAUNCHES["decode_attention_kernel"] >= engine.model.config.num_layers
