"""Records an engine's run: a wrapper that times its methods. Introduced in phase 4; lanes of host and GPU in phase 9.

The engine reads no clock and does no I/O, so its caller can record it from outside. Requests are added, stepped and
aborted through the recorder, which forwards every call. Invariant: recording does not change the engine's behaviour.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from shared.engine.memory_map import MemoryMap
from shared.engine.output import StepOutput
from shared.engine.record import StepRecord
from shared.grammar.grammar import Grammar
from shared.grammar.progress import Progress
from shared.sampling.params import SamplingParams
from shared.tracing.activity import ActivityRecorder, StepActivity
from shared.tracing.trace import Outcome, Trace, TracedRequest, TracedStep, TracedToken

SEGMENT = "segment "
"""The prefix of the ids of requests that compute a segment (:mod:`shared.tracks.segments.scheduler`)."""


class Recorder:
    """Wraps ``add_request``, ``step`` and ``abort`` of an engine of phase 4 or later; ``clock`` is in nanoseconds.

    Raises:
        ValueError: the engine has requests already, whose arrivals would be missing.
    """

    def __init__(self, engine: Any, *, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        if engine.has_work():
            raise ValueError("The engine has requests already; start recording while it has none.")
        self.engine = engine
        self.clock = clock
        self.zero_ns = clock()
        self.computes_segments = hasattr(engine, "segments")
        self.activity = ActivityRecorder(engine, self._now)
        self.steps: list[TracedStep] = []  # without the GPU's times
        self.activities: list[StepActivity] = []  # of each step
        self.requests: list[TracedRequest] = []  # without their tokens
        self.tokens: list[list[TracedToken]] = []  # of each request
        self.progress: dict[str, Progress] = {}  # for requests with a grammar, by id
        self.indices: dict[str, int] = {}  # index in those lists by id; an id may be reused after its request's end

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        text: str | None = None,
        segments: Sequence[Sequence[int]] = (),
    ) -> str:
        """The engine's ``add_request``; ``text`` is shown for a prompt given as ids.

        ``segments`` are registered, and precede the prompt (phase 9.1).
        """
        prompt_ids = self.engine.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        arrived_ns = self._now()
        context = {"segment_ids": [self.engine.register(segment) for segment in segments]} if segments else {}
        request_id = str(self.engine.add_request(prompt_ids, params, request_id, **context))
        self.progress.pop(request_id, None)
        if isinstance(params.structured_output, Grammar):
            self.progress[request_id] = Progress(self.engine.constraints.grammars.get(params.structured_output))
        self.indices[request_id] = len(self.requests)
        self.tokens.append([])
        self.requests.append(
            TracedRequest(
                request_id,
                num_prompt_tokens=sum(map(len, segments)) + len(prompt_ids),
                max_new_tokens=params.max_new_tokens,
                arrival_step=len(self.steps),
                arrived_ns=arrived_ns,
                prompt=prompt if isinstance(prompt, str) else text,
            )
        )
        return request_id

    def step(self) -> list[StepOutput]:
        """The engine's ``step``."""
        with self.activity.watch() as activity:
            started_ns = activity.last_ns
            outputs: list[StepOutput] = self.engine.step()
            ended_ns = self._now()
        record, index = self.engine.last_step, len(self.steps)
        memory = MemoryMap.of(self.engine.scheduler, record)
        self.activities.append(activity)
        self.steps.append(TracedStep(replace(record, step=index), started_ns, ended_ns, memory, tuple(activity.host)))
        for output in outputs:
            self._note(output, index, ended_ns)
        if self.computes_segments:
            self._note_segments(record, index, started_ns, ended_ns)
        return outputs

    def abort(self, request_id: str) -> bool:
        """The engine's ``abort``."""
        was_here: bool = self.engine.abort(request_id)
        if was_here:
            self._set(request_id, outcome=Outcome.ABORTED, end_step=len(self.steps), ended_ns=self._now())
        return was_here

    def trace(self, title: str, **settings: str | int | float | None) -> Trace:
        """The recording so far; waits for a GPU."""
        gpu, ranks = map(self.activity.gpu_spans, self.activities), map(self.activity.rank_spans, self.activities)
        return Trace(
            title,
            max_batch_size=self.engine.config.max_batch_size,
            steps=tuple(replace(s, gpu=g, ranks=r) for s, g, r in zip(self.steps, gpu, ranks, strict=True)),
            requests=tuple(replace(r, tokens=tuple(t)) for r, t in zip(self.requests, self.tokens, strict=True)),
            settings=settings,
        )

    def _note(self, output: StepOutput, index: int, now_ns: int) -> None:
        if output.num_cached_tokens:
            self._set(output.request_id, num_cached_tokens=output.num_cached_tokens)
        if output.token_id is not None:
            progress = self.progress.get(output.request_id)
            position = None if progress is None else progress.read(output.token_id)
            token = TracedToken(index, output.token_id, output.text, position)
            self.tokens[self.indices[output.request_id]].append(token)
        if output.finish_reason is not None:
            self._set(
                output.request_id,
                outcome=Outcome.FINISHED if output.error is None else Outcome.FAILED,
                finish_reason=str(output.finish_reason),
                error=output.error,
                end_step=index + 1,
                ended_ns=now_ns,
            )

    def _note_segments(self, record: StepRecord, index: int, started_ns: int, ended_ns: int) -> None:
        """Adds and ends a row for each internal request that computes a segment."""
        computing = {request.request_id for request in self.engine.segments.computing}
        for request_id, start in zip((name for name, _ in record.prefilled), record.prefill_starts, strict=True):
            if start == 0 and request_id.startswith(SEGMENT) and self._is_ended(request_id):
                length = len(self.engine.segments.find(request_id.removeprefix(SEGMENT).rstrip("+")))
                self.indices[request_id] = len(self.requests)
                self.tokens.append([])
                self.requests.append(TracedRequest(request_id, length, 0, index, started_ns, "a segment"))
        for request_id, number in self.indices.items():
            is_own = self.requests[number].max_new_tokens == 0  # a client may use an id like these
            if is_own and request_id not in computing and not self._is_ended(request_id):
                self._set(request_id, outcome=Outcome.FINISHED, end_step=index + 1, ended_ns=ended_ns)

    def _is_ended(self, request_id: str) -> bool:
        """Whether no row with this id is open."""
        return request_id not in self.indices or self.requests[self.indices[request_id]].end_step is not None

    def _set(self, request_id: str, **changes: Any) -> None:
        index = self.indices[request_id]
        self.requests[index] = replace(self.requests[index], **changes)

    def _now(self) -> int:
        return self.clock() - self.zero_ns
