"""Which part of the memory belongs to whom, between two steps. Introduced in phase 6.

Counts say how full a memory is; a map says why: which blocks each request holds, in the order of its table, how many
tokens of them are written, and which requests lost theirs and are computed again. It is made on demand, from what
scheduler and pool know, and reads no tensor. The unit that a pool grants is a block here; a region is one large block,
so that both kinds of memory can be drawn the same way.

Invariants: no block belongs to two requests; a map keeps no reference to what it was made from, so it can be drawn
while the engine goes on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from shared.engine.record import StepRecord
from shared.engine.request import Request, RequestStatus
from shared.scheduling.scheduler import Scheduler


class HoldingState(StrEnum):
    """What the last step did for a request, or what it waits for. PREFILL: its prompt. DECODE: a token, or a turn that
    others had. RECOMPUTE: its prompt and its answer so far, for the second time. PREEMPTED: it holds nothing and waits
    to be computed again. LOST: blocks of somebody who neither runs nor waits, which is a defect.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    RECOMPUTE = "recompute"
    PREEMPTED = "preempted"
    LOST = "lost"


@dataclass(frozen=True)
class Holding:
    """What one request has of the memory."""

    request_id: str
    state: HoldingState
    num_prompt_tokens: int
    num_tokens: int  # prompt and answer so far; the last one is written by the step that follows
    num_written: int  # tokens that the memory has
    blocks: tuple[int, ...]  # in the order of the tokens: its block table


@dataclass(frozen=True)
class MemoryMap:
    """The memory and its holders."""

    unit: str  # "region" where a block has room for the longest request there may be, else "block"
    block_tokens: int
    num_blocks: int
    num_waiting: int  # those that were preempted among them
    num_preemptions: int  # since the engine was made
    holdings: tuple[Holding, ...]  # as they were admitted, then those that were preempted, the next first

    @classmethod
    def of(cls, scheduler: Scheduler, last_step: StepRecord | None = None) -> Self:
        """The memory now; ``last_step`` tells whose prompt was run in the step before."""
        pool = scheduler.pool
        block_tokens, holdings = pool.holdings()
        held = dict(holdings)
        ran = {request_id for request_id, _ in last_step.prefilled} if last_step is not None else set()
        found = [
            _holding(request, _state(request, request.request_id in ran), pool.length(request), held.pop(request, ()))
            for request in scheduler.running.values()
        ]
        found += [
            _holding(request, HoldingState.PREEMPTED, pool.length(request), held.pop(request, ()))
            for request in scheduler.waiting.values()
            if request.status is RequestStatus.PREEMPTED
        ]
        for request, blocks in held.items():
            if request not in scheduler.ending:  # what those hold comes back with the step in flight
                found.append(_holding(request, HoldingState.LOST, pool.length(request), blocks))
        return cls(
            unit="region" if block_tokens >= pool.request_capacity else "block",
            block_tokens=block_tokens,
            num_blocks=pool.capacity_tokens // block_tokens,
            num_waiting=len(scheduler.waiting),
            num_preemptions=scheduler.num_preemptions,
            holdings=tuple(found),
        )

    def of_request(self, request_id: str) -> Holding | None:
        """What this request has; None if it is not in the map."""
        return next((holding for holding in self.holdings if holding.request_id == request_id), None)

    @property
    def num_held(self) -> int:
        """Blocks that belong to somebody."""
        return sum(len(holding.blocks) for holding in self.holdings)

    @property
    def num_written(self) -> int:
        """Tokens that the memory has."""
        return sum(holding.num_written for holding in self.holdings)

    @property
    def written_share(self) -> float | None:
        """Share of the held memory that is written, 0 to 1: the rest is lost to fragmentation; None if none is held."""
        return self.num_written / (self.num_held * self.block_tokens) if self.num_held else None

    def as_json(self) -> dict[str, Any]:
        """The map with its figures, as JSON values."""
        return {
            "unit": self.unit,
            "block_tokens": self.block_tokens,
            "num_blocks": self.num_blocks,
            "num_free": self.num_blocks - self.num_held,
            "written_share": self.written_share,
            "num_waiting": self.num_waiting,
            "num_preemptions": self.num_preemptions,
            "holdings": [{**vars(holding), "blocks": list(holding.blocks)} for holding in self.holdings],
        }


def _state(request: Request, was_run: bool) -> HoldingState:
    """Of a request that runs. The run of a prompt gives one token; who has more had them before."""
    if not request.is_prefilling and not was_run:
        return HoldingState.DECODE
    before = len(request.output_ids) - (not request.is_prefilling)
    return HoldingState.RECOMPUTE if before else HoldingState.PREFILL


def _holding(request: Request, state: HoldingState, num_written: int, blocks: Sequence[int]) -> Holding:
    prompt = len(request.prompt_ids)
    return Holding(request.request_id, state, prompt, request.num_tokens, num_written, tuple(blocks))
