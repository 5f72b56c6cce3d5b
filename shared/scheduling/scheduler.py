"""What every scheduler does: a queue, admission, and the accounts of what was computed. Introduced in phase 4.

A scheduler decides and touches neither tensors nor text. ``schedule`` reads counts and never token values, so a step
can be scheduled while tokens of the one before are still in flight: what a schedule computes is counted as scheduled at
once, and as computed when it is committed. Which requests join, and which of those that run take part in a step, is
what schedulers differ in: the one method that is not here.

A request is admitted only with memory for its prompt and its longest answer, so none that runs can run out of it
(:mod:`shared.scheduling.preemption` does without that).
Invariants: FCFS: requests are admitted in the order they came; at most ``max_batch_size`` run; what a request holds is
released when it ends, or when the last step in flight that computes it is committed; a step that was broken off is
dropped and scheduled again.
"""

import logging
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from shared.cache.pool import CachePoolProtocol
from shared.engine.config import EngineConfig
from shared.engine.prompt import check_capacity, check_queue
from shared.engine.request import Request, RequestStatus
from shared.engine.sampler import SampledTokens
from shared.errors import RequestError
from shared.sampling.params import SamplingParams
from shared.scheduling.schedule import Schedule, Scheduled

logger = logging.getLogger("infer.engine")


class Scheduler(ABC):
    """Requests that wait and requests that run."""

    def __init__(self, config: EngineConfig, pool: CachePoolProtocol, max_seq_len: int) -> None:
        self.config = config
        self.pool = pool
        self.max_seq_len = max_seq_len
        self.waiting: OrderedDict[str, Request] = OrderedDict()  # in the order they came
        self.running: OrderedDict[str, Request] = OrderedDict()  # in the order they were admitted
        self.ending: dict[Request, None] = {}  # those that ended, and are computed by a step in flight
        self.num_steps = 0
        self.num_preemptions = 0

    @abstractmethod
    def schedule(self) -> Schedule:
        """Admit the requests that this scheduler admits now, and say what the coming step computes."""

    def check(self, request_id: str, num_prompt_tokens: int, params: SamplingParams) -> None:
        """Raise what speaks against a new request, before anything of it is kept.

        Raises:
            RequestError: its id is in use, or the memory could never hold it.
            QueueFullError: as many requests wait as may wait.
        """
        if request_id in self:
            raise RequestError(f"A request with the id {request_id!r} is waiting or running; choose another id.")
        check_capacity(num_prompt_tokens, params.max_new_tokens, self.max_seq_len, self.pool.request_capacity)
        check_queue(len(self.waiting), self.config.max_waiting_requests)

    def add(self, request: Request) -> None:
        """Put a request that ``check`` had nothing against at the end of the queue."""
        self.waiting[request.request_id] = request

    def commit(self, schedule: Schedule, sampled: SampledTokens) -> None:
        """Count what a step, or a part of it, has computed, append its tokens, and retire the requests that failed.

        What was computed for a request that has ended or was preempted meanwhile is dropped.
        """
        tokens = iter(sampled)
        for number, (request, start, num_tokens, _, num_logit_rows) in enumerate(schedule):
            error = sampled.errors.get(number)
            drawn = list(islice(tokens, num_logit_rows)) if error is None else []
            if request.status is RequestStatus.RUNNING and request.num_computed_tokens == start:
                if error is not None:
                    self._fail(request, error)
                else:
                    self.pool.commit(request, num_tokens)
                    request.num_computed_tokens += num_tokens
                    request.num_pending_tokens -= len(drawn)
                    request.last_step = schedule.step
                    for token_id, logprobs in drawn:
                        request.append(token_id, logprobs)
            if self.ending and request in self.ending and request.num_scheduled_tokens == start + num_tokens:
                del self.ending[request]  # no later step computes it
                self.pool.release(request)

    def finish(self, requests: Iterable[Request]) -> None:
        """Retire requests whose answers have ended."""
        for request in requests:
            self._retire(request, RequestStatus.FINISHED)

    def abort(self, request_id: str) -> Request | None:
        """Retire a request, which gives no further output; None if it is not here (any more)."""
        request = self.waiting.get(request_id) or self.running.get(request_id)
        if request is not None:
            self._retire(request, RequestStatus.FINISHED)
        return request

    def drop_in_flight(self) -> None:
        """Forget what was scheduled and not committed: a step that was broken off, which is then scheduled again."""
        for request in self.running.values():
            request.num_scheduled_tokens, request.num_pending_tokens = request.num_computed_tokens, 0
        for request in self.ending:
            self.pool.release(request)
        self.ending.clear()

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.waiting or self.running)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.waiting or request_id in self.running

    def _admit(self, num_tokens: Callable[[Request], int], num_kept_free: int = 0) -> None:
        """Let the first of the queue run, and the next, as long as there is a place and memory for it.

        Args:
            num_tokens: for how many tokens a request needs memory.
            num_kept_free: free tokens that are left to running requests; where none runs, to none.
        """
        # exercise 04x4: let the first of the queue run
        # hint: go on while requests wait and fewer than max_batch_size run; look at the first in the queue alone
        # hint: pool.admit says how many of its tokens are there already: they count as computed, and as scheduled
        # hint: pool.reserve asks for its memory; if that is refused, pool.release it and stop: no request overtakes
        # hint: so too where fewer tokens than num_kept_free would be left free, while others run
        # hint: else it moves from waiting to running and gets the status RUNNING
        while self.waiting and len(self.running) < self.config.max_batch_size:
            request = next(iter(self.waiting.values()))
            num_cached, needed = self.pool.admit(request), num_tokens(request)
            free = self.pool.free_tokens - (num_kept_free if self.running else 0)
            if needed - num_cached > free or not self.pool.reserve(request, needed):
                self.pool.release(request)
                return
            request.num_computed_tokens = request.num_scheduled_tokens = num_cached
            request.status = RequestStatus.RUNNING
            del self.waiting[request.request_id]
            self.running[request.request_id] = request
        # end exercise

    def _prompts(self) -> list[Request]:
        """Of the requests whose prompts are not computed the first, and those behind it within the token budget."""
        chosen: list[Request] = []
        num_tokens = 0
        for request in self.running.values():
            if not request.is_prefilling:
                continue
            num_tokens += request.num_unscheduled_tokens
            if chosen and num_tokens > self.config.max_num_batched_tokens:
                break
            chosen.append(request)
        return chosen

    def _decoding(self) -> list[Request]:
        """The requests that can get their next token, in the order they were admitted."""
        return [
            request
            for request in self.running.values()
            if not request.is_prefilling and (request.num_pending_tokens == 0 or not self._is_complete(request))
        ]

    def _plan(self, decoding: Sequence[Request], prompts: Sequence[Request], preempted: Iterable[str] = ()) -> Schedule:
        """The schedule that computes all tokens of these that no step computes yet, and draws the next of each."""
        entries = []
        for request in (*decoding, *prompts):
            num_new = request.num_unscheduled_tokens
            entries.append(Scheduled(request, request.num_scheduled_tokens, num_new))
            request.num_scheduled_tokens += num_new
            request.num_pending_tokens += 1
        return Schedule(self.num_steps, tuple(entries), len(decoding), tuple(preempted))

    def _is_complete(self, request: Request) -> bool:
        """Whether its answer is as long as it may be, with the tokens in flight."""
        return request.num_tokens + request.num_pending_tokens >= self._longest(request)

    def _longest(self, request: Request) -> int:
        """Tokens of the prompt and of the longest answer there can be."""
        return min(request.num_prompt_tokens + request.params.max_new_tokens, self.max_seq_len)

    def _fail(self, request: Request, error: Exception) -> None:
        """Retire a request that could not be computed; the cause goes to the log, with its traceback."""
        logger.error("request %s failed", request.request_id, exc_info=error)
        request.error = (
            f"The engine could not compute this request ({type(error).__name__}); the cause stands in its log, and no "
            "other request was affected."
        )
        self._retire(request, RequestStatus.FAILED)

    def _retire(self, request: Request, status: RequestStatus) -> None:
        """Take a request out, and take back what it holds as soon as no step computes it."""
        is_in_flight = request.num_scheduled_tokens > request.num_computed_tokens
        request.status = status
        self.waiting.pop(request.request_id, None)
        self.running.pop(request.request_id, None)
        if is_in_flight:
            self.ending[request] = None
        else:
            self.pool.release(request)
