"""The protocols between the server and its engine, and between the server and its metrics. Introduced in phase 4.

Invariant: the server uses only these members of an engine, so every phase that has them can be served.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from shared.engine.output import StepOutput
from shared.sampling.params import SamplingParams
from shared.server.answers.answer_stream import AnswerStream


class ServedEngine(Protocol):
    """The members of an engine that the server uses; every phase from 4 on has them."""

    config: Any
    model: Any
    tokenizer: Any
    max_seq_len: int
    pool: Any
    scheduler: Any
    last_step: Any

    def add_request(
        self, prompt: Any, params: SamplingParams, request_id: str | None = None, **context: Any
    ) -> str: ...

    def step(self) -> list[StepOutput]: ...

    def abort(self, request_id: str) -> bool: ...

    def has_work(self) -> bool: ...

    def stats(self) -> dict[str, Any]: ...

    def load(self) -> Any: ...


def chunk_refusal(engine: ServedEngine) -> str | None:
    """Why the engine has no chunks (phase 9.1); None: it has."""
    registry = getattr(engine, "chunks", None)
    if registry is None:
        return "This server's engine has no chunks; serve phase 9.1 for them: infer serve --phase 09.1."
    return None if registry.free is not None else str(registry.refusal)


class Observer(Protocol):
    """Receives the progress of requests, on the event loop."""

    def on_first_token(self, stream: AnswerStream) -> None: ...

    def on_gaps(self, gaps: Mapping[float, int]) -> None:
        """A step's tokens that followed others: how many of them by the seconds since."""

    def on_preemptions(self, count: int) -> None: ...

    def on_prefix_lookups(self, num_queries: int, num_hits: int) -> None: ...

    def on_drafts(self, num_drafts: Sequence[int], num_accepted: Sequence[int]) -> None: ...

    def on_end(self, stream: AnswerStream) -> None: ...
