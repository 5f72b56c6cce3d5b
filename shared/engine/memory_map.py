"""Which request holds which blocks of the KV cache, between two steps. Introduced in phase 6.

A memory map lists, for each request, the blocks that it holds (in the order of its block table), how many of their
tokens are written, and whether it was preempted or is being recomputed. It also lists the blocks that no request holds
but that are cached for requests with the same prefix (phase 8). It is built on demand from the host state of scheduler
and pool, without reading a tensor. A contiguous region is shown as one large block, so both kinds of pool are displayed
the same way.

Invariants: a block in several block tables has the same index in each, and is written; a map holds no reference to the
scheduler or the pool, so it can be displayed while the engine runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, Self

from shared.engine.record import StepRecord
from shared.engine.request import Request, RequestStatus
from shared.scheduling.scheduler import Scheduler


class HoldingState(StrEnum):
    """What a request is doing. PREFILL: the last step computed its prompt. DECODE: it is decoding, whether or not the
    last step included it. RECOMPUTE: the last step recomputed its prompt and outputs after a preemption. PREEMPTED: it
    holds no blocks and waits for readmission. LOST: it holds blocks but neither runs nor waits, which is a bug.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    RECOMPUTE = "recompute"
    PREEMPTED = "preempted"
    LOST = "lost"


@dataclass(frozen=True)
class Holding:
    """The blocks of one request."""

    request_id: str
    state: HoldingState
    num_prompt_tokens: int
    num_tokens: int  # prompt and output so far; the next step writes the last token
    num_written: int  # tokens whose keys and values are in the KV cache
    num_cached_tokens: int  # of its first tokens, found in the KV cache when it was first admitted
    blocks: tuple[int, ...]  # its block table


@dataclass(frozen=True)
class MemoryMap:
    """The KV cache and the requests that hold parts of it."""

    unit: str  # "region" if a block holds the longest possible request, otherwise "block"
    block_tokens: int
    num_blocks: int
    num_waiting: int  # preempted requests included
    num_preemptions: int  # since the engine started
    holdings: tuple[Holding, ...]  # running requests in order of admission, then preempted ones in queue order
    cached: tuple[int, ...]  # blocks of prefixes that no request holds

    @classmethod
    def of(cls, scheduler: Scheduler, last_step: StepRecord | None = None) -> Self:
        """The current map; ``last_step`` says which prompts the previous step prefilled."""
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
            if request not in scheduler.ending:  # released when the step in flight is committed
                found.append(_holding(request, HoldingState.LOST, pool.length(request), blocks))
        return cls(
            unit="region" if block_tokens >= pool.request_capacity else "block",
            block_tokens=block_tokens,
            num_blocks=pool.capacity_tokens // block_tokens,
            num_waiting=len(scheduler.waiting),
            num_preemptions=scheduler.num_preemptions,
            holdings=tuple(found),
            cached=tuple(pool.cached_blocks()),
        )

    def of_request(self, request_id: str) -> Holding | None:
        """The blocks of this request; None if it is not in the map."""
        return next((holding for holding in self.holdings if holding.request_id == request_id), None)

    @cached_property
    def num_held(self) -> int:
        """Blocks that are in use; a shared one counts once."""
        return len({block for holding in self.holdings for block in holding.blocks})

    @property
    def num_written(self) -> int:
        """Tokens in the blocks in use whose keys and values are written; a shared block counts once."""
        num_shared = sum(len(holding.blocks) for holding in self.holdings) - self.num_held
        return sum(holding.num_written for holding in self.holdings) - num_shared * self.block_tokens

    @property
    def written_share(self) -> float | None:
        """The share of the blocks in use that is written, 0 to 1; the rest is fragmentation. None if no block is in
        use."""
        return self.num_written / (self.num_held * self.block_tokens) if self.num_held else None

    def as_json(self) -> dict[str, Any]:
        """The map and its counts as JSON values."""
        return {
            "unit": self.unit,
            "block_tokens": self.block_tokens,
            "num_blocks": self.num_blocks,
            "num_free": self.num_blocks - self.num_held - len(self.cached),
            "written_share": self.written_share,
            "num_waiting": self.num_waiting,
            "num_preemptions": self.num_preemptions,
            "holdings": [{**vars(holding), "blocks": list(holding.blocks)} for holding in self.holdings],
            "cached": list(self.cached),
        }


def _state(request: Request, was_run: bool) -> HoldingState:
    """The state of a running request. A prefill yields one token, so a request with more outputs had them before."""
    if not request.is_prefilling and not was_run:
        return HoldingState.DECODE
    before = len(request.output_ids) - (not request.is_prefilling)
    return HoldingState.RECOMPUTE if before else HoldingState.PREFILL


def _holding(request: Request, state: HoldingState, num_written: int, blocks: Sequence[int]) -> Holding:
    prompt = len(request.prompt_ids)
    num_cached = request.num_cached_tokens
    return Holding(request.request_id, state, prompt, request.num_tokens, num_written, num_cached, tuple(blocks))
