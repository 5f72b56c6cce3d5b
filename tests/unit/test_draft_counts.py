"""What a scheduler counts of drafts, for each request and by position in a step, and the space for their logits."""

from pathlib import Path
from typing import Any

import pytest

from shared.cache import pool_size
from shared.cache.layout.paged import PagedSizes
from shared.cache.pool.paged import PagedKVCachePool
from shared.cache.view.paged import PagedView
from shared.engine.config import EngineConfig
from shared.engine.record import EngineLoad, StepRecord
from shared.engine.request import Request
from shared.engine.sampling.sampler import SampledTokens
from shared.loading.loader import load_model
from shared.models.causal_lm import CausalLM
from shared.sampling.params import SamplingParams
from shared.scheduling.drafts import settle
from shared.scheduling.speculative import SpeculativeScheduler
from tests.views import paged_view

LENGTH, WRONG = 3, 99


def step(scheduler: SpeculativeScheduler, drafts: dict[str, list[int]]) -> StepRecord:
    """Each request proposes its drafts, if it may have any; every sampled token is 7."""
    schedule = scheduler.schedule()
    for entry in schedule:
        entry.request.draft_ids = list(drafts.get(entry.request.request_id, ()))[: entry.num_drafts]
    schedule = settle(schedule, scheduler.pool)
    scheduler.commit(schedule, SampledTokens([7] * int(schedule.num_logit_rows.sum()), None, {}))
    return StepRecord.of(scheduler, schedule, [])


def test_drafts_are_counted_by_request_step_and_position() -> None:
    config = EngineConfig(use_speculative_decoding=True, drafter="ngram", spec_length=LENGTH, adapt_spec_length=False)
    scheduler = SpeculativeScheduler(config, PagedKVCachePool(40, 2, 4, 32), 32)
    requests = {
        name: Request(name, [1, 2], SamplingParams(max_new_tokens=20, use_speculative_decoding=name != "c"), 0)
        for name in "abc"
    }
    for request in requests.values():
        scheduler.add(request)
    assert step(scheduler, {}).verified == ()
    record = step(scheduler, {"a": [7, 7, WRONG], "b": [WRONG], "c": [7, 7, 7]})
    assert set(record.verified) == {("a", 2, 1), ("b", 0, 1)}
    assert set(record.decoded) == {"a", "b", "c"}
    assert step(scheduler, {"a": [7, 7, 7], "b": [7, WRONG, 7]}).verified == (("a", 3, 0), ("b", 1, 2))
    assert step(scheduler, {}).verified == ()
    counts = {name: (request.num_accepted_drafts, request.num_rejected_drafts) for name, request in requests.items()}
    assert counts == {"a": (5, 1), "b": (1, 3), "c": (0, 0)}
    assert (scheduler.num_accepted_drafts, scheduler.num_rejected_drafts) == (6, 4)
    load = EngineLoad.of(scheduler)
    assert load.num_drafts_by_position == (4, 3, 3)
    assert load.num_accepted_by_position == (3, 2, 1)
    assert {name: len(request.output_ids) for name, request in requests.items()} == {"a": 9, "b": 5, "c": 4}


def test_an_engine_that_does_not_speculate_has_no_positions() -> None:
    scheduler = SpeculativeScheduler(EngineConfig(), PagedKVCachePool(40, 2, 4, 32), 32)
    assert EngineLoad.of(scheduler).num_drafts_by_position == ()


def paged(model: CausalLM, sizes: PagedSizes) -> tuple[PagedKVCachePool, PagedView]:
    pool = PagedKVCachePool(sizes.num_blocks, sizes.block_size, sizes.max_sequences)
    return pool, paged_view(model.config, sizes)


@pytest.mark.parametrize(("spec_length", "max_seq_len", "rows"), [(3, 64, 4 * 8), (7, 64, 8 * 8), (7, 20, 20 + 8)])
def test_the_pool_leaves_room_for_the_logits_of_all_drafts(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, spec_length: int, max_seq_len: int, rows: int
) -> None:
    """Each draft has a row; a step has no more rows than tokens."""
    model, seen = load_model(tiny_checkpoints["llama"]), list[int]()
    logits = CausalLM.logits
    monkeypatch.setattr(CausalLM, "logits", lambda self, hidden: seen.append(len(hidden)) or logits(self, hidden))
    options: dict[str, Any] = {"max_batch_size": 8, "max_num_batched_tokens": 12}
    drafts = {"use_speculative_decoding": True, "drafter": "ngram", "spec_length": spec_length}
    sizes = []
    for more in ({}, drafts):
        config = EngineConfig(str(tiny_checkpoints["llama"]), **options, **more)
        num_tokens = config.most_tokens_of_a_step(max_seq_len)
        memory = pool_size.measured_memory(config, model, max_seq_len, num_tokens, lambda sizes: paged(model, sizes))
        sizes.append(pool_size.step_bytes(config, model, num_tokens, *memory))
    assert seen == [8, rows]
    logit_bytes = 4 * model.config.vocab_size
    assert sizes[1] - sizes[0] >= (rows - 8) * logit_bytes
