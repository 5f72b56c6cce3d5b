"""Keeps what an engine was asked, and before which step, so that a run can be repeated step by step.

What a step does follows from the queue, the seed, the table of step costs, and the arrival step
of each request and abort; no clock takes part. So a fresh engine with the same settings that is asked the same gives
the same steps and tokens, adaptive lengths of drafts and rejection sampling included.

Invariant: recording does not change the engine's behaviour.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shared.engine.output import StepOutput
from shared.engine.record import StepRecord
from shared.errors import ConfigError
from shared.sampling.params import SamplingParams

Entry = tuple[str, int, int, int]
"""Of a committed step and a request: its id, the first token computed, tokens with drafts, and drafts."""


@dataclass(frozen=True)
class Call:
    """A request before step ``step``, or without ``params`` its abort."""

    step: int
    request_id: str
    prompt_ids: tuple[int, ...] = ()
    params: SamplingParams | None = None


@dataclass(frozen=True)
class RecordedRun:
    """What an engine was asked and did; ``step_costs`` names the table that decided."""

    step_costs: str | None
    calls: tuple[Call, ...]
    steps: tuple[StepRecord, ...]
    schedules: tuple[tuple[Entry, ...], ...]  # in the order in which steps were committed
    outputs: tuple[tuple[StepOutput, ...], ...]  # of each step


class RunRecorder:
    """Wraps a fresh engine's ``add_request``, ``step`` and ``abort``.

    Raises ConfigError for an engine that has run steps: they are part of what later ones follow from.
    """

    def __init__(self, engine: Any) -> None:
        if engine.scheduler.num_steps or engine.has_work():
            raise ConfigError("The engine has run steps or has requests; record a run from an engine's start.")
        self.engine = engine
        self.calls: list[Call] = []
        self.steps: list[StepRecord] = []
        self.schedules: list[tuple[Entry, ...]] = []
        self.outputs: list[tuple[StepOutput, ...]] = []
        self._commit = engine.scheduler.commit
        engine.scheduler.commit = self._note

    def add_request(self, prompt: str | Sequence[int], params: SamplingParams, request_id: str | None = None) -> str:
        """The engine's ``add_request``; a seed that the engine chooses is recorded."""
        prompt_ids = self.engine.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        name: str = self.engine.add_request(prompt_ids, params, request_id)
        seeded = replace(params, seed=self.engine.scheduler.waiting[name].seed)
        self.calls.append(Call(len(self.steps), name, tuple(prompt_ids), seeded))
        return name

    def abort(self, request_id: str) -> bool:
        """The engine's ``abort``."""
        self.calls.append(Call(len(self.steps), request_id))
        return bool(self.engine.abort(request_id))

    def step(self) -> list[StepOutput]:
        """The engine's ``step``."""
        outputs: list[StepOutput] = self.engine.step()
        self.steps.append(self.engine.last_step)
        self.outputs.append(tuple(outputs))
        return outputs

    def has_work(self) -> bool:
        """The engine's ``has_work``."""
        return bool(self.engine.has_work())

    def run(self) -> RecordedRun:
        """The run so far."""
        table = self.engine.load().step_costs
        return RecordedRun(table, tuple(self.calls), tuple(self.steps), tuple(self.schedules), tuple(self.outputs))

    def _note(self, schedule: Any, sampled: Any) -> None:
        entries = [(each.request.request_id, each.start, each.num_tokens, each.num_drafts) for each in schedule]
        self._commit(schedule, sampled)
        self.schedules.append(tuple(entries))


def replay(run: RecordedRun, engine: Any) -> RecordedRun:
    """Ask a fresh engine the same before the same steps; what it did should be equal to ``run``.

    Raises ConfigError for an engine that decides by another table, or that is not fresh.
    """
    recorder = RunRecorder(engine)
    if (table := engine.load().step_costs) != run.step_costs:
        raise ConfigError(f"The run was decided by the step costs {run.step_costs}, and the engine has {table}.")
    for number in range(len(run.steps)):
        for call in run.calls:
            if call.step == number and call.params is not None:
                recorder.add_request(call.prompt_ids, call.params, call.request_id)
            elif call.step == number:
                recorder.abort(call.request_id)
        recorder.step()
    return recorder.run()
