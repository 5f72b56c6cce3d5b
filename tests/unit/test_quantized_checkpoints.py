"""Whole quantized checkpoints, in each format and with each of its options: every matrix is the one that is meant.

A case is a ``quantization_config``, and how the modules whose names match a pattern are stored; the first pattern that
matches the whole name decides, and None leaves the module plain. Both are written by hand, so that neither follows from
the other by the rules of a reader.
"""

import json
from functools import partial
from pathlib import Path
from re import fullmatch
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from shared.checkpoints.make import checkpoint_tensors
from shared.checkpoints.shapes import SHAPES
from shared.loading.loader import load_model
from shared.loading.quantized import quantizer
from shared.models.causal_lm import CausalLM
from shared.models.quantized import QuantizedProjection
from shared.quantization.weight import dequantize
from shared.tracks.ranks.collectives import Collectives
from shared.tracks.ranks.model import load_part
from tests.stored_weights import Store, awq, eight_bits, fp8_blocks, gptq, packed_groups

BF16, HALF = torch.bfloat16, torch.float16


class Case(NamedTuple):
    config: dict[str, Any]
    stored: list[tuple[str, Store | None]]
    shape: dict[str, Any] = {}  # noqa: RUF012


def compressed(layout: str | None, ignore: list[str], *groups: dict[str, Any]) -> dict[str, Any]:
    named = {f"group_{n}": group for n, group in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": layout, "ignore": ignore, "config_groups": named}


def scheme(*targets: str, layout: str | None = None, **weights: Any) -> dict[str, Any]:
    return {"targets": list(targets), "weights": weights} | ({"format": layout} if layout else {})


def grouped(size: int, **options: Any) -> dict[str, Any]:
    return {"num_bits": 4, "type": "int", "strategy": "group", "group_size": size} | options


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
FP8 = {"num_bits": 8, "type": "float"}
OF_GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False, "dynamic": None, "damp_percent": 0.01}
OF_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}
TIED = {"tie_word_embeddings": True}
ODD = {"hidden_size": 130, "intermediate_size": 386}  # no multiples of what an int32 holds
EIGHTS = {"vocab_size": 304}
ALL = ".*"
CASES = {
    "FP8 in blocks": Case(
        BLOCKS
        | {
            "modules_to_not_convert": [
                "model.layers.1",
                "model.layers.2.self_attn",
                "layers.3",
                "model.layers.4.mlp.up",
                "model.layers.5.mlp.up_proj",
            ]
        },
        [(r"model\.layers\.((1|2\.self_attn)\..*|5\.mlp\.up_proj)|lm_head", None), (ALL, fp8_blocks)],
    ),
    "FP8 in blocks, the head too": Case(
        BLOCKS | {"modules_to_not_convert": None, "fmt": "e4m3"}, [(ALL, partial(fp8_blocks, dtype=BF16))]
    ),
    "FP8 by tensor, names and patterns are left out": Case(
        compressed(
            "float-quantized",
            [
                "lm_head",
                "model.layers.1.mlp.up_proj",
                "model.layers.2",
                "re:.*layers[.]3[.].*",
                "re:layers[.]4",
                "re:model.layers.5.mlp",
            ],
            scheme("Linear", **FP8, strategy="tensor"),
        ),
        [
            (r"lm_head|model\.layers\.(1\.mlp\.up_proj|3\..*|5\.mlp.*)", None),
            (r".*\.q_proj", partial(eight_bits, kind="float", scale="scalar", dtype=BF16)),
            (ALL, partial(eight_bits, kind="float", scale="tensor", dtype=HALF)),
        ],
    ),
    "INT8 by row, the embedding is the head": Case(
        compressed("int-quantized", [], scheme("Linear", **INT8, strategy="channel")),
        [("lm_head", None), (ALL, partial(eight_bits, dtype=BF16))],
        ODD | TIED,
    ),
    "INT8 in int32 that are not full": Case(
        compressed("pack-quantized", ["lm_head"], scheme("Linear", **INT8, strategy="channel")),
        [("lm_head", None), (ALL, partial(eight_bits, kind="packed"))],
        ODD,
    ),
    "INT8 in int32, by tensor, the head too": Case(
        compressed("pack-quantized", [], scheme("Linear", **INT8, strategy="tensor")),
        [(ALL, partial(eight_bits, kind="packed", scale="tensor"))],
        ODD,
    ),
    "INT4 in groups, the head too": Case(
        compressed("pack-quantized", [], scheme("Linear", **grouped(128, actorder="static"))),
        [(ALL, partial(packed_groups, group=128, zeros=False))],
    ),
    "INT4 with zeros, of rows that do not fill an int32": Case(
        compressed("pack-quantized", [], scheme("Linear", **grouped(32, symmetric=False))),
        [(ALL, partial(packed_groups, group=32, zeros=True, dtype=torch.float32))],
    ),
    "groups of modules, each in its own format": Case(
        compressed(
            "int-quantized",
            ["lm_head"],
            scheme("Linear", **INT8, strategy="channel"),
            scheme(
                "model.layers.1.mlp.up_proj",
                "re:.*layers[.]10[.]mlp[.]up_proj",
                layout="float-quantized",
                **FP8,
                strategy="tensor",
            ),
            scheme(
                "re:.*mlp[.](up|down)_proj", layout="pack-quantized", **grouped(64, symmetric=False, actorder="weight")
            ),
            scheme("Linear", layout="float-quantized", **FP8, strategy="tensor"),
            scheme("re:.*v_proj", layout="pack-quantized", **INT8, strategy="channel"),
        ),
        [
            ("lm_head", None),
            (r"model\.layers\.10?\.mlp\.up_proj", partial(eight_bits, kind="float", scale="tensor")),
            (r".*\.mlp\.(up|down)_proj", partial(packed_groups, group=64, zeros=True)),
            (r".*v_proj", partial(eight_bits, kind="packed")),
            (ALL, eight_bits),
        ],
    ),
    "only the modules that a group names": Case(
        compressed(
            "mixed-precision", [], scheme("re:.*self_attn.*", layout="naive-quantized", **INT8, strategy="channel")
        ),
        [(r".*self_attn.*", eight_bits), (ALL, None)],
    ),
    "GPTQ": Case(
        OF_GPTQ | {"group_size": 128, "checkpoint_format": "GPTQ", "format": "gptq", "lm_head": False},
        [("lm_head", None), (ALL, partial(gptq, group=128, zeros=True))],
        EIGHTS,
    ),
    "GPTQ, version 2, without an index, the head too": Case(
        OF_GPTQ | {"group_size": 32, "checkpoint_format": "gptq_v2", "lm_head": True},
        [(ALL, partial(gptq, group=32, zeros=True, version=2, has_index=False))],
        EIGHTS | TIED,  # which the head contradicts
    ),
    "GPTQ, symmetric": Case(
        OF_GPTQ | {"group_size": 64, "sym": True},
        [("lm_head", None), (ALL, partial(gptq, group=64, zeros=False))],
        EIGHTS | TIED,
    ),
    "AWQ, parts of names are left out": Case(
        OF_AWQ | {"zero_point": True, "modules_to_not_convert": ["layers.1.", "6.self", "_norm"]},
        [(r"lm_head|model\.layers\.(1|6\.self_attn)\..*", None), (ALL, partial(awq, group=64, zeros=True))],
        EIGHTS,
    ),
    "AWQ without zeros": Case(
        OF_AWQ | {"zero_point": False, "modules_to_not_convert": None},
        [("lm_head", None), (ALL, partial(awq, group=64, zeros=False))],
        EIGHTS,
    ),
}
SHAPE = SHAPES["tiny-llama"] | {"hidden_size": 128, "intermediate_size": 640, "num_hidden_layers": 11}
SHAPE |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 300,
    "tie_word_embeddings": False,
}


def store_of(case: Case, module: str) -> Store | None:
    return next((store for pattern, store in case.stored if fullmatch(pattern, module)), None)


def written(folder: Path, case: Case) -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray | None]]:
    """Write the checkpoint; returns the weight of every matrix, and the zeros of the quantized ones."""
    config, random = SHAPE | case.shape, np.random.default_rng(0)
    tensors, weights, zeros = dict[str, torch.Tensor](), dict[str, torch.Tensor](), dict[str, np.ndarray | None]()
    is_tied = config["tie_word_embeddings"] and store_of(case, "lm_head") is None
    for name, shape in checkpoint_tensors(config | {"tie_word_embeddings": is_tied}):
        module = name.removesuffix(".weight")
        store = store_of(case, module)
        if len(shape) == 1 or store is None or "embed" in module:
            tensors[name] = torch.from_numpy(random.standard_normal(shape, np.float32) * 0.1)
            weights[module] = tensors[name]
            continue
        stored = store(random, *shape)
        weights[module], zeros[module] = stored.weight, stored.zeros
        tensors |= {f"{module}.{part}": tensor.contiguous() for part, tensor in stored.tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": case.config}))
    return weights, zeros


def matrices(model: CausalLM) -> dict[str, Any]:
    """The model's projections, by their names in the checkpoint."""
    found = {"lm_head": model.head}
    for layer, block in enumerate(model.blocks):
        for name, module in block.named_modules():
            part = name.rpartition(".")[2]
            if part.endswith("_proj"):
                of = "self_attn" if part[0] in "qkvo" else "mlp"
                found[f"model.layers.{layer}.{of}.{part}"] = getattr(module, "projection", module)
    return found


def part(name: str, weight: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """A rank's part: of heads by their queries, of the MLP at multiples of 128, of the vocabulary evenly."""
    module = name.rpartition(".")[2]
    if module in ("k_proj", "v_proj"):
        heads = weight.chunk(2)
        return heads[rank] if size == 2 else heads[rank // 2]
    if module in ("q_proj", "o_proj"):
        return weight.chunk(size, 0 if module == "q_proj" else 1)[rank]
    dim = 1 if module == "down_proj" else 0
    if module == "lm_head":
        return weight.tensor_split(size)[rank]
    units = np.array_split(np.arange(-(-weight.shape[dim] // 128)), size)[rank]
    return weight.narrow(dim, 128 * units[0], min(128 * (units[-1] + 1), weight.shape[dim]) - 128 * units[0])


@pytest.mark.parametrize("name", CASES)
def test_every_matrix_is_the_one_that_is_meant(tmp_path: Path, name: str) -> None:
    """In the whole model, on both of 2 ranks, and on the second and the last of 4: to the last bit."""
    weights, zeros = written(tmp_path, CASES[name])
    model = load_model(tmp_path, quantize=quantizer())
    weights.setdefault("lm_head", weights["model.embed_tokens"])
    found = matrices(model)
    assert found.keys() == {module for module in weights if module.endswith(("_proj", "lm_head"))}
    for module, projection in found.items():
        assert isinstance(projection, QuantizedProjection) == (module in zeros), module
        weight = projection.weight
        if module in zeros:
            of_groups = zeros[module]
            assert weight.bits == 4 or weight.scales.dtype == torch.float32
            assert (weight.zeros is None) == (of_groups is None), "zeros of 8 are left out"
            assert of_groups is None or np.array_equal(weight.zeros, of_groups)
            weight = dequantize(weight)
        assert torch.equal(weight, weights[module]), module
    for size, rank in ((2, 0), (2, 1), (4, 1), (4, 3)):
        ranks = cast(Collectives, SimpleNamespace(rank=rank, size=size, device=torch.device("cpu")))
        for module, projection in matrices(load_part(tmp_path, ranks)).items():
            weight = projection.weight
            weight = dequantize(weight) if module in zeros else weight
            assert torch.equal(weight, part(module, weights[module], rank, size)), f"{module} of rank {rank} of {size}"
