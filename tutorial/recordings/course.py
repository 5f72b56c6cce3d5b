"""The workloads of the recordings: settings and requests of each phase, from ``course.toml``.

Invariant: a recording is made from what stands there alone, so each making of it gives the same, apart from times.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from shared.engine.config import EngineConfig
from shared.errors import ConfigError
from shared.grammar.grammar import grammar_of
from shared.lessons import Lesson, find_lesson
from shared.sampling.params import SamplingParams
from shared.tracing.steps.recording import StepRecorder
from shared.tracing.workload import Arrival, run

FOLDER = Path(__file__).parent
MODEL = "smollm2-135m"


@dataclass(frozen=True)
class Workload:
    """Settings of an engine, its requests, and the functions that are shown beside those of every recording.

    ``before`` are the settings in which the run of the phase before differs; None: there is none.
    """

    phase: str
    settings: Mapping[str, Any]
    requests: tuple[Mapping[str, Any], ...]
    functions: tuple[str, ...] = ()
    before: Mapping[str, Any] | None = None
    questions: tuple[Mapping[str, Any], ...] = ()

    def arrivals(self, engine: Any) -> list[Arrival]:
        """The requests, in order of arrival; all are greedy."""
        supports = hasattr(engine, "constraints")
        return [
            Arrival(
                each.get("arrives", 0),
                each["id"],
                tuple(engine.tokenizer.encode(each["prompt"])),
                _params(each, with_grammar=supports),
                each["prompt"],
            )
            for each in sorted(self.requests, key=lambda each: each.get("arrives", 0))
        ]


@cache
def workloads() -> dict[str, Workload]:
    """The workload of each phase that has a recording."""
    values = tomllib.loads((FOLDER / "course.toml").read_text(encoding="utf-8"))
    lists = ("requests", "functions", "questions")
    return {
        phase: Workload(phase, **{name: tuple(value) if name in lists else value for name, value in entry.items()})
        for phase, entry in values.items()
    }


def workload_of(lesson: Lesson) -> Workload:
    """Of a phase; raises ConfigError if it has no recording."""
    if lesson.number not in workloads():
        raise ConfigError(f"Phase {lesson.number} has no recording; there are those of {', '.join(workloads())}.")
    return workloads()[lesson.number]


def recordings() -> dict[str, tuple[Workload, Lesson]]:
    """The files of the course: each with its workload, and the phase that runs it."""
    found = {}
    for number, workload in workloads().items():
        lesson = find_lesson(number)
        found[f"{lesson.folder.name}.json"] = workload, lesson
        if workload.before is not None and lesson.previous is not None:
            previous = find_lesson(lesson.previous)
            found[f"{lesson.folder.name}_by_{previous.folder.name.removeprefix('phase_')}.json"] = workload, previous
    return found


def record(workload: Workload, lesson: Lesson, model: str = MODEL) -> dict[str, Any]:
    """The recording of a workload by the phase, its own or the one before."""
    settings = dict(workload.settings)
    if lesson.number != workload.phase:
        settings |= workload.before or {}
        supported = lesson.load("engine").SUPPORTED
        settings = {name: value for name, value in settings.items() if name in supported}
    engine = lesson.engine(EngineConfig(model=model, **settings))
    recorder = StepRecorder(engine, lesson, workload.functions)
    run(recorder, workload.arrivals(engine))
    recording = recorder.recording(Path(model).name, **settings)
    return recording | ({"questions": [dict(each) for each in workload.questions]} if workload.questions else {})


def _params(request: Mapping[str, Any], *, with_grammar: bool) -> SamplingParams:
    grammar = grammar_of(json_schema=request.get("json_schema"), regex=request.get("regex"), choice=request.get("choice"))
    return SamplingParams(
        temperature=0.0,
        max_new_tokens=request["max_tokens"],
        structured_output=grammar if with_grammar else None,
    )
