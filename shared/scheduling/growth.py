"""Growth: reserves each request's next token, and preempts when the pool is exhausted. Introduced in phase 6.

When the pool is exhausted, the request that was admitted last is *preempted*: its KV cache is freed, and it moves to
the head of the queue. Readmission recomputes its keys and values, for prompt and outputs, in one forward
(recomputation, as in vLLM: Kwon et al., SOSP 2023, section 4.5). The request keeps its tokens, and sampling noise
depends only on a token's index, so its output is the same as without preemption.

Invariants: every running request arrived before every waiting one; the oldest running request is never preempted.
"""

from collections.abc import Sequence

from shared.engine.request import Request, RequestStatus
from shared.scheduling.scheduler import Scheduler


def grow(scheduler: Scheduler, decoding: Sequence[Request]) -> list[str]:
    """Reserve KV cache for the token that each decoding request writes; return the ids of preempted requests.

    Args:
        decoding: the decoding requests, in order of admission.
    """
    preempted = []
    # exercise 06x3: reserve for the oldest request first
    # hint: iterate from the oldest request; each needs KV cache for its known tokens and those in flight:
    # hint: num_tokens + num_pending_tokens
    # hint: while reserve fails, preempt the youngest running request, which may be the request itself
    # hint: skip requests that have been preempted: check that the request still runs
    for request in decoding:
        while request.request_id in scheduler.running:
            if scheduler.pool.reserve(request, request.num_tokens + request.num_pending_tokens):
                break
            youngest = next(reversed(scheduler.running.values()))
            preempt(scheduler, youngest)
            preempted.append(youngest.request_id)
    # end exercise
    return preempted


def preempt(scheduler: Scheduler, request: Request) -> None:
    """Free a running request's KV cache and move it to the head of the queue."""
    # exercise 06x4: drop the computed state, keep the tokens
    # hint: release the request's blocks; reset the counts of computed, scheduled and pending tokens
    # hint: OrderedDict.move_to_end(key, last=False) puts an entry first
    scheduler.pool.release(request)
    request.num_computed_tokens = request.num_scheduled_tokens = request.num_pending_tokens = 0
    request.status = RequestStatus.PREEMPTED
    del scheduler.running[request.request_id]
    scheduler.waiting[request.request_id] = request
    scheduler.waiting.move_to_end(request.request_id, last=False)
    # end exercise
    scheduler.num_preemptions += 1


def known_tokens(request: Request) -> int:
    """What is reserved on admission: the prompt, and any outputs generated before a preemption."""
    return request.num_tokens
