"""The buffer between the engine and one client: outputs of a request, and their times. Introduced in phase 4.

The engine never waits for a client: it pushes outputs here, and the client's task takes all that are buffered. Used
only on the event loop's thread. Invariants: a stream ends exactly once, with a finish reason or an error, and takes no
output afterwards; the number of unread bytes is bounded.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

from shared.engine.output import StepOutput
from shared.server.errors import ApiError, engine_failure
from shared.text.stopping import FinishReason

_FRAME_BYTES = 320  # of a frame without its text
_CHARACTER_BYTES = 6  # the longest JSON escape of a character
_LOGPROB_BYTES = 96


class AnswerStream:
    """The outputs of one request that its client has not taken yet.

    Args:
        num_prompt_tokens: for the usage.
        param: the field of the body that holds the prompt; for the body of an error.
        max_unread_bytes: the limit on the bytes that unread outputs will take, estimated from above.
        abandon: called with the id of a request that is cancelled; must abort it in the engine.

    ``arrived``, ``scheduled``, ``first_token``, ``last_token`` and ``ended`` are readings of ``time.perf_counter``.
    """

    def __init__(
        self,
        request_id: str,
        num_prompt_tokens: int,
        *,
        param: str,
        max_unread_bytes: int,
        abandon: Callable[[str], None],
    ) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = num_prompt_tokens
        self.param = param
        self.num_tokens = 0
        self.arrived = time.perf_counter()
        self.scheduled: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.ended: float | None = None
        self.finish_reason: FinishReason | None = None
        self.stop: str | None = None
        self.error: ApiError | None = None
        self.cause: str | None = None
        self._abandon = abandon
        self._max_unread_bytes = max_unread_bytes
        self._unread: deque[StepOutput] = deque()
        self._unread_bytes = 0
        self._is_nudged = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_open(self) -> bool:
        return self.ended is None

    def push(self, output: StepOutput, at: float) -> None:
        """Add the output of a step that ended at ``at``."""
        if not self.is_open:
            return
        if output.token_id is not None:
            self.num_tokens += 1
            self.first_token = self.first_token or at
            self.last_token = at
            self._unread.append(output)
            self._unread_bytes += _FRAME_BYTES + _CHARACTER_BYTES * len(output.text)
            if output.logprobs is not None:
                self._unread_bytes += _LOGPROB_BYTES * (1 + len(output.logprobs.top))
        if output.finish_reason is FinishReason.ERROR:
            self._end(FinishReason.ERROR, at, engine_failure(output.error))
        elif output.finish_reason is not None:
            self.stop = output.stop
            self._end(output.finish_reason, at)
        elif self._unread_bytes > self._max_unread_bytes:
            message = f"The client did not read the answer: more than {self._max_unread_bytes} bytes are unread."
            self.cancel("slow_reader", ApiError(408, "slow_reader", message))
        self._wake()

    def refuse(self, error: ApiError) -> None:
        """End with an error because the engine refused the request, or has stopped."""
        if self.is_open:
            self._end(FinishReason.ERROR, time.perf_counter(), error)

    def fail(self, error: ApiError) -> None:
        """End with an error that the request did not cause, and abort the request in the engine."""
        self.cancel(error.code, error)

    def cancel(self, cause: str, error: ApiError | None = None) -> None:
        """End the stream and abort the request in the engine; ``cause`` is for the log."""
        if self.is_open:
            self.cause = cause
            self._end(FinishReason.ABORT, time.perf_counter(), error)
            self._abandon(self.request_id)

    def nudge(self) -> None:
        """Wake ``take``, which then returns an empty list."""
        self._is_nudged = True
        self._wake()

    async def take(self) -> list[StepOutput]:
        """Wait for outputs and return all unread ones; an empty list after a nudge, and once the stream has ended."""
        while not self._unread and self.is_open and not self._is_nudged:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._is_nudged = False
        outputs = list(self._unread)
        self._unread.clear()
        self._unread_bytes = 0
        return outputs

    @property
    def usage(self) -> dict[str, int]:
        """The token counts, in OpenAI's form."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_tokens,
        }

    def _end(self, reason: FinishReason, at: float, error: ApiError | None = None) -> None:
        self.finish_reason, self.ended, self.error = reason, at, error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
