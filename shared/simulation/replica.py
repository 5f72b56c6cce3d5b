"""One engine of a fleet: its queue, its steps and its prefix cache, without a model. Follows phase 11.

It plans steps as the scheduler of phase 8 does: one token for each decoding request, then chunks of prompts in the
order of admission. Steps that only decode the same requests form one run. A run ends with the first complete answer, or
with the step in which an admissible request arrives. So an event costs the same for one step as for a hundred.

It simulates neither preemption (a request is admitted with memory for its whole answer) nor waiting for blocks that
another request is computing. Invariants: requests are admitted in order of arrival; at most ``max_batch_size`` run.
"""

import heapq
from collections import deque
from dataclasses import dataclass

from shared.errors import CapacityError, ConfigError
from shared.simulation.arrivals import Request
from shared.simulation.blocks import SimulatedBlocks
from shared.simulation.step_times import StepTimes


@dataclass(frozen=True)
class EngineLimits:
    """Each engine's settings, named as in :class:`shared.engine.config.EngineConfig`; ``kv_tokens``: the tokens of all
    blocks.

    A chunk has at most ``prefill_chunk_size`` tokens, even while nothing decodes.
    """

    max_batch_size: int = 64
    max_num_batched_tokens: int = 8192
    prefill_chunk_size: int = 512
    block_size: int = 16
    kv_tokens: int = 2**18

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1.")


class Replica:
    """An engine. The caller gets the end of a run of steps from :meth:`plan`, and calls :meth:`finish` at that time."""

    def __init__(self, times: StepTimes, limits: EngineLimits) -> None:
        self.times, self.limits = times, limits
        self.blocks = SimulatedBlocks(limits.kv_tokens // limits.block_size, limits.block_size)
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.decoding: list[tuple[int, int, Request]] = []  # a heap: the step of the last token, a number, the request
        self.num_steps = self.num_started = 0
        self.num_keys = 0  # keys that the next step of the decoding requests attends to
        self.began = self.seconds_busy = 0.0
        self.chunks: list[int] = []  # chunks of the current step, from the first prompts
        self.run = 0  # steps of the current run
        self.ends: float | None = None  # when

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def is_busy(self) -> bool:
        return self.ends is not None

    @property
    def num_ongoing(self) -> int:
        return len(self.waiting) + self.num_running

    def add(self, request: Request) -> None:
        """Queue a request; raises CapacityError if the KV cache could never hold it."""
        if self.blocks.needed(request) > self.blocks.num_blocks:
            tokens = request.prompt_tokens + request.new_tokens
            raise CapacityError(f"A request has {tokens} tokens; a replica's KV cache holds {self.limits.kv_tokens}.")
        self.waiting.append(request)

    def plan(self, now: float) -> float | None:
        """Begin a run of steps; returns its end, or None if there is nothing to do."""
        while self.waiting and self.num_running < self.limits.max_batch_size and self.blocks.admit(self.waiting[0]):
            request = self.waiting.popleft()
            request.scheduled, request.num_computed = now, request.num_cached
            self.prefilling.append(request)
        self.began, self.chunks, rows = now, [], len(self.decoding)
        if not self.prefilling:
            self.run = self.decoding[0][0] - self.num_steps if rows else 0
            self.ends = now + self.times.decode(rows, self.num_keys, self.run) if rows else None
            return self.ends
        seconds, self.run = self.times.decode(rows, self.num_keys) + self.times.prefill_step, 1
        budget = max(self.limits.max_num_batched_tokens - rows, 1)
        for request in self.prefilling:
            chunk = min(request.prompt_tokens - request.num_computed, self.limits.prefill_chunk_size, budget)
            if chunk == 0:
                break
            self.chunks.append(chunk)
            budget -= chunk
            seconds += self.times.prefill(chunk, request.num_computed)
        self.ends = now + seconds
        return self.ends

    def cut(self, now: float) -> float | None:
        """A request has arrived: if it can be admitted, the run ends with the step in progress at ``now``. Returns the
        time of that end, or None if the run continues as planned.
        """
        if self.run == 1 or self.num_running == self.limits.max_batch_size or len(self.waiting) > 1:
            return None
        rows = len(self.decoding)
        run = self.times.steps_within(now - self.began, rows, self.num_keys, self.run)
        if run == self.run:
            return None
        self.run = run
        self.ends = self.began + self.times.decode(rows, self.num_keys, run)
        return self.ends

    def finish(self, now: float) -> list[Request]:
        """Finish the run; returns the requests whose answers are complete."""
        self.seconds_busy += now - self.began
        self.num_steps += self.run
        self.num_keys += self.run * len(self.decoding)
        done = []
        while self.decoding and self.decoding[0][0] == self.num_steps:
            done.append(request := heapq.heappop(self.decoding)[2])
            self.num_keys -= request.prompt_tokens + request.new_tokens
        for request, chunk in zip(self.prefilling, self.chunks, strict=False):
            request.num_computed += chunk
            if request.num_computed == request.prompt_tokens:
                request.first_token = now
                self.blocks.enter(request)
                if request.new_tokens == 1:
                    done.append(request)
                else:
                    self.num_started += 1
                    last = self.num_steps + request.new_tokens - 1
                    heapq.heappush(self.decoding, (last, self.num_started, request))
                    self.num_keys += request.prompt_tokens + 1
        if self.chunks:
            self.prefilling = [each for each in self.prefilling if each.num_computed < each.prompt_tokens]
        for request in done:
            request.ended = now
            self.blocks.release(request)
        return done
