"""The common step, in which each running request gets its next token, in one pass over the requests. Introduced in
phase 9.

Most steps admit nothing and prefill nothing. This module plans and commits such a step in one pass, with the same
schedule and counts as the general path. If the step before gave the same requests a token, they need not be looked at
at all until one of them ends: both belong to one :class:`shared.scheduling.schedule.DecodeRun`.
"""

from collections.abc import Iterable
from itertools import compress

from shared.engine.request import Request, RequestStatus, append_next
from shared.engine.sampling.sampler import SampledTokens
from shared.scheduling.schedule import DecodeRun, Schedule
from shared.scheduling.scheduler import Scheduler


def only_decoding(scheduler: Scheduler, running: Iterable[Request]) -> list[Request]:
    """The requests of ``running`` that get their next token, with memory reserved for what each writes; empty if the
    next step admits or prefills a request.
    """
    if scheduler.waiting and len(scheduler.running) < scheduler.config.max_batch_size:
        return []
    running, run, pool = list(running), scheduler.run, scheduler.pool
    if run is not None and can_continue(scheduler, run) and run.requests == running:
        decoding = run.requests
    else:
        decoding = all_decoding(scheduler, running)
    others = pool.reserve_next(decoding)
    if all(pool.reserve(request, request.num_tokens + request.num_pending_tokens) for request in others):
        return decoding
    return []


def can_continue(scheduler: Scheduler, run: DecodeRun) -> bool:
    """Whether the newest step belongs to the run, and no request reaches its maximum length in it."""
    return run.step == scheduler.num_steps < run.last_step


def all_decoding(scheduler: Scheduler, running: Iterable[Request]) -> list[Request]:
    """The requests of ``running`` that get their next token; empty if one of them is prefilled."""
    decoding, max_seq_len = [], scheduler.max_seq_len
    for request in running:
        start, num_prompt = request.num_scheduled_tokens, request.num_prompt_tokens
        num_pending = request.num_pending_tokens
        end = request.num_tokens + num_pending
        if start < num_prompt or start + 1 < end:
            return []  # a prefill
        is_complete = end >= max_seq_len or end - num_prompt >= request.params.max_new_tokens
        if start + 1 == end and not (num_pending and is_complete):
            decoding.append(request)
    return decoding


def grant_next_tokens(scheduler: Scheduler, decoding: list[Request]) -> Schedule:
    """Schedule the next token of each request."""
    run = scheduler.run
    if run is not None and decoding is run.requests:
        run.starts = [start + 1 for start in run.starts]
    else:
        starts = [request.num_scheduled_tokens for request in decoding]
        num_steps = min([scheduler.longest(request) - start for request, start in zip(decoding, starts, strict=True)])
        run = scheduler.run = DecodeRun(decoding, scheduler.num_steps + num_steps - 1)
        run.starts = starts
    scheduler.num_steps += 1
    run.step = scheduler.num_steps
    for request in decoding:
        request.num_scheduled_tokens += 1
        request.num_pending_tokens += 1
    return Schedule.of_run(run.step, run, run.starts)


def commit_next_tokens(scheduler: Scheduler, schedule: Schedule, sampled: SampledTokens) -> None:
    """Like :meth:`Scheduler.commit`, for a step that gives each of its requests one token and in which none failed."""
    requests, starts, running = schedule.requests, schedule.columns["start"], RequestStatus.RUNNING
    ids, all_logprobs = sampled.token_ids, sampled.logprobs
    awaited = requests
    if schedule.run is None or schedule.run is not scheduler.run:  # one may have ended, or been preempted, since
        columns = zip(requests, starts, strict=True)
        is_awaited = [request.status is running and request.num_computed_tokens == start for request, start in columns]
        awaited, ids = list(compress(requests, is_awaited)), list(compress(ids, is_awaited))
        all_logprobs = None if all_logprobs is None else list(compress(all_logprobs, is_awaited))
    scheduler.pool.commit_next(awaited)
    append_next(awaited, ids, all_logprobs, schedule.step)
    if scheduler.ending:
        for request, start in zip(requests, starts, strict=True):
            if request in scheduler.ending and request.num_scheduled_tokens == start + 1:
                del scheduler.ending[request]  # no later step computes it
                scheduler.pool.release(request)
