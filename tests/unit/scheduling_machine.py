"""One state machine for all schedulers and pools.

It adds, steps, fails, interrupts and aborts in any order, with a step in flight or none.

What varies is a :class:`Setting`: the choices of a run, how they make a scheduler with its pool, which drafts are
proposed, and the checks that this scheduler must pass in addition to those of all. Next to the pool there is a naive
model of its memory (:mod:`tests.unit.slot_model`), so a block that is shared wrongly, freed too early or written while
it is shared shows as a request that reads what it should not. Each request has tokens that no other has, so a token
that is lost, doubled or given to the wrong request shows too.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared.cache.pool.paged import PagedKVCachePool
from shared.engine.output import StepOutput
from shared.engine.record import StepRecord
from shared.engine.request import Request, RequestStatus
from shared.errors import QueueFullError, RequestError, SegmentInUseError
from shared.sampling.params import SamplingParams
from shared.scheduling.schedule import Schedule, Scheduled
from shared.scheduling.scheduler import Scheduler
from shared.text.stopping import FinishReason
from shared.text.tokenizer import Tokenizer
from shared.tracks.segments.registry import Segment, SegmentRegistry
from tests.unit.scheduling_loop import Loop, index_of
from tests.unit.slot_model import SlotModel

LONGEST_INTERVAL = 4
"""The largest ``max_decode_interval`` that a run chooses where it checks intervals."""


@dataclass
class Choice:
    """What a run chooses at its beginning."""

    config: dict[str, Any]
    size: int  # regions or blocks of the pool
    num_in_flight: int = 0
    watermark: int = 0  # blocks
    max_bytes: int = 6000  # of the registry of segments
    seed: int = 0  # of the order of free blocks, and of the drafts


@dataclass
class Planned:
    """A step as it was scheduled, with the state before it."""

    schedule: Schedule
    order: list[Request]  # running, then waiting
    running: list[Request]
    had_work: bool
    had_ending: bool


@dataclass(frozen=True)
class Setting:
    """A kind of scheduler and pool. ``step_checks`` see each step as it is scheduled, ``state_checks`` each state."""

    choices: st.SearchStrategy[Choice]
    make: Callable[[Choice], Scheduler]
    make_drafts: Callable[["SchedulingMachine"], Any] | None = None
    step_checks: tuple[Callable[["SchedulingMachine", Planned], None], ...] = ()
    state_checks: tuple[Callable[["SchedulingMachine"], None], ...] = ()


class SchedulingMachine(RuleBasedStateMachine):
    """``told`` holds the finish reason of each request that got one, ``aborted`` the requests that shall get none.

    ``met`` counts what happened. Rules can be called by hand, each followed by ``check_state``.
    """

    def __init__(self, setting: Setting, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.setting, self.tokenizer = setting, tokenizer
        self.met: Counter[str] = Counter()
        self.requests: list[Request] = []  # in the order they came
        self.numbers: dict[Request, int] = {}
        self.by_name: dict[str, Request] = {}  # the last of each id
        self.told: dict[Request, FinishReason] = {}
        self.aborted: set[Request] = set()
        self.num_heard: dict[Request, int] = {}
        self.ends: dict[Request, int] = {}  # the index of the end-of-sequence token
        self.num_computed: Counter[Segment] = Counter()  # how often each segment was computed
        self.registry: SegmentRegistry | None = None
        self.loop: Loop | None = None

    @initialize(choice=st.runner().flatmap(lambda machine: machine.setting.choices))
    def begin(self, choice: Choice) -> None:
        self.scheduler = self.setting.make(choice)
        self.pool, self.config = self.scheduler.pool, self.scheduler.config
        self.target: Any = getattr(self.pool, "target", self.pool)  # that of the model, beside that of a draft model
        self.extension: Any = getattr(self.target, "extension", None)
        self.sharing: Any = getattr(self.extension, "sharing", self.extension)  # of the requests without segments
        self.tree = getattr(self.sharing, "tree", None)
        self.registry = getattr(self.extension, "registry", None)
        self.chance, self.share_right, self.most_drafts = Random(choice.seed), 0.8, 6
        if isinstance(self.target, PagedKVCachePool):
            self.target.watermark_tokens = choice.watermark * self.target.block_size
            self.chance.shuffle(free := self.target.allocator.stack.tolist())
            self.target.allocator.stack[:] = free
        self.slots = SlotModel(self.pool, self.token_at)
        self.loop = Loop(self.scheduler, self.tokenizer, self.token_at, choice.num_in_flight)
        self.drafts = self.setting.make_drafts(self) if self.setting.make_drafts else None

    # What requests are.

    def token_at(self, request: Request, index: int) -> int:
        if self.ends.get(request) == index:
            return min(self.tokenizer.eos_ids)
        if request not in self.numbers:
            return 7  # it computes a segment, and nothing reads what it samples
        return 1000 + 100 * self.numbers[request] + index

    def longest(self, request: Request) -> int:
        return min(len(request.prompt_ids) + request.params.max_new_tokens, self.scheduler.max_seq_len)

    def can_decode(self, request: Request) -> bool:
        is_open = request.num_tokens + request.num_pending_tokens < self.longest(request)
        return not request.is_prefilling and is_open

    def own(self, requests: Any) -> list[Request]:
        """Without requests that compute a segment, which the scheduler made."""
        return [request for request in requests if self.registry is None or request not in self.registry.computing]

    def live(self) -> list[Request]:
        return self.own((*self.scheduler.running.values(), *self.scheduler.waiting.values()))

    def in_flight(self, request: Request) -> list[Scheduled]:
        return [entry for schedule in self.loop.in_flight for entry in schedule if entry.request is request]

    def granted(self, request: Request) -> int:
        """The tokens for which a request has memory."""
        if not isinstance(self.target, PagedKVCachePool):
            return self.target.granted[self.target.regions[request]]
        return self.target.granted[self.target.rows[request]] + self.target.num_slotless.get(request, 0)

    # Requests come and go.

    def add_request(
        self, name: str, prompt: list[int], max_new_tokens: int, segments: list[Segment] = (), end: int | None = None
    ) -> None:
        params, scheduler = SamplingParams(max_new_tokens=max_new_tokens), self.scheduler
        length = min(len(prompt) + max_new_tokens, scheduler.max_seq_len)
        if len(prompt) >= scheduler.max_seq_len:
            return
        if length > self.pool.request_capacity:
            with pytest.raises(RequestError, match=f"the KV cache holds {self.pool.request_capacity} for one"):
                scheduler.check(name, len(prompt), params)
            return
        if len(scheduler.waiting) == self.config.max_waiting_requests:
            with pytest.raises(QueueFullError):
                scheduler.check(name, len(prompt), params)
            return
        scheduler.check(name, len(prompt), params)
        request = Request(name, prompt, params, 0, (min(self.tokenizer.eos_ids),))
        if segments:
            assert self.registry is not None
            self.registry.contexts[request] = tuple(segments)
        self.numbers[request] = len(self.requests)
        self.requests.append(request)
        if end is not None:
            self.ends[request] = end
        self.by_name[name] = self.loop.add(request)

    @rule(prompt=st.integers(1, 23), answer=st.integers(1, 12), end=st.none() | st.integers(0, 11))
    def add(self, prompt: int, answer: int, end: int | None = None) -> None:
        self.add_request(str(len(self.requests)), [5] * prompt, answer, end=end)

    @rule(prompts=st.lists(st.integers(1, 4), min_size=2, max_size=5))
    def add_a_crowd(self, prompts: list[int]) -> None:
        """Short prompts and long answers: all are admitted, and not all can stay."""
        for prompt in prompts:
            self.add_request(str(len(self.requests)), [5] * prompt, max(1, self.pool.request_capacity - prompt))

    @precondition(lambda self: self.requests)
    @rule(number=st.integers(0, 30), cut=st.integers(0, 6), more=st.integers(0, 3), answer=st.integers(1, 8))
    def add_the_next_turn(self, number: int, cut: int, more: int, answer: int) -> None:
        """A prompt that begins with the prompt and the answer of another request, or a part of them."""
        earlier = self.requests[number % len(self.requests)].token_ids
        prompt = [*earlier[: len(earlier) - cut], *[6] * more][: self.scheduler.max_seq_len - 1]
        self.add_request(str(len(self.requests)), prompt or [5], answer)

    @precondition(lambda self: self.by_name)
    @rule(number=st.integers(0, 30), is_id_reused=st.booleans())
    def abort(self, number: int, is_id_reused: bool = False) -> None:
        name = sorted(self.by_name)[number % len(self.by_name)]
        request, was_here = self.by_name[name], name in self.scheduler
        assert self.loop.abort(name) is was_here
        if was_here:
            self.aborted.add(request)
            if is_id_reused:
                self.add_request(name, [5] * 2, 3)

    # Segments, where there is a registry of them.

    @precondition(lambda self: self.registry is not None)
    @rule(role=st.sampled_from("ab"), count=st.integers(1, 9), is_wanted=st.booleans())
    def register(self, role: str, count: int, is_wanted: bool = False) -> None:
        before = set(self.registry.segments)
        try:
            segment = self.registry.add(role, [ord(role) + n for n in range(count)])
        except SegmentInUseError:
            pytest.fail("one that is in use was chosen to be forgotten")
        except RequestError:
            assert set(self.registry.segments) == before
            self.met["full"] += 1
            return
        self.met["forgotten"] += not before <= set(self.registry.segments)
        try:
            self.registry.check([segment], 1)
        except RequestError:
            return
        if is_wanted:
            self.registry.want(segment)

    @precondition(lambda self: self.registry is not None and self.registry.segments)
    @rule(numbers=st.lists(st.integers(0, 30), max_size=4), own=st.integers(1, 5), answer=st.integers(1, 6))
    def ask(self, numbers: list[int], own: int, answer: int) -> None:
        """A request that is made of segments."""
        known = list(self.registry.segments.values())
        segments = [known[number % len(known)] for number in numbers]
        prompt = [token_id for segment in segments for token_id in segment.token_ids] + [7 + n for n in range(own)]
        try:
            self.registry.check(segments, own + answer)
        except RequestError:
            return
        self.add_request(str(len(self.requests)), prompt, answer, segments)

    @precondition(lambda self: self.registry is not None)
    @rule(count=st.integers(0, 9))
    def evict(self, count: int) -> None:
        in_use = [segment for request in self.extension.users for segment in self.registry.contexts[request]]
        self.met["segments evicted"] += self.registry.evict(count) > 0
        assert all(segment.is_resident for segment in in_use)

    # Steps.

    @rule(
        end=st.integers(-1, 3),
        fails=st.sets(st.integers(0, 7), max_size=2),
        share_right=st.sampled_from([0, 0.8, 1]),
        most_drafts=st.integers(0, 6),
    )
    def step(self, end: int = -1, fails: Any = (), share_right: float = 0.8, most_drafts: int = 6) -> None:
        """Schedule a step, and commit the oldest. Of those that get a token, the one at index ``end`` gets an end of
        sequence; those at ``fails`` cannot be computed. Of the drafts, at most so many are proposed, and so many are
        right."""
        self.share_right, self.most_drafts = share_right, most_drafts
        self.loop.in_flight.append(self.plan())
        while len(self.loop.in_flight) > self.loop.num_in_flight:
            self.finish_oldest(end, fails)

    @rule(num_committed=st.integers(0, 4), is_new=st.booleans(), fails=st.sets(st.integers(0, 3), max_size=1))
    def break_off(self, num_committed: int, is_new: bool, fails: Any = ()) -> None:
        """A step is interrupted when the first of the oldest one in flight have their tokens, and no output is made."""
        if is_new or not self.loop.in_flight:
            self.loop.in_flight.append(self.plan())
        self.met["ending"] += len(self.scheduler.ending)
        oldest = self.loop.in_flight[0]
        failing = [entry.request for n, entry in enumerate(oldest) if n in fails]
        self.loop.commit(replace(oldest, entries=oldest.entries[:num_committed]), failing)
        self.hear(self.loop.break_off())
        assert not self.scheduler.ending
        assert not getattr(self.scheduler, "guesses", {}), "guesses of a step that was interrupted are not verified"

    def plan(self) -> Schedule:
        """Schedule a step with its drafts; as in the engine, a step that follows or precedes drafts is finished first.

        The invariants of every scheduler in every state are checked.
        """
        if any(schedule.has_drafts for schedule in self.loop.in_flight):
            self.finish_all()
        scheduler, running = self.scheduler, list(self.scheduler.running.values())
        flying = {request for request in running if request.num_pending_tokens}
        decoding = [request for request in running if self.can_decode(request)]
        before = self.live(), running, scheduler.has_work(), bool(scheduler.ending)
        num_blocks, resident, num_steps = self.num_cached_blocks(), self.resident(), scheduler.num_steps
        looked_up = scheduler.num_prefix_queries, scheduler.num_prefix_hits
        planned = Planned(scheduler.schedule(), *before)
        schedule = planned.schedule
        admitted = set(scheduler.running.values()) - set(running)
        self.check_that_lookups_are_counted(admitted, *looked_up)
        self.met["decodes at once"] += len(admitted & set(schedule.decoding.requests))
        if not schedule.prompts or self.config.scheduler_policy == "fcfs":
            late = [request for request in admitted - set(schedule.requests) if not request.is_prefilling]
            assert not late, "a request that can decode when it is admitted gets its token in the same step"
        assert schedule.step == scheduler.num_steps
        assert scheduler.num_steps > num_steps or not schedule, "each step has a number of its own"
        self.check_entries(schedule)
        for request in decoding:
            if request not in schedule.requests and request.request_id in scheduler.running:
                assert scheduler.num_steps - request.last_step < self.config.max_decode_interval
        for check in self.setting.step_checks:
            check(self, planned)
        lost = set(running) - set(scheduler.running.values())
        self.met["preempted"] += len(schedule.preempted)
        self.met["preempted in flight"] += len(flying & lost)
        self.met["evicted"] += max(0, num_blocks - self.num_cached_blocks())
        self.met["segments evicted"] += not resident <= self.resident()
        self.met["waits"] += sum(map(self.pool.must_wait, scheduler.waiting.values()))
        if schedule.has_drafts:
            self.finish_all()
        if self.drafts is not None:
            schedule = self.drafts.propose(schedule)
        self.met["copies"] += self.slots.run(schedule)
        self.met["shared"] = self.slots.num_shared
        return schedule

    def check_that_lookups_are_counted(self, admitted: set[Request], num_queries: int, num_hits: int) -> None:
        """Of the requests that are looked up in the prefix tree, and of no others."""
        looked_up = [request for request in admitted if self.tree is not None and request in self.sharing.prefixes]
        assert self.scheduler.num_prefix_queries == num_queries + sum(request.num_tokens for request in looked_up)
        assert self.scheduler.num_prefix_hits == num_hits + sum(request.num_computed_tokens for request in looked_up)

    def num_cached_blocks(self) -> int:
        return 0 if self.tree is None else self.tree.num_blocks

    def resident(self) -> set[str]:
        return set() if self.registry is None else set(self.registry.resident)

    def check_entries(self, schedule: Schedule) -> None:
        scheduler = self.scheduler
        planned = [entry.request for entry in schedule]
        assert len(set(planned)) == len(planned) <= len(scheduler.running) <= self.config.max_batch_size
        assert [*schedule] == [*schedule.decoding, *schedule.prompts], "decoding requests stand before prompts"
        for entry in schedule:
            request = entry.request
            assert scheduler.running[request.request_id] is request
            assert entry.start + entry.num_tokens + 1 <= self.longest(request), "no step for a token too many"
            rest = request.num_tokens + request.num_pending_tokens - (entry.start + entry.num_tokens)
            assert entry.num_tokens > 0
            assert rest == 1 if entry.num_logit_rows else rest > 0, "sampled where the last known token is computed"
        for part in (schedule.prompts, schedule.decoding):
            self.pool.layout(part)  # raises where a token has no slot

    def is_awaited(self, entry: Scheduled) -> bool:
        """Whether the result of this entry of a step in flight is still needed."""
        request = entry.request
        return request.status is RequestStatus.RUNNING and request.num_computed_tokens == entry.start

    def finish_oldest(self, end: int = -1, fails: Any = ()) -> None:
        schedule = self.loop.in_flight.popleft()
        failing = [entry.request for n, entry in enumerate(schedule) if n in fails]
        awaited = [entry for entry in schedule if self.is_awaited(entry) and self.own([entry.request])]
        computed = [entry for entry in awaited if entry.num_logit_rows or entry.request in failing]
        sampled = [entry for entry in computed if entry.request not in failing]
        if 0 <= end < len(sampled):
            self.ends.setdefault(sampled[end].request, index_of(sampled[end]) - sampled[end].num_drafts)
        absent = [] if self.registry is None else [c for c in self.registry.segments.values() if not c.is_resident]
        counted = self.scheduler.num_accepted_drafts, self.scheduler.num_rejected_drafts
        self.loop.finish(schedule, failing)
        if self.registry is not None:  # requests that wait for a segment fail with it, and are in no step
            self.scheduler.finish(self.loop.processor.catch_up())
        outputs = self.loop.processor.take()
        self.met["accepted"] += self.scheduler.num_accepted_drafts - counted[0]
        self.met["rejected"] += self.scheduler.num_rejected_drafts - counted[1]
        for segment in absent:
            self.num_computed[segment] += segment.is_resident
            self.met["computed"] += segment.is_resident
            self.met["recomputed"] += segment.is_resident and self.num_computed[segment] > 1
        self.check_outputs(schedule, computed, outputs)
        self.hear(outputs)

    def check_outputs(self, schedule: Schedule, computed: list[Scheduled], outputs: list[StepOutput]) -> None:
        scheduled = {request.request_id for request in schedule.requests}
        names = [output.request_id for output in outputs if self.registry is None or output.request_id in scheduled]
        expected = [entry.request.request_id for entry in computed]
        assert sorted(set(names) if schedule.has_drafts else names) == sorted(expected)
        if self.registry is None:
            record = StepRecord.of(self.scheduler, schedule, outputs)
            assert record.preempted == schedule.preempted
            assert set(record.failed) == {o.request_id for o in outputs if o.error is not None}
            assert set(record.finished) | set(record.failed) == {o.request_id for o in outputs if o.finish_reason}
            prefilled = {entry.request.request_id: entry.num_tokens for entry in schedule.prompts}
            assert dict(record.prefilled) == {n: count for n, count in prefilled.items() if n not in record.failed}

    def finish_all(self) -> None:
        while self.loop.in_flight:
            self.finish_oldest()

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
                self.met["failed"] += output.finish_reason is FinishReason.ERROR
                wanted = {FinishReason.EOS: request in self.ends, FinishReason.ERROR: request.error is not None}
                assert wanted.get(output.finish_reason, request.num_tokens == self.longest(request))

    # What holds in every state.

    @invariant()
    def check_state(self) -> None:
        self.check_that_every_request_is_in_one_queue()
        self.check_that_no_token_is_lost_or_doubled()
        self.check_that_counts_say_what_is_in_flight()
        self.check_that_memory_is_held_by_those_that_run_or_are_in_flight()
        for check in self.setting.state_checks:
            check(self)

    def check_that_every_request_is_in_one_queue(self) -> None:
        scheduler = self.scheduler
        waiting, running = self.own(scheduler.waiting.values()), self.own(scheduler.running.values())
        over = {*self.told, *self.aborted}
        assert {*waiting, *running, *over} == {*self.requests}
        assert len(waiting) + len(running) + len(over) == len(self.requests)
        assert set(self.loop.processor.streams) == {*waiting, *running}
        assert {r.status for r in waiting} <= {RequestStatus.WAITING, RequestStatus.PREEMPTED}
        assert {r.status for r in running} <= {RequestStatus.RUNNING}
        for request in over:
            is_failed = self.told.get(request) is FinishReason.ERROR
            assert request.status is (RequestStatus.FAILED if is_failed else RequestStatus.FINISHED)
        assert scheduler.num_preemptions == self.met["preempted"]
        order = [self.numbers[request] for request in self.live()]
        assert self.tree is not None or order == sorted(order), "only requests that wait for blocks are overtaken"

    def check_that_no_token_is_lost_or_doubled(self) -> None:
        for request in self.requests:
            assert request.output_ids == [self.token_at(request, n) for n in range(len(request.output_ids))]
            if request not in self.aborted:
                assert len(request.output_ids) == self.num_heard.get(request, 0)

    def check_that_counts_say_what_is_in_flight(self) -> None:
        for request in self.scheduler.running.values():
            assert self.pool.length(request) == request.num_computed_tokens
            flying = [entry for entry in self.in_flight(request) if entry.start >= request.num_computed_tokens]
            num_flying = request.num_scheduled_tokens - request.num_computed_tokens
            assert sum(entry.num_tokens for entry in flying) == num_flying
            assert sum(entry.num_logit_rows for entry in flying) == request.num_pending_tokens
        for request in self.scheduler.waiting.values():
            assert request.num_scheduled_tokens == request.num_computed_tokens == request.num_pending_tokens == 0

    def check_that_memory_is_held_by_those_that_run_or_are_in_flight(self) -> None:
        held = set(self.pool.holdings()[1])
        assert held == {*self.scheduler.running.values(), *self.scheduler.ending}
        assert self.scheduler.has_work() or not (held or self.scheduler.waiting), "what is in flight is work"
        num_pools = 1 if self.target is self.pool else 2
        assert len(self.pool.audit()) == num_pools * len(held), self.pool.audit()
        for request in self.own(self.scheduler.ending):
            assert request in {*self.told, *self.aborted}
            assert self.in_flight(request), "what no step computes is released"
        for request in (request for schedule in self.loop.in_flight for request in schedule.requests):
            is_over = request.status in (RequestStatus.FINISHED, RequestStatus.FAILED)
            if is_over and request.num_scheduled_tokens > request.num_computed_tokens:
                assert request in held, "a step in flight writes to memory that was released"
        assert self.pool.used_tokens == self.num_written()

    def num_written(self) -> int:
        """The tokens in memory; a shared block counts once, and so does the source of a copy that is yet to be made."""
        pool = self.target
        if not isinstance(pool, PagedKVCachePool):
            return sum(pool.length(request) for request in pool.regions)
        num_tokens, full = 0, set[int]()
        for request, row in pool.rows.items():
            num_tokens += pool.lengths[row]
            prefix = self.sharing.prefixes.get(request)
            if prefix is not None:
                num_tokens -= prefix.num_shared * pool.block_size
                full |= {*pool.table(request)[: prefix.num_shared].tolist()}
                if prefix.num_blocks > prefix.num_shared:
                    full.add(int(prefix.node.blocks[-1]))
        used = [] if self.registry is None else [c for c in self.registry.resident.values() if c.num_users]
        return num_tokens + len(full) * pool.block_size + sum(map(len, used))

    def teardown(self) -> None:
        """Whatever happened, the rest comes to an end: the oldest gets a token in every few steps, and every other step
        ends a request, so that the longest answers do not take most of the time."""
        if self.loop is None:
            return
        num_requests = 1 + len(self.requests) + (0 if self.registry is None else len(self.registry.segments))
        interval = min(self.config.max_decode_interval, LONGEST_INTERVAL)
        for number in range(4 + 2 * num_requests * (self.scheduler.max_seq_len + 1) * interval):
            if not self.loop.has_work():
                break
            self.step(end=number % 2 - 1)
            if not self.scheduler.has_work():
                self.finish_all()
        assert not self.loop.has_work(), "a request never ends"
        assert self.loop.processor.take() == []
        assert {*self.told, *self.aborted} == {*self.requests}
        assert self.pool.audit() == []
        assert self.pool.free_tokens == self.pool.capacity_tokens
        if self.tree is not None:
            assert self.sharing.prefixes == self.sharing.computing == {}
            self.met["hits"] = self.scheduler.num_prefix_hits
        if self.registry is not None:
            assert not self.registry.computing
            assert not self.extension.users
        if isinstance(self.target, PagedKVCachePool) and self.loop.num_in_flight:
            every = self.extension.allocate(self.target, self.target.allocator.num_blocks)
            assert every is not None, "a request can have all blocks that no other uses"
            self.target.allocator.free(every)
        self.pool.drop_cached()
        if isinstance(self.target, PagedKVCachePool):
            assert self.target.allocator.num_free == self.target.allocator.num_blocks
