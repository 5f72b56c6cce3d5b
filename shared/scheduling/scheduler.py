"""What every scheduler does with requests: queue, commit and retire them. Introduced in phase 4.

Schedulers differ in one method, ``schedule``: which requests they admit, and which running requests take part in a
step. Each is complete in its own file and reads from top to bottom. It is built from functions named for what they do:
:mod:`shared.scheduling.admission`, :mod:`shared.scheduling.prefill`, and those of later phases.

A scheduler touches neither tensors nor text. ``schedule`` reads counts and never token values, so a step can be
scheduled while tokens of the previous step are in flight: tokens count as scheduled immediately, and as computed when
the step is committed.

Invariants: FCFS: requests are admitted in order of arrival, and at most ``max_batch_size`` run. A request's KV cache is
released when the request finishes, or when the last step in flight that computes it is committed. An interrupted step
is dropped and scheduled again.
"""

import logging
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from shared.cache.pool.interface import CachePoolProtocol
from shared.engine.config import EngineConfig
from shared.engine.prompt import check_capacity, check_queue
from shared.engine.request import Request, RequestStatus
from shared.engine.sampling.sampler import SampledTokens
from shared.errors import RequestError
from shared.sampling.params import SamplingParams
from shared.scheduling.schedule import Schedule

Compression = tuple[str, int, tuple[tuple[int, ...], ...]]
"""A request, the number of its tokens, and how many of them each KV head of each layer keeps."""

logger = logging.getLogger("infer.engine")


class Scheduler(ABC):
    """The waiting and the running requests; the interface of all schedulers."""

    def __init__(self, config: EngineConfig, pool: CachePoolProtocol, max_seq_len: int) -> None:
        self.config = config
        self.pool = pool
        self.max_seq_len = max_seq_len
        self.waiting: OrderedDict[str, Request] = OrderedDict()  # in order of arrival
        self.running: OrderedDict[str, Request] = OrderedDict()  # in order of admission
        self.ending: dict[Request, None] = {}  # retired, but still being computed by a step in flight
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_prefix_queries = self.num_prefix_hits = 0  # tokens looked up in a prefix tree, and tokens found
        self.num_accepted_drafts = self.num_rejected_drafts = 0  # of all requests (phase 11)
        self.num_accepted_forced_drafts = 0  # accepted drafts that a grammar forced (phase 12)
        self.num_drafts_by_position: list[int] = []  # verified drafts; position 0 follows the newest token of a request
        self.num_accepted_by_position: list[int] = []
        self.step_costs: str | None = None  # the hash of the table that determines draft lengths (phase 11)
        self.verified: list[tuple[str, int, int]] = []  # in the last step with drafts: request, accepted, rejected
        self.compressions: list[Compression] = []  # preempted before the last step (phase 9.2)

    @abstractmethod
    def schedule(self) -> Schedule:
        """Admit waiting requests and plan the next step."""

    def check(self, request_id: str, num_prompt_tokens: int, params: SamplingParams) -> None:
        """Validate a new request; changes no state.

        Raises:
            RequestError: the id is in use, or the KV cache could never hold the request.
            QueueFullError: ``max_waiting_requests`` requests are waiting.
        """
        if request_id in self:
            raise RequestError(f"A request with the id {request_id!r} is waiting or running; choose another id.")
        check_capacity(num_prompt_tokens, params.max_new_tokens, self.max_seq_len, self.pool.request_capacity)
        check_queue(len(self.waiting), self.config.max_waiting_requests)

    def add(self, request: Request) -> None:
        """Append a request that passed ``check`` to the queue."""
        self.waiting[request.request_id] = request

    def commit(self, schedule: Schedule, sampled: SampledTokens) -> None:
        """Count the tokens that a step, or a part of it, computed; append the sampled ones; retire failed requests.

        Results for a request that has meanwhile finished or been preempted are dropped.
        """
        tokens, first, errors, running = list(sampled), 0, sampled.errors, RequestStatus.RUNNING
        for number, (request, start, num_tokens, _, num_logit_rows, _) in enumerate(schedule):
            error = errors.get(number) if errors else None
            results = tokens[first : first + num_logit_rows] if error is None else []
            first += len(results)
            if request.status is running and request.num_computed_tokens == start:
                if error is not None:
                    self._fail(request, error)
                else:
                    self.pool.commit(request, num_tokens)
                    request.num_computed_tokens += num_tokens
                    request.num_pending_tokens -= len(results)
                    request.last_step = schedule.step
                    if request.params.prompt_logprobs is not None and request.needs_prompt_logits:
                        request.add_prompt_logprobs(start, sampled.prompt_logprobs.get(number, ()))
                    for token_id, logprobs in results:
                        request.append(token_id, logprobs)
            if self.ending and request in self.ending and request.num_scheduled_tokens == start + num_tokens:
                del self.ending[request]  # no later step computes it
                self.pool.release(request)

    def finish(self, requests: Iterable[Request]) -> None:
        """Retire requests whose outputs are complete."""
        for request in requests:
            self.retire(request, RequestStatus.FINISHED)

    def abort(self, request_id: str) -> Request | None:
        """Retire a request; it produces no further output. None if it is neither waiting nor running."""
        request = self.waiting.get(request_id) or self.running.get(request_id)
        if request is not None:
            self.retire(request, RequestStatus.FINISHED)
        return request

    def drop_in_flight(self) -> None:
        """Roll back what was scheduled but not committed, after an interrupted step, so that it can be scheduled
        again."""
        for request in self.running.values():
            request.num_scheduled_tokens, request.num_pending_tokens = request.num_computed_tokens, 0
        for request in self.ending:
            self.pool.release(request)
        self.ending.clear()

    def has_work(self) -> bool:
        """Whether any request is waiting, running, or being computed by a step in flight."""
        return bool(self.waiting or self.running or self.ending)

    def stats(self) -> dict[str, Any]:
        """Counters beyond those of all engines, for ``infer generate --stats``."""
        return {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.waiting or request_id in self.running

    def start(self, request: Request, num_cached: int) -> None:
        """Move an admitted request from the queue to the running requests; its first ``num_cached`` tokens are
        computed."""
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = num_cached
        request.num_computed_tokens = request.num_scheduled_tokens = num_cached
        request.status = RequestStatus.RUNNING
        del self.waiting[request.request_id]
        self.running[request.request_id] = request

    def decoding(self) -> list[Request]:
        """The running requests that can get their next token, in order of admission."""
        return [
            request
            for request in self.running.values()
            if request.is_decoding and not (request.num_pending_tokens and self._is_complete(request))
        ]

    def longest(self, request: Request) -> int:
        """The request's maximum length in tokens, prompt included."""
        return min(request.num_prompt_tokens + request.params.max_new_tokens, self.max_seq_len)

    def retire(self, request: Request, status: RequestStatus) -> None:
        """Remove a request from the scheduler; release its KV cache once no step in flight computes it."""
        is_in_flight = request.num_scheduled_tokens > request.num_computed_tokens
        request.status = status
        self.waiting.pop(request.request_id, None)
        self.running.pop(request.request_id, None)
        if is_in_flight:
            self.ending[request] = None
        else:
            self.pool.release(request)

    def _is_complete(self, request: Request) -> bool:
        """Whether the request has reached its maximum length, counting tokens in flight."""
        num_tokens = request.num_tokens + request.num_pending_tokens
        return num_tokens >= self.max_seq_len or num_tokens - request.num_prompt_tokens >= request.params.max_new_tokens

    def _fail(self, request: Request, error: Exception) -> None:
        """Retire a request whose forward or sampling raised; log the exception with its traceback."""
        logger.error("request %s failed", request.request_id, exc_info=error)
        request.error = (
            f"The engine could not compute this request ({type(error).__name__}); its log has the traceback. No other "
            "request was affected."
        )
        self.retire(request, RequestStatus.FAILED)
