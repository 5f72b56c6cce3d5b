"""Phase 10 gives the outputs of phase 9 on the dequantized weights, whatever their storage format."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from phases.phase_09.engine import Engine as Plain
from phases.phase_10.engine import Engine
from shared.cache.view.uncached import UncachedView
from shared.checkpoints.make import make_checkpoint
from shared.checkpoints.quantize import quantize_checkpoint
from shared.checkpoints.shapes import SHAPES
from shared.engine.config import EngineConfig
from shared.errors import ConfigError, ModelFolderError
from shared.loading.loader import load_model
from shared.models.quantized import QuantizedProjection
from shared.models.tokens import Tokens
from shared.sampling.params import SamplingParams
from tests.mixed_requests import ALIKE, ARRIVALS, ARRIVE, MIXED, seen, serve, tokens
from tests.stored_weights import Store, awq, eight_bits, fp8_blocks, packed_groups

FAMILIES = ("llama", "qwen3", "gemma3")
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2}
SETTINGS: dict[str, Any] = {"max_seq_len": 128, "block_size": 4, "num_gpu_blocks": 48, "max_batch_size": 6}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random checkpoint of each family, whose matrices are divisible into blocks of 128 columns."""
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        for family in FAMILIES:
            shape = SHAPES[f"tiny-{family}"] | WIDE | {"num_hidden_layers": 2}
            shape.pop("layer_types", None)
            patch.setitem(SHAPES, f"wide-{family}", shape)
            made[family] = make_checkpoint(f"wide-{family}", tmp_path_factory.mktemp(family), seed=2)
    return made


def of_compressed_tensors(layout: str, **weights: Any) -> dict[str, Any]:
    scheme = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"], "config_groups": scheme}


FORMATS: dict[str, tuple[Store, dict[str, Any]]] = {
    "fp8 rows": (
        partial(eight_bits, kind="float"),
        of_compressed_tensors("float-quantized", num_bits=8, type="float", strategy="channel"),
    ),
    "int8 rows": (
        eight_bits,
        of_compressed_tensors("int-quantized", num_bits=8, type="int", strategy="channel"),
    ),
    "fp8 blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "int4 packed": (
        partial(packed_groups, group=64, zeros=False),
        of_compressed_tensors(
            "pack-quantized", num_bits=4, type="int", strategy="group", group_size=64, symmetric=True
        ),
    ),
    "awq": (
        partial(awq, group=64, zeros=True),
        {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True},
    ),
}


def write(source: Path, target: Path, kind: str, left_out: str = "") -> tuple[Path, Path]:
    """A quantized checkpoint of random weights, and a plain one of what they mean; ``left_out`` stays plain."""
    (store, config), random = FORMATS[kind], np.random.default_rng(0)
    if left_out:
        config = config | {"ignore": ["lm_head", left_out]}
    small, meant = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if "_proj" not in name or module == left_out:
            small[name] = meant[name] = tensor
            continue
        parts, meant[name], _ = store(random, *tensor.shape)
        small |= {f"{module}.{part}": value.contiguous() for part, value in parts.items()}
    for folder, tensors, options in (
        (target / "small", small, {"quantization_config": config}),
        (target / "plain", meant, {}),
    ):
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("model.safetensors", "infer-manifest.json"))
        save_file(tensors, folder / "model.safetensors")
        values = json.loads((source / "config.json").read_text()) | options
        (folder / "config.json").write_text(json.dumps(values))
    return target / "small", target / "plain"


def outputs(phase: Any, folder: Path, **config: Any) -> Any:
    """What clients receive, with requests that arrive late, share blocks and are preempted."""
    engine = phase(EngineConfig(model=str(folder), overlap_scheduling=True, **SETTINGS, **config))
    return seen(serve(engine, [*ALIKE, *MIXED], [*ARRIVE, *ARRIVALS])[0])


@pytest.fixture
def dequantizes_int4(monkeypatch: pytest.MonkeyPatch) -> None:
    """INT4 is dequantized, so activations keep their 32 bits even on a CPU."""
    monkeypatch.setattr("shared.ops.quantized.CPU_GROUPS", ())


@pytest.mark.usefixtures("dequantizes_int4")
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "fp8 blocks"),
        ("qwen3", "fp8 rows"),
        ("qwen3", "int4 packed"),
        ("gemma3", "awq"),
        ("gemma3", "fp8 blocks"),
    ],
)
def test_tokens_are_those_of_the_weights_that_are_meant(
    folders: dict[str, Path], tmp_path: Path, kind: str, family: str
) -> None:
    small, plain = write(folders[family], tmp_path, kind)
    engine = Engine(EngineConfig(model=str(small), **SETTINGS))
    assert sum(type(module).__name__ == "FusedQuantizedProjection" for module in engine.model.modules()) == 2 * 4
    meant = list(map(tokens, outputs(Plain, plain)))
    assert list(map(tokens, outputs(Engine, small))) == meant
    assert list(map(tokens, outputs(Plain, folders[family]))) != meant, "the blocks decide"


@pytest.mark.parametrize(("family", "kind"), [("llama", "int8 rows"), ("qwen3", "int4 packed")])
def test_tokens_of_integers_are_the_likeliest_of_the_weights_that_are_meant(
    folders: dict[str, Path], tmp_path: Path, kind: str, family: str
) -> None:
    """A CPU rounds activations to bf16 for INT8 and INT4, so a token may differ where two logits are close.

    Not for Gemma, which with random weights repeats its last token whatever the blocks compute; nor for AWQ, whose
    random zeros make the weights so large that rounding decides more.
    """
    small, plain = write(folders[family], tmp_path, kind)
    engine = Engine(EngineConfig(model=str(small), **SETTINGS))
    prompt = list(range(5, 45))
    params = SamplingParams(max_new_tokens=64, temperature=0.0, ignore_eos=True)
    ids = torch.tensor(prompt + [output.token_id for output in engine.generate(prompt, params)])
    model = load_model(plain)
    with torch.inference_mode():
        hidden = model(Tokens(ids, torch.arange(len(ids))), UncachedView([len(ids)]))
        logits = model.logits(hidden)[len(prompt) - 1 : -1]
    chosen = logits.gather(1, ids[len(prompt) :, None])[:, 0]
    assert (logits.amax(1) - chosen).max() <= 0.02 * logits.std()


@pytest.mark.usefixtures("dequantizes_int4")
def test_a_module_that_was_left_out_stays_plain_beside_quantized_ones(folders: dict[str, Path], tmp_path: Path) -> None:
    """Values together with queries and keys, in one product; and in a separate product."""
    for number, left_out in enumerate(("0.self_attn.v_proj", "1.mlp.down_proj")):
        small, plain = write(folders["qwen3"], tmp_path / str(number), "int4 packed", f"model.layers.{left_out}")
        assert list(map(tokens, outputs(Engine, small))) == list(map(tokens, outputs(Plain, plain)))


@pytest.mark.parametrize("method", ["fp8", "int8", "int4"])
def test_rounding_while_loading_is_the_written_checkpoint(
    folders: dict[str, Path], tmp_path: Path, method: str
) -> None:
    written = quantize_checkpoint(folders["gemma3"], tmp_path / method, method)
    assert outputs(Engine, written) == outputs(Engine, folders["gemma3"], quantization=method)


def test_a_head_is_rounded_if_asked_and_the_embedding_stays(folders: dict[str, Path]) -> None:
    for family in ("llama", "qwen3"):  # tied to the embedding, and not
        kept, rounded = (
            Engine(EngineConfig(model=str(folders[family]), quantization="fp8", quantize_head=head, **SETTINGS))
            for head in (False, True)
        )
        assert torch.equal(kept.model.embedding.weight, rounded.model.embedding.weight)
        names = [type(engine.model.head).__name__ for engine in (kept, rounded)]
        assert names == ["FusedProjection", "FusedQuantizedProjection"]
        params = SamplingParams(max_new_tokens=4, temperature=0.0)
        assert len(list(rounded.generate([5, 6, 7], params))) == len(list(kept.generate([5, 6, 7], params))) == 4


def test_without_a_setting_nothing_changes(folder: Path) -> None:
    assert outputs(Engine, folder) == outputs(Plain, folder)


def test_settings_that_cannot_be_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"quantize_head is True and quantization is None"):
        EngineConfig(quantize_head=True)
    with pytest.raises(ConfigError, match=r"pack_weights is True and quantization is 'int8'"):
        EngineConfig(pack_weights=True, quantization="int8")
    small = quantize_checkpoint(folders["llama"], tmp_path / "int8", "int8")
    with pytest.raises(ModelFolderError, match=r"already quantized.*phase 10"):
        Plain(EngineConfig(model=str(small)))
    with pytest.raises(ConfigError, match="quantized already"):
        Engine(EngineConfig(model=str(small), quantization="fp8"))
    packed_engine = Engine(EngineConfig(model=str(small), pack_weights=True, **SETTINGS))
    assert any(isinstance(module, QuantizedProjection) for module in packed_engine.model.modules())
