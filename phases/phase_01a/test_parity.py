"""One layer of each family against transformers, at true sizes, and proof that the thresholds catch real mistakes.

The weights are random but chosen so that mistakes show. Norm weights differ from one. A third of the tokens are so
small that epsilon is a large part of their mean square, and so are half of the query and KV heads if these are normed.
Attention's output is small, so that for small tokens it dominates the MLP's input.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from phases.phase_01a import engine as engine_module
from phases.phase_01a.engine import Engine
from shared.checkpoints.make import checkpoint_tensors
from shared.checkpoints.shapes import SHAPES
from shared.errors import ConfigError
from shared.loading.config_json import read_config
from shared.models import attention, gemma3
from shared.models.attention import NormAndRotate
from shared.models.config import ModelConfig, RopeConfig
from shared.ops.attention import ATTENTION_BACKENDS, naive_attention
from shared.ops.gated import GATED_ACTIVATIONS
from shared.ops.rmsnorm import rms_norm
from shared.ops.rope import rotate
from shared.parity.reference import ReferenceLayer, load_reference
from shared.parity.thresholds import PEER_FACTOR, THRESHOLDS, Threshold, allowed_error, distance
from shared.text.tokenizer import Tokenizer
from tests.comparison import assert_rows_close

WINDOW = 16  # instead of Gemma's 512: the same crossing with a thirtieth of the tokens
QUIET = 0.003  # mean square 9e-6, on the order of an epsilon
BACKENDS = ("naive", "sdpa")
SMOLLM2 = {  # the demo model's layers: small, and RoPE not scaled
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rope_scaling": None,
    "rope_theta": 100_000.0,
    # A frequency that is computed in another way may differ by an ulp. That is an angle of 0.008 at position 131,071,
    # and even at 4,096 it is too much for a small token.
    "max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}  # Qwen 3's, for 131,072
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama": ("llama-3.2-1b", 0, {}),
    "smollm2": ("llama-3.2-1b", 0, SMOLLM2),
    "qwen3": ("qwen3-1.7b", 0, {}),
    "qwen3-yarn": ("qwen3-1.7b", 0, {"rope_scaling": YARN}),
    "gemma3-sliding": ("gemma-3-1b", 0, {"sliding_window": WINDOW}),
    "gemma3-full": ("gemma-3-1b", 5, {"sliding_window": WINDOW}),
}


@dataclass(frozen=True, eq=False)
class Case:
    """One layer of a checkpoint, and its input. References are computed once."""

    folder: Path
    layer: int
    x: torch.Tensor  # fp32 [T, H]
    positions: torch.Tensor  # int64 [T]

    def ours(self, dtype: torch.dtype, backend: str = "naive") -> torch.Tensor:
        engine = Engine(str(self.folder), self.layer, dtype=dtype, attention_backend=backend)
        return engine.forward(self.x, self.positions)

    @cache  # noqa: B019
    def reference(
        self, dtype: torch.dtype, backend: str = "naive", round_to: torch.dtype | None = None
    ) -> torch.Tensor:
        x = self.x.to(round_to or dtype).to(dtype)
        return ReferenceLayer(self.folder, self.layer, dtype, backend, round_to)(x, self.positions)

    def truth(self, dtype: torch.dtype) -> torch.Tensor:
        """The result of ``dtype`` with exact arithmetic: fp32 on weights and inputs rounded to it."""
        return self.reference(torch.float32, round_to=dtype)


MakeCase = Callable[[str], Case]


def layer_tensors(config: dict[str, Any], layer: int) -> dict[str, torch.Tensor]:
    """Random weights of one layer, as described in the module's docstring."""
    generator = torch.Generator().manual_seed(layer)
    is_gemma = config["model_type"] == "gemma3_text"
    has_qk_norm = config["model_type"] != "llama"
    tensors = {}
    for name, shape in checkpoint_tensors(config):
        if not name.startswith(f"model.layers.{layer}."):
            continue
        values = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            values.mul_(0.2).add_(0.0 if is_gemma else 1.0)
        else:
            values.mul_(shape[1] ** -0.5)
        if name.endswith("o_proj.weight") or (is_gemma and name.endswith("down_proj.weight")):
            values.mul_(0.01)
        if has_qk_norm and name.endswith(("q_proj.weight", "k_proj.weight")):
            values.unflatten(0, (-1, config["head_dim"]))[::2].mul_(QUIET)
        tensors[name] = values
    return tensors


def random_input(hidden_size: int, num_tokens: int) -> torch.Tensor:
    """Tokens of three magnitudes, alternating."""
    x = torch.randn(num_tokens, hidden_size, generator=torch.Generator().manual_seed(0))
    return x * torch.tensor([1.0, 0.1, QUIET])[torch.arange(num_tokens) % 3, None]


def spread_positions(num_tokens: int, limit: int) -> torch.Tensor:
    """Three stretches: from 0; across 8192 (the original length of Llama 3's RoPE) or half the limit; and up to the
    limit."""
    part = num_tokens // 3
    starts = (0, min(8192, limit // 2) - part // 2, limit - (num_tokens - 2 * part))
    lengths = (part, part, num_tokens - 2 * part)
    return torch.cat([torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)])


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeCase]:
    """Layers of true size by name, each made once; the folders, hundreds of megabytes each, are removed at the end."""
    made: dict[str, Case] = {}

    def make(name: str) -> Case:
        if name not in made:
            shape, layer, changes = CASES[name]
            config = SHAPES[shape] | changes
            folder = tmp_path_factory.mktemp(name)
            (folder / "config.json").write_text(json.dumps(config))
            save_file(layer_tensors(config, layer), folder / "model.safetensors")
            num_tokens = 2 * WINDOW + 7 if "sliding_window" in changes else 18
            positions = spread_positions(num_tokens, read_config(folder).max_position_embeddings)
            made[name] = Case(folder, layer, random_input(config["hidden_size"], num_tokens), positions)
        return made[name]

    yield make
    for case in made.values():
        shutil.rmtree(case.folder)


@pytest.mark.from_empty("smollm2-naive")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_fp32(cases: MakeCase, name: str, backend: str) -> None:
    case = cases(name)
    assert_rows_close(
        case.ours(torch.float32, backend),
        case.reference(torch.float32, backend),
        THRESHOLDS[torch.float32].layer,
        "hidden states after the layer",
        ("token", "dim"),
    )


@pytest.mark.parametrize("name", CASES)
def test_bf16(cases: MakeCase, name: str) -> None:
    case = cases(name)
    truth, bound = case.truth(torch.bfloat16), THRESHOLDS[torch.bfloat16].layer
    for backend in BACKENDS:
        peer = distance(case.reference(torch.bfloat16, backend), truth).relative
        assert distance(case.ours(torch.bfloat16, backend), truth).relative <= allowed_error(bound, peer), backend


# Mutations: mistakes that ports of these models have made or could make.

Mutation = Callable[[pytest.MonkeyPatch], None]


def with_config(change: Callable[[ModelConfig], dict[str, Any]]) -> Mutation:
    """The configuration, read differently."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        read = engine_module.read_config
        patch.setattr(engine_module, "read_config", lambda folder: dataclasses.replace(c := read(folder), **change(c)))

    return mutate


def with_norm_epsilon(module: str, factor: float = 10.0) -> Mutation:
    """One norm of the block with a different epsilon."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        fill = engine_module.fill

        def fill_and_change(block: torch.nn.Module, *args: Any) -> None:
            fill(block, *args)
            block.get_submodule(module).eps *= factor  # type: ignore[assignment, operator]

        patch.setattr(engine_module, "fill", fill_and_change)

    return mutate


def shifted_window(shift: int) -> Mutation:
    return with_config(lambda c: {"windows": tuple(w and w + shift for w in c.windows)})


def rotation_sign(patch: pytest.MonkeyPatch) -> None:
    """The minus sign on the other half: a backwards rotation."""

    def backwards(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return rotate(x.roll(half, -1), rows).roll(half, -1)

    patch.setattr(attention, "rotate", backwards)


def interleaved_pairs(patch: pytest.MonkeyPatch) -> None:
    """Dimension 2i rotated with 2i + 1, as in the original Llama code, on weights in the half-split layout."""

    def interleaved(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        halves = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return rotate(halves, rows).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)

    patch.setattr(attention, "rotate", interleaved)


def norm_after_rotation(patch: pytest.MonkeyPatch) -> None:
    def forward(
        self: NormAndRotate, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.q_norm is not None
        assert self.k_norm is not None
        rows = self.table[positions]
        return self.q_norm(rotate(q, rows)), self.k_norm(rotate(k, rows))

    patch.setattr(NormAndRotate, "forward", forward)


def norm_without_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("shared.models.norm.rms_norm", lambda x, weight, eps, offset: rms_norm(x, weight, eps))


def interleaved_groups(patch: pytest.MonkeyPatch) -> None:
    """Query head h reads KV head h mod Hkv instead of h // G."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        num_kv_heads = k.numel() // (q.shape[0] * q.shape[2])  # as many keys as queries: nothing is cached
        q = q.unflatten(1, (-1, num_kv_heads)).transpose(1, 2).flatten(1, 2)
        out = naive_attention(q, k, v, **options)
        return out.unflatten(1, (num_kv_heads, -1)).transpose(1, 2).flatten(1, 2)

    patch.setitem(ATTENTION_BACKENDS, "naive", attend)


def exact_gelu(patch: pytest.MonkeyPatch) -> None:
    """GELU by the error function instead of its tanh approximation."""
    patch.setitem(GATED_ACTIVATIONS, "gelu_pytorch_tanh", lambda gate, up: F.gelu(gate) * up)


def swapped_norm_names(patch: pytest.MonkeyPatch) -> None:
    """``post_attention_layernorm`` mistaken for the norm before the MLP, as in Llama."""
    names = gemma3.LAYER_NAMES
    patch.setitem(names, "post_attention_norm", "pre_feedforward_layernorm")
    patch.setitem(names, "mlp_norm", "post_attention_layernorm")


silu_for_gelu = with_config(lambda c: {"hidden_act": "silu"})
gelu_for_silu = with_config(lambda c: {"hidden_act": "gelu_pytorch_tanh"})
no_llama3_scaling = with_config(lambda c: {"rope": RopeConfig(c.rope.theta)})
all_frequencies_scaled = with_config(lambda c: {"rope": RopeConfig(c.rope.theta, "linear", c.rope.factor)})
other_original_length = with_config(lambda c: {"rope": dataclasses.replace(c.rope, original_max_position=4096)})
rope_base_of_full_layers = with_config(lambda c: {"local_rope": None})
rope_base_of_sliding_layers = with_config(lambda c: {"rope": c.local_rope})
scale_of_hidden_size = with_config(lambda c: {"attention_scale": (c.hidden_size / c.num_heads * 1.02) ** -0.5})
no_scale = with_config(lambda c: {"attention_scale": 1.0})

MUTATIONS: dict[str, dict[str, Mutation]] = {
    "llama": {
        "epsilon of attention_norm": with_norm_epsilon("attention_norm"),
        "epsilon of mlp_norm": with_norm_epsilon("mlp_norm"),
        "epsilon 1e-6 for 1e-5": with_config(lambda c: {"rms_norm_eps": 1e-6}),
        "rotation sign": rotation_sign,
        "interleaved pairs": interleaved_pairs,
        "interleaved groups": interleaved_groups,
        "no llama3 scaling": no_llama3_scaling,
        "all frequencies scaled": all_frequencies_scaled,
        "other original length": other_original_length,
        "gelu for silu": gelu_for_silu,
        "scale off by 1 %": scale_of_hidden_size,
        "no scale": no_scale,
    },
    "qwen3": {
        "epsilon 1e-5 for 1e-6": with_config(lambda c: {"rms_norm_eps": 1e-5}),
        "epsilon of q_norm": with_norm_epsilon("attention.qk.q_norm"),
        "epsilon of k_norm": with_norm_epsilon("attention.qk.k_norm"),
        "norm after rotation": norm_after_rotation,
    },
    "gemma3-sliding": {
        "epsilon 1e-5 for 1e-6": with_config(lambda c: {"rms_norm_eps": 1e-5}),
        "epsilon of post_attention_norm": with_norm_epsilon("post_attention_norm"),
        "epsilon of post_mlp_norm": with_norm_epsilon("post_mlp_norm"),
        "norm without 1 +": norm_without_one,
        "window one wider": shifted_window(+1),
        "window one narrower": shifted_window(-1),
        "RoPE base of full layers": rope_base_of_full_layers,
        "silu for gelu": silu_for_gelu,
        "exact gelu for tanh": exact_gelu,
        "swapped norm names": swapped_norm_names,
        "scale of hidden size": scale_of_hidden_size,
    },
    "gemma3-full": {
        "RoPE base of sliding layers": rope_base_of_sliding_layers,
        "window on a full layer": with_config(lambda c: {"windows": (WINDOW,) * c.num_layers, "local_rope": c.rope}),
        "no scale": no_scale,
    },
}
FP32_FAILURES = [(name, mutation) for name, mutations in MUTATIONS.items() for mutation in mutations]
# bf16 detects only errors larger than its own rounding: not a scale that is off by 1 %, nor the other GELU.
BF16_FAILURES = [
    ("qwen3", "epsilon 1e-5 for 1e-6"),
    ("qwen3", "norm after rotation"),
    ("gemma3-sliding", "epsilon 1e-5 for 1e-6"),
    ("gemma3-sliding", "window one wider"),
]


@pytest.mark.parametrize(("name", "mutation"), FP32_FAILURES)
def test_mutation_fails_in_fp32(cases: MakeCase, name: str, mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases(name)
    reference = case.reference(torch.float32)
    MUTATIONS[name][mutation](monkeypatch)
    error = distance(case.ours(torch.float32), reference).relative
    assert not error <= 4 * THRESHOLDS[torch.float32].layer


@pytest.mark.parametrize(("name", "mutation"), BF16_FAILURES)
def test_mutation_fails_in_bf16(cases: MakeCase, name: str, mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases(name)
    truth, bound = case.truth(torch.bfloat16), THRESHOLDS[torch.bfloat16].layer
    peer = distance(case.reference(torch.bfloat16), truth).relative
    MUTATIONS[name][mutation](monkeypatch)
    assert not distance(case.ours(torch.bfloat16), truth).relative <= 2 * allowed_error(bound, peer)


# The demo model's layers, on its real hidden states.

# The first token's activations cancel in layer 9, grow huge in 11, and shrink again in 28.
DEMO_LAYERS = (0, 1, 9, 11, 28, 29)
DEMO_TEXT = "The steam engine was invented long before the railway; def main(): return 1"


@pytest.fixture(scope="module")
def demo_states(demo_folder: Path) -> tuple[torch.Tensor, ...]:
    """transformers' hidden states before each layer, fp32 [T, H]."""
    ids = Tokenizer.load(demo_folder).encode(DEMO_TEXT)
    with torch.inference_mode():
        output = load_reference(demo_folder, torch.float32)(torch.tensor([ids]), output_hidden_states=True)
    return tuple(state[0] for state in output.hidden_states)


@pytest.mark.demo
@pytest.mark.parametrize("layer", DEMO_LAYERS)
def test_demo_layer(demo_folder: Path, demo_states: tuple[torch.Tensor, ...], layer: int) -> None:
    x = demo_states[layer]
    case = Case(demo_folder, layer, x, torch.arange(len(x)))
    for backend in BACKENDS:
        error = distance(case.ours(torch.float32, backend), case.reference(torch.float32, backend))
        assert error.relative <= THRESHOLDS[torch.float32].layer, backend
        truth = case.truth(torch.bfloat16)
        peer = distance(case.reference(torch.bfloat16, backend), truth).relative
        error = distance(case.ours(torch.bfloat16, backend), truth)
        assert error.relative <= allowed_error(THRESHOLDS[torch.bfloat16].layer, peer), backend


def test_layer_outside_the_model(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match="layer is 99"):
        Engine(str(model_folder), 99)


def test_thresholds_in_docs() -> None:
    """The table in docs/PHASE_01A.md is the module's."""
    text = (Path(__file__).parents[2] / "docs" / "PHASE_01A.md").read_text(encoding="utf-8")
    section = text.split("## Thresholds")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in section.splitlines() if "|" in line]
    columns = [field.name for field in dataclasses.fields(Threshold)]
    assert rows[0] == ["dtype", *(f"`{column}`" for column in columns)]
    expected = {
        str(dtype).removeprefix("torch."): [f"{getattr(threshold, column):.2g}" for column in columns]
        for dtype, threshold in THRESHOLDS.items()
    }
    assert {name: cells for name, *cells in rows[2:]} == expected
    assert f"{PEER_FACTOR:g} times" in section
