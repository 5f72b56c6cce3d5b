"""An engine's report of one step, and of its load. Introduced in phase 4.

A record holds ids and counts but no times; the caller of ``step`` measures those. Invariant: the same requests in the
same order give the same records, so tests can compare them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from shared.engine.output import StepOutput
from shared.scheduling.schedule import Schedule
from shared.scheduling.scheduler import Compression, Scheduler


@dataclass(frozen=True)
class StepRecord:
    """What one step did. A request is named at most once in each field, in the order of its batch."""

    step: int  # counted from 0
    prefilled: tuple[tuple[str, int], ...]  # (request id, tokens computed; outputs included if recomputed)
    decoded: tuple[str, ...]
    finished: tuple[str, ...]
    failed: tuple[str, ...]
    num_waiting: int  # after the step
    num_running: int  # after the step
    kv_used_tokens: int  # tokens in the KV cache after the step, without finished requests
    kv_capacity_tokens: int
    preempted: tuple[str, ...] = ()  # when the step was scheduled
    prefill_starts: tuple[int, ...] = ()  # the index of the first token that each of `prefilled` computed
    verified: tuple[tuple[str, int, int], ...] = ()  # (request id, accepted drafts, rejected drafts)
    compressed: tuple[Compression, ...] = ()  # before the step

    @classmethod
    def of(cls, scheduler: Scheduler, schedule: Schedule, outputs: Sequence[StepOutput]) -> Self:
        """The record of the step that ran ``schedule`` and returned ``outputs``."""
        last = [output for output in outputs if output.finish_reason is not None]
        failed = tuple([output.request_id for output in last if output.error is not None])
        prefilled = [entry for entry in schedule.prompts if entry.request.request_id not in failed]
        decoded = [request.request_id for request in schedule.requests[: schedule.num_decoding]]
        return cls(
            step=schedule.step - 1,
            prefilled=tuple((entry.request.request_id, entry.num_tokens) for entry in prefilled),
            decoded=tuple([request_id for request_id in decoded if request_id not in failed] if failed else decoded),
            finished=tuple([output.request_id for output in last if output.error is None]),
            failed=failed,
            preempted=schedule.preempted,
            prefill_starts=tuple(entry.start for entry in prefilled),
            verified=tuple(scheduler.verified) if schedule.has_drafts else (),
            compressed=tuple(scheduler.compressions),
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running),
            kv_used_tokens=scheduler.pool.used_tokens,
            kv_capacity_tokens=scheduler.pool.capacity_tokens,
        )


@dataclass(frozen=True)
class EngineLoad:
    """Running and waiting requests, and KV cache usage, between two steps."""

    num_running: int
    num_waiting: int
    kv_usage: float  # share of the KV cache that is reserved, 0 to 1
    num_preemptions: int  # since the engine started
    num_prefix_queries: int = 0  # tokens looked up in a prefix tree since the engine started
    num_prefix_hits: int = 0  # and found there
    num_drafts_by_position: tuple[int, ...] = ()  # drafts verified since the engine started, the first of a step first
    num_accepted_by_position: tuple[int, ...] = ()
    step_costs: str | None = None  # the hash of the step-cost table that the scheduler uses

    @classmethod
    def of(cls, scheduler: Scheduler) -> Self:
        """The load now."""
        pool = scheduler.pool
        kv_usage = 1 - pool.free_tokens / pool.capacity_tokens
        return cls(
            len(scheduler.running),
            len(scheduler.waiting),
            kv_usage,
            scheduler.num_preemptions,
            scheduler.num_prefix_queries,
            scheduler.num_prefix_hits,
            tuple(scheduler.num_drafts_by_position),
            tuple(scheduler.num_accepted_by_position),
            scheduler.step_costs,
        )
