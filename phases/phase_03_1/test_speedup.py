"""The gain from fusion: launch counts, and on a GPU the time; on a CPU no loss."""

import statistics
from pathlib import Path

import pytest
import torch

from benchmarks.timing import SyntheticPrompts, run
from phases.phase_03.engine import Engine as Unfused
from phases.phase_03_1.engine import Engine
from shared.checkpoints.make import make_checkpoint
from shared.engine.config import EngineConfig
from shared.kernels.launch import LAUNCHES
from shared.sampling.params import SamplingParams


@pytest.mark.benchmark(group="decode 16 tokens after 32, tiny model")
def test_generate(tiny_checkpoints: dict[str, Path], benchmark) -> None:
    engine = Engine(EngineConfig(model=str(tiny_checkpoints["llama"])))
    params = SamplingParams(temperature=0.0, max_new_tokens=16, ignore_eos=True)
    benchmark.pedantic(lambda: list(engine.generate([7] * 32, params)), rounds=5, warmup_rounds=1)
    before = engine.num_tokens_computed
    list(engine.generate([7] * 32, params))
    assert engine.num_tokens_computed - before == 32 + 15, "each answer computes every token once"


def test_on_a_cpu_a_token_costs_no_more_than_in_phase_3(tiny_checkpoints: dict[str, Path]) -> None:
    config = EngineConfig(model=str(tiny_checkpoints["llama"]))
    engines = {"03": Unfused(config), "03.1": Engine(config)}
    intervals: dict[str, list[float]] = {"03": [], "03.1": []}
    LAUNCHES.clear()
    for engine in engines.values():
        run(engine, [7] * 32, 4)
    for _ in range(5):
        for name, engine in engines.items():
            intervals[name] += run(engine, [7] * 32, 16).intervals
    assert statistics.median(intervals["03.1"]) <= 1.2 * statistics.median(intervals["03"])
    assert LAUNCHES.total() == 0, "without a GPU the launchers call the operations"


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["llama-3.2-1b", "qwen3-1.7b", "gemma-3-1b"])
def test_decode_against_phase_3(shape: str, tmp_path: Path) -> None:
    folder = make_checkpoint(shape, tmp_path / "model", device="cuda")
    config = EngineConfig(model=str(folder), device="cuda", max_seq_len=512)
    engines = {"03": Unfused(config), "03.1": Engine(config)}
    prompts = SyntheticPrompts(engines["03"].model.config.vocab_size, seed=0)
    for engine in engines.values():
        run(engine, prompts.draw(256), 16)
    intervals: dict[str, list[float]] = {"03": [], "03.1": []}
    for _ in range(3):
        prompt = prompts.draw(256)
        for name, engine in engines.items():
            intervals[name] += run(engine, prompt, 64).intervals
    speedup = statistics.median(intervals["03"]) / statistics.median(intervals["03.1"])
    assert speedup >= 1.8, f"{speedup:.2f} times"


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
