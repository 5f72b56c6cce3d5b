"""Reads a checkpoint's ``config.json`` into a :class:`ModelConfig`. Introduced in phase 1a.

The file comes in two dialects, the hub's and that of transformers 5. Invariant: an absent field takes the family's
published default, or is an error that names the field. An unimplemented setting that changes the mathematics is an
error, and so are two spellings of one setting that disagree.
"""

import json
from pathlib import Path
from typing import Any

from shared.errors import ModelFolderError
from shared.loading.fields import Fields
from shared.loading.rope_settings import read_ropes
from shared.models.config import ModelConfig
from shared.models.families import FAMILIES
from shared.ops.gated import GATED_ACTIVATIONS

DTYPES = ("float32", "bfloat16", "float16")
WINDOW_RULES = {"gemma3_text": ("sliding_window_pattern",), "qwen3": ("use_sliding_window", "max_window_layers")}


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
    """Like :func:`read_config`, but from parsed JSON; ``where`` names it in messages."""
    if not isinstance(values, dict):
        raise ModelFolderError(f"{where} must hold a JSON object, not {type(values).__name__}.")
    family = values.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ModelFolderError(
            f"{where}: model_type {family!r} is not supported; supported are {', '.join(FAMILIES)} "
            "(Llama 3 and its kin, Qwen 3, Gemma 3 text)."
        )
    fields = Fields(values, FAMILIES[family].config_defaults, where)
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
    rope, local_rope = read_ropes(fields, family)
    max_positions = fields.count("max_position_embeddings")
    if rope.kind == "yarn":  # the number of positions that its scaling is for, even if the file is otherwise unchanged
        max_positions = max(max_positions, int(rope.factor * rope.original_max_position))
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
        max_position_embeddings=max_positions,
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
        own={name: fields.required(name) for name in FAMILIES[family].own_fields},
    )


def _refuse_unimplemented(fields: Fields, can_quantize: bool) -> None:
    if fields.get("use_bidirectional_attention"):
        raise fields.wrong("use_bidirectional_attention", "false: only causal decoders are supported")
    for name, value in fields.json_object("text_config").items():
        if value is not None and value != fields.values.get(name):
            raise ModelFolderError(
                f"{fields.where}: text_config.{name} is {value!r} and {name} is {fields.values.get(name)!r}; the model "
                "is read from the fields outside text_config, so leave text_config out or let both agree."
            )
    if fields.get("quantization_config") is not None and not can_quantize:
        raise ModelFolderError(
            f"{fields.where}: the checkpoint is already quantized (quantization_config), which arrives in phase 10; "
            "give the original bf16 one."
        )


def _dtype(fields: Fields) -> str:
    spelled = {name: fields.values.get(name) for name in ("dtype", "torch_dtype")}
    names = {field: str(value).removeprefix("torch.") for field, value in spelled.items() if value}
    name = fields.agreed(names) or "float32"
    if name not in DTYPES:
        raise ModelFolderError(f"{fields.where}: dtype {name!r} is not supported; supported are {', '.join(DTYPES)}.")
    return name


def _windows(fields: Fields, family: str, num_layers: int) -> tuple[int | None, ...]:
    """Each layer's sliding window; None: full attention."""
    layer_types, by_rule = fields.get("layer_types"), _sliding_by_rule(fields, family, num_layers)
    if layer_types is None:
        sliding = by_rule or [False] * num_layers
    else:
        known = ("full_attention", "sliding_attention")
        if not isinstance(layer_types, list) or any(kind not in known for kind in layer_types):
            raise fields.wrong("layer_types", "a list of full_attention and sliding_attention")
        if len(layer_types) != num_layers:
            raise ModelFolderError(
                f"{fields.where}: layer_types has {len(layer_types)} entries for {num_layers} layers; one each."
            )
        sliding = [kind == "sliding_attention" for kind in layer_types]
        if by_rule is not None and sliding != by_rule:
            rule = {name: fields.values[name] for name in WINDOW_RULES[family] if name in fields.values}
            raise fields.wrong("layer_types", f"what {rule} says; leave out the one that is wrong")
    window = fields.count("sliding_window") if any(sliding) else None
    return tuple(window if is_sliding else None for is_sliding in sliding)


def _sliding_by_rule(fields: Fields, family: str, num_layers: int) -> list[bool] | None:
    """Which layers have a sliding window, by the family's rule in the hub's spelling of ``layer_types``; None: no
    rule."""
    is_listed = fields.get("layer_types") is not None
    if family == "gemma3_text" and (not is_listed or fields.values.get("sliding_window_pattern") is not None):
        pattern = fields.count("sliding_window_pattern")
        return [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    if family != "qwen3" or fields.values.get("use_sliding_window") is None:
        return None
    first = fields.get("max_window_layers", 28) if fields.flag("use_sliding_window") else num_layers
    if isinstance(first, bool) or not isinstance(first, int):
        raise fields.wrong("max_window_layers", "an integer")
    if is_listed and first == 28 != num_layers:  # its default; transformers writes it alongside any list
        return None
    return [layer >= first for layer in range(num_layers)]
