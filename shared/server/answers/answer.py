"""The answer to one HTTP request: one choice, or several that are generated together. Introduced in phase 4.

A choice is a request of the engine with its :class:`AnswerStream`; ``n`` and a list of prompts make several. Used only
on the event loop's thread. Invariants: the choices are submitted together; if one fails, all end with its error; a
cancelled answer leaves no request in the engine.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Literal

from shared.engine.output import StepOutput
from shared.server.answers.answer_stream import AnswerStream
from shared.server.errors import ApiError


class Answer:
    """The choices of one answer, in the order of their indices: ``n`` for the first prompt, then for the next.

    ``error`` and ``cause`` belong to the choice that failed or was cancelled first. ``write`` is called while ``take``
    waits, with an open choice that has outputs. If it returns True, it has taken them and ``take`` keeps waiting.
    """

    def __init__(self, request_id: str, choices: Sequence[AnswerStream], n: int = 1) -> None:
        self.request_id = request_id
        self.choices = choices
        self._first_choices = choices[::n]  # of each prompt
        self.num_prompt_tokens = sum(choice.num_prompt_tokens for choice in self._first_choices)
        self.error: ApiError | None = None
        self.cause: str | None = None
        self.write: Callable[[AnswerStream], bool] = lambda choice: False
        self._num_open = len(choices)
        self._changed: dict[AnswerStream, None] = {}  # a set, in order of arrival
        self._is_nudged = False
        self._waiter: asyncio.Future[None] | None = None
        for choice in choices:
            choice.notify = self._on_change

    @property
    def is_open(self) -> bool:
        return self._num_open > 0

    async def take(self) -> list[tuple[AnswerStream, list[StepOutput]]]:
        """Wait until a choice has outputs or has ended; returns the changed choices with their unread outputs.

        Returns nothing after a nudge. A choice that has ended is returned once more with its last outputs.
        """
        while not self._changed and self.is_open and not self._is_nudged:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._is_nudged = False
        changed, self._changed = self._changed, {}
        return [(choice, choice.take()) for choice in changed]

    def nudge(self) -> None:
        """Wake ``take``."""
        self._is_nudged = True
        self._wake()

    def cancel(self, cause: str) -> None:
        """End every open choice and abort its request in the engine; ``cause`` is for the log."""
        for choice in self.choices:
            choice.cancel(cause)

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def usage(self) -> dict[str, Any]:
        """The token counts of the complete answer, in OpenAI's form."""
        drafts = {
            "accepted_prediction_tokens": sum(choice.num_accepted_drafts for choice in self.choices),
            "rejected_prediction_tokens": sum(choice.num_rejected_drafts for choice in self.choices),
        }
        return {**self.usage_after(self.num_tokens), "completion_tokens_details": drafts}

    def usage_after(self, num_tokens: int) -> dict[str, Any]:
        """The usage once this many tokens have been generated; drafts are counted at the end.

        A prompt counts once, however many choices it has, and so do the cached tokens of its first choice.
        """
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": self.num_prompt_tokens + num_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(choice.num_cached_tokens for choice in self._first_choices)},
        }

    def earliest(self, moment: Literal["scheduled", "first_token"]) -> float | None:
        """When the first choice was scheduled, or when it had its first token, by ``time.perf_counter``; None: not
        yet."""
        return min((at for choice in self.choices if (at := getattr(choice, moment)) is not None), default=None)

    def _on_change(self, choice: AnswerStream) -> None:
        is_waited_for = self._waiter is not None and not self._waiter.done()
        if is_waited_for and choice.is_open and self.write(choice):
            return
        self._changed[choice] = None
        if not choice.is_open:
            self._num_open -= 1
            if self.cause is None and self.error is None:
                self.cause, self.error = choice.cause, choice.error
            if choice.error is not None:
                self.cancel("failed_together")
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
