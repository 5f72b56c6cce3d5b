"""Records the steps of an engine line by line, as one JSON object. Introduced in phase 4.

The recorder is the timelines' recorder, whose steps run under a :class:`~shared.tracing.steps.line_tracer.LineTracer`.
Besides its phase, model, settings and the hash of its sources, a recording has:

- ``requests``: their prompts, and the steps before which they arrived; ``texts``: the text of each token by its id;
- ``functions``: the sources, in true lines; ``lines``: [function, offset in its lines, depth, kind], where kind is
  "launch" for a line that launches a forward or a draw (on a CPU: computes it), "wait" for one that waits for tokens;
- ``events``: [index in ``lines``, microseconds, patch], an executed statement each; the first of a step is its ``def``,
  whose patch is what happened between the steps. The state after an event is ``state`` with all patches up to it;
- ``steps``: the first event of each, its time, and on a GPU when that ran what the step launched;
- ``state``: panels, each absent if the phase has none of it: ``queues``; ``requests`` with counts, outputs, text and
  block tables; ``schedule``, also while it is filled; ``batch`` and ``sampled`` of the step; ``pool``, the blocks that
  are not free as [owners, references, 1 if cached]; ``tree``, the prefix tree's nodes; ``in_flight``, what is launched
  and not awaited; ``drafts`` and their fate; ``grammar``, the position of each output in it; ``kept`` by compression;
  ``variables`` of the running functions by depth;
- ``error``: what a step raised, at which the recording ends.

Invariants: recording does not change the engine's behaviour; equal runs give equal recordings, apart from the values
named ``ms`` and the times of events.
"""

import dataclasses
import inspect
import json
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from shared.engine.batch import Batch
from shared.engine.config import EngineConfig
from shared.engine.output import StepOutput
from shared.engine.runner import Runner
from shared.engine.sampling.sampler import SamplerOutput
from shared.engine.warm_up import warm_up
from shared.lessons import Lesson
from shared.tracing.recorder import Recorder
from shared.tracing.steps.engine_state import EngineState, name_of, short
from shared.tracing.steps.line_tracer import LineTracer, Watched
from shared.tracing.steps.patches import State
from shared.tracing.steps.shown import Function, shown_functions, sources_hash
from shared.tracing.workload import Arrival, run

FORMAT = 1


class StepRecorder(Recorder):
    """Records ``engine``, of the phase ``lesson``; ``more`` functions are shown as well, as in ``shown_functions``."""

    def __init__(
        self,
        engine: Any,
        lesson: Lesson,
        more: Iterable[str] = (),
        *,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        super().__init__(engine, clock=clock)
        self.lesson = lesson
        self.reader = EngineState(engine)
        watched: dict[Any, Watched] = {
            Runner.forward: Watched("launch", self.reader.launch),
            Runner.sample: Watched("launch", self.reader.sample),
            SamplerOutput.wait: Watched("wait", self.reader.wait),
        }
        for kind in (Batch, *Batch.__subclasses__()):  # those of side tracks
            watched[kind.of.__func__] = Watched("", self.reader.make_batch)  # type: ignore[attr-defined]
        codes = {function.__code__: each for function, each in watched.items()}
        shown = shown_functions(lesson, (type(engine.scheduler).__module__, *more))
        self.tracer = LineTracer(shown, codes, self.reader, clock)
        self.first = self.tracer.state
        self.firsts: list[int] = []  # the index of the first event of each step
        self.error: str | None = None  # of the last step, which it ended

    def step(self) -> list[StepOutput]:
        """See :class:`Recorder`."""
        self.firsts.append(len(self.tracer.events))
        self.reader.begin()
        try:
            with self.tracer.watch(inspect.unwrap(type(self.engine).step).__code__):
                return super().step()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            raise

    def recording(self) -> dict[str, Any]:
        """What was recorded, as JSON values; waits for a GPU."""
        trace = self.trace("")
        functions: dict[Function, int] = {}
        lines: dict[tuple[int, int, int, str], int] = {}
        events: list[list[Any]] = []
        for event in self.tracer.events:
            function = functions.setdefault(event.function, len(functions))
            line = function, event.line - event.function.first, event.depth, event.kind
            micros = round(event.nanoseconds / 1000)
            events.append([lines.setdefault(line, len(lines)), micros, *([event.patch] if event.patch else [])])
        ends = [*self.firsts[1:], len(events)]
        steps: list[State] = []
        for first, end, step in zip_longest(self.firsts, ends, trace.steps):  # a step that raised is not in the trace
            micros = sum(event[1] for event in events[first:end])
            gpu = step.gpu if step is not None else ()
            spans = [[s.name, *((ns - step.started_ns) // 1000 for ns in (s.started_ns, s.ended_ns))] for s in gpu]
            steps.append({"first": first, "ms": micros / 1000, **({"gpu": spans} if spans else {})})
        requests = [self._request(request) for request in trace.requests]
        return {
            "format": FORMAT,
            "phase": self.lesson.number,
            "title": self.lesson.title,
            "model": Path(self.engine.config.model).name,
            "device": self.engine.model.device.type,
            "settings": settings_of(self.engine.config),
            "sources_hash": sources_hash(functions),
            "texts": self._texts(),
            "requests": requests,
            "functions": [
                {"name": each.name, "path": each.path, "first": each.first, "lines": list(each.lines)}
                for each in functions
            ],
            "lines": [list(line) for line in lines],
            **({"error": self.error} if self.error is not None else {}),
            "steps": steps,
            "state": self.first,
            "events": events,
        }

    def _request(self, traced: Any) -> State:
        request = self.reader.requests[short(traced.request_id)]
        grammar = request.params.structured_output
        return {
            "id": name_of(request),
            "prompt": traced.prompt or self.engine.tokenizer.decode(request.prompt_ids),
            "prompt_ids": request.prompt_ids,
            "arrives": traced.arrival_step,
            "max_tokens": request.params.max_new_tokens,
            **({"schema": str(getattr(grammar, "text", grammar))} if grammar is not None else {}),
        }

    def _texts(self) -> dict[str, str]:
        """The text of every token of the run."""
        ids = {id for request in self.reader.requests.values() for id in request.token_ids}
        for event in self.tracer.events:
            ids |= _token_ids(event.patch)
        tokenizer = self.engine.tokenizer
        return {str(each): tokenizer.token_bytes(each).decode("utf-8", "replace") for each in sorted(ids) if each >= 0}


def record(engine: Any, lesson: Lesson, arrivals: Sequence[Arrival], more: Iterable[str] = ()) -> dict[str, Any]:
    """The recording of requests that arrive at an engine of the phase; ``more`` as in ``shown_functions``.

    If a step raises, as a learner's code may, the recording ends there and has an ``error``. A GPU's kernels are
    compiled beforehand, so that times do not include the compiler's.
    """
    if engine.model.device.type == "cuda":
        warm_up(engine)
        engine.pool.drop_cached()
    recorder = StepRecorder(engine, lesson, more)
    try:
        run(recorder, arrivals)
    except Exception:
        if recorder.error is None:
            raise
    return recorder.recording()


def settings_of(config: EngineConfig) -> dict[str, str | int | float]:
    """The settings that differ from their defaults, without model and device."""
    values = {field.name: (getattr(config, field.name), field.default) for field in dataclasses.fields(config)}
    return {name: new for name, (new, old) in values.items() if new != old and name not in ("model", "device")}


def as_text(recording: dict[str, Any]) -> str:
    """The recording as JSON, one event per line, so that diffs are readable."""
    head = {name: value for name, value in recording.items() if name != "events"}
    compact: dict[str, Any] = {"ensure_ascii": False, "separators": (",", ":")}
    events = ",\n".join(json.dumps(event, **compact) for event in recording["events"])
    return f'{json.dumps(head, **compact)[:-1]},"events":[\n{events}\n]}}\n'


def _token_ids(patch: State) -> set[int]:
    """The ids that a patch has besides those of the requests: drafts, samples, examples."""
    found: set[int] = set()
    for panel, name in (("drafts", "ids"), ("grammar", "examples")):
        for each in (patch.get(panel) or {}).values():
            found |= set((each or {}).get(name) or ())
    for each in (patch.get("sampled") or {}).values():
        found |= set(each or ())
    return found
