"""Any order of adding, stepping, failing, breaking off and aborting with a draft model in too little memory.

Its KV cache holds the text of each request and nothing of a rejected draft, both pools add up, and no token is lost."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from shared.cache.paged_layout import PagedSizes
from shared.cache.paired import PairedPool
from shared.cache.prefix import PrefixKVCachePool
from shared.engine.batch import Batch
from shared.engine.request import Request, RequestStatus
from shared.engine.sampler import SampledTokens
from shared.sampling.params import SamplingParams
from shared.sampling.sampler import SamplingRow
from shared.scheduling.schedule import Schedule, Scheduled
from shared.scheduling.speculative import SpeculativeScheduler, settle
from shared.speculation.draft_model import DraftModel
from shared.text.tokenizer import Tokenizer
from tests.unit.scheduling_loop import SchedulingMachine, run_machine
from tests.unit.test_speculative_machine import MAX_SEQ_LEN, NO_TOKEN, DraftLoop, SpeculativeMachine

MOST_STEPS = 3 * MAX_SEQ_LEN  # for a request, more than any run needs to come to its end


class Followed(DraftModel):
    """Shows its runner which requests a batch is of; no model is loaded."""

    def __init__(self) -> None:
        pass

    def _run(self, schedule: Schedule, entries: Sequence[Scheduled], num_ahead: int) -> Any:
        requests = {twin: request for request, twin in self.pair.twins.items()}
        self.runner.requests = [requests[entry.request] for entry in entries]  # type: ignore[attr-defined]
        return super()._run(schedule, entries, num_ahead)


class NaiveRunner:
    """A draft model whose memory holds token ids: each forward checks that it reads the text before its tokens."""

    def __init__(self, machine: "DraftMachine") -> None:
        self.machine = machine
        self.requests: list[Request] = []
        self.memory: dict[int, int] = {}  # by slot
        self.last_ids: dict[int, int] = {}  # by the pool's row
        self.sampler = SimpleNamespace(penalties=SimpleNamespace(forget=lambda: None))

    def forward(self, batch: Batch) -> SimpleNamespace:
        layout: Any = batch.layout
        size = self.machine.config.block_size
        for source, target in layout.copies.tolist():
            for offset in range(size):
                self.memory[target * size + offset] = self.memory.get(source * size + offset, NO_TOKEN)
        ids = batch.token_ids.copy()
        ids[batch.pending] = [self.last_ids[int(layout.rows[number])] for number in batch.pending_sequences]
        self.memory |= zip(layout.slot_mapping.tolist(), ids.tolist(), strict=True)
        tables = np.split(layout.tables, layout.table_starts[1:-1])
        for request, table, num_cached in zip(self.requests, tables, layout.num_cached.tolist(), strict=True):
            read = [self.memory[int(table[n // size]) * size + n % size] for n in range(num_cached)]
            known = [*request.token_ids, *self.machine.drawn.get(request, [])]
            assert read == known[:num_cached], "the draft model reads the request's text and its own drafts"
        return SimpleNamespace(batch=batch, requests=self.requests, errors=self.errors(len(batch)))

    def repeat(self, launched: SimpleNamespace) -> None:
        return None

    def errors(self, num_sequences: int) -> dict[int, Exception]:
        chance = self.machine.chance
        return {n: RuntimeError("injected") for n in range(num_sequences) if chance.random() < 0.02}

    def sample(self, launched: SimpleNamespace, rows: list[SamplingRow]) -> SimpleNamespace:
        batch, errors, ids = launched.batch, dict(launched.errors), []
        for number, row in zip(batch.logit_sequences.tolist(), rows, strict=True):
            if number in errors:
                continue
            request = launched.requests[number]
            is_right = self.machine.chance.random() < 0.8
            token_id = self.machine.token_at(request, row.index) if is_right else NO_TOKEN
            self.last_ids[int(batch.layout.rows[number])] = token_id
            self.machine.drawn.setdefault(request, []).append(token_id)
            ids.append(token_id)
        return SimpleNamespace(errors=errors, wait=lambda: SampledTokens(ids, None, errors))


class DraftMachine(SpeculativeMachine):
    """The machine of phase 11's scheduler, with drafts that a draft model proposes."""

    num_preempted_in_all: ClassVar[int] = 0

    @initialize(
        about=st.fixed_dictionaries(
            {
                "block_size": st.sampled_from([1, 2, 3]),
                "max_batch_size": st.integers(1, 5),
                "max_num_batched_tokens": st.integers(1, 40),
                "prefill_chunk_size": st.integers(1, 9),
                "spec_length": st.integers(1, 5),
                "adapt_spec_length": st.booleans(),
                "draft_model": st.just("a draft model"),
            }
        ),
        num_blocks=st.integers(2, 12),
        num_in_flight=st.integers(0, 1),
        chance=st.randoms(use_true_random=False),
    )
    def begin(self, about: dict[str, Any], num_blocks: int, num_in_flight: int, chance: Random) -> None:
        config = self.speculating(**about)
        sizes = PagedSizes(num_blocks, config.block_size, config.max_batch_size, 64, MAX_SEQ_LEN)
        self.drafter = Followed()
        self.drafter.config, self.drafter.distributions = config, {}
        self.drafter.most_tokens = config.prefill_chunk_size
        self.drafter.room = config.most_tokens_of_a_step(MAX_SEQ_LEN)
        self.drafter.pool = PrefixKVCachePool(sizes, None)
        self.drafter.pair = PairedPool(PrefixKVCachePool(sizes, None), self.drafter.pool)
        self.drafter.runner = NaiveRunner(self)  # type: ignore[assignment]
        self.drawn: dict[Request, list[int]] = {}  # the drafts of the step, by request
        self.chance = chance
        self.set_up(SpeculativeScheduler(config, self.drafter.pair, MAX_SEQ_LEN), num_in_flight)
        self.loop = DraftLoop(self.scheduler, self.tokenizer, self.token_at, num_in_flight)

    def plan(self) -> Schedule:
        """With the drafts of the draft model, which is also called for steps without drafts."""
        if any(schedule.has_drafts for schedule in self.loop.in_flight):
            self.finish_all()
        schedule = SchedulingMachine.plan(self)
        if schedule.has_drafts:
            self.finish_all()
        self.drawn.clear()
        self.drafter.propose(schedule)
        SpeculativeMachine.num_short += sum(
            len(request.draft_ids) < count for request, _, _, count, _, _ in schedule if count
        )
        schedule = settle(schedule, self.pool)
        self.pool.layout(schedule)
        return schedule

    def teardown(self) -> None:
        """Whatever happened, the rest comes to an end soon."""
        if hasattr(self, "loop"):
            for _ in range(MOST_STEPS * (1 + len(self.requests))):
                if not self.loop.has_work():
                    break
                self.step(end=-1, fails=set())
                if not self.scheduler.has_work():
                    self.finish_all()
            assert not self.loop.has_work(), "a request never comes to its end"
        super().teardown()

    @invariant()
    def memory_is_held_by_those_that_run_or_are_in_flight(self) -> None:
        pair: Any = self.pool
        held = {*self.scheduler.running.values(), *self.scheduler.ending}
        assert pair.twins.keys() == set(pair.target.holdings()[1]) == held
        assert set(pair.draft.holdings()[1]) == set(pair.twins.values())
        assert len(pair.audit()) == 2 * len(held), pair.audit()

    @invariant()
    def nothing_is_left_of_rejected_drafts(self) -> None:
        pair: Any = self.pool
        for pool in (pair.target, pair.draft):
            assert pool.audit_blocks() == []
        for request, twin in pair.twins.items():
            assert request.token_ids[: twin.num_tokens] == twin.token_ids
            assert pair.draft.length(twin) <= request.num_tokens
            assert NO_TOKEN not in request.token_ids
            if request.status is RequestStatus.RUNNING:
                flying = sum(entry.num_drafts for entry in self.in_flight(request))
                granted = pair.target.granted[pair.target.rows[request]]
                assert granted == pair.draft.granted[pair.draft.rows[twin]], "both pools reserve, or none"
                assert granted <= request.num_tokens + request.num_pending_tokens + flying


def test_a_draft_models_memory_follows_the_text(
    tiny_checkpoints: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")
    machine = DraftMachine
    machine.tokenizer = Tokenizer.load(tiny_checkpoints["llama"])
    shared = SpeculativeMachine
    shared.num_accepted = shared.num_rejected = shared.num_short = shared.num_preemptions = 0

    def met() -> tuple[int, ...]:
        return shared.num_accepted, shared.num_rejected, shared.num_preemptions

    def has_met() -> bool:
        return min(met()) >= 5

    run_machine(machine, has_met, max_examples=30, stateful_step_count=25)
    assert has_met(), met()


def test_drafts_of_an_interrupted_step_are_forgotten_with_their_place() -> None:
    sizes = PagedSizes(8, 2, 2, 64, MAX_SEQ_LEN)
    drafter = Followed()
    drafter.pool = PrefixKVCachePool(sizes, None)
    drafter.pair = pair = PairedPool(PrefixKVCachePool(sizes, None), drafter.pool)
    request = Request("a", [5, 6, 7], SamplingParams(max_new_tokens=12), 0)
    pair.admit(request)
    assert pair.reserve(request, 7)
    twin = pair.twins[request]
    drafter.pool.commit(twin, 3)
    twin.draft_ids = [10, 11, 12, 13]  # the keys of the first three are written
    pair.shrink(request, 5)
    assert twin.draft_ids == [10, 11, 12]
    pair.shrink(request, request.num_tokens)  # as after an interruption
    for token_id in (10, 11, 12):
        request.append(token_id)
    assert pair.reserve(request, 7)  # in other blocks, perhaps
    assert drafter._follow(twin, request) == 3
