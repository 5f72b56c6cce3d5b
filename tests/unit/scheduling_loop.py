"""An engine's loop without a model: tokens by hand, committed in their own step or one step late.

``SchedulingMachine`` is what the state machines of all schedulers have in common.
"""

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from shared.engine.output import StepOutput
from shared.engine.output_processor import OutputProcessor
from shared.engine.record import EngineLoad, StepRecord
from shared.engine.request import Request, RequestStatus
from shared.engine.sampler import SampledTokens
from shared.errors import QueueFullError, RequestError
from shared.sampling.params import SamplingParams
from shared.scheduling.chunked import ChunkedScheduler
from shared.scheduling.schedule import Schedule, Scheduled
from shared.scheduling.scheduler import Scheduler
from shared.text.stopping import FinishReason
from shared.text.tokenizer import Tokenizer

TokenAt = Callable[[Request, int], int]
"""The token of a request's answer at an index: what a model would say, whatever it was scheduled beside."""


def index_of(entry: Scheduled) -> int:
    """Which token of its answer an entry draws; the entry alone says so, while earlier tokens are in flight."""
    return entry.start + entry.num_tokens - len(entry.request.prompt_ids)


def names(schedule: Schedule) -> str:
    return "".join(entry.request.request_id for entry in schedule)


def run_machine(
    machine: type[RuleBasedStateMachine], has_met: Callable[[], bool], max_examples: int, stateful_step_count: int
) -> None:
    """Run a state machine, which does random things, up to twelve times until it ``has_met`` what it is for."""
    sizes = settings(max_examples=max_examples, stateful_step_count=stateful_step_count, deadline=None)
    chosen = settings(sizes, derandomize=False)  # in CI too, where all runs would be the same
    for _ in range(12):
        run_state_machine_as_test(machine, settings=chosen)
        if has_met():
            return


class Loop:
    """``num_in_flight`` steps are scheduled before the one before them is committed."""

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer, token_at: TokenAt, num_in_flight: int = 0) -> None:
        self.scheduler = scheduler
        self.processor = OutputProcessor(tokenizer, scheduler.max_seq_len)
        self.token_at = token_at
        self.num_in_flight = num_in_flight
        self.in_flight: deque[Schedule] = deque()

    def add(self, request: Request) -> Request:
        self.scheduler.add(request)
        self.processor.add(request)
        return request

    def abort(self, request_id: str) -> bool:
        request = self.scheduler.abort(request_id)
        if request is not None:
            self.processor.drop(request)
        return request is not None

    def step(self) -> tuple[Schedule, list[StepOutput]]:
        """What it schedules, and the outputs of the step that it commits."""
        schedule = self.scheduler.schedule()
        self.in_flight.append(schedule)
        while len(self.in_flight) > self.num_in_flight:
            self.finish(self.in_flight.popleft())
        return schedule, self.processor.take()

    def finish(self, schedule: Schedule, errors: Collection[Request] = ()) -> None:
        """As one batch where steps overlap or prompts are chunked; else prompts by themselves, then what decodes."""
        is_one = self.num_in_flight or isinstance(self.scheduler, ChunkedScheduler)
        for part in (schedule,) if is_one else (schedule.prompts, schedule.decoding):
            self.commit(part, errors)
            self.scheduler.finish(self.processor.process(part))

    def commit(self, part: Schedule, errors: Collection[Request] = ()) -> None:
        """Those in ``errors`` could not be computed."""
        failed = {n: RuntimeError("injected") for n, entry in enumerate(part) if entry.request in errors}
        sampled = [entry for entry in part if entry.num_logit_rows and entry.request not in errors]
        ids = [self.token_at(entry.request, index_of(entry)) for entry in sampled]
        self.scheduler.commit(part, SampledTokens(ids, None, failed))

    def break_off(self) -> list[StepOutput]:
        """What an engine does when a step is interrupted; the outputs that come with the next step."""
        self.in_flight.clear()
        self.scheduler.drop_in_flight()
        self.scheduler.finish(self.processor.catch_up())
        return self.processor.take()

    def has_work(self) -> bool:
        return bool(self.in_flight) or self.scheduler.has_work()


class SchedulingMachine(RuleBasedStateMachine):
    """Any order of adding, stepping, failing, breaking off and aborting, with a step in flight or none.

    Each request has tokens that no other has, so a token that is lost, doubled or given to the wrong request shows.
    ``told`` holds the finish reason of each request that got one, ``aborted`` the requests that shall get none.
    """

    tokenizer: Tokenizer

    def set_up(self, scheduler: Scheduler, num_in_flight: int) -> None:
        self.scheduler, self.pool, self.config = scheduler, scheduler.pool, scheduler.config
        self.loop = Loop(scheduler, self.tokenizer, self.token_at, num_in_flight)
        self.requests: list[Request] = []  # in the order they came
        self.by_name: dict[str, Request] = {}  # the last of each id
        self.told: dict[Request, FinishReason] = {}
        self.aborted: set[Request] = set()
        self.num_heard: dict[Request, int] = {}
        self.ends: dict[Request, int] = {}  # the index of the end-of-sequence token
        self.num_preempted = 0

    def token_at(self, request: Request, index: int) -> int:
        if self.ends.get(request) == index:
            return min(self.tokenizer.eos_ids)
        return 1000 + 100 * self.requests.index(request) + index

    def longest(self, request: Request) -> int:
        return min(len(request.prompt_ids) + request.params.max_new_tokens, self.scheduler.max_seq_len)

    def prompt(self, num_tokens: int) -> list[int]:
        return [5] * num_tokens

    def live(self) -> list[Request]:
        return [*self.scheduler.running.values(), *self.scheduler.waiting.values()]

    def add_request(self, name: str, num_prompt_tokens: int, max_new_tokens: int) -> None:
        params = SamplingParams(max_new_tokens=max_new_tokens)
        if min(num_prompt_tokens + max_new_tokens, self.scheduler.max_seq_len) > self.pool.request_capacity:
            with pytest.raises(RequestError, match=f"the KV cache holds {self.pool.request_capacity} for one"):
                self.scheduler.check(name, num_prompt_tokens, params)
            return
        if len(self.scheduler.waiting) == self.config.max_waiting_requests:
            with pytest.raises(QueueFullError):
                self.scheduler.check(name, num_prompt_tokens, params)
            return
        self.scheduler.check(name, num_prompt_tokens, params)
        request = Request(name, self.prompt(num_prompt_tokens), params, 0)
        self.requests.append(request)
        self.by_name[name] = self.loop.add(request)

    @rule(prompt=st.integers(1, 23), answer=st.integers(1, 12))
    def add(self, prompt: int, answer: int) -> None:
        self.add_request(str(len(self.requests)), prompt, answer)

    def plan(self) -> Schedule:
        """Schedule a step, and check what holds for every scheduler in every state."""
        scheduler = self.scheduler
        decoding = [r for r in scheduler.running.values() if self.can_decode(r)]
        schedule = scheduler.schedule()
        planned = [entry.request for entry in schedule]
        assert len(set(planned)) == len(planned) <= len(scheduler.running) <= self.config.max_batch_size
        assert [*schedule] == [*schedule.decoding, *schedule.prompts], "decoding requests stand before prompts"
        self.check_budget(schedule)
        for entry in schedule:
            request = entry.request
            assert scheduler.running[request.request_id] is request
            assert entry.start + entry.num_tokens + 1 <= self.longest(request), "no step for a token too many"
            rest = request.num_tokens + request.num_pending_tokens - (entry.start + entry.num_tokens)
            assert entry.num_tokens > 0
            assert rest == 1 if entry.num_logit_rows else rest > 0, "sampled where the last known token is computed"
        for request in decoding:
            if request in planned or request.request_id not in scheduler.running:
                continue
            assert scheduler.num_steps - request.last_step < self.config.max_decode_interval
        for part in (schedule.prompts, schedule.decoding):
            self.pool.layout(part)  # raises where a token has no place
        self.num_preempted += len(schedule.preempted)
        return schedule

    def check_budget(self, schedule: Schedule) -> None:
        num_prompt_tokens = sum(entry.num_tokens for entry in schedule.prompts)
        assert num_prompt_tokens <= self.config.max_num_batched_tokens or len(schedule.prompts) == 1

    def can_decode(self, request: Request) -> bool:
        is_open = request.num_tokens + request.num_pending_tokens < self.longest(request)
        return not request.is_prefilling and is_open

    @rule(end=st.integers(-1, 3), fails=st.sets(st.integers(0, 7), max_size=2))
    def step(self, end: int, fails: set[int]) -> None:
        """Of those that get a token the one at place ``end`` gets an end of sequence; those at ``fails`` get none."""
        self.loop.in_flight.append(self.plan())
        if len(self.loop.in_flight) <= self.loop.num_in_flight:
            return
        schedule = self.loop.in_flight.popleft()
        failing = [entry.request for n, entry in enumerate(schedule) if n in fails]
        awaited = [entry for entry in schedule if self.is_awaited(entry)]
        computed = [entry for entry in awaited if entry.num_logit_rows or entry.request in failing]
        sampled = [entry for entry in computed if entry.request not in failing]
        if 0 <= end < len(sampled):
            self.ends.setdefault(sampled[end].request, index_of(sampled[end]))
        self.loop.finish(schedule, failing)
        outputs = self.loop.processor.take()
        assert sorted(o.request_id for o in outputs) == sorted(entry.request.request_id for entry in computed)
        record = StepRecord.of(self.scheduler, schedule, outputs)
        assert record.preempted == schedule.preempted
        assert set(record.failed) == {o.request_id for o in outputs if o.error is not None}
        assert set(record.finished) | set(record.failed) == {o.request_id for o in outputs if o.finish_reason}
        assert dict(record.prefilled) == {
            e.request.request_id: e.num_tokens for e in schedule.prompts if e.request.request_id not in record.failed
        }
        self.hear(outputs)

    def is_awaited(self, entry: Scheduled) -> bool:
        """Whether what this entry of a step in flight computes is still wanted."""
        request = entry.request
        return request.status is RequestStatus.RUNNING and request.num_computed_tokens == entry.start

    def hear(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            request = self.by_name[output.request_id]
            assert request not in self.told
            assert request not in self.aborted
            if output.error is None:
                index = self.num_heard.get(request, 0)
                assert output.token_id == self.token_at(request, index)
                self.num_heard[request] = index + 1
            if output.finish_reason is not None:
                self.told[request] = output.finish_reason
                wanted = {FinishReason.EOS: request in self.ends, FinishReason.ERROR: request.error is not None}
                is_full = request.num_tokens == self.longest(request)
                assert wanted.get(output.finish_reason, is_full)

    @rule(num_committed=st.integers(0, 4), is_new=st.booleans())
    def break_off(self, num_committed: int, is_new: bool) -> None:
        """A step is interrupted when the first of the oldest one in flight have their tokens, and no output is made."""
        if is_new or not self.loop.in_flight:
            self.loop.in_flight.append(self.plan())
        oldest = self.loop.in_flight[0]
        self.loop.commit(replace(oldest, entries=oldest.entries[:num_committed]))
        self.hear(self.loop.break_off())
        assert not self.scheduler.ending

    @precondition(lambda self: self.by_name)
    @rule(data=st.data(), is_id_reused=st.booleans())
    def abort(self, data: st.DataObject, is_id_reused: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.by_name)))
        request, was_here = self.by_name[name], name in self.scheduler
        assert self.loop.abort(name) is was_here
        if was_here:
            self.aborted.add(request)
            if is_id_reused:
                self.add_request(name, 2, 3)

    def in_flight(self, request: Request) -> list[Scheduled]:
        return [entry for schedule in self.loop.in_flight for entry in schedule if entry.request is request]

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        waiting, running = list(self.scheduler.waiting.values()), list(self.scheduler.running.values())
        over = {*self.told, *self.aborted}
        assert {*waiting, *running, *over} == {*self.requests}
        assert len(waiting) + len(running) + len(over) == len(self.requests)
        assert set(self.loop.processor.streams) == {*waiting, *running}
        assert {r.status for r in waiting} <= {RequestStatus.WAITING, RequestStatus.PREEMPTED}
        assert {r.status for r in running} <= {RequestStatus.RUNNING}
        for request in over:
            is_failed = self.told.get(request) is FinishReason.ERROR
            assert request.status is (RequestStatus.FAILED if is_failed else RequestStatus.FINISHED)
        load = EngineLoad.of(self.scheduler)
        assert (load.num_running, load.num_waiting) == (len(running), len(waiting))
        assert load.num_preemptions == self.num_preempted

    @invariant()
    def the_order_is_that_of_arrival(self) -> None:
        order = [self.requests.index(request) for request in self.live()]
        assert order == sorted(order)

    @invariant()
    def no_token_is_lost_or_doubled(self) -> None:
        for request in self.requests:
            assert request.output_ids == [self.token_at(request, n) for n in range(len(request.output_ids))]
            if request not in self.aborted:
                assert len(request.output_ids) == self.num_heard.get(request, 0)

    @invariant()
    def counts_say_what_is_in_flight(self) -> None:
        for request in self.scheduler.running.values():
            assert self.pool.length(request) == request.num_computed_tokens
            flying = [entry for entry in self.in_flight(request) if entry.start >= request.num_computed_tokens]
            assert sum(entry.num_tokens for entry in flying) == (
                request.num_scheduled_tokens - request.num_computed_tokens
            )
            assert sum(entry.num_logit_rows for entry in flying) == request.num_pending_tokens
        for request in self.scheduler.waiting.values():
            assert request.num_scheduled_tokens == request.num_computed_tokens == request.num_pending_tokens == 0

    @invariant()
    def memory_is_held_by_those_that_run_or_are_in_flight(self) -> None:
        held = set(self.pool.holdings()[1])
        running = set(self.scheduler.running.values())
        assert held == running | {*self.scheduler.ending}
        assert len(self.pool.audit()) == len(held), self.pool.audit()
        for request in self.scheduler.ending:
            assert request in {*self.told, *self.aborted}
            assert self.in_flight(request), "what no step computes is released"
        assert self.pool.used_tokens == self.num_written()

    def num_written(self) -> int:
        """The tokens in memory."""
        return sum(self.pool.length(request) for request in self.pool.holdings()[1])

    def teardown(self) -> None:
        """Whatever happened, the rest comes to an end: the oldest gets a token in every few steps."""
        if not hasattr(self, "loop"):
            return
        steps = 4 + 2 * len(self.requests) * (self.scheduler.max_seq_len + 1) * self.config.max_decode_interval
        for _ in range(steps):
            if not self.loop.has_work():
                break
            self.step(end=-1, fails=set())
            if not self.scheduler.has_work():
                while self.loop.in_flight:
                    self.loop.finish(self.loop.in_flight.popleft())
        assert not self.loop.has_work()
        assert self.loop.processor.take() == []
        assert self.pool.audit() == []
        assert self.pool.free_tokens == self.pool.capacity_tokens
        assert {*self.told, *self.aborted} == {*self.requests}
