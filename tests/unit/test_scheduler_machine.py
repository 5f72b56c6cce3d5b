"""Any order of adding, stepping, failing, breaking off and aborting: scheduler and pool agree, and nothing leaks."""

from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from shared.engine.draw import Drawn

from shared.cache.contiguous_pool import ContiguousKVCachePool
from shared.checkpoints.shapes import SHAPES
from shared.engine.config import BATCHING_MODES, SCHEDULER_POLICIES, EngineConfig
from shared.engine.record import EngineLoad, StepRecord
from shared.engine.request import Request, RequestStatus
from shared.errors import QueueFullError
from shared.loading.config_json import parse_config
from shared.sampling.params import SamplingParams
from shared.scheduling.continuous import ContinuousScheduler
from shared.scheduling.scheduler import Scheduler
from shared.scheduling.static import StaticScheduler
from shared.text.tokenizer import Tokenizer

SHAPE = parse_config(SHAPES["tiny-llama"])
MAX_SEQ_LEN = 24
LETTER = 70


class Machine(RuleBasedStateMachine):
    """``told`` holds the finish reason of each request that got one, ``aborted`` those that shall get none."""

    tokenizer: Tokenizer

    @initialize(
        mode=st.sampled_from(BATCHING_MODES),
        policy=st.sampled_from(SCHEDULER_POLICIES),
        interval=st.integers(1, 4),
        regions=st.integers(1, 4),
        budget=st.integers(1, 40),
    )
    def begin(self, mode: str, policy: str, interval: int, regions: int, budget: int) -> None:
        sharing = {"scheduler_policy": policy, "max_decode_interval": interval} if mode == "continuous" else {}
        config = EngineConfig(
            batching_mode=mode,
            max_batch_size=regions,
            max_num_batched_tokens=budget,
            max_waiting_requests=5,
            **sharing,
        )
        self.pool = ContiguousKVCachePool(SHAPE, regions, MAX_SEQ_LEN, torch.float32)
        made: type[Scheduler] = {"static": StaticScheduler, "continuous": ContinuousScheduler}[mode]
        self.scheduler = made(config, self.pool, self.tokenizer, MAX_SEQ_LEN)
        self.interval = interval if mode == "continuous" else 1
        self.requests: dict[str, Request] = {}
        self.told: dict[str, str] = {}
        self.aborted: set[str] = set()
        self.planned_at: dict[str, int] = {}
        self.order: list[str] = []

    @rule(prompt=st.integers(1, MAX_SEQ_LEN - 1), answer=st.integers(1, 12))
    def add(self, prompt: int, answer: int) -> None:
        name, params = str(len(self.requests)), SamplingParams(max_new_tokens=answer)
        if len(self.scheduler.waiting) == 5:
            with pytest.raises(QueueFullError):
                self.scheduler.check(name, prompt, params)
            return
        self.scheduler.check(name, prompt, params)
        self.requests[name] = Request(name, [5] * prompt, params, 0)
        self.scheduler.add(self.requests[name])

    def plan(self):
        schedule = self.scheduler.schedule()
        now = self.scheduler.num_steps
        for request in self.scheduler.running.values():
            if request.status is RequestStatus.DECODE:
                name = request.request_id
                assert request in schedule.decode or now - self.planned_at[name] < self.interval
        for request in (*schedule.prefill, *schedule.decode):
            self.planned_at[request.request_id] = now
        return schedule

    @rule(end=st.integers(-1, 3), fails=st.sets(st.integers(0, 7), max_size=3))
    def step(self, end: int, fails: set[int]) -> None:
        """The request at place ``end`` of a part gets an end of sequence, those at ``fails`` of all cannot be run."""
        schedule = self.plan()
        outputs, place = [], 0
        for part in (schedule.prefill, schedule.decode):
            for n, request in enumerate(part):
                before = list(request.output_ids)
                if place in fails:
                    outputs.append(self.scheduler.fail(request.request_id, RuntimeError("injected")))
                    assert request.output_ids == before
                else:
                    if request in schedule.prefill:
                        self.order.append(request.request_id)
                    ids = [min(self.tokenizer.eos_ids) if n == end else LETTER]
                    outputs += self.scheduler.commit([request], Drawn(ids))
                place += 1
        record = StepRecord.of(self.scheduler, schedule, outputs)
        for output in outputs:
            assert output.request_id not in self.told
            assert output.request_id not in self.aborted
            if output.finish_reason is not None:
                self.told[output.request_id] = output.finish_reason
        assert set(record.failed) == {o.request_id for o in outputs if o.error is not None}
        assert set(record.finished) == {n for n in self.told if n in {o.request_id for o in outputs}} - set(
            record.failed
        )
        done = [name for name, _ in record.prefilled] + list(record.decoded)
        assert sorted([*done, *record.failed]) == sorted(o.request_id for o in outputs)

    @rule()
    def break_off(self) -> None:
        """The process was interrupted in the forward: nothing was committed."""
        self.plan()

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
        if not hasattr(self, "scheduler"):
            return
        waiting, running = set(self.scheduler.waiting), set(self.scheduler.running)
        over = set(self.told) | self.aborted
        assert waiting | running | over == set(self.requests)
        assert len(waiting) + len(running) + len(over) == len(self.requests)
        assert set(self.scheduler.streams) == waiting | running
        expected = {RequestStatus.WAITING: waiting}
        for status, names in expected.items():
            assert all(self.requests[name].status is status for name in names)
        assert all(self.requests[n].status in (RequestStatus.PREFILL, RequestStatus.DECODE) for n in running)
        for name in over:
            wanted = RequestStatus.FAILED if self.told.get(name) == "error" else RequestStatus.FINISHED
            assert self.requests[name].status is wanted

    @invariant()
    def the_pool_holds_what_runs_and_nothing_else(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        running = self.scheduler.running
        assert set(self.pool.regions) == set(running)
        assert len(self.pool.audit()) == len(running), self.pool.audit()
        assert {n: self.pool.length(n) for n in running} == {n: r.num_computed_tokens for n, r in running.items()}
        load = EngineLoad.of(self.scheduler)
        assert (load.num_running, load.num_waiting) == (len(running), len(self.scheduler.waiting))
        assert load.kv_usage == pytest.approx(len(running) / self.pool.num_regions)

    @invariant()
    def prompts_were_run_in_the_order_they_came(self) -> None:
        if hasattr(self, "scheduler"):
            assert self.order == sorted(self.order, key=int)

    def teardown(self) -> None:
        """Whatever happened, the rest comes to an end."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2000):
            if not self.scheduler.has_work():
                break
            self.step(end=-1, fails=set())
        assert self.pool.audit() == []
        assert set(self.told) | self.aborted == set(self.requests)


@pytest.fixture(scope="module", autouse=True)
def _tokenizer(tiny_checkpoints: dict[str, Path]) -> None:
    Machine.tokenizer = Tokenizer.load(tiny_checkpoints["llama"])


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")


TestSchedulerAndPool = Machine.TestCase
TestSchedulerAndPool.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
