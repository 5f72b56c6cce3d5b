"""The common step, in which each running request gets its next token, in one pass over the requests. Introduced in
phase 9.

Most steps admit nothing and prefill nothing. This module plans and commits such a step in one pass, with the same
schedule and counts as the general path.
"""

from collections.abc import Iterable
from itertools import compress

from shared.engine.request import Request, RequestStatus
from shared.engine.sampling.sampler import SampledTokens
from shared.scheduling.schedule import Schedule
from shared.scheduling.scheduler import Scheduler


def only_decoding(scheduler: Scheduler, running: Iterable[Request]) -> list[Request]:
    """The requests of ``running`` that get their next token, with memory reserved for what each writes; empty if the
    next step admits or prefills a request.
    """
    if scheduler.waiting and len(scheduler.running) < scheduler.config.max_batch_size:
        return []
    decoding, max_seq_len, pool = [], scheduler.max_seq_len, scheduler.pool
    for request in running:
        start, num_prompt = request.num_scheduled_tokens, request.num_prompt_tokens
        num_pending = request.num_pending_tokens
        end = request.num_tokens + num_pending
        if start < num_prompt or start + 1 < end:
            return []  # a prefill
        is_complete = end >= max_seq_len or end - num_prompt >= request.params.max_new_tokens
        if start + 1 == end and not (num_pending and is_complete):
            decoding.append(request)
    others = pool.reserve_next(decoding)
    if all(pool.reserve(request, request.num_tokens + request.num_pending_tokens) for request in others):
        return decoding
    return []


def grant_next_tokens(scheduler: Scheduler, decoding: list[Request]) -> Schedule:
    """Schedule the next token of each request."""
    scheduler.num_steps += 1
    starts = [request.num_scheduled_tokens for request in decoding]
    for request in decoding:
        request.num_scheduled_tokens += 1
        request.num_pending_tokens += 1
    return Schedule.of_decoding(scheduler.num_steps, decoding, starts)


def commit_next_tokens(scheduler: Scheduler, schedule: Schedule, sampled: SampledTokens) -> None:
    """Like :meth:`Scheduler.commit`, for a step that gives each of its requests one token and in which none failed."""
    requests, starts, running = schedule.requests, schedule.columns["start"], RequestStatus.RUNNING
    columns = zip(requests, starts, strict=True)
    is_awaited = [request.status is running and request.num_computed_tokens == start for request, start in columns]
    awaited = list(compress(requests, is_awaited))
    scheduler.pool.commit_next(awaited)
    for request, (token_id, logprobs) in zip(awaited, compress(sampled, is_awaited), strict=True):
        request.num_computed_tokens += 1
        request.num_pending_tokens -= 1
        request.last_step = schedule.step
        request.append(token_id, logprobs)
    if scheduler.ending:
        for request, start in zip(requests, starts, strict=True):
            if request in scheduler.ending and request.num_scheduled_tokens == start + 1:
                del scheduler.ending[request]  # no later step computes it
                scheduler.pool.release(request)
