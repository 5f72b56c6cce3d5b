"""Fused parts on the CPU, where the launchers call the ops: the same model, in the memory of one."""

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shared.cache.view.uncached import UncachedView
from shared.errors import ConfigError
from shared.kernels import launch
from shared.loading.config_json import read_config
from shared.loading.loader import load_model
from shared.loading.placement import check_device
from shared.models import fused
from shared.models.causal_lm import CausalLM
from shared.models.fused import FusedNorm, FusedProjection, fuse, fused_part
from shared.models.norm import RMSNorm
from shared.models.parts import MergedGroup
from shared.models.projection import Projection, ProjectionGroup
from shared.models.tokens import Tokens
from tests.comparison import assert_close


@torch.inference_mode()
def logits(model: CausalLM, num_tokens: int) -> torch.Tensor:
    ids = torch.arange(num_tokens) * 7 % model.config.vocab_size
    return model.logits(model(Tokens(ids, torch.arange(num_tokens)), UncachedView([num_tokens])))


def random_model(folder: Path, **changes: object) -> CausalLM:
    """A model of the folder's shape with ``changes`` to its configuration and random weights, biases included."""
    model = CausalLM(dataclasses.replace(read_config(folder), **changes), 64)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            weight = torch.randn(parameter.shape, generator=generator) * 0.2
            setattr(module, name, torch.nn.Parameter(weight, requires_grad=False))
    return model


@pytest.mark.parametrize("num_tokens", [1, 3, 16, 17, 40])
def test_a_fused_model_is_the_same_model(model_folder: Path, num_tokens: int) -> None:
    model = load_model(model_folder, dtype=torch.float32)
    expected = logits(model, num_tokens)
    assert fuse(model) is model, "fuse returned another model"
    assert_close(
        logits(model, num_tokens),
        expected,
        "logits of the fused model",
        ("token", "vocabulary"),
        rtol=0,
        atol=1e-5 * expected.abs().max().item(),
    )


@pytest.mark.parametrize("num_tokens", [1, 20])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_biases_and_softcaps_are_kept(tiny_checkpoints: dict[str, Path], family: str, num_tokens: int) -> None:
    changes = {"attention_bias": True, "mlp_bias": True, "logit_softcap": 3.0, "attention_softcap": 2.0}
    model = random_model(tiny_checkpoints[family], **changes)
    expected = logits(model, num_tokens)
    assert_close(
        logits(fuse(model), num_tokens),
        expected,
        "logits of the fused model",
        ("token", "vocabulary"),
        rtol=0,
        atol=1e-5,
    )


def test_a_projection_of_another_class_brings_its_own_fused_version() -> None:
    """As quantized and sharded ones do: alone, and in a group."""

    class Other(nn.Module):
        weight = torch.zeros(3, 4)

        @staticmethod
        def fused(projections: Sequence[nn.Module]) -> nn.Module:
            return nn.Sequential(*projections)

    one, others = Other(), [Other(), Other()]
    alone = fused_part(one)
    assert isinstance(alone, nn.Sequential), f"a projection alone became {type(alone).__name__}"
    assert list(alone) == [one], "one projection alone"
    group = fused_part(ProjectionGroup(gate=others[0], up=others[1]))  # type: ignore[arg-type]
    assert isinstance(group, MergedGroup), f"a group became {type(group).__name__}"
    assert isinstance(group.matrix, nn.Sequential), f"its matrix is a {type(group.matrix).__name__}"
    assert list(group.matrix) == others, "the projections of a group, in their order"


def test_a_projection_without_a_bias_keeps_none_beside_one_that_has_one() -> None:
    torch.manual_seed(0)
    members = [Projection(4, 3, bias=has_bias) for has_bias in (False, True, False)]
    for member in members:
        for name, parameter in member.named_parameters():
            setattr(member, name, torch.nn.Parameter(torch.randn(parameter.shape), requires_grad=False))
    x = torch.randn(2, 4)
    torch.testing.assert_close(FusedProjection(members)(x), torch.cat([member(x) for member in members], dim=1))


def test_every_matrix_is_kept_once(model_folder: Path) -> None:
    model = load_model(model_folder)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    qkv = [projection.weight.clone() for projection in model.blocks[0].attention.qkv.children()]  # type: ignore
    blocks = [type(block) for block in model.blocks]
    fuse(model)
    assert [type(block) for block in model.blocks] == blocks, "the family's block runs"
    for block in model.blocks:
        parts = {type(part) for name, part in block.named_modules() if ".qk." not in name}
        assert {MergedGroup, FusedProjection, FusedNorm} <= parts
        assert not {Projection, ProjectionGroup, RMSNorm} & parts
        kept = {type(part) for name, part in block.named_modules() if ".qk." in name}
        assert not {FusedNorm} & kept, "the KV view reads the norms of queries and keys"
    assert isinstance(model.head, FusedProjection)
    assert sum(parameter.numel() for parameter in model.parameters()) == numbers
    for part in model.blocks[0].modules():
        if isinstance(part, MergedGroup | FusedProjection):
            found = {*dict(part.named_children()), *dict(part.named_parameters(recurse=False))}
            assert found <= {*vars(part)}, "parts and weights are found without a search"
    assert torch.equal(model.blocks[0].attention.qkv.matrix.weight, torch.cat(qkv))  # type: ignore
    is_tied = model.head.weight.data_ptr() == model.embedding.weight.data_ptr()
    assert is_tied == model.config.tie_word_embeddings


def test_a_layer_is_merged_when_the_one_before_it_is_free(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(model_folder)
    groups = [group for block in model.blocks for group in (block.attention.qkv, block.mlp.gate_up)]  # type: ignore
    weights = [weakref.ref(projection.weight) for group in groups for projection in group.children()]
    num_layers, by_layer = len(model.blocks), len(weights) // len(model.blocks)
    del groups
    alive = []
    replace = fused.replace_parts

    def watched(module: torch.nn.Module, replaced: Any) -> None:
        if module in list(model.blocks):
            alive.append([weights[layer * by_layer]() is not None for layer in range(num_layers)])
        replace(module, replaced)

    monkeypatch.setattr(fused, "replace_parts", watched)
    fuse(model)
    assert alive == [[layer >= current for layer in range(num_layers)] for current in range(num_layers)]
    assert not any(ref() is not None for ref in weights)


def passing_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU as check_launchable wants it, without one."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(launch, "triton", SimpleNamespace(__version__="3.6.0"))
    monkeypatch.setattr(launch.shutil, "which", lambda compiler: {"gcc": "/usr/bin/gcc"}.get(compiler))
    monkeypatch.setattr(launch.Path, "is_file", lambda path: True)
    monkeypatch.delenv("CC", raising=False)


MACHINES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "old triton": (
        lambda patch: patch.setattr(launch, "triton", SimpleNamespace(__version__="3.5.1")),
        r"need Triton 3\.6 or later and this environment has 3\.5\.1; install it with `pip install 'triton>=3\.6'`",
    ),
    "no triton": (
        lambda patch: patch.setattr(launch, "triton", SimpleNamespace(__version__=None)),
        r"need Triton 3\.6 or later and this environment has none; install",
    ),
    "old gpu": (
        lambda patch: patch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5)),
        r"NVIDIA Test has compute capability 7\.5 and cannot compute in bf16; the kernels need 8\.0 .* --device cpu",
    ),
    "no compiler": (
        lambda patch: patch.setattr(launch.shutil, "which", lambda compiler: None),
        r"there is neither gcc nor clang; install gcc .*environment variable CC",
    ),
    "another compiler": (lambda patch: patch.setenv("CC", "icc"), r"CC names 'icc', which does not exist; install gcc"),
    "no headers": (
        lambda patch: patch.setattr(launch.Path, "is_file", lambda path: False),
        r"there is no Python\.h in .*python3-dev",
    ),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_a_machine_that_cannot_run_the_kernels_is_refused_with_the_remedy(
    machine: str, tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    passing_machine(monkeypatch)
    launch.check_launchable(torch.device("cuda"))
    change, message = MACHINES[machine]
    change(monkeypatch)
    with pytest.raises(ConfigError, match=message):
        launch.check_launchable(torch.device("cuda"))
    launch.check_launchable(torch.device("cpu"))
    model = load_model(tiny_checkpoints["llama"])
    monkeypatch.setattr(CausalLM, "device", torch.device("cuda"))
    with pytest.raises(ConfigError, match=message):
        fuse(model)
    assert not any(isinstance(module, FusedNorm | FusedProjection) for module in model.modules())


@pytest.mark.parametrize("machine", [None, "no gpu", "rocm", *MACHINES])
def test_auto_is_a_gpu_that_can_run_the_kernels_else_the_cpu(
    machine: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None if machine == "rocm" else "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: machine != "no gpu")
    passing_machine(monkeypatch)
    change, _ = MACHINES.get(machine, (lambda patch: None, ""))
    change(monkeypatch)
    assert check_device("auto") == torch.device("cuda" if machine is None else "cpu")


@pytest.mark.parametrize("version", ["3.6.0", "3.10.1", "4.0.0+git123"])
def test_later_tritons_are_taken(version: str) -> None:
    launch.check_triton_version(version)


def test_head_sizes() -> None:
    for size in (64, 128, 256):
        launch.check_head_size(size)
    with pytest.raises(ConfigError, match=r"head size is 80; the kernels take 16, 32, 64, 128, 256\..*--device cpu"):
        launch.check_head_size(80)
