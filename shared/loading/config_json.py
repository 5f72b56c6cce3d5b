"""Reads a checkpoint's ``config.json`` into a :class:`ModelConfig`. Introduced in phase 1a.

The file comes in two dialects: the hub's (``rope_theta`` and ``rope_scaling`` at the top) and that of transformers 5
(``rope_parameters``, for Gemma 3 one per kind of layer). Invariant: an absent field takes the family's published
default or is an error that names the field; an unimplemented setting that changes the mathematics is an error.
"""

import json
import sys
from pathlib import Path
from typing import Any

from shared.errors import ModelFolderError
from shared.models.config import ModelConfig, RopeConfig
from shared.models.families import FAMILIES
from shared.ops.gated import GATED_ACTIVATIONS

ROPE_KINDS = ("default", "linear", "llama3")
DTYPES = ("float32", "bfloat16", "float16")

# transformers' defaults for a family's absent fields.
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_act": "silu", "rope_theta": 10_000.0, "tie_word_embeddings": False},
    "qwen3": {"hidden_act": "silu", "rope_theta": 10_000.0, "tie_word_embeddings": False, "head_dim": 128},
    "gemma3_text": {
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "tie_word_embeddings": True,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
}


class Fields:
    """The values of one JSON object, fetched by name and checked; errors name the file, the field and the value."""

    def __init__(self, values: dict[str, Any], defaults: dict[str, Any], where: str) -> None:
        self.values = values
        self.defaults = defaults
        self.where = where

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return self.defaults.get(name, default) if value is None else value

    def wrong(self, name: str, wanted: str) -> ModelFolderError:
        return ModelFolderError(f"{self.where}: {name} is {self.values.get(name)!r}; it must be {wanted}.")

    def required(self, name: str, default: Any = None) -> Any:
        value = self.get(name, default)
        if value is None:
            raise ModelFolderError(
                f"{self.where} has no field {name!r}, which this family needs; fetch the original config.json again."
            )
        return value

    def count(self, name: str, default: int | None = None, at_most: int = 1 << 22) -> int:
        value = self.required(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= at_most:
            raise self.wrong(name, f"an integer from 1 to {at_most}")
        return value

    def number(self, name: str, default: float | None = None, can_be_zero: bool = False) -> float:
        value = self.required(name, default)
        # Compared, not converted: an integer may be too large for a float.
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise self.wrong(name, "a finite number")
        if value < 0 or (value == 0 and not can_be_zero):
            raise self.wrong(name, "at least 0" if can_be_zero else "greater than 0")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return None if self.get(name) is None else self.number(name)

    def flag(self, name: str) -> bool:
        value = self.get(name, False)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def choice(self, name: str, allowed: tuple[str, ...], default: str | None = None) -> str:
        value = self.required(name, default)
        if value not in allowed:
            raise self.wrong(name, "one of " + ", ".join(allowed))
        return value


def read_config(folder: Path, can_quantize: bool = False) -> ModelConfig:
    """The model's shape from ``folder/config.json``; raises ModelFolderError on anything missing or unsupported.

    ``can_quantize``: whether the config of a quantized checkpoint is accepted.
    """
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFolderError(
            f"{folder} has no config.json, so it is not a model folder; give the folder that holds config.json, "
            "*.safetensors and tokenizer.json."
        ) from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, a number too long
        raise ModelFolderError(f"{path} cannot be read as JSON ({error}); fetch it again.") from None
    return parse_config(values, str(path), can_quantize)


def parse_config(values: Any, where: str = "config.json", can_quantize: bool = False) -> ModelConfig:
    """As :func:`read_config`, from the parsed JSON; ``where`` names it in messages."""
    if not isinstance(values, dict):
        raise ModelFolderError(f"{where} must hold a JSON object, not {type(values).__name__}.")
    family = values.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ModelFolderError(
            f"{where}: model_type {family!r} is not supported; supported are {', '.join(FAMILIES)} "
            "(Llama 3 and its kin, Qwen 3, Gemma 3 text)."
        )
    fields = Fields(values, FAMILY_DEFAULTS[family], where)
    _refuse_unimplemented(fields, can_quantize)

    num_heads = fields.count("num_attention_heads")
    hidden_size = fields.count("hidden_size")
    num_kv_heads = fields.count("num_key_value_heads", num_heads if family == "llama" else None)
    head_dim = fields.count("head_dim", hidden_size // num_heads or None)
    if num_heads % num_kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    if head_dim % 2:
        raise ModelFolderError(f"{where}: the head size is {head_dim}; RoPE rotates pairs, so it must be even.")
    activation = "hidden_activation" if family == "gemma3_text" else "hidden_act"
    windows = _windows(fields, family, fields.count("num_hidden_layers", at_most=1024))
    rope, local_rope = _ropes(fields, family)
    scalar = fields.number("query_pre_attn_scalar") if family == "gemma3_text" else float(head_dim)
    return ModelConfig(
        family=family,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=len(windows),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=fields.count("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", can_be_zero=True),
        hidden_act=fields.choice(activation, tuple(GATED_ACTIVATIONS)),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        attention_scale=scalar**-0.5,
        rope=rope,
        windows=windows,
        local_rope=local_rope,
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=family == "llama" and fields.flag("mlp_bias"),
        attention_softcap=fields.optional_number("attn_logit_softcapping"),
        logit_softcap=fields.optional_number("final_logit_softcapping"),
        dtype=_dtype(fields),
    )


def _refuse_unimplemented(fields: Fields, can_quantize: bool) -> None:
    if fields.get("use_bidirectional_attention"):
        raise fields.wrong("use_bidirectional_attention", "false: only causal decoders are supported")
    if fields.get("quantization_config") is not None and not can_quantize:
        raise ModelFolderError(
            f"{fields.where}: the checkpoint is already quantized (quantization_config), which arrives in phase 10; "
            "give the original bf16 one."
        )


def _dtype(fields: Fields) -> str:
    name = str(fields.get("dtype") or fields.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise ModelFolderError(f"{fields.where}: dtype {name!r} is not supported; supported are {', '.join(DTYPES)}.")
    return name


def _windows(fields: Fields, family: str, num_layers: int) -> tuple[int | None, ...]:
    """Each layer's sliding window; None: full attention."""
    layer_types = fields.get("layer_types")
    if layer_types is None:
        if family == "gemma3_text":
            pattern = fields.count("sliding_window_pattern")
            sliding = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
        elif family == "qwen3" and fields.flag("use_sliding_window"):
            first = fields.get("max_window_layers", 28)
            if isinstance(first, bool) or not isinstance(first, int):
                raise fields.wrong("max_window_layers", "an integer")
            sliding = [layer >= first for layer in range(num_layers)]
        else:
            sliding = [False] * num_layers
    else:
        known = ("full_attention", "sliding_attention")
        if not isinstance(layer_types, list) or any(kind not in known for kind in layer_types):
            raise fields.wrong("layer_types", "a list of " + " and ".join(known))
        if len(layer_types) != num_layers:
            raise ModelFolderError(
                f"{fields.where}: layer_types has {len(layer_types)} entries for {num_layers} layers; one each."
            )
        sliding = [kind == "sliding_attention" for kind in layer_types]
    window = fields.count("sliding_window") if any(sliding) else None
    return tuple(window if is_sliding else None for is_sliding in sliding)


def _ropes(fields: Fields, family: str) -> tuple[RopeConfig, RopeConfig | None]:
    """The RoPE of full-attention layers, and that of sliding-window layers if the family has one (Gemma 3)."""
    parameters = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise fields.wrong("rope_parameters", "an object")
    theta = fields.number("rope_theta")
    if family != "gemma3_text":
        # transformers nests by layer type only where the types differ; take the full layers' entry if it did.
        parameters = parameters.get("full_attention") or parameters
        return _rope(fields, parameters, theta), None
    local_theta = fields.number("rope_local_base_freq")
    nested = "full_attention" in parameters or "sliding_attention" in parameters
    full = (parameters.get("full_attention") or {}) if nested else parameters
    local = (parameters.get("sliding_attention") or {}) if nested else {}
    return _rope(fields, full, theta), _rope(fields, local, local_theta)


def _rope(fields: Fields, parameters: Any, theta: float) -> RopeConfig:
    if not isinstance(parameters, dict):
        raise fields.wrong("rope_parameters", "an object")
    where = f"{fields.where}, RoPE"
    rope = Fields(parameters, {}, where)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise ModelFolderError(f"{where}: type {kind!r} is not supported; supported are {', '.join(ROPE_KINDS)}.")
    partial = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ModelFolderError(f"{where}: partial_rotary_factor {partial!r} is not supported; it must be 1.")
    theta = rope.number("rope_theta", theta)
    if kind == "default":
        return RopeConfig(theta)
    factor = rope.number("factor")
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise rope.wrong("low_freq_factor", f"below high_freq_factor ({high:g})")
    original = rope.count("original_max_position_embeddings", fields.get("max_position_embeddings"))
    return RopeConfig(theta, kind, factor, low, high, original)
