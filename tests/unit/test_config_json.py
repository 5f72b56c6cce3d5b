"""``config.json``: both dialects say the same, and whatever is wrong is said in words."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from shared.checkpoints.shapes import SHAPES
from shared.errors import ModelFolderError
from shared.loading.config_json import parse_config, read_config
from shared.models.config import ModelConfig, RopeConfig

LLAMA, QWEN3, GEMMA3 = (SHAPES[f"tiny-{family}"] for family in ("llama", "qwen3", "gemma3"))
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
LINEAR = {"rope_type": "linear", "factor": 8.0}
REQUIRED = {
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "vocab_size",
}
HUB_CONFIGS = (
    SHAPES
    | {
        "linear": LLAMA | {"rope_scaling": LINEAR},
        "old spelling of the type": LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}},
        "rope_type default": LLAMA | {"rope_scaling": {"rope_type": "default"}},
        "gemma linear": GEMMA3 | {"rope_scaling": LINEAR},
        "gemma softcaps": GEMMA3 | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        "gemma without local base": {k: v for k, v in GEMMA3.items() if k != "rope_local_base_freq"},
        "qwen sliding": QWEN3 | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
        "biases": LLAMA | {"attention_bias": True, "mlp_bias": True},
        "yarn": QWEN3 | {"rope_scaling": YARN},
        "gemma yarn": GEMMA3 | {"rope_scaling": YARN | {"mscale": 2.0, "mscale_all_dim": 1.0, "beta_fast": 9}},
    }
    | {
        f"silent {config['model_type']}": {k: config[k] for k in REQUIRED | {"model_type"}}
        for config in (LLAMA, QWEN3, GEMMA3)
    }
)


def write(folder: Path, config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def changed(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A copy with some fields replaced; those set to ``...`` are left out."""
    return {k: v for k, v in (copy.deepcopy(config) | changes).items() if v is not ...}


@pytest.mark.parametrize("name", HUB_CONFIGS)
def test_both_dialects_give_the_same_config(name: str, tmp_path: Path) -> None:
    """transformers reads the hub's file and writes its own; where the file is silent it fills in its defaults."""
    hub = write(tmp_path / "hub", HUB_CONFIGS[name])
    saved = tmp_path / "saved"
    AutoConfig.from_pretrained(hub, local_files_only=True).save_pretrained(saved)
    written = json.loads((saved / "config.json").read_text())
    assert "rope_parameters" in written
    assert "rope_theta" not in written
    assert read_config(saved) == read_config(hub)


def test_a_hub_config_in_full() -> None:
    config = parse_config(SHAPES["llama-3.2-1b"])
    assert config == ModelConfig(
        family="llama",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        hidden_act="silu",
        tie_word_embeddings=True,
        attention_scale=0.125,
        rope=RopeConfig(500_000.0, "llama3", 32.0, 1.0, 4.0, 8192),
        windows=(None,) * 16,
        dtype="bfloat16",
    )


def test_gemma_alternates_windows_and_bases() -> None:
    config = parse_config(SHAPES["gemma-3-1b"])
    assert config.windows == (512, 512, 512, 512, 512, None) * 4 + (512, 512)
    assert [config.layer_rope(layer).theta for layer in (0, 4, 5, 6)] == [1e4, 1e4, 1e6, 1e4]
    assert config.tie_word_embeddings
    assert config.attention_scale == 256**-0.5


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("field", sorted(REQUIRED))
def test_a_missing_field_is_named(family: str, field: str) -> None:
    config = changed(SHAPES[f"tiny-{family}"], **{field: ...})
    if (family, field) == ("llama", "num_key_value_heads"):  # the first Llamas have as many as query heads
        assert parse_config(config).num_kv_heads == config["num_attention_heads"]
        return
    with pytest.raises(ModelFolderError, match=rf"here/config.json has no field '{field}'"):
        parse_config(config, "here/config.json")


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (LLAMA, {"model_type": "mamba"}, r"'mamba' is not supported; supported are llama, qwen3, gemma3_text"),
    (LLAMA, {"model_type": ...}, "None is not supported"),
    (LLAMA, {"model_type": ["llama"]}, "not supported"),
    (LLAMA, {"quantization_config": {"bits": 4}}, "already quantized"),
    (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention is True; it must be false"),
    (LLAMA, {"hidden_size": 0}, "hidden_size is 0; it must be an integer from 1"),
    (LLAMA, {"hidden_size": 96.0}, "hidden_size is 96.0"),
    (LLAMA, {"hidden_size": True}, "hidden_size is True"),
    (LLAMA, {"vocab_size": 1 << 40}, "vocab_size is"),
    (LLAMA, {"num_hidden_layers": 5000}, "num_hidden_layers is 5000; it must be an integer from 1 to 1024"),
    (LLAMA, {"num_key_value_heads": 4}, r"num_key_value_heads is 4; it must be a divisor of num_attention_heads \(6\)"),
    (LLAMA, {"head_dim": 15}, "head size is 15"),
    (LLAMA, {"head_dim": ..., "hidden_size": 4}, "head_dim"),
    (LLAMA, {"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'; it must be a finite number"),
    (LLAMA, {"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05"),
    (LLAMA, {"rms_norm_eps": float("nan")}, "finite"),
    (LLAMA, {"rms_norm_eps": True}, "finite"),
    (LLAMA, {"rms_norm_eps": 10**400}, "finite"),
    (LLAMA, {"hidden_act": "relu"}, "hidden_act is 'relu'; it must be one of silu, gelu_pytorch_tanh"),
    (GEMMA3, {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
    (LLAMA, {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; it must be true or false"),
    (LLAMA, {"attention_bias": 1}, "attention_bias is 1"),
    (LLAMA, {"mlp_bias": 0}, "mlp_bias is 0"),
    (LLAMA, {"torch_dtype": "float64"}, "dtype 'float64' is not supported"),
    (LLAMA, {"rope_theta": 0}, "rope_theta is 0; it must be greater than 0"),
    (LLAMA, {"rope_theta": float("inf")}, "finite"),
    (LLAMA, {"rope_scaling": "llama3"}, "an object"),
    (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported; supported are default"),
    (LLAMA, {"rope_scaling": {"factor": 2.0}}, "factor is 2.0; it must be absent without a rope_type"),
    (QWEN3, {"rope_scaling": {"rope_type": "yarn"}}, "no field 'factor'"),
    (QWEN3, {"rope_scaling": YARN | {"factor": 1e5}}, "factor is 100000.0; it must be at most 8192"),
    (QWEN3, {"rope_scaling": YARN | {"beta_fast": 0.5}}, r"beta_fast is 0.5; it must be at least beta_slow \(1\)"),
    (QWEN3, {"rope_scaling": YARN | {"truncate": 1}}, "truncate is 1; it must be true or false"),
    (QWEN3, {"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta is 1.0; it must be above 1"),
    (GEMMA3, {"rope_parameters": {"full_attention": {}, "factor": 8.0}}, "as a whole; factor stands outside"),
    (LLAMA, {"rope_scaling": {"rope_type": "linear"}}, "no field 'factor'"),
    (LLAMA, {"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor is 0"),
    (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "no field 'low_freq_factor'"),
    (LLAMA, {"rope_scaling": LLAMA["rope_scaling"] | {"low_freq_factor": 4.0}}, r"below high_freq_factor \(4\)"),
    (LLAMA, {"rope_scaling": LLAMA["rope_scaling"] | {"original_max_position_embeddings": 0}}, "original_max_position"),
    (LLAMA, {"rope_scaling": ..., "rope_parameters": {"rope_type": "longrope"}}, "'longrope' is not supported"),
    (LLAMA, {"rope_parameters": {"rope_theta": "x"}}, "rope_theta is 'x'"),
    (LLAMA, {"partial_rotary_factor": 0.5, "rope_scaling": None}, "partial_rotary_factor is 0.5; it must be 1"),
    (GEMMA3, {"rope_parameters": {"full_attention": 3}}, "an object"),
    (GEMMA3, {"rope_local_base_freq": -1}, "rope_local_base_freq is -1"),
    (GEMMA3, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
    (GEMMA3, {"final_logit_softcapping": 0.0}, "final_logit_softcapping is 0.0"),
    (GEMMA3, {"attn_logit_softcapping": -50.0}, "attn_logit_softcapping is -50.0"),
    (GEMMA3, {"sliding_window": 0}, "sliding_window is 0"),
    (GEMMA3, {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
    (GEMMA3, {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 8 layers"),
    (GEMMA3, {"layer_types": ["chunked_attention"] * 8}, "layer_types is .*full_attention and sliding_attention"),
    (GEMMA3, {"layer_types": 5}, "layer_types is 5"),
    (QWEN3, {"use_sliding_window": "no"}, "use_sliding_window is 'no'"),
    (QWEN3, {"use_sliding_window": True, "max_window_layers": 1.5, "sliding_window": 8}, "max_window_layers is 1.5"),
    (QWEN3, {"use_sliding_window": True, "max_window_layers": 0}, "no field 'sliding_window'"),
]


SAVED = {"rope_theta": ..., "rope_scaling": ...}  # transformers 5 writes neither
KINDS = ["full_attention", "sliding_attention"]
SPELLED_TWICE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        QWEN3,
        SAVED | {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "rope_scaling": YARN},
        "rope_parameters.rope_type is 'default' and rope_scaling.rope_type is 'yarn', two spellings of one setting",
    ),
    (LLAMA, {"rope_parameters": {"rope_theta": 5e5}}, "rope_theta is 10000.0 and rope_parameters.rope_theta is 500000"),
    (
        QWEN3,
        {"rope_scaling": YARN | {"rope_type": "default", "type": "yarn"}},
        "_type is 'default' and .*ing.type is 'yarn'",
    ),
    (LLAMA, {"rope_scaling": LINEAR | {"type": "llama3"}}, "rope_scaling.rope_type is 'linear' and .*type is 'llama3'"),
    (LLAMA, {"rope_parameters": {"factor": 2}}, "rope_parameters.factor is 2 and rope_scaling.factor is 4.0"),
    (LLAMA, {"original_max_position_embeddings": 9}, r"embeddings is 9 and rope_scaling\.\w+ is 512"),
    (LLAMA, {"rope_parameters": {k: {"rope_theta": len(k)} for k in KINDS}}, "rope_theta is 10000.0 and rope_.* is 14"),
    (GEMMA3, {"rope_parameters": {KINDS[1]: {"rope_theta": 9.0}}}, "theta is 9.0 and rope_local_base_freq is 10000"),
    (GEMMA3, {"rope_parameters": {KINDS[0]: LINEAR}, "rope_scaling": YARN}, "is 'linear' and rope_scaling.* is 'yarn'"),
    (LLAMA, {"dtype": "bfloat16"}, "dtype is 'bfloat16' and torch_dtype is 'float32'"),
    (GEMMA3, {"layer_types": KINDS * 4}, r"layer_types is .* what \{'sliding_window_pattern': 6\} says"),
    (QWEN3, {"layer_types": KINDS * 2, "sliding_window": 8}, "layer_types is .* what {'use_sliding_window': False"),
    (GEMMA3, {"layer_types": [KINDS[layer % 6 != 0] for layer in range(8)][::-1]}, "layer_types is .* says"),
    (
        LLAMA,
        {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": LLAMA["rope_scaling"] | {"rope_theta": 9.0}},
        "rope_theta is 10000.0 and rope_scaling.rope_theta is 9",
    ),
    (LLAMA, {"text_config": {"hidden_size": 64}}, "text_config.hidden_size is 64 and hidden_size is 96"),
    (LLAMA, {"text_config": {"sliding_window": 64}}, "text_config.sliding_window is 64 and sliding_window is None"),
]


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    WRONG + SPELLED_TWICE,
    ids=[str(changes)[:70] for _, changes, _ in WRONG + SPELLED_TWICE],
)
def test_what_is_wrong_is_said(config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFolderError, match=message) as caught:
        parse_config(changed(config, **changes), "here/config.json")
    assert str(caught.value).startswith("here/config.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "changes", "same"),
    [
        (QWEN3, SAVED | {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": YARN}, {"rope_scaling": YARN}),
        (LLAMA, {"rope_parameters": LLAMA["rope_scaling"] | {"rope_theta": 1e4}}, {}),
        (LLAMA, {"dtype": "torch.float32", "text_config": {"hidden_size": 96, "head_dim": None}}, {}),
        (GEMMA3, {"layer_types": [KINDS[(layer + 1) % 6 != 0] for layer in range(8)]}, {}),
        (
            QWEN3,
            {"layer_types": KINDS * 2, "use_sliding_window": True, "max_window_layers": 28, "sliding_window": 8},
            {"layer_types": KINDS * 2, "use_sliding_window": ..., "sliding_window": 8},
        ),
    ],
    ids=["yarn added to a saved config", "rope_parameters", "dtype and text_config", "gemma", "qwen"],
)
def test_two_spellings_that_agree(config: dict[str, Any], changes: dict[str, Any], same: dict[str, Any]) -> None:
    assert parse_config(changed(config, **changes)) == parse_config(changed(config, **same))


def test_yarn_brings_the_positions_that_it_is_for() -> None:
    """Qwen 3's model card adds the scaling alone; a longer limit of the file stays."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert parse_config(SHAPES["qwen3-8b"] | {"rope_scaling": yarn}).max_position_embeddings == 131_072
    assert parse_config(QWEN3 | {"rope_scaling": YARN | {"factor": 2.0}}).max_position_embeddings == 2048


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"hidden_size": ' + b"9" * 5000 + b"}", b'{"a": 1} trailing'],
    ids=["empty", "cut", "not utf-8", "deep", "a number of 5000 digits", "trailing"],
)
def test_a_file_that_is_not_json(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelFolderError, match=r"config\.json cannot be read as JSON .* fetch it again"):
        read_config(tmp_path)


def test_no_file_and_no_object(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"has no config\.json, so it is not a model folder"):
        read_config(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelFolderError, match="cannot be read"):
        read_config(tmp_path)
    for values in ([], "llama", 3, None, True):
        with pytest.raises(ModelFolderError, match="must hold a JSON object"):
            parse_config(values)


FIELDS = sorted(
    {field for config in SHAPES.values() for field in config}
    | {"rope_parameters", "layer_types", "dtype", "partial_rotary_factor", "quantization_config", "type"}
    | {"use_bidirectional_attention", "low_freq_factor", "factor", "rope_type", "full_attention", "sliding_attention"}
)
NUMBERS = st.one_of(
    st.integers(-2, 3),
    st.integers(),
    st.floats(),
    st.sampled_from([10**400, -(10**400), 1 << 22, 5e-324, 1e308, -1e-301]),
)
WORDS = st.sampled_from(
    ["llama", "qwen3", "gemma3_text", "default", "linear", "llama3", "yarn", "full_attention", "sliding_attention", ""]
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, WORDS, st.text(max_size=4))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4)),
    max_leaves=8,
)


@settings(max_examples=200)
@given(
    name=st.sampled_from(["tiny-llama", "tiny-qwen3", "tiny-gemma3"]),
    changes=st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=4),
    left_out=st.sets(st.sampled_from(FIELDS), max_size=2),
    in_rope=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3),
)
@example(name="tiny-llama", changes={"rms_norm_eps": 10**400}, left_out=set(), in_rope={})
@example(name="tiny-llama", changes={"rope_theta": 10**400}, left_out=set(), in_rope={})
@example(name="tiny-llama", changes={"rms_norm_eps": -1e-301}, left_out=set(), in_rope={})
def test_a_mutated_config_is_read_or_refused(
    name: str, changes: dict[str, Any], left_out: set[str], in_rope: dict[str, Any]
) -> None:
    values = changed(SHAPES[name], **changes)
    if isinstance(values.get("rope_scaling"), dict):
        values["rope_scaling"] = values["rope_scaling"] | in_rope
    values = {key: value for key, value in values.items() if key not in left_out}
    try:
        config = parse_config(values)
    except ModelFolderError:
        return
    assert config.num_heads % config.num_kv_heads == 0
    assert len(config.windows) == config.num_layers
    assert config.rms_norm_eps >= 0
    assert all(window is None or window >= 1 for window in config.windows)
    for rope in (config.rope, config.local_rope or config.rope):
        assert rope.theta > 0
        assert rope.factor > 0
