"""Compiled parts: the numbers of the others, with one compilation for all layers."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.cpp_extension  # before any test runs: it lets setuptools replace distutils, once, for inductor

from phases.phase_11_1.engine import Engine
from shared.engine.config import EngineConfig
from shared.errors import ConfigError
from shared.loading.loader import load_model
from shared.models.compiled import CompiledProjection, compile_model
from shared.models.fused import fuse
from tests.mixed_requests import MIXED, serve, tokens

SETTINGS: dict[str, Any] = {"max_seq_len": 128, "max_batch_size": 3}


def test_a_traced_model_has_the_hidden_states_of_the_fused_one(model_folder: Path) -> None:
    """All families, as TorchDynamo traces them, without code."""
    engine, other = (Engine(EngineConfig(str(model_folder), **SETTINGS)) for _ in range(2))
    compile_model(other.model, backend="eager")
    assert all(type(block.mlp.down_proj) is CompiledProjection for block in other.model.blocks)
    expected = serve(engine, MIXED)[0]
    for mine, theirs in zip(serve(other, MIXED)[0], expected, strict=True):
        assert tokens(mine) == tokens(theirs)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="TorchInductor needs g++ on a CPU")
def test_a_compiled_model_gives_the_tokens_of_the_fused_one(tiny_checkpoints: dict[str, Path]) -> None:
    folder = str(tiny_checkpoints["llama"])  # one kind of layer: what differs between families, the trace above covers
    engine = Engine(EngineConfig(folder, execution="compile", **SETTINGS))
    assert engine.compile_seconds > 0
    counts = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    expected = serve(Engine(EngineConfig(folder, **SETTINGS)), MIXED)[0]
    for mine, theirs in zip(serve(engine, MIXED)[0], expected, strict=True):
        assert tokens(mine) == tokens(theirs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == counts, "every step finds its code"


def test_what_cannot_be_compiled_is_refused(tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_checkpoints["llama"]
    with pytest.raises(
        ConfigError, match=r"^execution is 'compile' and quantization is 'int8'; .* leave one of them out"
    ):
        EngineConfig(str(folder), execution="compile", quantization="int8")
    with pytest.raises(ConfigError, match="A part of the model is a RMSNorm, and only fused parts"):
        compile_model(load_model(folder))

    def none(*_: Any) -> Any:
        raise RuntimeError("no compiler\nand a long story")

    monkeypatch.setattr("shared.models.compiled.compiled", lambda *_: none)
    with pytest.raises(ConfigError, match=r"cannot compile the model here \(no compiler\); install a C\+\+ compiler"):
        compile_model(fuse(load_model(folder)))
