"""The gain from small weights: their bytes are counted everywhere, their speed is measured."""

import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.timing import torch_threads
from phases.phase_09.engine import Engine as Plain
from phases.phase_10.engine import Engine
from shared.checkpoints.make import make_checkpoint
from shared.engine.config import EngineConfig
from shared.models.quantized import FusedQuantizedProjection
from shared.sampling.params import SamplingParams

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


@pytest.mark.benchmark(group="decode 16 tokens after 32, tiny model")
def test_generate(tiny_checkpoints: dict[str, Path], benchmark) -> None:
    engine = Engine(EngineConfig(model=str(tiny_checkpoints["llama"]), quantization="int8", max_batch_size=8))
    params = SamplingParams(**GREEDY, max_new_tokens=16)
    benchmark.pedantic(lambda: list(engine.generate([7] * 32, params)), rounds=5, warmup_rounds=1)


@pytest.mark.parametrize(("method", "most"), [("fp8", 0.27), ("int8", 0.27), ("int4", 0.17)])
def test_a_token_reads_a_quarter_or_an_eighth_of_the_bytes(
    tiny_checkpoints: dict[str, Path], method: str, most: float
) -> None:
    """Of fp32, scales included; groups of 32 columns, as in this tiny model, have an eighth of a number more each."""
    folder = str(tiny_checkpoints["llama"])
    model = Engine(EngineConfig(model=folder, quantization=method, max_batch_size=1)).model
    parts = [module.weight for module in model.modules() if isinstance(module, FusedQuantizedProjection)]
    assert len(parts) == 4 * model.config.num_layers
    plain = sum(4 * part.shape[0] * part.shape[1] for part in parts)
    assert sum(part.num_bytes for part in parts) <= most * plain


def seconds_a_token(engine: Any, num_tokens: int = 24) -> float:
    """Median seconds between the tokens of one answer."""
    times = []
    for _ in engine.generate([7] * 16, SamplingParams(**GREEDY, max_new_tokens=num_tokens)):
        times.append(time.perf_counter())
    return statistics.median(b - a for a, b in itertools.pairwise(times[3:]))


@pytest.mark.demo
@pytest.mark.measured
def test_int8_decodes_faster_on_a_cpu(demo_folder: Path) -> None:
    """1.33 to 1.62 times as fast was measured on two threads; a busy machine makes two wait for each other."""
    about: dict[str, Any] = {"model": str(demo_folder), "max_seq_len": 128, "max_batch_size": 1}
    engines = [Plain(EngineConfig(**about)), Engine(EngineConfig(**about, quantization="int8"))]
    with torch_threads(1):
        trials = [[seconds_a_token(engine) for engine in engines] for _ in range(3)]
    assert statistics.median(plain / small for plain, small in trials) >= 1.2, trials


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize(("method", "factor"), [("fp8", 1.2), ("int8", 1.15), ("int4", 1.2)])
def test_a_token_is_faster_on_a_gpu(tmp_path_factory: pytest.TempPathFactory, method: str, factor: float) -> None:
    folder = make_checkpoint("qwen3-1.7b", tmp_path_factory.getbasetemp() / "qwen3", dtype="bfloat16", device="cuda")
    about: dict[str, Any] = {"model": str(folder), "device": "cuda", "max_seq_len": 512, "max_batch_size": 1}
    plain, small = (
        seconds_a_token(engine(EngineConfig(**about, **quantization)), 128)
        for engine, quantization in ((Plain, {}), (Engine, {"quantization": method}))
    )
    assert plain / small >= factor, (plain, small)
