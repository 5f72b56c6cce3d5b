"""Any order of adding, stepping, failing, breaking off and aborting: scheduler and pool agree, and nothing leaks."""

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from shared.cache.contiguous_pool import ContiguousKVCachePool
from shared.engine.config import BATCHING_MODES, SCHEDULER_POLICIES, EngineConfig
from shared.engine.record import EngineLoad
from shared.engine.request import Request
from shared.scheduling.continuous import ContinuousScheduler
from shared.scheduling.schedule import Schedule
from shared.scheduling.scheduler import Scheduler
from shared.scheduling.static import StaticScheduler
from shared.text.tokenizer import Tokenizer
from tests.unit.scheduling_loop import SchedulingMachine

MAX_SEQ_LEN = 24


class Machine(SchedulingMachine):
    """Regions, which a request keeps until it ends."""

    @initialize(
        mode=st.sampled_from(BATCHING_MODES),
        policy=st.sampled_from(SCHEDULER_POLICIES),
        interval=st.integers(1, 4),
        regions=st.integers(1, 4),
        budget=st.integers(1, 40),
        num_in_flight=st.integers(0, 1),
    )
    def begin(self, mode: str, policy: str, interval: int, regions: int, budget: int, num_in_flight: int) -> None:
        sharing = {"scheduler_policy": policy, "max_decode_interval": interval} if mode == "continuous" else {}
        config = EngineConfig(
            batching_mode=mode, max_batch_size=regions, max_num_batched_tokens=budget, max_waiting_requests=5, **sharing
        )
        pool = ContiguousKVCachePool(regions, MAX_SEQ_LEN)
        made: type[Scheduler] = {"static": StaticScheduler, "continuous": ContinuousScheduler}[mode]
        self.set_up(made(config, pool, MAX_SEQ_LEN), num_in_flight)
        self.order: list[Request] = []

    def plan(self) -> Schedule:
        had_work, was_running = self.scheduler.has_work(), list(self.scheduler.running)
        schedule = super().plan()
        if not self.loop.num_in_flight:
            assert bool(schedule) == had_work, "no step is lost while there is work"
        if self.config.batching_mode == "static" and was_running:
            assert list(self.scheduler.running) == was_running, "none joins a batch that runs"
        self.order += [entry.request for entry in schedule.prompts if entry.request not in self.order]
        return schedule

    @invariant()
    def a_region_is_all_that_a_request_can_come_to_need(self) -> None:
        for request in self.scheduler.running.values():
            assert self.pool.reserve(request, self.longest(request)), "granted at admission, so never refused"
        held = len(self.scheduler.running) + len(self.scheduler.ending)
        assert EngineLoad.of(self.scheduler).kv_usage == pytest.approx(held / self.pool.max_sequences)
        assert self.num_preempted == 0

    @invariant()
    def prompts_are_run_in_the_order_they_came(self) -> None:
        numbers = [self.requests.index(request) for request in self.order]
        assert numbers == sorted(numbers)


@pytest.fixture(scope="module", autouse=True)
def _tokenizer(tiny_checkpoints: dict[str, Path]) -> None:
    Machine.tokenizer = Tokenizer.load(tiny_checkpoints["llama"])


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")


TestSchedulerAndPool = Machine.TestCase
TestSchedulerAndPool.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
