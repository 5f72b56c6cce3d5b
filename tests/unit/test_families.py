"""A family is its own file and a row: transformers' checkpoints of two families that this project does not have.

Phi-3 stores queries, keys and values in one tensor, and gate and up in another. Qwen3-MoE has a number of experts.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, Phi3Config, Qwen3MoeConfig

from phases.phase_12.engine import Engine
from shared.cache.view.uncached import UncachedView
from shared.checkpoints.byte_tokenizer import save_byte_tokenizer
from shared.checkpoints.quantize import quantize_checkpoint
from shared.engine.config import EngineConfig
from shared.errors import ConfigError, InferError, ModelFolderError
from shared.loading.checkpoint import Checkpoint
from shared.loading.loader import load_model
from shared.loading.quantized import quantizer
from shared.loading.sources import Source, sources
from shared.loading.weights import fill
from shared.models import llama
from shared.models.causal_lm import CausalLM
from shared.models.families import FAMILIES, Family
from shared.models.fused import fuse
from shared.models.tensor_names import Rows
from shared.models.tokens import Tokens
from shared.sampling.params import SamplingParams
from shared.tracks.multi_token.lora import adapt
from shared.tracks.ranks.model import load_part
from tests import experts
from tests.ranks import on_ranks

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
PHI3 = Family(
    llama.LlamaBlock,
    llama.LAYER_NAMES
    | {f"attention.qkv.{name}": Rows("self_attn.qkv_proj", n) for n, name in enumerate(("q_proj", "k_proj", "v_proj"))}
    | {f"mlp.gate_up.{name}": Rows("mlp.gate_up_proj", n) for n, name in enumerate(("gate_proj", "up_proj"))},
    llama.CONFIG_DEFAULTS,
)
SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
CONFIGS = {
    "phi3": Phi3Config(**SHAPE),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random checkpoints as transformers writes them."""
    made = {}
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        made[name] = tmp_path_factory.mktemp(name)
        AutoModelForCausalLM.from_config(config).save_pretrained(made[name])
        save_byte_tokenizer(SHAPE | {"model_type": "llama", "bos_token_id": 1}, made[name])
    return made


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "phi3", PHI3)
    monkeypatch.setitem(FAMILIES, "qwen3_moe", experts.FAMILY)


@torch.inference_mode()
def logits(model: CausalLM, num_tokens: int = 7) -> torch.Tensor:
    ids = torch.arange(num_tokens) * 5 + 3
    return model.logits(model(Tokens(ids, torch.arange(num_tokens)), UncachedView([num_tokens], "naive")))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(folders: dict[str, Path], name: str) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = reference(torch.arange(7)[None] * 5 + 3).logits[0]
    model = load_model(folders[name])
    for form in (lambda plain: plain, fuse):
        torch.testing.assert_close(logits(form(model)), expected, rtol=0, atol=2e-5 * expected.abs().max().item())
    tokens, rows = Tokens(torch.arange(7) * 5 + 3, torch.arange(7)), torch.tensor([6, 2])
    with torch.inference_mode():
        found = model.logits(model(tokens, UncachedView([7], "naive"), rows))
    torch.testing.assert_close(found, expected[rows], rtol=0, atol=2e-5 * expected.abs().max().item())


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_phase_12_serves_them(folders: dict[str, Path], name: str, quantization: str | None) -> None:
    config = EngineConfig(str(folders[name]), max_seq_len=64, quantization=quantization)
    params = SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True)
    answer = [output.token_id for output in Engine(config).generate([5, 9, 3], params)]
    model = load_model(folders[name], quantize=quantizer(quantization))
    ids, steps = [5, 9, 3], torch.arange(16)
    with torch.inference_mode():
        while len(ids) < 9:
            hidden = model(Tokens(torch.tensor(ids), steps[: len(ids)]), UncachedView([len(ids)], "naive"))
            ids.append(int(model.logits(hidden[-1:]).argmax()))
    assert answer == ids[3:]


def stacked(folder: Path, to: Path) -> Path:
    """The checkpoint of experts with a stack of all in one tensor, gate and up one below the other."""
    tensors = load_file(folder / "model.safetensors")
    for layer in range(SHAPE["num_hidden_layers"]):
        mlp = f"model.layers.{layer}.mlp.experts"
        parts = {
            kind: torch.stack([tensors.pop(f"{mlp}.{n}.{kind}.weight") for n in range(4)])
            for kind in ("gate_proj", "up_proj", "down_proj")
        }
        tensors[f"{mlp}.gate_up_proj"] = torch.cat((parts["gate_proj"], parts["up_proj"]), dim=1)
        tensors[f"{mlp}.down_proj"] = parts["down_proj"]
    to.mkdir()
    save_file(tensors, to / "model.safetensors")
    (to / "config.json").write_text((folder / "config.json").read_text())
    return to


STACKED = {
    "mlp.experts.*.gate_up.gate_proj.weight": Rows("mlp.experts.gate_up_proj", 0),
    "mlp.experts.*.gate_up.up_proj.weight": Rows("mlp.experts.gate_up_proj", 1),
    "mlp.experts.*.down_proj.weight": "mlp.experts.down_proj",
}


def with_names(monkeypatch: pytest.MonkeyPatch, names: dict[str, Any]) -> None:
    family = experts.FAMILY
    kept = {module: name for module, name in family.layer_names.items() if module not in experts.EXPERT}
    monkeypatch.setitem(
        FAMILIES, "qwen3_moe", Family(family.block, kept | names, family.config_defaults, family.own_fields)
    )


def test_a_stack_of_experts_loads_as_single_ones_do(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load_model(folders["qwen3_moe"]).state_dict()
    with_names(monkeypatch, STACKED)
    found = load_model(stacked(folders["qwen3_moe"], tmp_path / "stacked")).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_several_tensors_make_one_parameter(folders: dict[str, Path]) -> None:
    """A layer's experts as two stacks, and its queries, keys and values as one matrix."""
    module = nn.Module()
    module.gate_up = nn.Parameter(torch.empty(4, 64, 64, device="meta"))
    module.down = nn.Parameter(torch.empty(4, 64, 32, device="meta"))
    module.qkv = nn.Linear(64, 128, bias=False, device="meta")
    projections = tuple(f"self_attn.{name}_proj" for name in "qkv")
    names = {
        "gate_up": tuple(f"mlp.experts.*.{name}_proj.weight" for name in ("gate", "up")),
        "down": "mlp.experts.*.down_proj.weight",
        "qkv": projections,
    }
    checkpoint = Checkpoint(folders["qwen3_moe"])
    source_of = sources(module, names, "model.layers.1.")
    fill(module, source_of, checkpoint, torch.float32, "cpu")
    module.down = nn.Parameter(torch.empty(12, 1, 1, device="meta"))
    stack = sources(module, names, "model.layers.1.")["down"]
    assert stack.names == [f"model.layers.1.mlp.experts.{n}.down_proj.weight" for n in range(12)]
    module.down = nn.Parameter(source_of["down"].read(checkpoint))
    first = {name: checkpoint.tensor(f"model.layers.1.{name}.weight") for name in projections}
    assert torch.equal(module.qkv.weight, torch.cat(list(first.values())))
    for n in range(4):
        expert = {
            name: checkpoint.tensor(f"model.layers.1.mlp.experts.{n}.{name}_proj.weight")
            for name in ("gate", "up", "down")
        }
        assert torch.equal(module.gate_up[n], torch.cat((expert["gate"], expert["up"])))
        assert torch.equal(module.down[n], expert["down"])


@pytest.mark.parametrize(
    ("name", "tensor", "damage", "message"),
    [
        (
            "phi3",
            "model.layers.1.self_attn.qkv_proj.weight",
            lambda tensor: tensor[:-16],
            r"json: 1 of another shape than config.json says: \S+qkv_proj.weight \(\[112, 64\], not \[128, 64\]\)\.",
        ),
        ("phi3", "model.layers.0.mlp.gate_up_proj.weight", None, "1 missing: model.layers.0.mlp.gate_up_proj.weight"),
        (
            "stacked",
            "model.layers.0.mlp.experts.down_proj",
            lambda tensor: tensor[:3],
            r"json: 1 of another shape than config.json says: \S+down_proj \(\[3, 64, 32\], not \[4, 64, 32\]\)\.",
        ),
        (
            "stacked",
            "model.layers.1.mlp.experts.gate_up_proj",
            lambda tensor: tensor[:, :32],
            r"gate_up_proj \(\[4, 32, 64\], not \[4, 64, 64\]\)\.",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_its_parameters_is_refused(
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    tensor: str,
    damage: Callable[[torch.Tensor], torch.Tensor] | None,
    message: str,
) -> None:
    folder = tmp_path / "model"
    if name == "stacked":
        with_names(monkeypatch, STACKED)
        stacked(folders["qwen3_moe"], folder)
    else:
        folder.mkdir()
        (folder / "config.json").write_text((folders[name] / "config.json").read_text())
        save_file(load_file(folders[name] / "model.safetensors"), folder / "model.safetensors")
    tensors = load_file(folder / "model.safetensors")
    whole = tensors.pop(tensor)
    if damage is not None:
        tensors[tensor] = damage(whole).contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFolderError, match=message):
        load_model(folder)


def test_what_is_not_supported_for_them_is_said(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(InferError, match=r"several matrices in one tensor.*quantized while it loads"):
        quantize_checkpoint(str(folders["phi3"]), tmp_path / "quantized", "int8")
    shutil.copytree(folders["phi3"], stored := tmp_path / "stored")
    config = json.loads((stored / "config.json").read_text()) | {"quantization_config": GPTQ}
    (stored / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFolderError, match=r"has .*qkv_proj quantized, and .*q_proj is not this tensor as a whole"):
        load_model(stored, quantize=quantizer())
    for name, folder in folders.items():
        with pytest.raises(ConfigError, match=f"{name!r} have sizes or tensors of their own that are not sharded"):
            on_ranks(2, lambda ranks, folder=folder: load_part(folder, ranks))
    with pytest.raises(ConfigError, match="'qwen3_moe' have parts of their own"):
        adapt(fuse(load_model(folders["qwen3_moe"])), [], torch.zeros(1, 64))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(4, 8), (4, 6)], r"a and b \(\[4, 8\] and \[4, 6\], not \[8, 8\] together\)"),
        ([(8, 8), (4,)], r"a and b \(\[8, 8\] and \[4\], not \[8, 8\] together\)"),
        ([(4, 8), (5, 8)], r"a and b \(\[4, 8\] and \[5, 8\], not \[8, 8\] together\)"),
        ([(3, 4, 8), (3, 4, 8)], None),
        ([(3, 4, 8), (2, 4, 8)], r"not \[3, 8, 8\] together\)"),
    ],
)
def test_rows_of_several_tensors_fit_together(
    tmp_path: Path, shapes: list[tuple[int, ...]], message: str | None
) -> None:
    """Of whole tensors, and of the entries of stacks."""
    save_file(
        {name: torch.randn(shape) for name, shape in zip("ab", shapes, strict=True)}, tmp_path / "model.safetensors"
    )
    checkpoint, is_stack = Checkpoint(tmp_path), len(shapes[0]) == 3
    source = Source((("a", "b"),), entry=(1, 3) if is_stack else None)
    wrong = source.mismatches(checkpoint, (8, 8))
    if message is None:
        assert not wrong
        assert torch.equal(source.read(checkpoint), torch.cat([checkpoint.tensor(name)[1] for name in "ab"]))
    else:
        assert re.search(message, *wrong)
