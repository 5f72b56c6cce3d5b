"""Measures what steps with and without drafts take, so that drafts are weighed against them. Introduced in phase 11.

It runs steps of made-up requests when the engine starts, through the pool and the runner that serve. Plain steps are
launched one behind the other, as they run with ``overlap_scheduling``; a step with drafts is waited for. All are
measured in turns, and the fastest of each counts: what slows a machine for a moment would else slow one of them alone.

Invariant: nothing of it stays in the pool.
"""

import time
from collections.abc import Callable
from typing import Any

from shared.cache.pool import CachePoolProtocol
from shared.engine.batch import Batch
from shared.engine.request import Request
from shared.engine.runner import Runner
from shared.sampling.params import SamplingParams
from shared.scheduling.schedule import Schedule, Scheduled
from shared.scheduling.scheduler import Scheduler
from shared.scheduling.speculative import SpeculativeScheduler
from shared.speculation.adaptive import StepTimes
from shared.speculation.drafter import Drafter

MOST_ON_CPU = 4  # requests; the time of a CPU's step grows evenly from there
TURNS = 3
STEPS = {"cuda": 4, "cpu": 1}


LayOut = Callable[[Schedule, CachePoolProtocol], Batch]
"""As ``Batch.of``."""


def tune(
    scheduler: Scheduler,
    runner: Runner,
    drafter: Drafter,
    lay_out: LayOut = Batch.of,
    num_tokens: Callable[[int], int] = lambda num_drafts: num_drafts + 1,
) -> None:
    """Measure the times by which the scheduler chooses lengths, if it adapts them.

    ``num_tokens`` says how many tokens the batches of ``lay_out`` have for each request, by its drafts.
    """
    if not isinstance(scheduler, SpeculativeScheduler) or not scheduler.lengths.is_adaptive:
        return
    pool, longest = scheduler.pool, scheduler.lengths.longest
    most = pool.max_sequences if runner.model.device.type == "cuda" else min(MOST_ON_CPU, pool.max_sequences)
    while longest > 1 and num_tokens(longest) > pool.request_capacity:
        longest -= 1
    longest_request = num_tokens(longest)
    room = min(pool.free_tokens, scheduler.config.most_tokens_of_a_step(scheduler.max_seq_len))
    while most > 1 and most * longest_request > room:
        most //= 2
    sizes = sorted({most, *(2**n for n in range(most.bit_length()))})

    def seconds(num_drafts: int, *, waits: bool) -> list[float]:
        about: dict[str, Any] = {"waits": waits, "lay_out": lay_out, "num_tokens": num_tokens(num_drafts)}
        return [step_seconds(runner, pool, size, num_drafts, **about) for size in sizes]

    turns = []
    for _ in range(TURNS):
        measured = seconds(0, waits=False), seconds(1, waits=True), seconds(longest, waits=True)
        turns.append((*measured, *drafter.forward_seconds(sizes)))
    fastest = ([min(of_size) for of_size in zip(*rows, strict=True)] for rows in zip(*turns, strict=True))
    scheduler.lengths.num_certain = drafter.num_certain
    scheduler.lengths.times = StepTimes(sizes, *fastest)


def step_seconds(
    runner: Runner,
    pool: CachePoolProtocol,
    num_requests: int,
    num_drafts: int = 0,
    *,
    waits: bool = False,
    repeats: bool = False,
    lay_out: LayOut = Batch.of,
    num_tokens: int | None = None,
) -> float:
    """Seconds of a step that decodes made-up requests with ``num_drafts`` each; ``waits``: for the tokens of each step.

    Without waiting, a step is launched while the one before it runs; ``repeats``: for the token that that one draws.
    ``num_tokens``: of a request, as laid out.
    """
    params = SamplingParams(temperature=0.0, max_new_tokens=1)
    size = num_drafts + 1
    requests = [Request(f"timing {n}", [0], params, 0, draft_ids=[0] * num_drafts) for n in range(num_requests)]
    num_steps = STEPS[runner.model.device.type]
    num_ahead = min(num_steps, pool.request_capacity - size) if repeats else 0
    try:
        for request in requests:
            pool.admit(request)
            pool.reserve(request, (num_tokens or size) + num_ahead)
        schedule = Schedule(
            0, tuple(Scheduled(request, 0, size, num_drafts, size) for request in requests), num_requests, (), num_ahead
        )
        started, launched = time.perf_counter(), None
        for _ in range(num_steps):
            again = runner.repeat(launched) if repeats and launched is not None else None
            launched = again or runner.forward(lay_out(schedule, pool))
            sampled = runner.sample(launched, schedule.sampling_rows())
            if waits:
                sampled.wait()
        sampled.wait()
        return (time.perf_counter() - started) / num_steps
    finally:
        for request in requests:
            pool.release(request)
