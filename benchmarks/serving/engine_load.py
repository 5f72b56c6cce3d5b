"""A trace against an engine, with nothing between: a loop that hands over who has come, and steps.

Introduced in phase 4. An engine that answers one request at a time, of a phase before 4, is served by
:class:`OneAtATime`, which is what a server would do with it: a queue, and one after another. Invariants: every
contender is driven by the same loop; requests are handed over between two steps, in the trace's order; when the loop
ends, the engine holds nothing of them.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from benchmarks.serving.run import ServedRequest, ServedRun, TimedStep
from benchmarks.workloads.serving import Trace
from shared.engine.output import StepOutput
from shared.engine.record import StepRecord
from shared.errors import InferError
from shared.sampling.params import SamplingParams


class Servable(Protocol):
    """What the loop needs of an engine."""

    last_step: StepRecord | None

    def stats(self) -> dict[str, int]: ...

    def add_request(self, prompt: Sequence[int], params: SamplingParams, request_id: str | None = None) -> str: ...

    def step(self) -> list[StepOutput]: ...

    def abort(self, request_id: str) -> bool: ...

    def has_work(self) -> bool: ...


def drive(engine: Servable, trace: Trace, max_seconds: float | None = None) -> ServedRun:
    """Serve a trace, greedily and past any end of sequence; after ``max_seconds`` break off what still runs."""
    waiting = deque(range(len(trace.requests)))  # of the trace, not yet handed over
    served = [ServedRequest(0.0, len(request.prompt_ids)) for request in trace.requests]
    steps: list[TimedStep] = []
    open_ids: set[int] = set()
    forwards = engine.stats()["forward passes"]
    start = time.perf_counter()
    freed: deque[float] = deque()  # when the places that are free in a closed loop became so
    if trace.concurrency is not None:
        freed.extend([0.0] * trace.concurrency)

    def now() -> float:
        return time.perf_counter() - start

    while waiting or open_ids:
        while waiting:
            arrival = trace.requests[waiting[0]].arrival
            if trace.concurrency is not None:
                if not freed:
                    break
                arrival = freed.popleft()
            assert arrival is not None
            if arrival > now():
                break
            n = waiting.popleft()
            request = trace.requests[n]
            served[n].arrived = arrival
            params = SamplingParams(temperature=0.0, max_new_tokens=request.new_tokens, ignore_eos=True)
            try:
                engine.add_request(request.prompt_ids, params, str(n))
            except InferError as error:
                served[n].error, served[n].ended = str(error), now()
                if trace.concurrency is not None:
                    freed.append(now())
            else:
                open_ids.add(n)
        if not engine.has_work():
            if waiting:
                time.sleep(max(0.0, (trace.requests[waiting[0]].arrival or 0.0) - now()))
            continue
        started = now()
        outputs = engine.step()
        ended = now()
        assert engine.last_step is not None
        steps.append(TimedStep(started, ended, engine.last_step))
        for request_id in (*(name for name, _ in engine.last_step.prefilled), *engine.last_step.failed):
            first = served[int(request_id)]
            first.scheduled = started if first.scheduled is None else first.scheduled
        for output in outputs:
            mine = served[int(output.request_id)]
            if output.token_id is not None:
                mine.token_ids.append(output.token_id)
                mine.token_times.append(ended)
            if output.finish_reason is not None:
                mine.ended, mine.error = ended, output.error
                open_ids.discard(int(output.request_id))
                if trace.concurrency is not None:
                    freed.append(ended)
        if max_seconds is not None and ended >= max_seconds:
            break
    for n in open_ids:
        engine.abort(str(n))
    return ServedRun(served, steps, engine.stats()["forward passes"] - forwards, is_cut=bool(open_ids or waiting))


class OneAtATime:
    """A queue in front of an engine that has no ``step``: the first is answered to its end, then the next.

    One token is one step and one forward pass.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.queue: deque[tuple[str, Sequence[int], SamplingParams]] = deque()
        self.answer: tuple[str, Iterator[StepOutput]] | None = None
        self.last_step: StepRecord | None = None
        self.num_forwards = 0
        self.num_steps = 0

    def stats(self) -> dict[str, int]:
        return {**self.engine.stats(), "forward passes": self.num_forwards}

    def add_request(self, prompt: Sequence[int], params: SamplingParams, request_id: str | None = None) -> str:
        """Put a request at the end of the queue."""
        assert request_id is not None
        self.queue.append((request_id, prompt, params))
        return request_id

    def step(self) -> list[StepOutput]:
        """The next token of the answer under way, or the first of the next one."""
        prefilled: tuple[tuple[str, int], ...] = ()
        if self.answer is None:
            request_id, prompt, params = self.queue.popleft()
            self.answer = request_id, self.engine.generate(prompt, params)
            prefilled = ((request_id, len(prompt)),)
        request_id, outputs = self.answer
        output = next(outputs)
        output = StepOutput(request_id, output.token_id, output.text, output.finish_reason, output.stop)
        is_last = output.finish_reason is not None
        if is_last:
            self.answer = None
        self.last_step = StepRecord(
            step=self.num_steps,
            prefilled=prefilled,
            decoded=() if prefilled else (request_id,),
            finished=(request_id,) if is_last else (),
            failed=(),
            num_waiting=len(self.queue),
            num_running=0 if is_last else 1,
            kv_used_tokens=0,
            kv_capacity_tokens=0,
        )
        self.num_steps += 1
        self.num_forwards += 1
        return [output]

    def abort(self, request_id: str) -> bool:
        """Drop a request, wherever it is."""
        if self.answer is not None and self.answer[0] == request_id:
            self.answer = None
            return True
        before = len(self.queue)
        self.queue = deque(entry for entry in self.queue if entry[0] != request_id)
        return len(self.queue) < before

    def has_work(self) -> bool:
        return bool(self.queue or self.answer)
