"""The settings of :mod:`tests.unit.scheduling_machine`: schedulers, pools, drafts, and what each must keep."""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from shared.cache.layout.paged import PagedSizes
from shared.cache.pool.contiguous import ContiguousKVCachePool
from shared.cache.pool.paged import PagedKVCachePool
from shared.cache.pool.paired import PairedPool
from shared.cache.pool.prefix import PrefixSharing
from shared.engine.batch import Batch
from shared.engine.config import SCHEDULER_POLICIES, EngineConfig
from shared.engine.request import Request, RequestStatus
from shared.engine.sampling.sampler import SampledTokens
from shared.sampling.sampler import SamplingRow
from shared.scheduling import chunks
from shared.scheduling.chunked import ChunkedScheduler
from shared.scheduling.chunks import Chunks
from shared.scheduling.continuous import ContinuousScheduler
from shared.scheduling.drafts import settle
from shared.scheduling.overlapped import OverlappedScheduler
from shared.scheduling.preemptive import PreemptiveScheduler
from shared.scheduling.prefix import PrefixScheduler
from shared.scheduling.schedule import Schedule, Scheduled
from shared.scheduling.scheduler import Scheduler
from shared.scheduling.speculative import SpeculativeScheduler
from shared.scheduling.static import StaticScheduler
from shared.speculation.draft_model import NO_MASKS, DraftModel
from shared.tracks.multi_token.batch import _WithMasks as WithMasks
from shared.tracks.multi_token.scheduler import MultiTokenSchedule, MultiTokenScheduler
from shared.tracks.multi_token.scheduler import settle as settle_with_masks
from shared.tracks.segments.pool import segment_pool
from shared.tracks.segments.registry import SegmentRegistry
from shared.tracks.segments.scheduler import SegmentScheduler
from tests.unit.scheduling_loop import NO_TOKEN
from tests.unit.scheduling_machine import LONGEST_INTERVAL, Choice, Planned, SchedulingMachine, Setting

MAX_SEQ_LEN = 24
NO_INTERVAL = 10_000
"""For schedulers that may schedule an empty step, which counts as a step of the interval."""


def choices(
    min_size: int, max_size: int, most_watermark: int = 0, **config: st.SearchStrategy | Any
) -> st.SearchStrategy[Choice]:
    return st.builds(
        Choice,
        st.fixed_dictionaries(
            {name: v if isinstance(v, st.SearchStrategy) else st.just(v) for name, v in config.items()}
        ),
        st.integers(min_size, max_size),
        num_in_flight=st.integers(0, 1),
        watermark=st.integers(0, most_watermark),
        max_bytes=st.integers(2000, 6000),
        seed=st.integers(0, 2**16),
    )


# Checks of a step.


def no_step_is_lost(machine: SchedulingMachine, planned: Planned) -> None:
    if not machine.loop.num_in_flight:
        assert bool(planned.schedule) == planned.had_work, "no step is lost while there is work"


def a_static_batch_is_closed(machine: SchedulingMachine, planned: Planned) -> None:
    if machine.config.batching_mode == "static" and planned.running:
        assert list(machine.scheduler.running.values()) == planned.running, "none joins a batch that runs"


def a_free_region_is_used(machine: SchedulingMachine, planned: Planned) -> None:
    scheduler, config = machine.scheduler, machine.config
    num_held = len(scheduler.running) + len(scheduler.ending)
    has_room = num_held < machine.pool.max_sequences and len(scheduler.running) < config.max_batch_size
    assert not has_room or not scheduler.waiting or config.batching_mode == "static", "a request waits for no reason"


def prompts_are_run_in_the_order_they_came(machine: SchedulingMachine, planned: Planned) -> None:
    later = [r for r in machine.live() if r not in planned.schedule.prompts.requests and not r.num_scheduled_tokens]
    for request in planned.schedule.prompts.requests:
        assert all(machine.numbers[request] < machine.numbers[other] for other in later)


def the_token_budget_is_kept(machine: SchedulingMachine, planned: Planned) -> None:
    schedule, config = planned.schedule, machine.config
    sizes = [entry.num_tokens for entry in schedule.prompts]
    if not isinstance(machine.scheduler.prefill, Chunks):  # type: ignore[attr-defined]
        assert sum(sizes) <= config.max_num_batched_tokens or len(sizes) == 1
        return
    budget = max(config.max_num_batched_tokens - len(schedule.decoding), 1)
    if schedule.has_drafts:
        assert int(schedule.num_tokens.sum()) <= max(config.max_num_batched_tokens, schedule.num_decoding + 1)
    running = machine.scheduler.running.values()
    granted = {entry.request: entry.num_tokens for entry in schedule.prompts}
    prefilling = [r for r in running if r.is_prefilling or r in granted]
    limit = 1 if config.scheduler_policy == "decode_round_robin" else config.max_prefill_chunks_per_step
    if config.prefill_chunk_size is not None:
        assert max(sizes, default=0) <= config.prefill_chunk_size
    elif schedule.decoding:
        assert max(sizes, default=0) <= chunks.BESIDE_DECODING
    elif schedule:
        left = [granted.get(r, 0) + (r.num_unscheduled_tokens if r.is_prefilling else 0) for r in prefilling]
        budget = min(budget, chunks.step_size(config, left[:limit], 0))
        assert budget < 1.5 * chunks.ALONE
    assert sum(sizes) <= budget
    if not schedule:
        return
    assert schedule.prompts.requests == prefilling[: len(sizes)], "the oldest first, and none left out"
    assert bool(sizes) == bool(prefilling), "a prompt progresses in each step"
    is_full = sum(sizes) == budget or len(sizes) == (limit or len(prefilling))
    assert is_full or len(sizes) == len(prefilling), "the budget is used"


def the_youngest_give_their_memory(machine: SchedulingMachine, planned: Planned) -> None:
    """Preemption: which requests lose their memory, and what the others have."""
    running = list(machine.scheduler.running.values())
    lost = [request.request_id for request in reversed(planned.running) if request not in running]
    assert [*planned.schedule.preempted] == lost, "the youngest first"
    is_spec, masks = machine.config.use_speculative_decoding, masks_of(planned.schedule)
    for request in running:
        most = request.num_tokens + request.num_pending_tokens + (0 if is_spec else machine.loop.num_in_flight)
        most += masks.get(request, 0)
        assert request.num_scheduled_tokens <= machine.granted(request) <= most, "memory for what is written, no more"


def masks_of(schedule: Schedule) -> dict[Request, int]:
    """The mask tokens of each request of 11.1."""
    masks = schedule.masks if isinstance(schedule, MultiTokenSchedule) else {}
    return {entry.request: entry.num_tokens * masks.get(entry.request, 0) for entry in schedule}


def masks_have_slots_within_the_budget(machine: SchedulingMachine, planned: Planned) -> None:
    schedule, masks = planned.schedule, masks_of(planned.schedule)
    machine.met["masks"] += sum(masks.values())
    sizes = [entry.num_tokens + masks[entry.request] for entry in schedule.decoding]
    assert [size > 1 for size in sizes] == sorted(size > 1 for size in sizes), "single tokens stand first"
    if isinstance(schedule, MultiTokenSchedule):
        num_tokens = int(schedule.num_tokens.sum()) + sum(masks.values())
        assert num_tokens <= max(machine.config.max_num_batched_tokens, schedule.num_decoding + 1)
        layout: Any = WithMasks(schedule, machine.pool).layout(schedule)
        assert len(set(layout.slot_mapping.tolist())) == num_tokens, "each token has a slot of its own"
    guesses = machine.scheduler.guesses  # type: ignore[attr-defined]
    assert all(entry.num_drafts <= guesses.get(entry.request, 0) for entry in schedule), "guesses of the step before"


def the_oldest_always_runs(machine: SchedulingMachine, planned: Planned) -> None:
    if not planned.had_ending:  # else it may have to wait until a step in flight gives memory back
        assert planned.order[:1] == list(machine.scheduler.running.values())[:1]


def only_requests_that_wait_for_blocks_are_overtaken(machine: SchedulingMachine, planned: Planned) -> None:
    pool, scheduler = machine.pool, machine.scheduler
    if machine.tree is None:
        assert machine.live() == planned.order, "a preempted request goes to the head of the queue"
    place = {request: number for number, request in enumerate(planned.order)}
    running = machine.own(scheduler.running.values())
    for request in machine.own(scheduler.waiting.values()):
        if any(place[request] < place[other] for other in running):
            assert pool.must_wait(request), "a request that does not wait for blocks is overtaken"


def what_has_room_is_admitted(machine: SchedulingMachine, planned: Planned) -> None:
    """And nothing else: not in a step with a preemption, nor into the memory that is left to running requests."""
    scheduler, pool, schedule = machine.scheduler, machine.pool, planned.schedule
    running = list(scheduler.running.values())
    if set(running) - set(planned.running):
        assert not schedule.preempted, "no request is admitted in a step in which one was preempted"
        assert schedule.has_drafts or len(running) == 1 or pool.free_tokens >= pool.watermark_tokens
    elif schedule and not schedule.preempted and len(running) + len(scheduler.ending) < machine.config.max_batch_size:
        ready = [request for request in scheduler.waiting.values() if not pool.must_wait(request)]
        if ready:
            needed = ready[0].num_tokens
            if machine.tree is not None:  # what it has in the tree stops being free when it is admitted
                of_tree = machine.tree.match(machine.sharing._tokens(ready[0]))[2]
                needed += (of_tree + 1) * machine.target.block_size
            assert pool.free_tokens - (pool.watermark_tokens if running else 0) < needed, "what has room is admitted"


def no_block_is_computed_twice(machine: SchedulingMachine, planned: Planned) -> None:
    """Except for the last of a request, which is computed again if there is no space for a copy."""
    size, begun = machine.target.block_size, set()
    for request, start, num_tokens, *_ in planned.schedule.prompts if machine.tree is not None else ():
        if request not in machine.sharing.prefixes:
            continue
        for end in range(start // size * size + size, min(start + num_tokens, request.num_tokens - size) + 1, size):
            block = tuple(request.token_ids[:end])
            assert block not in begun, "two requests compute the same block"
            begun.add(block)


# Checks of a state.


def a_region_is_all_that_a_request_can_come_to_need(machine: SchedulingMachine) -> None:
    for request in machine.scheduler.running.values():
        assert machine.pool.reserve(request, machine.longest(request)), "granted at admission, so never refused"
    assert machine.met["preempted"] == 0


def blocks_are_free_cached_or_held(machine: SchedulingMachine) -> None:
    for pool in {machine.target, getattr(machine.pool, "draft", machine.target)}:
        assert pool.audit_blocks() == []
        cached = {*pool.cached_blocks()}
        held = {block for request in pool.rows for block in pool.table(request).tolist()}
        held |= {block for each in pool.extension.block_lists() for block in each.tolist()} - cached
        assert pool.allocator.num_free + len(cached) + len(held) == pool.allocator.num_blocks
        assert not held & cached
        assert pool.free_tokens == (pool.allocator.num_free + len(cached)) * pool.block_size
        if machine.tree is not None:
            sharing = getattr(pool.extension, "sharing", pool.extension)
            assert set(sharing.prefixes) <= set(pool.rows)
            assert machine.registry is not None or set(sharing.prefixes) == set(pool.rows)
            assert set(sharing.computing.values()) <= set(sharing.prefixes)


def grants_cover_what_is_computed(machine: SchedulingMachine) -> None:
    is_spec = machine.config.use_speculative_decoding
    for request in machine.scheduler.running.values():
        flying = sum(entry.num_drafts for entry in machine.in_flight(request))
        flying += sum(masks_of(schedule).get(request, 0) for schedule in machine.loop.in_flight)
        most = request.num_tokens + request.num_pending_tokens + (flying if is_spec else machine.loop.num_in_flight)
        assert request.num_computed_tokens <= machine.granted(request) <= most


def the_draft_models_memory_follows_the_text(machine: SchedulingMachine) -> None:
    pair: Any = machine.pool
    assert pair.draft_requests.keys() == set(pair.target.holdings()[1])
    assert set(pair.draft.holdings()[1]) == set(pair.draft_requests.values())
    for request, draft_request in pair.draft_requests.items():
        assert request.token_ids[: draft_request.num_tokens] == draft_request.token_ids
        assert pair.draft.length(draft_request) <= request.num_tokens
        if request.status is RequestStatus.RUNNING:
            granted = pair.target.granted[pair.target.rows[request]]
            assert granted == pair.draft.granted[pair.draft.rows[draft_request]], "both pools reserve, or none"


# Drafts.


class GivenDrafts:
    """Up to ``machine.most_drafts`` drafts for each request, of which a share is right."""

    def __init__(self, machine: SchedulingMachine, settle: Callable[..., Schedule] = settle) -> None:
        self.machine, self.settle = machine, settle

    def propose(self, schedule: Schedule) -> Schedule:
        machine = self.machine
        if not schedule.has_drafts:
            return schedule
        for request, start, _, num_drafts, _, _ in schedule:
            first = start + 1 - request.num_prompt_tokens
            count = min(num_drafts, machine.most_drafts) if request.status is RequestStatus.RUNNING else 0
            is_right = [machine.chance.random() < machine.share_right for _ in range(count)]
            request.draft_ids = [
                machine.token_at(request, first + n) if right else NO_TOKEN for n, right in enumerate(is_right)
            ]
            machine.met["short"] += count < num_drafts
        return self.settle(schedule, machine.pool)


class Followed(DraftModel):
    """Shows its runner which requests a batch is of; no model is loaded."""

    def __init__(self, config: EngineConfig, pair: PairedPool, runner: Any) -> None:
        self.config, self.pair, self.runner, self.distributions = config, pair, runner, {}
        self.pool: Any = pair.draft
        self.masks, self.is_masked = NO_MASKS, False
        self.room = config.most_tokens_of_a_step(MAX_SEQ_LEN)

    def _run(self, schedule: Schedule, entries: Sequence[Scheduled], num_ahead: int) -> Any:
        requests = {draft_request: request for request, draft_request in self.pair.draft_requests.items()}
        self.runner.requests = [requests[entry.request] for entry in entries]  # type: ignore[attr-defined]
        return super()._run(schedule, entries, num_ahead)


class ModelDrafts:
    """A draft model whose memory holds token ids: each forward checks that it reads the text before its tokens.

    It is the runner of a :class:`Followed`, and fails now and then.
    """

    def __init__(self, machine: SchedulingMachine) -> None:
        self.machine = machine
        self.model = Followed(machine.config, machine.pool, self)  # type: ignore[arg-type]
        self.requests: list[Request] = []
        self.memory: dict[int, int] = {}  # by slot
        self.last_ids: dict[int, int] = {}  # by the pool's row
        self.drawn: dict[Request, list[int]] = {}  # the drafts of the step
        self.sampler = SimpleNamespace(penalties=SimpleNamespace(forget=lambda: None))

    def propose(self, schedule: Schedule) -> Schedule:
        """Also called for steps without drafts."""
        self.drawn.clear()
        self.model.propose(schedule)
        self.machine.met["short"] += sum(
            len(request.draft_ids) < count for request, _, _, count, _, _ in schedule if count
        )
        return settle(schedule, self.machine.pool)

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
            known = [*request.token_ids, *self.drawn.get(request, [])]
            assert read == known[:num_cached], "the draft model reads the request's text and its own drafts"
        chance = self.machine.chance
        errors = {n: RuntimeError("injected") for n in range(len(batch)) if chance.random() < 0.02}
        return SimpleNamespace(batch=batch, requests=self.requests, errors=errors)

    def repeat(self, launched: SimpleNamespace) -> None:
        return None

    def sample(self, launched: SimpleNamespace, rows: list[SamplingRow]) -> SimpleNamespace:
        batch, errors, ids = launched.batch, dict(launched.errors), []
        for number, row in zip(batch.logit_sequences.tolist(), rows, strict=True):
            if number in errors:
                continue
            request = launched.requests[number]
            is_right = self.machine.chance.random() < self.machine.share_right
            token_id = self.machine.token_at(request, row.index) if is_right else NO_TOKEN
            self.last_ids[int(batch.layout.rows[number])] = token_id
            self.drawn.setdefault(request, []).append(token_id)
            ids.append(token_id)
        return SimpleNamespace(errors=errors, wait=lambda: SampledTokens(ids, None, errors))


# Schedulers and pools.


def paged(choice: Choice, config: EngineConfig) -> PagedKVCachePool:
    return PagedKVCachePool(choice.size, config.block_size, config.max_batch_size, MAX_SEQ_LEN)


def shared(choice: Choice, config: EngineConfig) -> PagedKVCachePool:
    return PagedKVCachePool.of(sizes_of(choice, config, MAX_SEQ_LEN), PrefixSharing(config.block_size))


def shared_or_paged(choice: Choice, config: EngineConfig) -> PagedKVCachePool:
    return (shared if config.use_prefix_caching else paged)(choice, config)


def paired(choice: Choice, config: EngineConfig) -> PairedPool:
    return PairedPool(shared(choice, config), shared(choice, config))


def regions(choice: Choice, config: EngineConfig) -> ContiguousKVCachePool:
    return ContiguousKVCachePool(choice.size, MAX_SEQ_LEN)


def sizes_of(choice: Choice, config: EngineConfig, max_seq_len: int) -> PagedSizes:
    return PagedSizes(choice.size, config.block_size, config.max_batch_size, 64, max_seq_len)


def making(scheduler: Any, make_pool: Callable[[Choice, EngineConfig], Any]) -> Callable[[Choice], Scheduler]:
    def make(choice: Choice) -> Scheduler:
        config = EngineConfig(**choice.config)
        return scheduler(config, make_pool(choice, config), MAX_SEQ_LEN)

    return make


def make_with_registry(choice: Choice) -> Scheduler:
    config, registry, longest = EngineConfig(**choice.config), SegmentRegistry(choice.max_bytes), 40
    pool = segment_pool(sizes_of(choice, config, longest), registry, bool(config.use_prefix_caching))
    return SegmentScheduler(config, pool, longest, registry)


# The settings.

PREEMPTIVE: dict[str, Any] = {
    "block_size": st.sampled_from([1, 2, 3, 4, 16]),
    "scheduler_policy": st.sampled_from(SCHEDULER_POLICIES),
    "max_decode_interval": st.integers(1, LONGEST_INTERVAL),
    "max_batch_size": st.integers(1, 6),
    "max_num_batched_tokens": st.integers(1, 60),
}
CHUNKED = PREEMPTIVE | {
    "prefill_chunk_size": st.none() | st.integers(1, 9),
    "max_prefill_chunks_per_step": st.none() | st.integers(1, 3),
}
SPECULATIVE = PREEMPTIVE | {
    "max_decode_interval": NO_INTERVAL,
    "prefill_chunk_size": st.none() | st.integers(1, 9),
    "spec_length": st.integers(1, 6),
    "adapt_spec_length": st.booleans(),
    "use_speculative_decoding": True,
}
STEP_CHECKS = (
    the_token_budget_is_kept,
    the_youngest_give_their_memory,
    only_requests_that_wait_for_blocks_are_overtaken,
    no_block_is_computed_twice,
)
CHECKS: dict[str, Any] = {
    "step_checks": (*STEP_CHECKS, no_step_is_lost, the_oldest_always_runs, what_has_room_is_admitted),
    "state_checks": (blocks_are_free_cached_or_held, grants_cover_what_is_computed),
}
REGIONS: dict[str, Any] = {
    "step_checks": (
        the_token_budget_is_kept,
        no_step_is_lost,
        a_static_batch_is_closed,
        a_free_region_is_used,
        prompts_are_run_in_the_order_they_came,
    ),
    "state_checks": (a_region_is_all_that_a_request_can_come_to_need,),
}
WITHOUT_BLOCKS = {
    "max_batch_size": st.integers(1, 4),
    "max_num_batched_tokens": st.integers(1, 40),
    "max_waiting_requests": 5,
}
SHARING_STEPS = {"scheduler_policy": PREEMPTIVE["scheduler_policy"], "max_decode_interval": st.integers(1, 4)}

SETTINGS: dict[str, Setting] = {
    "static": Setting(
        choices(1, 4, batching_mode="static", **WITHOUT_BLOCKS), making(StaticScheduler, regions), **REGIONS
    ),
    "continuous": Setting(
        choices(1, 4, batching_mode="continuous", **WITHOUT_BLOCKS, **SHARING_STEPS),
        making(ContinuousScheduler, regions),
        **REGIONS,
    ),
    "preemptive": Setting(choices(1, 12, 3, **PREEMPTIVE), making(PreemptiveScheduler, paged), **CHECKS),
    "chunked": Setting(choices(1, 12, 3, **CHUNKED), making(ChunkedScheduler, paged), **CHECKS),
    "prefix": Setting(choices(1, 12, 3, **CHUNKED), making(PrefixScheduler, shared), **CHECKS),
    "overlapped": Setting(
        choices(1, 12, 3, **CHUNKED | {"max_decode_interval": NO_INTERVAL}, use_prefix_caching=st.booleans()),
        making(OverlappedScheduler, shared_or_paged),
        **CHECKS,
    ),
    "drafts": Setting(
        choices(1, 12, **SPECULATIVE, drafter="ngram", use_prefix_caching=st.booleans()),
        making(SpeculativeScheduler, shared_or_paged),
        make_drafts=GivenDrafts,
        **CHECKS,
    ),
    "draft model": Setting(
        choices(2, 12, **SPECULATIVE, draft_model="a draft model"),
        making(SpeculativeScheduler, paired),
        make_drafts=ModelDrafts,
        step_checks=STEP_CHECKS,
        state_checks=(*CHECKS["state_checks"], the_draft_models_memory_follows_the_text),
    ),
    "masks of 11.1": Setting(
        choices(1, 12, **SPECULATIVE, adapter="an adapter", use_prefix_caching=st.booleans()),
        making(MultiTokenScheduler, shared_or_paged),
        make_drafts=partial(GivenDrafts, settle=settle_with_masks),
        step_checks=(*CHECKS["step_checks"], masks_have_slots_within_the_budget),
        state_checks=CHECKS["state_checks"],
    ),
    "segments of 9.1": Setting(
        choices(
            4,
            16,
            block_size=st.sampled_from([1, 2, 3, 4]),
            max_batch_size=st.integers(1, 4),
            prefill_chunk_size=st.none() | st.integers(1, 9),
            max_decode_interval=NO_INTERVAL,
            use_prefix_caching=st.booleans(),
        ),
        make_with_registry,
        step_checks=STEP_CHECKS,
        state_checks=CHECKS["state_checks"],
    ),
}
