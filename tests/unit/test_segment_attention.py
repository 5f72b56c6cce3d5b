"""Moving rotated keys and queries, and the state of a range of keys; both are exact in fp32."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.attention.states import attention_state, merge
from shared.models.attention import NormAndRotate
from shared.models.config import RopeConfig
from shared.models.norm import RMSNorm
from shared.ops.attention import naive_attention
from shared.ops.rope import inverse_frequencies, rope_table, rotate
from shared.tracks.segments.attention import range_state
from shared.tracks.segments.relocation import relocate, turns
from tests.comparison import assert_close, assert_equal

D = 16
ROPES = [
    RopeConfig(theta=10_000.0),
    RopeConfig(theta=1_000_000.0, kind="linear", factor=8.0),
    RopeConfig(theta=500_000.0, kind="llama3", factor=32.0, original_max_position=64),
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope.kind)
@pytest.mark.parametrize(("start", "distance"), [(0, 1), (3, 40), (100, -60), (100, -100), (7, 0), (200, -173)])
def test_a_moved_key_is_the_key_of_the_other_position(rope: RopeConfig, start: int, distance: int) -> None:
    """As layer 0 has it, whose keys depend on nothing but the token; with the norm that precedes the rotation."""
    norm = RMSNorm(D, 1e-6)
    norm.weight = torch.nn.Parameter(torch.linspace(-50, 100, D), requires_grad=False)
    qk = NormAndRotate(rope_table(rope, D, 256), norm, norm)
    x, positions = torch.randn(9, 2, D), torch.arange(start, start + 9)
    moved = relocate(qk(x, x, positions)[1], torch.full((9,), distance), inverse_frequencies(rope, D))
    expected = qk(x, x, positions + distance)[1]
    assert_close(moved, expected, f"keys moved by {distance}", ("token", "head", "dim"), rtol=1e-4, atol=2e-3)


def test_turns_by_a_distance_are_the_rows_of_the_table_and_may_be_negative() -> None:
    frequencies = inverse_frequencies(ROPES[0], D)
    table = rope_table(ROPES[0], D, 64)
    options = ("distance", "cosine or sine", "head", "dim")
    assert_close(turns(torch.arange(64), frequencies), table, "turns", options, atol=1e-5)
    back = table.clone()
    back[:, 1] *= -1
    assert_close(turns(-torch.arange(64), frequencies), back, "turns by negative distances", options, atol=1e-5)


def test_a_turn_far_along_the_sequence_is_exact() -> None:
    """In fp32 the angle 1,000,000 · 0.3 would be wrong by a hundredth."""
    row = turns(torch.tensor([1_000_000, -1_000_000]), torch.tensor([0.3]))
    angle = torch.tensor([1e6, -1e6], dtype=torch.float64) * torch.tensor([0.3]).double()
    assert_close(row[:, 0, 0, 0], angle.cos().float(), "cosine", ("distance",), atol=1e-6)
    assert_close(row[:, 1, 0, 1], angle.sin().float(), "sine", ("distance",), atol=1e-6)


def test_moving_the_query_back_gives_the_scores_of_keys_moved_forward() -> None:
    frequencies = inverse_frequencies(ROPES[0], D)
    q, k = torch.randn(1, 1, D), torch.randn(20, 1, D)
    table = rope_table(ROPES[0], D, 256)
    q, k = rotate(q, table[[150]]), rotate(k, table[:20])
    forward = relocate(k, torch.full((20,), 77), frequencies)
    back = relocate(q, torch.tensor([-77]), frequencies)
    assert_close((back * k).sum(-1), (q * forward).sum(-1), "scores", ("key", "head"), atol=1e-4)


def state_by_hand(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, places: list[int], window: int | None, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    states = []
    for query, place in zip(q, places, strict=True):
        first = 0 if window is None else min(max(0, place - window + 1), k.shape[1])
        seen = slice(first, max(first, place + 1))
        states.append(attention_state(query, k[:, seen], v[:, seen], scale=0.3, softcap=softcap))
    return torch.stack([values for values, _ in states]), torch.stack([logs for _, logs in states])


@settings(max_examples=60)
@given(
    places=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    S=st.integers(1, 24),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2)]),
    window=st.none() | st.integers(1, 30),
    softcap=st.sampled_from([None, 2.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_state_of_a_range_is_that_of_the_keys_that_each_query_sees(
    places: list[int], S: int, heads: tuple[int, int], window: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    """Queries far after a range see its last keys in the window, or none."""
    q, k, v = (torch.randn(*shape, D).to(dtype) for shape in ((len(places), heads[0]), (heads[1], S), (heads[1], S)))
    values, logs = range_state(q, k, v, torch.tensor(places), scale=0.3, window=window, softcap=softcap)
    expected = state_by_hand(q.float(), k.float(), v.float(), places, window, softcap)
    assert_close(values, expected[0], "values", ("token", "head", "dim"), rtol=1e-4, atol=1e-5)
    assert_close(logs, expected[1], "logarithms", ("token", "head"), rtol=1e-4, atol=1e-4)


def test_a_query_that_sees_no_key_has_the_state_of_no_keys() -> None:
    q, k = torch.randn(2, 2, D), torch.randn(1, 5, D)
    values, logs = range_state(q, k, k, torch.tensor([4, 20]), scale=1.0, window=8)
    assert_equal(values[1], torch.zeros(2, D), "values", ("head", "dim"))
    assert_equal(logs[1], torch.full((2,), -torch.inf), "logarithms", ("head",))
    assert logs[0].isfinite().all(), "the query beside it sees keys, and its logarithms are numbers"


def test_the_states_of_ranges_merge_to_the_attention_over_all_keys() -> None:
    q, k, v = torch.randn(3, 4, D), torch.randn(2, 30, D), torch.randn(2, 30, D)
    places = torch.tensor([27, 28, 29])
    for window in (None, 9, 22):
        state = range_state(q, k[:, 12:], v[:, 12:], places - 12, scale=0.3, window=window)
        for first, last in ((0, 7), (7, 12)):
            options = {"scale": 0.3, "window": window}
            state = merge(state, range_state(q, k[:, first:last], v[:, first:last], places - first, **options))
        expected = naive_attention(q, k, v, scale=0.3, window=window)
        assert_close(state[0], expected, f"attention, window {window}", ("token", "head", "dim"), rtol=1e-4, atol=1e-5)


def test_each_query_has_a_peak_of_its_own() -> None:
    """The scores of one query are 0 to 1,200, those of the other 0 to -1,200: exp overflows, or beside the largest of
    all scores the other's weights vanish."""
    q, k, v = torch.zeros(2, 1, D), torch.zeros(1, 5, D), torch.randn(1, 5, D)
    q[:, 0, 0] = torch.tensor([300.0, -300.0])
    k[0, :, 0] = torch.arange(5.0)
    values, logs = range_state(q, k, v, torch.tensor([4, 4]), scale=1.0)
    assert_close(values, v[0, [4, 0]][:, None], "values", ("token", "head", "dim"), atol=1e-6)
    assert_close(logs, torch.tensor([[1200 / math.log(2)], [0.0]]), "logarithms", ("token", "head"), rtol=1e-6)
    values, _ = range_state(q[:1], k, v, torch.tensor([0]), scale=1.0)
    assert_close(values, v[:, :1], "values beside keys of a large score that are not seen", ("token", "head", "dim"))
