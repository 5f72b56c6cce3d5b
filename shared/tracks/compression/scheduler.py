"""Scheduling around compressions: no step computes past a compression. Introduced in phase 9.2.

A request is compressed at lengths that depend only on its prompt and the settings. The first is the end of its prompt,
or ``steps_between_compressions`` tokens above the budget if that comes later; the next ones follow at intervals of
``steps_between_compressions`` tokens. A chunk ends wherever a compression is due. So a preempted request, whose tokens
are recomputed in chunks, is compressed at the same lengths and gets the same cache.

A compression reads what the request's last step writes, and it frees blocks. So if a request reaches such a length in
the step in flight, the next step omits it, and the request is compressed while that step runs.

Invariants: those of :class:`shared.scheduling.overlapped.OverlappedScheduler`; a token past such a length is scheduled
only after the compression.
"""

import logging
from collections.abc import Collection, Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from shared.cache.pool.interface import CachePoolProtocol
from shared.engine.config import EngineConfig
from shared.engine.request import Request
from shared.engine.sampling.sampler import SampledTokens
from shared.scheduling.admission import admit
from shared.scheduling.chunks import Chunks, prefill_of
from shared.scheduling.growth import grow, known_tokens, preempt
from shared.scheduling.next_tokens import commit_next_tokens, grant_next_tokens, only_decoding
from shared.scheduling.overlapped import has_block_for_each, must_know_ends
from shared.scheduling.policies import share
from shared.scheduling.prefix import count_prefix_hits, not_waiting_for_blocks, prefix_stats
from shared.scheduling.schedule import Schedule
from shared.scheduling.scheduler import Scheduler

logger = logging.getLogger("infer.engine")


class CompressingScheduler(Scheduler):
    """Schedules with at most one step in flight, and compressions between steps if ``compress_method`` is set."""

    def __init__(self, config: EngineConfig, pool: CachePoolProtocol, max_seq_len: int) -> None:
        super().__init__(config, pool, max_seq_len)
        self.is_compressing = config.compress_method is not None
        self.prefill = Chunks(config, self.num_until_point) if self.is_compressing else prefill_of(config)
        self.interval = config.steps_between_compressions
        # the first compression length of requests with shorter prompts
        self.first = config.layer_budget + self.interval
        # the last compression length since admission
        self.compressed_at: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        self.preempted: list[str] = []  # preempted for a compression since the last schedule

    def schedule(self) -> Schedule:
        """Omits requests whose step in flight reaches a compression; empty if that step must finish first."""
        held = set(self.arriving())
        if has_block_for_each(self):
            if not self.preempted and (decoding := only_decoding(self, without(held, self.running.values()))):
                return grant_next_tokens(self, decoding)
        elif held or must_know_ends(self):  # a request whose token is in flight must not be preempted
            return Schedule(self.num_steps)
        self.num_steps += 1
        decoding = without(held, self.decoding())
        preempted = [*self.preempted, *grow(self, decoding)]
        self.preempted = []
        ready = not_waiting_for_blocks(self)
        admitted = [] if preempted else admit(self, ready, known_tokens, self.pool.watermark_tokens)
        count_prefix_hits(self, admitted)
        for request in admitted:
            self.compressed_at.pop(request, None)
        if preempted or admitted:
            decoding = without(held, self.decoding())
        prompts = self.prefill.prompts(without(held, self.running.values()))
        decoding, prompts = share(self, decoding, prompts)
        entries = self.prefill.fill(decoding, prompts)
        return Schedule(self.num_steps, entries, len(decoding), tuple(preempted))

    def stats(self) -> dict[str, Any]:
        return prefix_stats(self)

    def commit(self, schedule: Schedule, sampled: SampledTokens) -> None:
        if schedule.is_decode and not sampled.errors:
            commit_next_tokens(self, schedule, sampled)
        else:
            super().commit(schedule, sampled)

    def next_point(self, request: Request, num_tokens: int) -> int:
        """The first length above ``num_tokens`` at which the request is compressed."""
        first = max(request.num_prompt_tokens, self.first)
        return first if num_tokens < first else num_tokens + self.interval - (num_tokens - first) % self.interval

    def num_until_point(self, request: Request) -> int:
        """The tokens that a request may compute next: its remaining tokens, up to its next compression."""
        start = request.num_scheduled_tokens
        return min(request.num_unscheduled_tokens, self.next_point(request, start) - start)

    def due(self) -> Iterator[Request]:
        """Yield the running requests to compress before the next step, one by one."""
        self.compressions = []
        if not self.is_compressing:
            return
        for request in list(self.running.values()):
            if (
                request.request_id in self.running  # others may have ended, or been preempted, meanwhile
                and request.num_scheduled_tokens == request.num_computed_tokens
                and self._is_point(request, request.num_computed_tokens)
                and self.compressed_at.get(request) != request.num_computed_tokens
            ):
                yield request

    def arriving(self) -> list[Request]:
        """The running requests that must be compressed once the step in flight has finished."""
        return [
            request
            for request in self.running.values()
            if self.is_compressing
            and request.num_scheduled_tokens > request.num_computed_tokens
            and self._is_point(request, request.num_scheduled_tokens)
        ]

    def free_memory(self, request: Request) -> bool:
        """Preempt the youngest running request, while no step is in flight; False if that request is the one to
        compress."""
        youngest = next(reversed(self.running.values()))
        self.preempt(youngest)
        return youngest is not request

    def preempt(self, request: Request) -> None:
        """Drop the computed tokens of a running request, for a compression or because one was interrupted."""
        preempt(self, request)
        self.preempted.append(request.request_id)

    def compressed(self, request: Request, kept: tuple[tuple[int, ...], ...] | None, num_freed: int) -> None:
        """Record and log how many tokens each KV head of each layer keeps of a request (None: all), and how many blocks
        this freed.
        """
        num_tokens = self.compressed_at[request] = request.num_computed_tokens
        if kept is None:
            return
        self.compressions.append((request.request_id, num_tokens, kept))
        common = {"request": request.request_id, "tokens": num_tokens}
        if self.config.if_log_compress:
            share_kept = sum(map(sum, kept)) / (sum(map(len, kept)) * num_tokens)
            fields = common | {"kept": round(share_kept, 3), "freed_blocks": num_freed}
            logger.info("compressed", extra={"fields": fields})
        if self.config.if_log_num_topp:
            logger.info("kept by layer and KV head", extra={"fields": common | {"kept": kept}})

    def _is_point(self, request: Request, num_tokens: int) -> bool:
        after = num_tokens - max(request.num_prompt_tokens, self.first)
        return after >= 0 and after % self.interval == 0


def without(held: Collection[Request], requests: Iterable[Request]) -> list[Request]:
    """The requests that the step does not omit."""
    return [request for request in requests if request not in held]
