"""Reads the RoPE settings of a ``config.json`` into :class:`RopeConfig`. Introduced in phase 1a.

The hub's files have ``rope_theta`` and ``rope_scaling`` at the top level; those of transformers 5 have
``rope_parameters``, for Gemma 3 one per kind of layer. A user may have added settings of one dialect to a file in the
other. Invariant: each setting has one value, whichever dialects spell it; two values are an error that names both.
"""

import math
from typing import Any

from shared.errors import ModelFolderError
from shared.loading.fields import Fields
from shared.models.config import RopeConfig

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
AT_THE_TOP = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
MOST_POSITIONS = 1 << 22


def read_ropes(fields: Fields, family: str) -> tuple[RopeConfig, RopeConfig | None]:
    """The RoPE of full-attention layers, and that of sliding-window layers if the family has one (Gemma 3)."""
    top = {name: fields.values.get(name) for name in AT_THE_TOP}
    parameters, scaling = _by_layers(fields, "rope_parameters"), _by_layers(fields, "rope_scaling")
    full = {"": top, "rope_parameters.": parameters[0], "rope_scaling.": scaling[0]}
    local = {"rope_parameters.sliding_attention.": parameters[1], "rope_scaling.sliding_attention.": scaling[1]}
    if family != "gemma3_text":  # one RoPE for all layers, so nested settings must agree
        return _rope(fields, full | local, "rope_theta"), None
    local[""] = {name: fields.values.get(name) for name in ("rope_local_base_freq", "partial_rotary_factor")}
    return _rope(fields, full, "rope_theta"), _rope(fields, local, "rope_local_base_freq")


def _by_layers(fields: Fields, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of full-attention layers and of sliding-window layers; settings that are not nested apply to full
    attention."""
    settings = fields.json_object(name)
    if "full_attention" not in settings and "sliding_attention" not in settings:
        return settings, {}
    if others := settings.keys() - {"full_attention", "sliding_attention"}:
        raise fields.wrong(name, f"nested by kind of layer as a whole; {', '.join(sorted(others))} stands outside")
    nested = Fields(settings, {}, f"{fields.where}, {name}")
    return nested.json_object("full_attention"), nested.json_object("sliding_attention")


def _rope(fields: Fields, sources: dict[str, dict[str, Any]], theta: str) -> RopeConfig:
    """The RoPE whose settings are in ``sources``, by prefix; ``theta`` is the hub's name for its base."""
    names, spelled = {"type": "rope_type", "rope_theta": theta}, dict[str, dict[str, Any]]()
    for prefix, source in sources.items():
        for name, value in source.items():
            spelled.setdefault(names.get(name, name), {})[prefix + name] = value
    settings = {name: fields.agreed(values) for name, values in spelled.items()}
    rope = Fields(settings, YARN_DEFAULTS | {theta: fields.defaults[theta]}, f"{fields.where}, RoPE")
    kind = rope.get("rope_type") or "default"
    if kind not in ROPE_KINDS:
        raise ModelFolderError(f"{rope.where}: type {kind!r} is not supported; supported are {', '.join(ROPE_KINDS)}.")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise rope.wrong("partial_rotary_factor", "1: other values are not supported")
    base = rope.number(theta)
    if kind == "default":
        if rope.get("factor", 1) != 1:
            raise rope.wrong("factor", f"absent without a rope_type, which is one of {', '.join(ROPE_KINDS)}")
        return RopeConfig(base)
    if kind == "linear":
        return RopeConfig(base, kind, rope.number("factor"))
    if kind == "yarn" and base <= 1:
        raise rope.wrong(theta, "above 1 for a rope_type of 'yarn'")
    positions = fields.count("max_position_embeddings")
    return _yarn(rope, base, positions) if kind == "yarn" else _llama3(rope, base, positions)


def _llama3(rope: Fields, theta: float, max_positions: int) -> RopeConfig:
    factor, low, high = (rope.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise rope.wrong("low_freq_factor", f"below high_freq_factor ({high:g})")
    original = rope.count("original_max_position_embeddings", max_positions)
    return RopeConfig(theta, "llama3", factor, low, high, original)


def _yarn(rope: Fields, theta: float, max_positions: int) -> RopeConfig:
    """As transformers reads it: a factor of null is ``max_positions`` over the original positions."""
    original = rope.count("original_max_position_embeddings", max_positions)
    has_null_factor = "factor" in rope.values and rope.get("original_max_position_embeddings") is not None
    factor = rope.number("factor", max_positions / original if has_null_factor else None)
    if factor * original > MOST_POSITIONS:
        raise rope.wrong("factor", f"at most {MOST_POSITIONS / original:g}, for {MOST_POSITIONS} positions in all")
    fast, slow = rope.number("beta_fast"), rope.number("beta_slow")
    if fast < slow:
        raise rope.wrong("beta_fast", f"at least beta_slow ({slow:g})")
    attention = rope.optional_number("attention_factor")
    if attention is None:
        mscale, of_all = (rope.number(name, 0.0, can_be_zero=True) for name in ("mscale", "mscale_all_dim"))
        attention = _mscale(factor, mscale) / _mscale(factor, of_all) if mscale and of_all else _mscale(factor, 1.0)
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original_max_position=original,
        attention_factor=attention,
        beta_fast=fast,
        beta_slow=slow,
        truncate=rope.flag("truncate"),
    )


def _mscale(factor: float, mscale: float) -> float:
    """How YaRN scales queries and keys with the factor (arXiv 2309.00071, equation 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
