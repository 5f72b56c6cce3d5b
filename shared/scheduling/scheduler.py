"""What every scheduler does: a queue, admission, and what becomes of a step's tokens. Introduced in phase 4.

A scheduler decides and never touches a tensor. ``schedule`` reads counts and never token values, so the next step could
be planned while this one still runs; whether a token ends an answer is found in ``commit``. Which requests join, and
which of those that run get a token in a step, is what schedulers differ in: the one method that is not here.

A request is admitted only with memory for its prompt and its longest answer, so none that runs can run out of it
(:mod:`shared.scheduling.preemption` does without that).
Invariants: requests are admitted in the order they came, and none overtakes another; at most ``max_batch_size`` run;
what a request holds is released in the moment it ends, whichever way; ``schedule`` changes nothing that a repeated
step would need, so a step that was broken off is planned again.
"""

import logging
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shared.cache.pool import CachePoolProtocol
from shared.engine.config import EngineConfig
from shared.engine.draw import Drawn
from shared.engine.output import OutputStream, StepOutput
from shared.engine.request import Request, RequestStatus
from shared.errors import QueueFullError, RequestError
from shared.sampling.params import SamplingParams
from shared.text.stopping import FinishReason
from shared.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Schedule:
    """What a step does: whole prompts are run, then a token of each decoding request.

    ``preempted`` names the requests whose memory others got, and which wait anew.
    """

    prefill: tuple[Request, ...] = ()
    decode: tuple[Request, ...] = ()
    preempted: tuple[str, ...] = ()


class Scheduler(ABC):
    """Requests that wait and requests that run."""

    def __init__(self, config: EngineConfig, pool: CachePoolProtocol, tokenizer: Tokenizer, max_seq_len: int) -> None:
        self.config = config
        self.pool = pool
        self.tokenizer = tokenizer
        self.max_seq_len = max_seq_len
        self.waiting: OrderedDict[str, Request] = OrderedDict()  # in the order they came
        self.running: OrderedDict[str, Request] = OrderedDict()  # in the order they were admitted
        self.streams: dict[str, OutputStream] = {}  # of all of them
        self.num_steps = 0
        self.num_preemptions = 0

    @abstractmethod
    def schedule(self) -> Schedule:
        """Admit whom this scheduler admits now, and say what the coming step does; nobody is in it twice."""

    def check(self, request_id: str, num_prompt_tokens: int, params: SamplingParams) -> None:
        """Raise what speaks against a new request, before anything of it is kept.

        Raises:
            RequestError: its id is in use, or the memory could never hold it.
            QueueFullError: as many requests wait as may wait.
        """
        if request_id in self:
            raise RequestError(f"A request with the id {request_id!r} is waiting or running; choose another id.")
        needed = self._most_tokens(num_prompt_tokens, params)
        if needed > self.pool.request_capacity:
            raise RequestError(
                f"The prompt has {num_prompt_tokens} tokens and with its answer up to {needed}; the KV memory holds "
                f"{self.pool.request_capacity} for one request: shorten the prompt, or lower max_new_tokens."
            )
        if len(self.waiting) >= self.config.max_waiting_requests:
            raise QueueFullError(
                f"{len(self.waiting)} requests wait and max_waiting_requests is {self.config.max_waiting_requests}; "
                "try again when some have been answered."
            )

    def add(self, request: Request) -> None:
        """Put a request that ``check`` had nothing against at the end of the queue."""
        self.waiting[request.request_id] = request
        self.streams[request.request_id] = OutputStream(request, self.tokenizer, self.max_seq_len)

    def commit(self, requests: Sequence[Request], drawn: Drawn) -> list[StepOutput]:
        """Write a step's tokens back: count what was computed, append, and retire who has reached an end."""
        outputs = []
        token_ids = drawn.token_ids  # waits for the device, and may be broken off, so before anything changes
        for n, request in enumerate(requests):
            num_computed = request.num_tokens - request.num_computed_tokens
            self.pool.advance(request.request_id, num_computed)
            request.num_computed_tokens += num_computed
            request.last_step = self.num_steps
            request.status = RequestStatus.DECODE
            logprobs = drawn.logprobs[n] if drawn.logprobs is not None else None
            output = self.streams[request.request_id].push(token_ids[n], logprobs)
            if output.finish_reason is not None:
                self._retire(request, RequestStatus.FINISHED)
            outputs.append(output)
        return outputs

    def fail(self, request_id: str, error: Exception) -> StepOutput:
        """End a running request that could not be computed; the cause goes to the log, with its traceback."""
        logger.error("Request %s failed.", request_id, exc_info=error)
        self._retire(self.running[request_id], RequestStatus.FAILED)
        sentence = (
            f"The engine could not compute this request ({type(error).__name__}); the cause stands in its log, and no "
            "other request was affected."
        )
        return StepOutput(request_id, None, "", FinishReason.ERROR, error=sentence)

    def abort(self, request_id: str) -> bool:
        """End a request without another output; False if it is not here (any more)."""
        request = self.waiting.get(request_id) or self.running.get(request_id)
        if request is None:
            return False
        self._retire(request, RequestStatus.FINISHED)
        return True

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.waiting or self.running)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.waiting or request_id in self.running

    def _admit(self) -> None:
        """Let the first of the queue run, and the next, as long as there is a place and memory for it."""
        # exercise 04.4: let the first of the queue run
        # hint: go on while somebody waits and fewer than max_batch_size run; look at the first in the queue alone
        # hint: _reserve asks the pool for its memory; if that is refused, stop: who came first goes first
        # hint: else it moves from waiting to running and gets the status PREFILL
        while self.waiting and len(self.running) < self.config.max_batch_size:
            request = next(iter(self.waiting.values()))
            if not self._reserve(request):
                return
            del self.waiting[request.request_id]
            self.running[request.request_id] = request
            request.status = RequestStatus.PREFILL
        # end exercise

    def _reserve(self, request: Request) -> bool:
        """Ask the pool for the request's prompt and its longest answer; whether there is room."""
        return self.pool.reserve(request.request_id, self._most_tokens(len(request.prompt_ids), request.params))

    def _prompts(self) -> list[Request]:
        """Of the prompts that are not computed the first, and those behind it that fit the same step's budget."""
        chosen: list[Request] = []
        num_tokens = 0
        for request in self._with(RequestStatus.PREFILL):
            num_tokens += request.num_tokens
            if chosen and num_tokens > self.config.max_num_batched_tokens:
                break
            chosen.append(request)
        return chosen

    def _with(self, status: RequestStatus) -> Iterable[Request]:
        """Those that run and have this status, in the order they were admitted."""
        return (request for request in self.running.values() if request.status is status)

    def _retire(self, request: Request, status: RequestStatus) -> None:
        """Take a request out, and everything that it holds back."""
        request.status = status
        self.waiting.pop(request.request_id, None)
        self.running.pop(request.request_id, None)
        self.streams.pop(request.request_id, None)
        self.pool.release(request.request_id)

    def _most_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Tokens of the prompt and of the longest answer there can be."""
        return min(num_prompt_tokens + params.max_new_tokens, self.max_seq_len)
