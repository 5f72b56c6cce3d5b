"""Guesses of a model about itself: masks, positions, the group that counts, and what a step leaves behind."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.cache.layout.paged import PagedSizes
from shared.cache.pool.paged import PagedKVCachePool
from shared.cache.view.block_storage import PlainStorage
from shared.cache.view.operations_attention import OperationsAttention
from shared.cache.view.paged import PagedView
from shared.engine.config import EngineConfig
from shared.engine.request import Request
from shared.engine.sampling.sampler import Draws, SampledTokens, SamplerOutput
from shared.loading.config_json import read_config
from shared.ops.attention import naive_attention
from shared.sampling.params import SamplingParams
from shared.sampling.sampler import SamplingRow
from shared.tracks.multi_token.attention import MaskTokenAttention, MaskTokenOperations
from shared.tracks.multi_token.batch import MultiTokenBatch
from shared.tracks.multi_token.drafter import Ahead, MultiTokenDrafter, _chosen, group_of_next
from shared.tracks.multi_token.lora import FIRST_MASK
from shared.tracks.multi_token.ops import groups_and_ranks, masked_attention, positions, visible_with_masks
from shared.tracks.multi_token.scheduler import MultiTokenSchedule, MultiTokenScheduler, settle
from tests.comparison import assert_close, assert_equal

MAX_SEQ_LEN, BLOCK_SIZE, LENGTH = 40, 1, 2
ANSWER = list(range(30, 50))
WRONG = 99


def drawn(mask: torch.Tensor) -> list[str]:
    return ["".join(".#"[int(seen)] for seen in row) for row in mask]


def test_the_mask_of_the_first_draft() -> None:
    """One real token and three masks, after two cached tokens: causal."""
    assert_equal(drawn(visible_with_masks(2, 1, 3)), ["###...", "####..", "#####.", "######"], "the mask")


def test_the_mask_of_a_step_that_verifies_and_drafts() -> None:
    """Three real tokens, and two masks after each: nine tokens, the real ones first."""
    assert_equal(
        drawn(visible_with_masks(1, 3, 2)),
        [
            "##........",
            "###.......",
            "####......",
            "##..#.....",  # the first mask of group 0
            "##..##....",
            "###...#...",  # of group 1
            "###...##..",
            "####....#.",  # of group 2
            "####....##",
        ],
        "the mask",
    )


def test_real_tokens_see_what_they_see_without_masks() -> None:
    for num_masks in range(4):
        mask = visible_with_masks(3, 4, num_masks)
        assert_equal(mask[:4, :7].tolist(), visible_with_masks(3, 4, 0).tolist(), "what real tokens see of each other")
        assert_equal(mask[:4, 7:].any().item(), False, "whether a real token sees a mask")


def test_a_mask_token_sees_the_masks_of_its_own_group() -> None:
    mask = visible_with_masks(1, 3, 2)
    assert_equal(mask[3:, 4:].sum(1).tolist(), [1, 2, 1, 2, 1, 2], "how many masks each mask sees")


def test_positions_of_a_step() -> None:
    assert_equal(positions(10, 1, 3).tolist(), [10, 11, 12, 13], "a real token and its masks")
    assert_equal(
        positions(10, 3, 2).tolist(), [10, 11, 12, 11, 12, 12, 13, 13, 14], "three real tokens, two masks after each"
    )
    assert_equal(positions(7, 3, 0).tolist(), [7, 8, 9], "real tokens alone")
    assert_equal(positions(7, 3, 1).dtype, np.dtype(np.int64), "the type of positions")


def test_a_group_stands_where_the_tokens_that_it_stands_for_will_stand() -> None:
    """Mask j of group g has the position of the token j positions after real token g."""
    for num_real in range(1, 5):
        group, rank = groups_and_ranks(num_real, 3)
        expected = [100 + g + r for g, r in zip(group, rank, strict=True)]
        assert_equal(positions(100, num_real, 3).tolist(), expected, f"positions of {num_real} real tokens")


@given(cached=st.integers(0, 9), real=st.integers(1, 4), masks=st.integers(0, 3), window=st.integers(4, 12))
def test_a_group_is_computed_as_if_its_masks_followed_its_real_token(
    cached: int, real: int, masks: int, window: int
) -> None:
    """The page's definition, by brute force: each group alone after the text up to its real token."""
    torch.manual_seed(0)
    T = real * (1 + masks)
    q, k, v = torch.randn(T, 2, 4), torch.randn(1, cached + T, 4), torch.randn(1, cached + T, 4)
    for limit in (None, window):
        found = masked_attention(q, k, v, visible_with_masks(cached, real, masks, limit), scale=0.5)
        for g in range(real):
            own = [*range(cached + g + 1), *range(cached + real + g * masks, cached + real + (g + 1) * masks)]
            rows = [g, *range(real + g * masks, real + (g + 1) * masks)]
            alone = naive_attention(q[rows], k[:, own], v[:, own], scale=0.5, window=limit)
            what = f"attention of group {g}, {cached} tokens cached, window {limit}"
            assert_close(found[rows], alone, what, ("token", "head", "dim"), rtol=1e-4, atol=1e-5)


def test_the_group_behind_the_last_accepted_token_counts() -> None:
    """A step computed the token at index 10 and three drafts; the token sampled after those accepted was appended."""
    for num_accepted in range(4):
        num_tokens = 11 + num_accepted + 1
        found = group_of_next(num_tokens, 10)
        assert_equal(found, num_accepted, f"the group, with {num_accepted} drafts accepted")
        assert_equal(type(found).__name__, "int", "the type of the group")


def test_a_request_gets_the_guesses_of_its_own_group() -> None:
    """Of guesses made ahead: two after each of the tokens of a, which has three, and of b."""
    a, b = (Request(name, [1], SamplingParams(), 0) for name in "ab")
    ahead = Ahead(2, {"a": 0, "b": 3}, range(40, 50), SamplerOutput([]))
    none = torch.zeros(0)
    assert _chosen([(a, none, 1, 2), (b, none, 0, 1)], ahead) == [None, None, a, a, None, None, b, None, None, None]
    assert _chosen([(b, none, 1, 2)], ahead) == [None] * 8 + [b, b]


def test_each_draft_follows_its_own_requests_draft_before() -> None:
    """Also where other requests have all theirs."""
    row = SamplingRow(SamplingParams(), 0, 0)
    asking: Any = [
        (SimpleNamespace(last_token_id=last, sampling_row=lambda _: row), torch.zeros(1, 3, 2), 0, num_drafts)
        for last, num_drafts in ((10, 1), (20, 3), (30, 2), (40, 3))
    ]
    previous: list[list[int]] = []

    def logits(ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        previous.append(ids.tolist())
        return ids[:, None]

    def sample(logits: torch.Tensor, rows: object, table_rows: list[int]) -> Draws:
        return Draws(logits[:, 0] + 1)

    drafter: Any = SimpleNamespace(
        sampler=SimpleNamespace(penalties=SimpleNamespace(forget=lambda: None), upload=lambda x: x, sample=sample),
        logits=logits,
    )
    drawn = MultiTokenDrafter._draw(drafter, asking)
    assert previous == [[10, 20, 30, 40], [21, 31, 41], [22, 42]]
    assert [len(requests) for requests, _ in drawn] == [4, 3, 2]


def test_after_a_first_draft_there_is_one_group() -> None:
    for start in (0, 5, 77):
        assert_equal(group_of_next(start + 2, start), 0, f"the group of a step that began at {start}")


def test_a_step_that_was_not_committed_has_no_group() -> None:
    assert_equal(group_of_next(11, 10) < 0, True, "whether the group of a step without its token is refused")


def make_scheduler(**config: object) -> MultiTokenScheduler:
    options = {"use_speculative_decoding": True, "adapter": "a", "adapt_spec_length": False}
    config = options | {"spec_length": LENGTH, "max_batch_size": 4} | config
    return MultiTokenScheduler(
        EngineConfig(**config),  # type: ignore[arg-type]
        PagedKVCachePool(60, BLOCK_SIZE, 4, MAX_SEQ_LEN),
        MAX_SEQ_LEN,
    )


def add(scheduler: MultiTokenScheduler, name: str = "a", num_tokens: int = len(ANSWER)) -> Request:
    request = Request(name, [1, 2, 3], SamplingParams(max_new_tokens=num_tokens, ignore_eos=True), 0)
    scheduler.add(request)
    return request


def step(scheduler: MultiTokenScheduler, num_right: int = LENGTH, aborted: str = "") -> tuple[int, int]:
    """A step whose first ``num_right`` drafts are right; the drafts and masks of the first request. A request may be
    aborted while the step is in flight."""
    schedule = scheduler.schedule()
    masks = schedule.masks if isinstance(schedule, MultiTokenSchedule) else {}
    for request, *_, num_drafts, _, _ in schedule:
        done = len(request.output_ids)
        request.draft_ids = [*ANSWER[done : done + num_right], *[WRONG] * num_drafts][:num_drafts]
    schedule = settle(schedule, scheduler.pool)
    MultiTokenBatch.of(schedule, scheduler.pool)
    sampled = []
    for request, *_, num_rows, _ in schedule:
        sampled += ANSWER[len(request.output_ids) : len(request.output_ids) + num_rows]
    first = schedule.entries[0]
    if aborted:
        scheduler.abort(aborted)
    scheduler.commit(schedule, SampledTokens(sampled, None, {}))
    return first.num_drafts, masks.get(first.request, 0)


def test_drafts_follow_the_masks_of_the_step_before() -> None:
    scheduler = make_scheduler()
    request = add(scheduler)
    assert_equal(step(scheduler), (0, 0), "drafts and masks of the prompt")
    assert_equal(step(scheduler), (0, LENGTH), "drafts and masks of the first decode step")
    assert_equal(step(scheduler), (LENGTH, LENGTH), "drafts and masks of the next step")
    assert_equal(request.output_ids, ANSWER[: 1 + 1 + LENGTH + 1], "the output")


def test_nothing_is_left_of_masks_and_rejected_guesses() -> None:
    for num_right in range(LENGTH + 1):
        scheduler = make_scheduler()
        request = add(scheduler)
        for _ in range(3):
            step(scheduler, num_right)
            length = request.num_tokens - 1
            assert_equal(scheduler.pool.length(request), length, f"cached tokens, {num_right} guesses right")
            held = -(-length // BLOCK_SIZE)
            assert_equal(len(scheduler.pool.table(request)), held, f"blocks of {length} tokens")
            assert_equal(scheduler.pool.free_tokens, (60 - held) * BLOCK_SIZE, f"free tokens beside {length} cached")


def test_a_request_has_as_many_guesses_as_it_had_masks() -> None:
    scheduler = make_scheduler()
    requests = [add(scheduler, name) for name in "ab"]
    step(scheduler)
    step(scheduler)
    assert_equal([scheduler.guesses.get(request) for request in requests], [LENGTH, LENGTH], "guesses of each request")
    step(scheduler, aborted="b")
    assert_equal([scheduler.guesses.get(request) for request in requests], [LENGTH, None], "guesses after an abort")


def test_masks_of_all_requests_stay_within_the_budget() -> None:
    """Of 11 tokens, six are real: each has one mask in the first request, and too few are left for the second."""
    scheduler = make_scheduler(max_num_batched_tokens=11)
    requests = [add(scheduler, name) for name in "ab"]
    for _ in range(2):
        step(scheduler)
    schedule = scheduler.schedule()
    assert isinstance(schedule, MultiTokenSchedule)
    assert ([entry.num_tokens for entry in schedule], schedule.masks) == ([3, 3], {requests[0]: 1})


def test_a_batch_has_real_tokens_first_and_no_logits_of_masks() -> None:
    scheduler = make_scheduler()
    for name in "ab":
        add(scheduler, name)
    for _ in range(2):
        step(scheduler)
    scheduler.add(Request("c", [1, 2, 3], SamplingParams(max_new_tokens=9, prompt_logprobs=1), 0))
    schedule = scheduler.schedule()
    for entry in schedule.decoding:
        entry.request.draft_ids = [70, 71]
    batch = MultiTokenBatch.of(schedule, scheduler.pool)
    m = FIRST_MASK
    assert batch.token_ids.tolist() == [*[31, 70, 71, *[m, m + 1] * 3] * 2, 1, 2, 3]
    assert batch.logit_rows.tolist() == [0, 1, 2, 9, 10, 11, 20]
    assert batch.prompt_rows is not None
    assert batch.prompt_rows.rows.tolist() == [18, 19]
    assert {n: (rows.start, rows.stop) for n, rows in batch.mask_rows().items()} == {0: (3, 9), 1: (12, 18)}
    assert np.array_equal(batch.part(range(1, 2)).positions, positions(4, 3, 2))
    assert batch.part(range(1, 2)).mask_rows() == {0: slice(3, 9)}
    assert batch.part(range(2, 3)).mask_rows() == {}
    for first, stop in ((0, 1), (0, 2), (1, 2), (1, 3), (2, 3)):
        assert batch.part(range(first, stop)).num_masks.tolist() == [2, 2, 0][first:stop]
    assert len(set(batch.layout.slot_mapping.tolist())) == 21


def test_a_request_without_its_guesses_loses_its_masks_and_no_other_does() -> None:
    scheduler = make_scheduler()
    requests = [add(scheduler, name) for name in "ab"]
    for _ in range(2):
        step(scheduler)
    schedule = scheduler.schedule()
    requests[0].draft_ids, requests[1].draft_ids = [70], [70, 71]
    settled = settle(schedule, scheduler.pool)
    assert isinstance(settled, MultiTokenSchedule)
    assert dict(settled.masks) == {requests[1]: LENGTH}
    assert MultiTokenBatch.of(settled, scheduler.pool).num_tokens == 2 + 9


@pytest.mark.parametrize("num_masks", [1, 2])
def test_a_view_opens_the_gates_of_masks_and_each_sequence_has_a_mask_of_its_own(
    tiny_checkpoints: dict[str, Path], num_masks: int
) -> None:
    scheduler = make_scheduler(spec_length=num_masks)
    add(scheduler, "a")
    scheduler.add(Request("b", [1, 2, 3, 4, 5], SamplingParams(max_new_tokens=20, ignore_eos=True), 0))
    for _ in range(2):
        step(scheduler)
    scheduler.add(Request("c", [1, 2, 3], SamplingParams(), 0))
    schedule = scheduler.schedule()
    for entry in schedule.decoding:
        entry.request.draft_ids = [70, 71][:num_masks]
    batch = MultiTokenBatch.of(schedule, scheduler.pool)
    config, sizes = read_config(tiny_checkpoints["llama"]), PagedSizes(60, BLOCK_SIZE, 4, MAX_SEQ_LEN, 60)
    storage = PlainStorage(config, sizes, torch.float32)
    attention = MaskTokenOperations(OperationsAttention(storage, "sdpa"))
    view, num_new = PagedView(config, sizes, torch.float32, storage, attention), batch.num_new_tokens.tolist()
    generator, Hq, Hkv = torch.Generator().manual_seed(0), config.num_heads, config.num_kv_heads
    for memory in (view.keys, view.values):
        memory.normal_(generator=generator)
    tokens = view.load(batch).tokens
    assert tokens.gate is not None
    assert tokens.gate.tolist() == (tokens.ids >= FIRST_MASK).tolist()
    planned: Any = SimpleNamespace(lay_out=None, attend=None, arrays=lambda *_: {})
    padding: Any = SimpleNamespace(bucket_of=lambda _: None)
    layout: Any = SimpleNamespace(num_decoding=1)
    sent = MaskTokenAttention(planned, padding).arrays(batch, layout)
    assert sent["gate"].tolist() == tokens.gate.bool().tolist()
    assert sent["num_masks"].tolist() == [num_masks, 0], "of the sequences after those that decode one token"
    heads = torch.randn(len(tokens.ids), Hq + 2 * Hkv, config.head_dim, generator=generator)
    q, k, v = heads.split((Hq, Hkv, Hkv), 1)
    view.write(0, q, k, v, tokens.positions, lambda q, k, positions: (q, k))
    for window in (None, 4):
        found = view.attend(0, q, scale=0.3, window=window).split(num_new)
        for number, entry in enumerate(schedule):
            table = torch.from_numpy(scheduler.pool.table(entry.request)).long()[: entry.start + num_new[number]]
            keys, values = (memory[0, table, 0].transpose(0, 1) for memory in (view.keys, view.values))
            mask = visible_with_masks(entry.start, entry.num_tokens, int(batch.num_masks[number]), window)
            expected = masked_attention(q.split(num_new)[number], keys, values, mask, scale=0.3)
            what = f"attention of sequence {number} with window {window}"
            assert_close(found[number], expected, what, ("token", "head", "dim"), rtol=1e-4, atol=1e-5)
    assert view.load(batch.part(range(2, 3))).tokens.gate is None, "a step without masks has no gate"
