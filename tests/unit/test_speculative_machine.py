"""Any order of adding, stepping, failing, breaking off and aborting, with right and wrong drafts in too little memory:
no token is lost or doubled, nothing leaks, and what was rejected leaves no trace in counts, tables and tree."""

from collections.abc import Collection
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from shared.cache.paged import PagedKVCachePool
from shared.cache.paged_layout import PagedSizes
from shared.cache.prefix import PrefixKVCachePool
from shared.engine.config import SCHEDULER_POLICIES, EngineConfig
from shared.engine.request import Request, RequestStatus
from shared.engine.sampler import SampledTokens
from shared.scheduling.schedule import Schedule
from shared.scheduling.speculative import SpeculativeScheduler, settle
from shared.text.tokenizer import Tokenizer
from tests.unit.scheduling_loop import Loop, SchedulingMachine, run_machine
from tests.unit.test_prefix_machine import PrefixMachine

MAX_SEQ_LEN = 24
NO_TOKEN = 999_999


class DraftLoop(Loop):
    """A logit row behind a wrong draft draws a token of no answer."""

    def commit(self, part: Schedule, errors: Collection[Request] = ()) -> None:
        failed = {n: RuntimeError("injected") for n, entry in enumerate(part) if entry.request in errors}
        ids = []
        for entry in part:
            request, is_right = entry.request, True
            first = entry.start + entry.num_tokens - entry.num_drafts - request.num_prompt_tokens
            for row in range(entry.num_logit_rows if request not in errors else 0):
                token_id = self.token_at(request, first + row)
                ids.append(token_id if is_right else NO_TOKEN)
                is_right = is_right and row < entry.num_drafts and request.draft_ids[row] == token_id
        self.scheduler.commit(part, SampledTokens(ids, None, failed))


class SpeculativeMachine(SchedulingMachine):
    """Drafts of random number and quality."""

    num_accepted: ClassVar[int] = 0
    num_rejected: ClassVar[int] = 0
    num_short: ClassVar[int] = 0  # entries for which fewer drafts were proposed than granted
    num_preemptions: ClassVar[int] = 0

    @initialize(
        about=st.fixed_dictionaries(
            {
                "block_size": st.sampled_from([1, 2, 3, 16]),
                "scheduler_policy": st.sampled_from(SCHEDULER_POLICIES),
                "max_batch_size": st.integers(1, 6),
                "max_num_batched_tokens": st.integers(1, 60),
                "prefill_chunk_size": st.integers(1, 9),
                "spec_length": st.integers(1, 6),
                "adapt_spec_length": st.booleans(),
                "use_prefix_caching": st.booleans(),
                "drafter": st.just("ngram"),
            }
        ),
        num_blocks=st.integers(1, 12),
        num_in_flight=st.integers(0, 1),
        chance=st.randoms(use_true_random=False),
    )
    def begin(self, about: dict[str, Any], num_blocks: int, num_in_flight: int, chance: Random) -> None:
        config = self.speculating(**about)
        block_size, places = config.block_size, config.max_batch_size
        sizes = PagedSizes(num_blocks, block_size, places, 64, MAX_SEQ_LEN)
        pool: PagedKVCachePool = PrefixKVCachePool(sizes, None)
        if not config.use_prefix_caching:
            pool = PagedKVCachePool(num_blocks, block_size, places, MAX_SEQ_LEN)
        self.chance = chance
        self.set_up(SpeculativeScheduler(config, pool, MAX_SEQ_LEN), num_in_flight)
        self.loop = DraftLoop(self.scheduler, self.tokenizer, self.token_at, num_in_flight)

    def speculating(self, **about: Any) -> EngineConfig:
        """A configuration; an empty step, before which ends must be known, counts as a step of the interval."""
        return EngineConfig(max_decode_interval=10_000, use_speculative_decoding=True, **about)

    def add_request(self, name: str, num_prompt_tokens: int, max_new_tokens: int) -> None:
        super().add_request(name, num_prompt_tokens, max_new_tokens)
        request = self.by_name.get(name)
        if request is not None and request is self.requests[-1] and not request.end_ids:
            request.end_ids = (min(self.tokenizer.eos_ids),)
            if self.chance.random() < 0.5:
                self.ends[request] = self.chance.randrange(max_new_tokens)

    @rule(prompts=st.lists(st.integers(1, 4), min_size=2, max_size=5))
    def add_a_crowd(self, prompts: list[int]) -> None:
        """Short prompts and long answers: all are admitted, and not all can stay."""
        for prompt in prompts:
            self.add_request(str(len(self.requests)), prompt, max(1, self.pool.request_capacity - prompt))

    def plan(self) -> Schedule:
        """With the drafts that are proposed; as in the engine, the steps in flight are finished first."""
        if any(schedule.has_drafts for schedule in self.loop.in_flight):
            self.finish_all()
        schedule = super().plan()
        num_tokens = int(schedule.num_tokens.sum())
        assert (
            num_tokens <= max(self.config.max_num_batched_tokens, schedule.num_decoding + 1) or not schedule.has_drafts
        )
        if not schedule.has_drafts:
            return schedule
        self.finish_all()
        for request, start, _, num_drafts, _, _ in schedule:
            first = start + 1 - request.num_prompt_tokens
            count = self.chance.randint(0, num_drafts) if request.status is RequestStatus.RUNNING else 0
            request.draft_ids = [
                self.token_at(request, first + n) if self.chance.random() < 0.8 else NO_TOKEN for n in range(count)
            ]
            SpeculativeMachine.num_short += count < num_drafts
        schedule = settle(schedule, self.pool)
        self.pool.layout(schedule)
        return schedule

    @rule(end=st.integers(-1, 3), fails=st.sets(st.integers(0, 7), max_size=2))
    def step(self, end: int, fails: set[int]) -> None:
        """Those at the places ``fails`` of the step that is finished cannot be computed; ``end`` is not used."""
        self.loop.in_flight.append(self.plan())
        while len(self.loop.in_flight) > self.loop.num_in_flight:
            schedule = self.loop.in_flight.popleft()
            before = [(request.num_accepted_drafts, request.num_rejected_drafts) for request in schedule.requests]
            self.loop.finish(schedule, [entry.request for n, entry in enumerate(schedule) if n in fails])
            self.hear(self.loop.processor.take())
            for request, (accepted, rejected) in zip(schedule.requests, before, strict=True):
                SpeculativeMachine.num_accepted += request.num_accepted_drafts - accepted
                SpeculativeMachine.num_rejected += request.num_rejected_drafts - rejected

    def finish_all(self) -> None:
        while self.loop.in_flight:
            self.loop.finish(self.loop.in_flight.popleft())
            self.hear(self.loop.processor.take())

    def num_written(self) -> int:
        return PrefixMachine.num_written(self) if hasattr(self.pool, "tree") else super().num_written()  # type: ignore

    @invariant()
    def the_order_is_that_of_arrival(self) -> None:
        """Not here: requests that wait for blocks are overtaken."""

    @invariant()
    def nothing_is_left_of_rejected_drafts(self) -> None:
        pool = self.pool
        assert isinstance(pool, PagedKVCachePool)
        assert pool.audit_blocks() == []
        for request in self.scheduler.running.values():
            granted = pool.granted[pool.rows[request]]
            flying = sum(entry.num_drafts for entry in self.in_flight(request))
            assert granted <= request.num_tokens + request.num_pending_tokens + flying
            assert NO_TOKEN not in request.token_ids

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "loop"):
            SpeculativeMachine.num_preemptions += self.num_preempted


def test_drafts_leave_no_trace(tiny_checkpoints: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")
    machine = SpeculativeMachine
    machine.tokenizer = Tokenizer.load(tiny_checkpoints["llama"])
    machine.num_accepted = machine.num_rejected = machine.num_short = machine.num_preemptions = 0

    def met() -> tuple[int, ...]:
        return machine.num_accepted, machine.num_rejected, machine.num_short, machine.num_preemptions

    def has_met() -> bool:
        return min(met()) >= 5

    run_machine(machine, has_met, max_examples=50, stateful_step_count=30)
    assert has_met(), met()
