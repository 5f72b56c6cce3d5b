"""Any order of adding, stepping, failing, breaking off and aborting, in too little memory, with whole prompts and with
chunks: allocator, pool and scheduler agree, nothing leaks, no token is lost, no request overtakes another, and every
request ends."""

from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from shared.cache.paged import PagedKVCachePool
from shared.engine.config import SCHEDULER_POLICIES, EngineConfig
from shared.engine.request import Request
from shared.scheduling.chunked import ChunkedScheduler
from shared.scheduling.preemption import PreemptiveScheduler
from shared.scheduling.schedule import Schedule
from shared.scheduling.scheduler import Scheduler
from shared.text.tokenizer import Tokenizer
from tests.unit.scheduling_loop import SchedulingMachine, run_machine

MAX_SEQ_LEN = 24


class Machine(SchedulingMachine):
    """Blocks, which an older request may take."""

    num_preemptions: ClassVar[list[int]] = [0, 0]  # of all runs, by steps in flight
    num_in_flight_preempted = 0  # requests that lost their memory while a step computed them

    @initialize(
        about=st.fixed_dictionaries(
            {
                "block_size": st.sampled_from([1, 2, 3, 4, 16]),
                "scheduler_policy": st.sampled_from(SCHEDULER_POLICIES),
                "max_decode_interval": st.integers(1, 4),
                "max_batch_size": st.integers(1, 6),
                "max_num_batched_tokens": st.integers(1, 60),
            }
        ),
        num_blocks=st.integers(1, 12),
        watermark=st.integers(0, 3),
        shuffled=st.randoms(use_true_random=False),
        num_in_flight=st.integers(0, 1),
        chunks=st.none() | st.tuples(st.integers(1, 9), st.none() | st.integers(1, 3)),
    )
    def begin(
        self,
        about: dict[str, Any],
        num_blocks: int,
        watermark: int,
        shuffled: Random,
        num_in_flight: int,
        chunks: tuple[int, int | None] | None,
    ) -> None:
        size, most = chunks or (512, None)
        config = EngineConfig(prefill_chunk_size=size, max_prefill_chunks_per_step=most, **about)
        block_size = config.block_size
        pool = self.make_pool(num_blocks, block_size, config.max_batch_size)
        pool.watermark_tokens = watermark * block_size
        shuffled.shuffle(stack := pool.allocator.stack.tolist())
        pool.allocator.stack[:] = stack
        self.set_up(self.make_scheduler(config, pool, chunks is not None), num_in_flight)

    def make_pool(self, num_blocks: int, block_size: int, places: int) -> PagedKVCachePool:
        return PagedKVCachePool(num_blocks, block_size, places, MAX_SEQ_LEN)

    def make_scheduler(self, config: EngineConfig, pool: PagedKVCachePool, is_chunked: bool) -> Scheduler:
        return (ChunkedScheduler if is_chunked else PreemptiveScheduler)(config, pool, MAX_SEQ_LEN)

    @rule(prompts=st.lists(st.integers(1, 4), min_size=2, max_size=5))
    def add_a_crowd(self, prompts: list[int]) -> None:
        """Short prompts and long answers: all are admitted, and not all can stay."""
        for prompt in prompts:
            self.add_request(str(len(self.requests)), prompt, max(1, self.pool.request_capacity - prompt))

    def plan(self) -> Schedule:
        """What every schedule must keep, whatever became of the last one."""
        scheduler, pool = self.scheduler, self.pool
        order, before = self.live(), list(scheduler.running.values())
        had_work, flying = scheduler.has_work(), {r for r in before if r.num_pending_tokens}
        was_held_by_ended = bool(scheduler.ending)
        schedule = super().plan()
        running, waiting = list(scheduler.running.values()), list(scheduler.waiting.values())
        self.check_order(order)
        lost = [request for request in reversed(before) if request not in running]
        assert [*schedule.preempted] == [request.request_id for request in lost], "the youngest first"
        Machine.num_in_flight_preempted += len(flying & {*lost})
        if not was_held_by_ended:  # else the oldest may have to wait until a step in flight gives memory back
            assert order[:1] == running[:1], "the oldest always runs"
        if not self.loop.num_in_flight:
            assert bool(schedule) == had_work, "no step is lost while there is work"
        for request in running:
            granted = pool.granted[pool.rows[request]]
            assert request.num_scheduled_tokens <= granted <= self.most(request), "memory for what is written, no more"
        if set(running) - set(before):
            assert not schedule.preempted, "no request is admitted in a step in which one was preempted"
            assert len(running) == 1 or pool.free_tokens >= pool.watermark_tokens
        elif waiting and not schedule.preempted and len(running) + len(scheduler.ending) < self.config.max_batch_size:
            self.check_no_room(waiting, pool.free_tokens - (pool.watermark_tokens if running else 0))
        return schedule

    def check_order(self, order: list[Request]) -> None:
        """``order`` is that of all requests before the step."""
        assert self.live() == order, "a preempted request goes to the head of the queue"

    def check_no_room(self, waiting: list[Request], num_free: int) -> None:
        assert num_free < waiting[0].num_tokens, "a request that has room is admitted"

    def check_budget(self, schedule: Schedule) -> None:
        if not isinstance(self.scheduler, ChunkedScheduler):
            super().check_budget(schedule)
            return
        sizes = [entry.num_tokens for entry in schedule.prompts]
        budget = max(self.config.max_num_batched_tokens - len(schedule.decoding), 1)
        assert sum(sizes) <= budget
        assert max(sizes, default=0) <= self.config.prefill_chunk_size
        prefilling = [
            request
            for request in self.scheduler.running.values()
            if request.is_prefilling or request in schedule.prompts.requests
        ]
        assert schedule.prompts.requests == prefilling[: len(sizes)], "the oldest first, and none left out"
        assert bool(sizes) == bool(prefilling), "a prompt progresses in each step"
        limit = self.config.max_prefill_chunks_per_step
        if self.config.scheduler_policy == "decode_round_robin":
            limit = 1
        is_full = sum(sizes) == budget or len(sizes) == (limit or len(prefilling))
        assert is_full or len(sizes) == len(prefilling), "the budget is used"

    def most(self, request: Request) -> int:
        """Tokens that it can be granted; what was granted for a step in flight stays granted when that is dropped."""
        return request.num_tokens + request.num_pending_tokens + self.loop.num_in_flight

    @invariant()
    def blocks_are_those_of_the_holders(self) -> None:
        pool = self.pool
        assert pool.audit_blocks() == []
        for request in self.scheduler.running.values():
            granted = pool.granted[pool.rows[request]]
            assert len(pool.table(request)) == -(-granted // pool.block_size)
            assert request.num_computed_tokens <= granted <= self.most(request)
        assert pool.allocator.num_free == pool.allocator.num_blocks - self.num_held()

    def num_held(self) -> int:
        """The blocks that are not free."""
        return sum(len(self.pool.table(request)) for request in self.pool.rows)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "loop"):
            Machine.num_preemptions[self.loop.num_in_flight] += self.num_preempted


def test_allocator_pool_and_scheduler_agree(
    tiny_checkpoints: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")
    Machine.tokenizer = Tokenizer.load(tiny_checkpoints["llama"])
    Machine.num_preemptions, Machine.num_in_flight_preempted = [0, 0], 0

    def has_met() -> bool:
        return min(*Machine.num_preemptions, Machine.num_in_flight_preempted) >= 5

    run_machine(Machine, has_met, max_examples=60, stateful_step_count=30)
    assert min(Machine.num_preemptions) >= 5, "the runs met no storms"
    assert Machine.num_in_flight_preempted >= 5, "none was preempted while a step computed it"
