"""What each step of an engine produces and costs while a context is open. Introduced in phase 11.1.

Speculation trades time per step for tokens per step, so both are recorded together: generated tokens, sequence lengths,
the time of each forward, and accepted drafts. The engine does not know about the profiler: inside the context its
``step`` is wrapped, and outside there is no overhead.

Invariant: after the context the engine's attributes are restored.
"""

import time
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Self

from shared.engine.output import StepOutput
from shared.engine.record import StepRecord
from shared.tracing.activity import ActivityRecorder, StepActivity, restore


@dataclass(frozen=True)
class ProfiledStep:
    """A step: its record, the tokens that it returned, each running request's tokens after it, and its forward.

    ``forward_seconds`` is the GPU's time, or on a CPU the host's; 0 if the step had no forward.
    """

    record: StepRecord
    num_tokens: int
    lengths: tuple[int, ...]
    forward_seconds: float


class Profiler:
    """Profiles an engine of phase 4 or later, for the duration of a ``with`` block."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.activity = ActivityRecorder(engine, time.perf_counter_ns)
        self.acceptance: tuple[float, ...] = ()
        """The share of the drafts at each position that were accepted together with all drafts before them; set by
        ``__exit__``."""
        self._steps: list[tuple[StepRecord, int, tuple[int, ...], StepActivity]] = []

    def __enter__(self) -> Self:
        self._own, self._step = vars(self.engine).get("step"), self.engine.step
        self._before = self._counts()
        self.engine.step = self._profiled
        return self

    def __exit__(self, *raised: object) -> None:
        restore(self.engine, "step", self._own)
        pairs = zip(self._counts(), self._before, strict=True)
        changes = [(accepted - old_accepted, all_ - old) for (accepted, all_), (old_accepted, old) in pairs]
        self.acceptance = tuple(accepted / all_ if all_ else 0.0 for accepted, all_ in changes)

    @property
    def steps(self) -> tuple[ProfiledStep, ...]:
        """The steps so far; waits for a GPU."""
        return tuple(
            ProfiledStep(record, num_tokens, lengths, self._forward_ns(activity) / 1e9)
            for record, num_tokens, lengths, activity in self._steps
        )

    def stats(self) -> dict[str, float | int]:
        """The profile as a few numbers, for a table or next to a trace; waits for a GPU."""
        steps = [step for step in self.steps if step.forward_seconds]
        if not steps:
            return {}
        decoding = [step for step in steps if step.record.decoded and not step.record.prefilled]
        return {
            "tokens of a decode step": fmean(step.num_tokens for step in decoding or steps),
            "forward, median ms": 1e3 * median(step.forward_seconds for step in decoding or steps),
            "longest sequence (tokens)": max(max(step.lengths, default=0) for step in steps),
            **{f"acceptance at position {position}": share for position, share in enumerate(self.acceptance)},
        }

    def _profiled(self) -> list[StepOutput]:
        with self.activity.watch() as activity:
            outputs: list[StepOutput] = self._step()
        lengths = tuple(request.num_tokens for request in self.engine.scheduler.running.values())
        num_tokens = sum(output.token_id is not None for output in outputs)
        self._steps.append((self.engine.last_step, num_tokens, lengths, activity))
        return outputs

    def _forward_ns(self, activity: StepActivity) -> int:
        gpu = [span for span in self.activity.gpu_spans(activity) if span.name == "forward"]
        spans = gpu or [span for span in activity.host if span.name == "launch"]
        return sum(span.ended_ns - span.started_ns for span in spans)

    def _counts(self) -> list[tuple[int, int]]:
        scheduler = self.engine.scheduler
        return list(zip(scheduler.num_accepted_by_position, scheduler.num_drafts_by_position, strict=True))
