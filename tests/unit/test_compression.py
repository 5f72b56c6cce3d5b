"""Compressors against naive fp64 formulas; top-n* against bisection; packed masks against numpy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.compression.calibration import pack, temperature, top_n, top_p_count, unpack
from shared.compression.compressors import SnapKV, VanillaTopP, window_attention


def naive_attention(q: torch.Tensor, k: torch.Tensor, head: int, row: int) -> list[float]:
    (w, num_heads, size), (n, num_kv_heads, _) = q.shape, k.shape
    kv = head // (num_heads // num_kv_heads)
    visible = n - w + row + 1
    dots = [sum(float(q[row, head, d]) * float(k[j, kv, d]) for d in range(size)) for j in range(visible)]
    exps = [math.exp(dot / math.sqrt(size)) for dot in dots]
    return [e / sum(exps) for e in exps] + [0.0] * (n - visible)


@pytest.fixture
def qk() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(5, 4, 8, dtype=torch.float64), torch.randn(19, 2, 8, dtype=torch.float64)


def test_snapkv_is_the_formula(qk: tuple[torch.Tensor, torch.Tensor]) -> None:
    rows = [[sum(c) for c in zip(*(naive_attention(*qk, h, r) for r in range(5)), strict=True)] for h in range(4)]
    pooled = [[max(row[max(0, j - 2) : j + 3]) for j in range(19)] for row in rows]
    expected = [[max(pooled[2 * h][j], pooled[2 * h + 1][j]) for j in range(19)] for h in range(2)]
    torch.testing.assert_close(SnapKV(kernel=5).scores(*qk), torch.tensor(expected, dtype=torch.float64))


def test_vanilla_top_p_is_the_formula(qk: tuple[torch.Tensor, torch.Tensor]) -> None:
    rows = np.array([[naive_attention(*qk, h, r) for r in range(5)] for h in range(4)])
    expected = rows.reshape(2, 2, 5, 19).mean((1, 2))
    torch.testing.assert_close(VanillaTopP().scores(*qk), torch.from_numpy(expected))


def test_more_queries_than_keys_are_refused(qk: tuple[torch.Tensor, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        window_attention(qk[0], qk[1][:4])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-400, 400), min_size=2, max_size=40, unique=True), st.floats(0.1, 0.95), st.integers(0, 99))
def test_top_n_star_is_what_bisection_keeps(raw: list[int], p: float, seed: int) -> None:
    scores = torch.tensor(raw, dtype=torch.float64) / 100
    logits = 2 * torch.randn(len(raw), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    count = top_p_count(logits.softmax(-1), p)
    if count / len(raw) >= p:
        return  # the attention is as good as uniform: no temperature exists
    calibrated = (scores / temperature(scores, int(count), p)).softmax(-1)
    # T solves mass = p up to rounding. The slack changes no set: the lightest kept key weighs at least (1 - p) / n.
    assert torch.equal(top_n(calibrated, top_p_count(calibrated, p - 1e-9)), top_n(scores, count))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_masks_are_little_endian_and_come_back(bits: list[bool]) -> None:
    kept = torch.tensor([bits, bits[::-1]])
    assert np.array_equal(pack(kept).numpy(), np.packbits(kept.numpy(), axis=-1, bitorder="little"))
    assert torch.equal(unpack(pack(kept), len(bits)), kept)
