"""Any order of adding, stepping, failing, breaking off and aborting, in too little memory: allocator, pool and
scheduler agree, nothing leaks, nobody loses a token, nobody overtakes, and every request ends."""

from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from shared.cache.paged import PagedKVCachePool
from shared.checkpoints.shapes import SHAPES
from shared.engine.batch import Batch
from shared.engine.config import SCHEDULER_POLICIES, EngineConfig
from shared.engine.draw import Drawn
from shared.engine.record import EngineLoad, StepRecord
from shared.engine.request import Request, RequestStatus
from shared.errors import RequestError
from shared.loading.config_json import parse_config
from shared.sampling.params import SamplingParams
from shared.scheduling.preemption import PreemptiveScheduler
from shared.scheduling.scheduler import Schedule
from shared.text.tokenizer import Tokenizer

SHAPE = parse_config(SHAPES["tiny-llama"])
MAX_SEQ_LEN = 24
LETTER = 70  # an answer's first token; the next is the letter behind it, so a lost or doubled one shows


class Machine(RuleBasedStateMachine):
    """``told`` holds the finish reason of each request that got one, ``aborted`` those that shall get none."""

    tokenizer: Tokenizer
    num_preemptions = 0  # of all runs

    @initialize(
        num_blocks=st.integers(1, 12),
        block_size=st.sampled_from([1, 2, 3, 4, 16]),
        watermark=st.integers(0, 3),
        policy=st.sampled_from(SCHEDULER_POLICIES),
        interval=st.integers(1, 4),
        places=st.integers(1, 6),
        budget=st.integers(1, 60),
        shuffled=st.randoms(use_true_random=False),
    )
    def begin(
        self,
        num_blocks: int,
        block_size: int,
        watermark: int,
        policy: str,
        interval: int,
        places: int,
        budget: int,
        shuffled,
    ) -> None:
        self.config = EngineConfig(
            scheduler_policy=policy,
            max_decode_interval=interval,
            max_batch_size=places,
            max_num_batched_tokens=budget,
        )
        about = {"request_capacity": MAX_SEQ_LEN}
        self.pool = PagedKVCachePool(SHAPE, num_blocks, block_size, places, torch.float32, **about)
        self.pool.watermark_tokens = watermark * block_size
        shuffled.shuffle(stack := self.pool.allocator.stack.tolist())
        self.pool.allocator.stack[:] = stack
        self.view = self.pool.view(SHAPE.num_heads)
        self.scheduler = PreemptiveScheduler(self.config, self.pool, self.tokenizer, MAX_SEQ_LEN)
        self.requests: dict[str, Request] = {}
        self.told: dict[str, str] = {}
        self.aborted: set[str] = set()
        self.num_heard: dict[str, int] = {}  # tokens that came out, by request
        self.num_preempted = 0

    @rule(prompt=st.integers(1, MAX_SEQ_LEN - 1), answer=st.integers(1, MAX_SEQ_LEN))
    def add(self, prompt: int, answer: int) -> None:
        name, params = str(len(self.requests)), SamplingParams(max_new_tokens=answer)
        if min(prompt + answer, MAX_SEQ_LEN) > self.pool.request_capacity:
            with pytest.raises(RequestError, match=f"the KV memory holds {self.pool.request_capacity} for one"):
                self.scheduler.check(name, prompt, params)
            return
        self.scheduler.check(name, prompt, params)
        self.requests[name] = Request(name, [5] * prompt, params, 0)
        self.scheduler.add(self.requests[name])

    @rule(prompts=st.lists(st.integers(1, 4), min_size=2, max_size=5))
    def add_a_crowd(self, prompts: list[int]) -> None:
        """Short prompts and long answers: all are let in, and not all can stay."""
        for prompt in prompts:
            self.add(prompt, max(1, self.pool.request_capacity - prompt))

    def plan(self) -> Schedule:
        """What every plan must keep, whatever became of the last one."""
        scheduler, pool = self.scheduler, self.pool
        order = [*scheduler.running, *scheduler.waiting]
        before = set(scheduler.running)
        schedule = scheduler.schedule()
        running, waiting = scheduler.running, scheduler.waiting
        assert [*running, *waiting] == order, "who is preempted goes to the head of the queue"
        assert [*schedule.preempted] == [name for name in reversed(order) if name in before and name not in running]
        assert order[:1] == list(running)[:1], "the oldest always runs"
        for request in (*schedule.prefill, *schedule.decode):
            assert request.request_id in running, "nobody is run who was preempted"
        assert bool(schedule.prefill or schedule.decode) == scheduler.has_work(), "no step is lost while there is work"
        for name, request in running.items():
            assert pool.granted[pool.rows[name]] == request.num_tokens, "memory for what a forward writes, no more"
            if request.status is RequestStatus.DECODE and request not in schedule.decode:
                assert scheduler.num_steps - request.last_step < self.config.max_decode_interval
        if set(running) - before:
            assert not schedule.preempted, "nobody is admitted in a step in which somebody had to leave"
            assert len(running) == 1 or pool.free_tokens >= pool.watermark_tokens
        elif waiting and not schedule.preempted and len(running) < self.config.max_batch_size:
            first = next(iter(waiting.values()))
            assert pool.free_tokens - pool.watermark_tokens < first.num_tokens, "whoever has room is let in"
        self.num_preempted += len(schedule.preempted)
        for part in (schedule.prefill, schedule.decode):
            if part:
                self.view.prepare(Batch.of(part))  # raises where a token has no place
        return schedule

    @rule(end=st.integers(-1, 3), fails=st.sets(st.integers(0, 7), max_size=2))
    def step(self, end: int, fails: set[int]) -> None:
        """The request at place ``end`` of a part gets an end of sequence, those at ``fails`` of all cannot be run."""
        schedule = self.plan()
        outputs, place = [], 0
        for part in (schedule.prefill, schedule.decode):
            for n, request in enumerate(part):
                if place in fails:
                    outputs.append(self.scheduler.fail(request.request_id, RuntimeError("injected")))
                else:
                    outputs += self.commit(request, n == end)
                place += 1
        record = StepRecord.of(self.scheduler, schedule, outputs)
        assert record.preempted == schedule.preempted
        done = [*(name for name, _ in record.prefilled), *record.decoded, *record.failed]
        assert sorted(done) == sorted(output.request_id for output in outputs)
        for name, num_computed in record.prefilled:
            assert num_computed == self.requests[name].num_tokens - 1, "all but the token that was drawn"
        self.hear(outputs)

    def commit(self, request: Request, is_last: bool):
        letter = LETTER + len(request.output_ids)
        return self.scheduler.commit([request], Drawn([min(self.tokenizer.eos_ids) if is_last else letter]))

    def hear(self, outputs) -> None:
        for output in outputs:
            assert output.request_id not in self.told
            assert output.request_id not in self.aborted
            self.num_heard[output.request_id] = self.num_heard.get(output.request_id, 0) + (output.error is None)
            if output.finish_reason is not None:
                self.told[output.request_id] = output.finish_reason

    @rule(num_committed=st.integers(0, 4))
    def break_off(self, num_committed: int) -> None:
        """The process was interrupted: the first of the step have their tokens, the others nothing."""
        schedule = self.plan()
        for request in (*schedule.prefill, *schedule.decode)[:num_committed]:
            self.hear(self.commit(request, is_last=False))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        was_here = name in self.scheduler
        assert self.scheduler.abort(name) is was_here
        if was_here:
            self.aborted.add(name)

    @invariant()
    def everybody_is_in_one_place(self) -> None:
        waiting, running = self.scheduler.waiting, self.scheduler.running
        over = set(self.told) | self.aborted
        assert {*waiting, *running, *over} == set(self.requests)
        assert len(waiting) + len(running) + len(over) == len(self.requests)
        order = [*map(int, running), *map(int, waiting)]
        assert order == sorted(order), "all who run came before all who wait, and each in the order they came"
        assert set(self.scheduler.streams) == {*waiting, *running}
        for status, names in (("waiting preempted", waiting), ("prefill decode", running), ("finished failed", over)):
            assert {self.requests[name].status.value for name in names} <= set(status.split())
        load = EngineLoad.of(self.scheduler)
        assert (load.num_running, load.num_waiting) == (len(running), len(waiting))
        assert load.num_preemptions == self.num_preempted

    @invariant()
    def no_token_is_lost_or_doubled(self) -> None:
        for name, request in self.requests.items():
            ids = request.output_ids[:-1] if self.told.get(name) == "eos" else request.output_ids
            assert ids == [LETTER + n for n in range(len(ids))]
            assert len(request.output_ids) == self.num_heard.get(name, 0)
            assert request.num_computed_tokens == self.pool.length(name) or name not in self.scheduler

    @invariant()
    def the_blocks_are_those_of_who_runs(self) -> None:
        pool, running = self.pool, self.scheduler.running
        assert pool.audit_blocks() == []
        assert len(pool.audit()) == len(running), pool.audit()
        assert set(pool.rows) == set(running)
        for name, request in running.items():
            granted = pool.granted[pool.rows[name]]
            assert len(pool.table(name)) == -(-granted // pool.block_size)
            assert request.num_computed_tokens <= granted <= request.num_tokens
        assert pool.used_tokens == sum(request.num_computed_tokens for request in running.values())
        held = sum(len(pool.table(name)) for name in running)
        assert pool.allocator.num_free == pool.allocator.num_blocks - held

    def teardown(self) -> None:
        """Whatever happened, the rest comes to an end: the oldest gets a token in every few steps."""
        if not hasattr(self, "scheduler"):
            return
        steps = len(self.requests) * (MAX_SEQ_LEN + 1) * self.config.max_decode_interval
        for _ in range(steps):
            if not self.scheduler.has_work():
                break
            self.step(end=-1, fails=set())
        assert not self.scheduler.has_work()
        assert self.pool.audit() == []
        assert self.pool.reclaim(()) == []
        assert set(self.told) | self.aborted == set(self.requests)
        Machine.num_preemptions += self.num_preempted


def test_allocator_pool_and_scheduler_agree(
    tiny_checkpoints: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")
    Machine.tokenizer = Tokenizer.load(tiny_checkpoints["llama"])
    Machine.num_preemptions = 0
    run_state_machine_as_test(Machine, settings=settings(max_examples=50, stateful_step_count=30, deadline=None))
    assert Machine.num_preemptions >= 20, "the runs met no storms"
