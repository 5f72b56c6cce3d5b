"""What became of a trace: each request's moments, and each step of the engine. Introduced in phase 4.

Moments are seconds from the start of the trace, as the client sees them: a token is there when the step that drew it
has ended or, over HTTP, when its event has been read. Invariant: a request waits from the moment at which it should
have been sent, even where the loop that sends it was busy then.
"""

from dataclasses import dataclass, field

from shared.engine.record import StepRecord


@dataclass
class ServedRequest:
    """One request. ``scheduled``: when the first step that computed it began; ``error``: why it has no whole answer."""

    arrived: float
    num_prompt_tokens: int
    scheduled: float | None = None
    token_times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    ended: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class TimedStep:
    """A step's record and when it ran."""

    started: float
    ended: float
    record: StepRecord


@dataclass
class ServedRun:
    """A trace that was served; requests stand in its order.

    ``steps`` and ``num_forwards`` are None where they cannot be seen: over HTTP, inside a peer. ``is_cut``: the run was
    broken off, and requests that had not ended have no error for it.
    """

    requests: list[ServedRequest]
    steps: list[TimedStep] | None
    num_forwards: int | None
    is_cut: bool = False

    @property
    def seconds(self) -> float:
        """Until the last token."""
        return max((request.token_times[-1] for request in self.requests if request.token_times), default=0.0)

    @property
    def num_tokens(self) -> int:
        return sum(len(request.token_ids) for request in self.requests)

    @property
    def finished(self) -> list[ServedRequest]:
        """Those with a whole answer."""
        return [request for request in self.requests if request.ended is not None and request.error is None]
