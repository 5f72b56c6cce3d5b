"""Compressors against naive fp64 formulas; top-n* against bisection; packed masks against numpy."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.compression import WAYS, Scorer
from shared.loading.loader import load_model
from shared.tracks.compression.compressors import COMPRESSORS, RKV, SnapKV, StreamingLLM, VanillaTopP, window_attention
from shared.tracks.compression.kept_cells import pack, unpack
from shared.tracks.compression.selection import REDUCTIONS, Budget, needed, select, top_n, top_p_count
from tests.comparison import assert_close, assert_equal


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
    got = SnapKV(kernel=5).scores(*qk)
    assert_close(got, torch.tensor(expected, dtype=torch.float64), "score", ("head", "key"), atol=1e-12)
    halved = SnapKV(kernel=5, scale=2 * 8**-0.5).scores(qk[0] / 2, qk[1])
    assert_close(halved, got, "score of half the queries at twice the scale", ("head", "key"), atol=1e-12)


def test_what_stands_beside_a_key_is_worth_as_much() -> None:
    """Two queries of two heads look at keys 3 and 6 of eight; the pooling takes a key on each side."""
    keys = torch.zeros(8, 1, 2, dtype=torch.float64)
    keys[3, 0, 0] = keys[6, 0, 1] = 200.0
    queries = torch.eye(2, dtype=torch.float64).expand(2, 2, 2)
    got = SnapKV(kernel=3, scale=1.0).scores(queries, keys)
    expected = torch.tensor([[0, 0, 2, 2, 2, 2, 2, 2]], dtype=torch.float64)
    assert_close(got, expected, "score", ("head", "key"), atol=1e-9)


def test_vanilla_top_p_is_the_formula(qk: tuple[torch.Tensor, torch.Tensor]) -> None:
    rows = np.array([[naive_attention(*qk, h, r) for r in range(5)] for h in range(4)])
    expected = rows.reshape(2, 2, 5, 19).mean((1, 2))
    torch.testing.assert_close(VanillaTopP().scores(*qk), torch.from_numpy(expected))


def test_more_queries_than_keys_are_refused(qk: tuple[torch.Tensor, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        window_attention(qk[0], qk[1][:4])


@pytest.mark.parametrize(("p", "count"), [(0.5, 1), (0.6, 2), (0.75, 2), (0.8, 3), (1.0, 4)])
def test_how_many_keys_a_mass_needs(p: float, count: int) -> None:
    rows = torch.tensor([[0.125, 0.5, 0.125, 0.25], [0.5, 0.25, 0.125, 0.125]])
    assert_equal(top_p_count(rows, p), torch.tensor([count, count]), f"keys for the mass {p}", ("row",))


def test_rounding_needs_no_key_that_is_not_there() -> None:
    rows = torch.tensor([[0.25, 0.25, 0.25, 0.2499]])
    assert_equal(top_p_count(rows, 1.0), torch.tensor([4]), "keys for the mass 1", ("row",))


def test_the_mass_is_added_up_in_fp64() -> None:
    """Rounded to fp32, a sum moves to the other side of a p between the two."""
    row = torch.randn(50, generator=torch.Generator().manual_seed(0)).softmax(0)
    mass = row.sort(descending=True).values.cumsum(0, dtype=torch.float64)[:40]
    for index, (exact, rounded) in enumerate(zip(mass.tolist(), mass.float().tolist(), strict=True)):
        if exact != rounded:
            count = index + 1 + (exact < (exact + rounded) / 2)
            what = f"keys for a mass between {exact!r} and {rounded!r}, which {index + 1} keys have"
            assert_equal(int(top_p_count(row, (exact + rounded) / 2)), count, what)


def temperature(scores: torch.Tensor, count: int, p: float) -> float:
    """Bisection for the T at which the top-``count`` mass of softmax(scores [n] / T) is p.

    The mass falls from 1 (T near 0) to count / n (T large), so count / n < p < 1.
    """
    ordered = scores.sort(descending=True).values
    low, high = 1e-6, 1e6
    for _ in range(200):
        middle = (low * high) ** 0.5
        enough = (ordered / middle).softmax(-1)[:count].sum() >= p
        low, high = (middle, high) if enough else (low, middle)
    return low


@settings(max_examples=60)
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


@settings(max_examples=40)
@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_masks_are_little_endian_and_come_back(bits: list[bool]) -> None:
    kept = torch.tensor([bits, bits[::-1]])
    assert np.array_equal(pack(kept).numpy(), np.packbits(kept.numpy(), axis=-1, bitorder="little"))
    assert torch.equal(unpack(pack(kept), len(bits)), kept)


def test_rkv_is_the_formula(qk: tuple[torch.Tensor, torch.Tensor]) -> None:
    queries, keys = qk
    keys[3] = keys[12] = keys[7] * 1.5 + 0.01  # near-duplicates, of which the newest is spared
    window, (n, num_kv_heads, _) = queries[-3:], keys.shape
    expected = []
    for kv in range(num_kv_heads):
        heads = [[naive_attention(window, keys, 2 * kv + g, r) for r in range(3)] for g in range(2)]
        means = [[sum(column) / 3 for column in zip(*rows, strict=True)] for rows in heads]
        pooled = [[max(row[max(0, j - 2) : j + 3]) for j in range(n)] for row in means]
        importance = [max(row[j] for row in pooled) for j in range(n)]
        unit = [[float(x) for x in key / key.norm()] for key in keys[:, kv]]
        cosine = [[sum(a * b for a, b in zip(x, y, strict=True)) for y in unit] for x in unit]
        for i, row in enumerate(cosine):
            row[i] = 0.0
            alike = [j for j in range(n) if row[j] > 0.5]
            if alike:
                row[alike[-1]] = 0.0
        exps = [math.exp(sum(row[j] for row in cosine) / n) for j in range(n)]
        expected.append([0.07 * importance[j] - 0.93 * exps[j] / sum(exps) for j in range(n)])
    got = RKV(window=3, kernel=5).scores(queries, keys)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))
    assert (got[:, 12] > got[:, 3]).all()


def test_the_baseline_keeps_sinks_and_the_newest(qk: tuple[torch.Tensor, torch.Tensor]) -> None:
    kept = select(*qk, StreamingLLM(), Budget(9, 9, num_sinks=2, num_recent=3))
    found = [row.nonzero().flatten().tolist() for row in kept]
    assert_equal(found, [[0, 1, *range(12, 19)]] * 2, "kept", ("head", "number"))
    few = select(*qk, VanillaTopP(), Budget(1, 3, num_sinks=2, num_recent=3))
    found = [row.nonzero().flatten().tolist() for row in few]
    assert_equal(found, [[0, 1, 16, 17, 18]] * 2, "kept of at most 3: what is always kept", ("head", "number"))


def test_no_compression_is_above_every_budget(qk: tuple[torch.Tensor, torch.Tensor]) -> None:
    counts = select(*qk, COMPRESSORS["none"](1.0), Budget(2, 4, num_sinks=1, num_recent=2)).sum(1).tolist()
    assert_equal(counts, [19, 19], "kept of 19 keys", ("head",))


def test_heads_keep_as_many_as_their_attention_needs() -> None:
    """Head 0 looks at one key, head 1 at all of them alike."""
    keys = torch.zeros(100, 2, 4)
    keys[50, 0] = 10.0
    kept = select(torch.ones(3, 2, 4), keys, VanillaTopP(), Budget(20, 60, num_sinks=2, num_recent=5))
    assert_equal(kept.sum(1).tolist(), [20, 60], "kept within 20 and 60", ("head",))
    assert kept[0, 50], "the key that head 0 looks at"
    assert kept[:, [0, 1, *range(95, 100)]].all(), "sinks and recent keys"
    between = Budget(1, 100, num_sinks=2, num_recent=5)
    counts = select(torch.ones(3, 2, 4), keys, VanillaTopP(), between).sum(1).tolist()
    assert_equal(counts, [8, 95], "kept within 1 and 100", ("head",))  # 2 + 1 + 5; 90 + 5
    alike = select(torch.ones(3, 2, 4), keys, VanillaTopP(), between, scale=0.0).sum(1).tolist()
    assert_equal(alike, [95, 95], "kept where the scale 0 makes all keys alike", ("head",))
    queries, keys = torch.zeros(2, 1, 4), torch.zeros(20, 1, 4)
    queries[[0, 1], 0, [0, 1]] = keys[[3, 5], 0, [0, 1]] = 10.0  # each query looks at a key of its own
    for reduction, count in (("raw", 1), ("mean", 2)):
        budget = Budget(1, 20, num_sinks=0, num_recent=0, reduction=reduction)
        assert_equal(select(queries, keys, VanillaTopP(), budget).sum(1).tolist(), [count], f"kept by {reduction}")


def test_the_rows_of_the_window_are_reduced(qk: tuple[torch.Tensor, torch.Tensor]) -> None:
    attention = window_attention(*qk)
    rows = attention.flatten(1, 2).numpy()

    def count(row: np.ndarray) -> int:
        mass = np.cumsum(np.sort(row)[::-1])
        return int(np.argmax(mass >= 0.8)) + 1

    expected = {
        "raw": [max(map(count, head)) for head in rows],
        "mean": [count(head.mean(0)) for head in rows],
        "sum": [count(head.mean(0)) for head in rows],
        "max": [count(head.max(0) / head.max(0).sum()) for head in rows],
    }
    assert {name: needed(attention, 0.8, name).tolist() for name in REDUCTIONS} == expected
    assert expected["raw"] != expected["mean"] != expected["max"]


@settings(max_examples=60)
@given(
    st.integers(1, 80), st.integers(1, 40), st.integers(0, 40), st.sampled_from(list(COMPRESSORS)), st.integers(0, 9)
)
def test_a_selection_stays_in_its_budget(n: int, least: int, more: int, method: str, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    queries, keys = torch.randn(min(n, 8), 4, 8, generator=random), 3 * torch.randn(n, 2, 8, generator=random)
    budget = Budget(least, least + more, 0.9, 2, 3)
    kept = select(queries, keys, COMPRESSORS[method](0.35), budget)
    assert kept[:, :2].all()
    assert kept[:, -3:].all()
    forced = min(n, 5)
    for count in kept.sum(1).tolist():
        assert count == n if method == "none" else min(n, max(least, forced)) <= count <= max(least + more, forced)


@pytest.mark.parametrize("way", WAYS)
def test_a_measured_budget_is_what_heads_keep_on_average(tiny_checkpoints: dict[str, Path], way: str) -> None:
    scorer = Scorer(load_model(tiny_checkpoints["llama"]), 320)
    scorer.read([(31 * n) % 250 for n in range(320)], 288)
    full, similar = scorer.follow(None), []
    for share in (0.25, 0.5, 1.0):
        found, kept = scorer.spend(WAYS[way], share)
        assert kept == pytest.approx(share, rel=0.02)
        similar.append((full.exp() * (full - found)).sum(-1).mean().item())
    assert similar[0] > 0
    assert similar[2] == 0, "the whole budget drops nothing"
