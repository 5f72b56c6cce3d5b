"""The workloads of the recordings: settings and requests of each phase, from ``course.toml``.

Invariant: a recording is made from what stands there alone, so each making of it gives the same, apart from times.
"""

import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shared.engine.config import EngineConfig
from shared.grammar.grammar import grammar_of
from shared.lessons import Lesson, find_lesson
from shared.sampling.params import SamplingParams
from shared.tracing.steps.recording import record
from shared.tracing.workload import Arrival

FOLDER = Path(__file__).parent
MODEL = "smollm2-135m"


@dataclass(frozen=True)
class Workload:
    """Settings of an engine, its requests, and the functions that are shown beside those of every recording.

    ``before`` are the settings in which the run of the phase before differs; None: there is none. ``is_planned``: a CPU
    makes attention plans too (phase 6.1). ``has_adapter``: the model drafts for itself (phase 11.1).
    """

    phase: str
    settings: Mapping[str, Any]
    requests: tuple[Mapping[str, Any], ...]
    functions: tuple[str, ...] = ()
    before: Mapping[str, Any] | None = None
    questions: tuple[Mapping[str, Any], ...] = ()
    is_planned: bool = False
    has_adapter: bool = False

    @contextmanager
    def engine_settings(self, model: str) -> Iterator[dict[str, Any]]:
        """Those of the run's engine, which is made in this context."""
        if not self.has_adapter:
            yield dict(self.settings)
            return
        with TemporaryDirectory(prefix="infer-recording-") as folder:
            yield {**self.settings, "adapter": str(_untrained_adapter(model, Path(folder) / "untrained"))}

    def prepare(self, engine: Any) -> Any:
        """The engine; with ``is_planned``, its batches have attention plans also where no kernel follows them."""
        if self.is_planned and engine.model.device.type == "cpu":
            _plan(engine)
        return engine

    def arrivals(self, engine: Any, max_tokens: int | None = None) -> list[Arrival]:
        """The requests, in order of arrival; all are greedy. ``max_tokens`` prevails over theirs."""
        has_grammars = hasattr(engine, "constraints")
        return [
            Arrival(
                each.get("arrives", 0),
                each["id"],
                tuple(engine.tokenizer.encode(each["prompt"])),
                _params(each, max_tokens or each["max_tokens"], with_grammar=has_grammars),
                each["prompt"],
                tuple(tuple(engine.tokenizer.encode(text)) for text in each.get("segments", ())),
            )
            for each in sorted(self.requests, key=lambda each: each.get("arrives", 0))
        ]


@cache
def workloads() -> dict[str, Workload]:
    """The workload of each phase that has a recording."""
    entries = tomllib.loads((FOLDER / "course.toml").read_text(encoding="utf-8"))
    return {
        phase: Workload(
            phase,
            settings=entry["settings"],
            requests=tuple(entry["requests"]),
            functions=tuple(entry.get("functions", ())),
            before=entry.get("before"),
            questions=tuple(entry.get("questions", ())),
            is_planned=entry.get("is_planned", False),
            has_adapter=entry.get("has_adapter", False),
        )
        for phase, entry in entries.items()
    }


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


def record_workload(workload: Workload, lesson: Lesson, model: str = MODEL) -> dict[str, Any]:
    """The recording of a workload by the phase, its own or the one before."""
    with workload.engine_settings(model) as settings:
        if lesson.number != workload.phase:
            settings |= workload.before or {}
            supported = lesson.load("engine").SUPPORTED
            settings = {name: value for name, value in settings.items() if name in supported}
        engine = lesson.engine(EngineConfig(model=model, **settings))
    if lesson.number == workload.phase:
        workload.prepare(engine)
    return record(engine, lesson, workload.arrivals(engine), workload.functions)


def _plan(engine: Any) -> None:
    """Let the pool plan attention, as it does for a GPU's kernels; the operations of a CPU do not follow the plans."""
    from shared.cache.layout.planned import AttentionPlanner, LayoutPlans
    from shared.cache.view.planned_attention import planner_arguments

    planner = AttentionPlanner(**planner_arguments(engine.model.config, engine.model.dtype, engine.view.storage))
    engine.pool.lay_out = partial(LayoutPlans.planned, planner=planner)


def _untrained_adapter(model: str, folder: Path) -> Path:
    """An adapter that has learned nothing, always the same: its guesses are mostly wrong, its answers are right."""
    import torch

    from shared.loading.loader import load_model
    from shared.loading.resolve import resolve_model
    from shared.tracks.multi_token.adapter import Adapter, AdapterConfig

    torch.manual_seed(0)
    teacher = load_model(resolve_model(model))
    adapter = Adapter(AdapterConfig(), teacher.config)
    adapter.start_masks(teacher.embedding)
    adapter.save(folder, torch.float32)
    return folder


def _params(request: Mapping[str, Any], max_tokens: int, *, with_grammar: bool) -> SamplingParams:
    described = {name: request.get(name) for name in ("json_schema", "regex", "choice")}
    grammar = grammar_of(**described) if with_grammar else None
    return SamplingParams(temperature=0.0, max_new_tokens=max_tokens, structured_output=grammar)
