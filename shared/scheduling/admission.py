"""Admission: which waiting requests start running. Introduced in phase 4.

Invariant: a request runs with the KV cache that its scheduler reserves for it, and no request overtakes one that waits
for memory.
"""

from collections.abc import Callable, Iterable

from shared.engine.request import Request
from shared.scheduling.scheduler import Scheduler


def admit(
    scheduler: Scheduler, candidates: Iterable[Request], num_tokens: Callable[[Request], int], num_kept_free: int = 0
) -> list[Request]:
    """Admit requests while the batch and the KV cache have capacity; return them.

    Args:
        candidates: waiting requests, in the order in which they may be admitted.
        num_tokens: the number of tokens to reserve for a request.
        num_kept_free: tokens that must stay free for running requests; ignored while none runs.
    """
    admitted: list[Request] = []
    running, pool = scheduler.running, scheduler.pool
    # exercise 04x4: admit from the head of the queue
    # hint: take the candidates in order, while fewer than max_batch_size requests run
    # hint: pool.admit returns how many of a request's tokens are cached: they count as computed, and as scheduled
    # hint: pool.reserve reserves its KV cache; if that fails, pool.release it and stop: no request overtakes
    # hint: stop as well if fewer than num_kept_free tokens would stay free while other requests run
    # hint: otherwise it runs: scheduler.start; and it is one of the admitted requests
    for request in candidates:
        if len(running) == scheduler.config.max_batch_size:
            break
        num_cached, needed = pool.admit(request), num_tokens(request)
        free = pool.free_tokens - (num_kept_free if running else 0)
        if needed - num_cached > free or not pool.reserve(request, needed):
            pool.release(request)
            break
        scheduler.start(request, num_cached)
        admitted.append(request)
    # end exercise
    return admitted


def queued(scheduler: Scheduler) -> list[Request]:
    """The waiting requests in order of arrival; a list, since admission takes them from the queue."""
    return list(scheduler.waiting.values())
