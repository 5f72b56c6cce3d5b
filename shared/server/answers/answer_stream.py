"""The buffer between the engine and one client: outputs of a request, and their times. Introduced in phase 4.

The engine never waits for a client: it pushes outputs here, and the client's task takes all that are buffered, through
:mod:`shared.server.answers.answer`. Used only on the event loop's thread. Invariants: a stream ends exactly once,
with a finish reason or an error, and takes no output afterwards; the number of unread bytes is bounded.
"""

import time
from collections.abc import Callable

from shared.engine.output import StepOutput
from shared.engine.request import TokenLogprobs
from shared.server.errors import ApiError, engine_failure
from shared.text.stopping import FinishReason

_FRAME_BYTES = 320  # bytes of a frame without its text
_CHARACTER_BYTES = 6  # the longest JSON escape of a character
_LOGPROB_BYTES = 96


class AnswerStream:
    """The outputs of one request that its client has not read yet.

    Args:
        index: its position among the answer's choices.
        param, segment_field: the fields of the body that hold the prompt and name its segments, for error bodies.
        max_unread_bytes: the limit on the size of unread outputs in bytes, by an upper estimate. The log-probabilities
            of the prompt, which are sent once, do not count.
        num_segment_tokens: the tokens of the segments before the prompt, which count as prompt tokens (phase 9.1).
        abandon: called with the id of a request that is cancelled; must abort it in the engine.

    ``notify`` is called with this stream at each flush, and once after the end. ``stop`` is the stop string, or the
    id of ``stop_token_ids``, that ended the output. ``arrived``, ``scheduled``, ``first_token``, ``last_token`` and
    ``ended`` are readings of ``time.perf_counter``.
    """

    def __init__(
        self,
        request_id: str,
        prompt_ids: list[int],
        *,
        index: int,
        param: str,
        max_unread_bytes: int,
        abandon: Callable[[str], None],
        num_segment_tokens: int = 0,
        segment_field: str | None = None,
    ) -> None:
        self.request_id, self.index = request_id, index
        self.fields = param, segment_field
        self.prompt_ids = prompt_ids
        self.num_prompt_tokens = num_segment_tokens + len(prompt_ids)
        self.num_tokens = 0
        self.num_cached_tokens = 0  # for the prompt, known with the first output
        self.num_accepted_drafts = self.num_rejected_drafts = 0  # known with the last output
        self.arrived = time.perf_counter()
        self.scheduled: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.ended: float | None = None
        self.finish_reason: FinishReason | None = None
        self.stop: str | int | None = None
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self.error: ApiError | None = None
        self.cause: str | None = None
        self.notify: Callable[[AnswerStream], None] = lambda stream: None
        self._abandon = abandon
        self._max_unread_bytes = max_unread_bytes
        self._unread: list[StepOutput] = []
        self._unread_bytes = 0

    @property
    def is_open(self) -> bool:
        return self.ended is None

    def push(self, output: StepOutput, at: float) -> None:
        """Add the output of a step that ended at ``at``."""
        if not self.is_open:
            return
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.num_cached_tokens = self.num_cached_tokens or output.num_cached_tokens
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
            self.num_accepted_drafts, self.num_rejected_drafts = output.num_accepted_drafts, output.num_rejected_drafts
            is_stop = output.finish_reason is FinishReason.STOP
            self.stop = output.token_id if is_stop and output.stop is None else output.stop
            self._end(output.finish_reason, at)
        elif self._unread_bytes > self._max_unread_bytes:
            message = f"The client did not read the answer: more than {self._max_unread_bytes} bytes are unread."
            self.cancel("slow_reader", ApiError(408, "slow_reader", message))

    def flush(self) -> None:
        """Announce the pushed outputs; the end announces itself."""
        if self.is_open:
            self.notify(self)

    def refuse(self, error: ApiError) -> None:
        """End with an error because the engine refused the request or has stopped."""
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

    def take(self) -> list[StepOutput]:
        """All unread outputs; they then count as read."""
        outputs, self._unread, self._unread_bytes = self._unread, [], 0
        return outputs

    def _end(self, reason: FinishReason, at: float, error: ApiError | None = None) -> None:
        self.finish_reason, self.ended, self.error = reason, at, error
        self.notify(self)
