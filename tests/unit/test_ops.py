"""The mathematics alone, by the definition in fp64 or by hand: norm, rotation, mask, attention."""

import math
from typing import Any

import pytest
import torch

from shared.checkpoints.shapes import SHAPES
from shared.loading.config_json import parse_config
from shared.models.config import RopeConfig
from shared.ops.attention import naive_attention, sdpa_attention, visible
from shared.ops.rmsnorm import rms_norm
from shared.ops.rope import inverse_frequencies, rope_table, rotate
from tests.comparison import assert_close, assert_equal

LLAMA_3_1 = RopeConfig(500_000.0, "llama3", 8.0, 1.0, 4.0, 8192)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_by_its_formula(offset: float) -> None:
    sizes = torch.tensor([3.0, 1.0, 1e-2, 1e-4, 0.0])  # epsilon is most of what a small token's mean square becomes
    x, weight = random(5, 48) * sizes[:, None], random(48, seed=1)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() + offset)
    assert_close(rms_norm(x, weight, 1e-5, offset).double(), expected, "normed", ("token", "dim"), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_rounds_once(offset: float) -> None:
    """Also where the weight has 16 bits and the offset is added to it."""
    x, weight = random(64, 256).bfloat16(), random(256, seed=1).bfloat16()
    exact = rms_norm(x.double(), weight.double(), 1e-6, offset).bfloat16()
    assert_equal(rms_norm(x, weight, 1e-6, offset), exact, "normed, bf16", ("token", "dim"))


def test_rms_norm_of_numbers_whose_squares_half_precision_cannot_hold() -> None:
    x = torch.full((1, 16), 1000.0, dtype=torch.float16)
    assert_equal(
        rms_norm(x, torch.ones(16), 1e-6),
        torch.ones(1, 16, dtype=torch.float16),
        "normed, 16 numbers of 1000 in fp16",
        ("token", "dim"),
    )


def test_what_a_token_sees() -> None:
    cpu = torch.device("cpu")
    assert_equal(
        visible(2, 4, None, cpu).tolist(),
        [[True, True, True, False], [True, True, True, True]],
        "mask of 2 queries and 4 keys",
        ("query", "key"),
    )
    assert_equal(
        visible(1, 3, None, cpu).tolist(), [[True, True, True]], "mask of 1 query and 3 keys", ("query", "key")
    )
    assert_equal(
        visible(3, 3, 2, cpu).tolist(),
        [[True, False, False], [True, True, False], [False, True, True]],
        "mask of 3 queries, window 2",
        ("query", "key"),
    )


def test_a_rotation_is_a_product_of_complex_numbers() -> None:
    D, positions = 16, torch.tensor([0, 1, 7, 4000])
    x = random(4, 3, D)
    turned = rotate(x, rope_table(RopeConfig(10_000.0), D, 4001)[positions])
    frequencies = 10_000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    angles = positions[:, None, None] * frequencies
    numbers = torch.complex(x[..., : D // 2].double(), x[..., D // 2 :].double())
    expected = numbers * torch.polar(torch.ones_like(angles), angles)
    assert_close(
        turned,
        torch.cat((expected.real, expected.imag), -1).float(),
        "rotated, positions 0, 1, 7 and 4000",
        ("token", "head", "dim"),
        rtol=1e-3,
        atol=1e-3,
    )
    assert_equal(turned[0], x[0], "rotated by position 0", ("head", "dim"))


def test_a_score_depends_on_the_distance_alone() -> None:
    table = rope_table(RopeConfig(10_000.0), 32, 200)
    q, k = random(1, 1, 32), random(1, 1, 32, seed=1)
    scores = [(rotate(q, table[[at + 9]]) * rotate(k, table[[at]])).sum() for at in (0, 3, 150)]
    assert_close(scores[0], scores[1], "score at distance 9, from position 3 and from 0", rtol=1e-5, atol=1e-5)
    assert_close(scores[0], scores[2], "score at distance 9, from position 150 and from 0", rtol=1e-4, atol=1e-4)


def test_a_rotation_is_computed_in_fp32_and_rounded_once() -> None:
    table = rope_table(RopeConfig(10_000.0), 32, 200)
    x = random(200, 4, 32).bfloat16()
    assert_equal(rotate(x, table), rotate(x.float(), table).bfloat16(), "rotated, bf16", ("token", "head", "dim"))


def test_llama_3_frequencies_are_those_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(head_dim=128, rope_parameters=scaling, max_position_embeddings=131_072)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    assert_close(inverse_frequencies(LLAMA_3_1, 128), expected, "frequencies", ("pair",), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"factor": 3.7, "beta_fast": 16.0, "beta_slow": 2, "truncate": False},
        {"factor": None, "attention_factor": 1.25},
        {"mscale": 0.707, "mscale_all_dim": 1.0},
        {"mscale": 0.707, "mscale_all_dim": 0},
        {"original_max_position_embeddings": None, "factor": 1.0},
    ],
    ids=str,
)
def test_yarn_is_that_of_transformers(settings: dict[str, Any]) -> None:
    """As Qwen 3's model card sets it, and by its other settings; to the last bit, as positions multiply errors."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768} | settings
    yarn = {name: value for name, value in yarn.items() if value is not None or name == "factor"}
    values = SHAPES["qwen3-1.7b"] | {"rope_scaling": yarn, "max_position_embeddings": 131_072}
    rope = parse_config(values).rope
    expected, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](AutoConfig.for_model(**values), torch.device("cpu"))
    assert_equal(inverse_frequencies(rope, 128), expected, "frequencies", ("pair",))
    assert_equal(rope.attention_factor, attention_factor, "attention factor")
    cos, sin = rope_table(rope, 128, 9)[:, :, 0].unbind(1)
    lengths, expected = (cos.square() + sin.square()).sqrt(), torch.full_like(cos, attention_factor)
    assert_close(lengths, expected, "length of a turn", ("position", "dim"), rtol=1e-6)


def test_llama_3_keeps_short_waves_and_stretches_long_ones() -> None:
    plain, scaled = inverse_frequencies(RopeConfig(500_000.0), 128), inverse_frequencies(LLAMA_3_1, 128)
    wavelengths = 2 * math.pi / plain
    assert_equal(scaled[wavelengths < 2048], plain[wavelengths < 2048], "frequencies of short waves", ("pair",))
    assert_equal(scaled[wavelengths > 8192], plain[wavelengths > 8192] / 8, "frequencies of long waves", ("pair",))
    between = (wavelengths > 2048) & (wavelengths < 8192)
    assert between.any(), "no wave between, so this test would prove nothing"
    assert ((scaled < plain) & (scaled > plain / 8))[between].all(), (
        "a wave between 2,048 and 8,192 positions is not between its own frequency and an eighth"
    )


@pytest.mark.parametrize("window", [None, 3, 5, 6])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(("num_new", "num_keys"), [(1, 1), (1, 7), (4, 7), (6, 6)])
def test_attention_one_score_after_the_other(
    num_new: int, num_keys: int, window: int | None, softcap: float | None
) -> None:
    Hq, Hkv, D = 6, 2, 8
    q, k, v = random(num_new, Hq, D), random(Hkv, num_keys, D, seed=1), random(Hkv, num_keys, D, seed=2)
    expected = torch.zeros(num_new, Hq, D, dtype=torch.float64)
    for i in range(num_new):
        last = num_keys - num_new + i
        first = 0 if window is None else max(0, last + 1 - window)
        for head in range(Hq):
            keys, values = k[head // (Hq // Hkv)].double(), v[head // (Hq // Hkv)].double()
            scores = [0.3 * (q[i, head].double() @ keys[j]) for j in range(first, last + 1)]
            if softcap is not None:
                scores = [softcap * torch.tanh(score / softcap) for score in scores]
            weights = torch.stack(scores).softmax(0)
            expected[i, head] = sum(w * values[j] for w, j in zip(weights, range(first, last + 1), strict=True))
    for attention in (naive_attention, sdpa_attention):
        out = attention(q, k, v, scale=0.3, window=window, softcap=softcap)
        assert_close(out.double(), expected, "attention", ("token", "query head", "dim"), rtol=1e-5, atol=1e-5)


def test_attention_has_the_dtype_of_its_queries() -> None:
    q, k, v = random(3, 6, 8), random(2, 5, 8, seed=1), random(2, 5, 8, seed=2)
    exact = naive_attention(q.bfloat16().float(), k.bfloat16().float(), v.bfloat16().float(), scale=0.3)
    out = naive_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), scale=0.3)
    # Scores, weights and the output are each rounded to 8 bits.
    assert_close(out, exact.bfloat16(), "attention, bf16", ("token", "query head", "dim"), rtol=0.02, atol=0.02)
