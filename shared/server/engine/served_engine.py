"""The engine as the server uses it, and the constants of an engine. Introduced in phase 4.

Invariant: the server uses only these members of an engine, so any phase that has them can be served.
"""

from dataclasses import dataclass
from typing import Any, Protocol, Self

from shared.engine.output import StepOutput
from shared.engine.record import EngineLoad
from shared.sampling.params import SamplingParams


class ServedEngine(Protocol):
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


@dataclass(frozen=True)
class EngineFacts:
    """The constants of an engine, and its load before the loop started."""

    config: Any
    model_config: Any
    max_seq_len: int
    request_capacity: int  # tokens that the KV cache can hold for one request
    load: EngineLoad
    has_grammars: bool  # from phase 12 on
    limits_thinking: bool  # in phase 11.1, for models that think
    segment_refusal: str | None  # why the engine has no segments; None: the engine has segments (phase 9.1)

    @classmethod
    def of(cls, engine: ServedEngine) -> Self:
        registry = getattr(engine, "segments", None)
        refusal: str | None
        if registry is None:
            refusal = "This server's engine has no segments; serve phase 9.1 for them: infer serve --phase 09.1."
        else:
            refusal = None if registry.free is not None else str(registry.refusal)
        return cls(
            engine.config,
            engine.model.config,
            engine.max_seq_len,
            engine.pool.request_capacity,
            engine.load(),
            has_grammars=hasattr(engine, "constraints"),
            limits_thinking=getattr(engine, "limits_thinking", False),
            segment_refusal=refusal,
        )
