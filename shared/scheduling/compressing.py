"""Scheduling around compressions: no step computes past one. Introduced in phase 9.2.

A request is compressed at lengths that depend on its prompt and the settings alone: first at the end of its prompt, or
``steps_between_compressions`` tokens above the budget if that comes later, then at every as many tokens. So a
preempted request, whose tokens are computed again in chunks, is compressed at the same lengths, and comes to the same
cache: a chunk ends where a compression is due.

A compression reads what the last step of its request writes, and frees blocks. So if a request reaches its length in
the step in flight, the next step leaves it out; when that one is in flight, the request is compressed.

Invariants: those of :class:`shared.scheduling.overlapped.OverlappedScheduler`; a token behind such a length is
scheduled only after the compression there.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from weakref import WeakKeyDictionary

from shared.cache.pool import CachePoolProtocol
from shared.engine.config import EngineConfig
from shared.engine.request import Request
from shared.scheduling.overlapped import OverlappedScheduler
from shared.scheduling.schedule import Schedule, Scheduled

logger = logging.getLogger("infer.engine")


class CompressingScheduler(OverlappedScheduler):
    """As :class:`OverlappedScheduler`, with compressions if ``compress_method`` is set."""

    def __init__(self, config: EngineConfig, pool: CachePoolProtocol, max_seq_len: int) -> None:
        super().__init__(config, pool, max_seq_len)
        self.is_compressing = config.compress_method is not None
        self.interval = config.steps_between_compressions
        self.first = config.layer_budget + self.interval  # the first length of a request whose prompt is shorter
        self.compressed_at: WeakKeyDictionary[Request, int] = WeakKeyDictionary()  # the last length, since admission
        self.preempted: list[str] = []  # for a compression, since the last schedule
        self.held: set[Request] = set()  # which the next step leaves out

    def next_point(self, request: Request, num_tokens: int) -> int:
        """The first length above ``num_tokens`` at which a request is compressed."""
        first = max(request.num_prompt_tokens, self.first)
        return first if num_tokens < first else num_tokens + self.interval - (num_tokens - first) % self.interval

    def due(self) -> Iterator[Request]:
        """The running requests to compress before the next step; to be compressed one by one."""
        self.compressions = []
        if not self.is_compressing:
            return
        for request in list(self.running.values()):
            if (
                request.request_id in self.running  # others may have ended, or been preempted, since
                and request.num_scheduled_tokens == request.num_computed_tokens
                and self._is_point(request, request.num_computed_tokens)
                and self.compressed_at.get(request) != request.num_computed_tokens
            ):
                yield request

    def arriving(self) -> list[Request]:
        """The running requests that are due when the step in flight has been finished."""
        return [
            request
            for request in self.running.values()
            if self.is_compressing
            and request.num_scheduled_tokens > request.num_computed_tokens
            and self._is_point(request, request.num_scheduled_tokens)
        ]

    def make_room(self, request: Request) -> bool:
        """Preempt the youngest running request for the compression of one, while no step is in flight; False if it is
        that one.
        """
        youngest = next(reversed(self.running.values()))
        self.preempt(youngest)
        return youngest is not request

    def schedule(self) -> Schedule:
        """See :class:`shared.scheduling.scheduler.Scheduler`; without requests that reach a compression in flight."""
        self.held = set(self.arriving())
        has_room = self.pool.free_tokens >= len(self.running) * self.config.block_size
        # A request whose token is in flight must not be preempted, so the step in flight is finished first.
        return super().schedule() if has_room or not self.held else Schedule(self.num_steps)

    @property
    def decodes_plainly(self) -> bool:
        """See :class:`OverlappedScheduler`; a schedule by the short way names no preempted requests."""
        return not self.preempted

    def _taking_part(self) -> Iterable[Request]:
        return [request for request in self.running.values() if request not in self.held]

    def _decoding(self) -> list[Request]:
        return [request for request in super()._decoding() if request not in self.held]

    def _prompts(self) -> list[Request]:
        return [request for request in super()._prompts() if request not in self.held]

    def compressed(self, request: Request, kept: tuple[tuple[int, ...], ...] | None, num_freed: int) -> None:
        """Note and log what each KV head of each layer keeps of a request that was due, None for all, and how many
        blocks this has freed.
        """
        num_tokens = self.compressed_at[request] = request.num_computed_tokens
        if kept is None:
            return
        self.compressions.append((request.request_id, num_tokens, kept))
        about = {"request": request.request_id, "tokens": num_tokens}
        if self.config.if_log_compress:
            share = sum(map(sum, kept)) / (sum(map(len, kept)) * num_tokens)
            logger.info("compressed", extra={"fields": about | {"kept": round(share, 3), "freed_blocks": num_freed}})
        if self.config.if_log_num_topp:
            logger.info("kept by layer and KV head", extra={"fields": about | {"kept": kept}})

    def preempt(self, request: Request) -> None:
        """Drop what a running request has computed, for a compression or because one was interrupted."""
        self._preempt(request)
        self.preempted.append(request.request_id)

    def _grow(self, decoding: Sequence[Request]) -> list[str]:
        preempted, self.preempted = self.preempted, []
        return preempted + super()._grow(decoding)

    def _preempt(self, request: Request) -> None:
        super()._preempt(request)
        self.compressed_at.pop(request, None)

    def _grant(self, request: Request, num_tokens: int) -> Scheduled:
        if self.is_compressing:
            start = request.num_scheduled_tokens
            num_tokens = min(num_tokens, self.next_point(request, start) - start)
        return super()._grant(request, num_tokens)

    def _is_point(self, request: Request, num_tokens: int) -> bool:
        behind = num_tokens - max(request.num_prompt_tokens, self.first)
        return behind >= 0 and behind % self.interval == 0
