"""What the server needs of an engine, and what it tells about it. Introduced in phase 4.

Invariant: the server uses nothing of an engine that does not stand here, so every phase that has this can be served.
"""

from typing import Any, Protocol

from shared.engine.output import StepOutput
from shared.sampling.params import SamplingParams
from shared.server.answer_stream import AnswerStream


class ServedEngine(Protocol):
    """What the server needs of an engine; every phase from 4 on has it."""

    config: Any
    model: Any
    tokenizer: Any
    max_seq_len: int
    pool: Any
    scheduler: Any
    last_step: Any

    def add_request(self, prompt: Any, params: SamplingParams, request_id: str | None = None) -> str: ...

    def step(self) -> list[StepOutput]: ...

    def abort(self, request_id: str) -> bool: ...

    def has_work(self) -> bool: ...

    def stats(self) -> dict[str, Any]: ...

    def load(self) -> Any: ...


class Observer(Protocol):
    """Is told, on the event loop, how requests fare."""

    def on_first_token(self, stream: AnswerStream) -> None: ...

    def on_token(self, seconds: float) -> None: ...

    def on_preemptions(self, count: int) -> None: ...

    def on_end(self, stream: AnswerStream) -> None: ...
