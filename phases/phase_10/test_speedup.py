"""The gain from small weights: their bytes are counted everywhere, their speed is measured."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.timing import torch_threads
from phases.phase_09.engine import Engine as Plain
from phases.phase_10.engine import Engine
from shared.checkpoints.make import make_checkpoint
from shared.engine.config import EngineConfig
from shared.models.quantized import FusedQuantizedProjection
from tests.speed import ONE_ANSWER, seconds_a_token, speedup, time_one_answer


@pytest.mark.measured
@pytest.mark.benchmark(group=ONE_ANSWER)
def test_generate(folder: Path, benchmark) -> None:
    time_one_answer(benchmark, Engine(EngineConfig(model=str(folder), quantization="int8", max_batch_size=8)))


@pytest.mark.parametrize(("method", "most"), [("fp8", 0.27), ("int8", 0.27), ("int4", 0.17)])
def test_a_token_reads_a_quarter_or_an_eighth_of_the_bytes(folder: Path, method: str, most: float) -> None:
    """Relative to fp32, including scales; with groups of 32 columns, as in this tiny model, scales add an eighth of a
    byte per number."""
    model = Engine(EngineConfig(model=str(folder), quantization=method, max_batch_size=1)).model
    parts = [module.weight for module in model.modules() if isinstance(module, FusedQuantizedProjection)]
    assert len(parts) == 4 * model.config.num_layers
    plain = sum(4 * part.shape[0] * part.shape[1] for part in parts)
    assert sum(part.num_bytes for part in parts) <= most * plain


@pytest.mark.measured
@pytest.mark.demo
def test_int8_decodes_faster_on_a_cpu(demo_folder: Path) -> None:
    """1.33 to 1.62 times as fast was measured on two threads; on a busy machine, two threads wait for each other."""
    settings: dict[str, Any] = {"model": str(demo_folder), "max_seq_len": 128, "max_batch_size": 1}
    plain, small = Plain(EngineConfig(**settings)), Engine(EngineConfig(**settings, quantization="int8"))
    with torch_threads(1):
        assert speedup(lambda: seconds_a_token(plain, 16, 24), lambda: seconds_a_token(small, 16, 24)) >= 1.2


# On a GPU.


@pytest.mark.measured
@pytest.mark.gpu
@pytest.mark.parametrize(("method", "factor"), [("fp8", 1.2), ("int8", 1.15), ("int4", 1.2)])
def test_a_token_is_faster_on_a_gpu(tmp_path_factory: pytest.TempPathFactory, method: str, factor: float) -> None:
    folder = make_checkpoint("qwen3-1.7b", tmp_path_factory.getbasetemp() / "qwen3", dtype="bfloat16", device="cuda")
    settings: dict[str, Any] = {"model": str(folder), "device": "cuda", "max_seq_len": 512, "max_batch_size": 1}
    plain, small = Plain(EngineConfig(**settings)), Engine(EngineConfig(**settings, quantization=method))
    assert speedup(lambda: seconds_a_token(plain, 16, 128), lambda: seconds_a_token(small, 16, 128)) >= factor
