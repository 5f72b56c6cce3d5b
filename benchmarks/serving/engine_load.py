"""A trace against an engine in this process: a loop that adds the requests that have arrived, and steps. Introduced in
phase 4. Invariant: when the loop ends, the engine holds none of the requests.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Any

from benchmarks.decoding import decoding
from benchmarks.serving.results import ServedRequest, ServedRun, TimedStep
from benchmarks.workloads.serving import Trace
from shared.engine.output import StepOutput
from shared.engine.record import StepRecord
from shared.errors import InferError
from shared.sampling.params import SamplingParams
from shared.text.stopping import FinishReason


def drive(engine: Any, trace: Trace, max_seconds: float | None = None) -> ServedRun:
    """Serve a trace, ignoring end of sequence; after ``max_seconds``, and at least one token, cut short whatever still
    runs. The background is aborted when all others have ended; a turn of a conversation follows the previous one.

    ``engine`` has the methods of the engine of phase 4 or later; its ``last_step`` is None if steps cannot be observed.
    """
    requests = list(trace.requests)
    waiting = deque(range(len(requests)))  # not yet added
    served = [ServedRequest(0.0, len(each.prompt_ids), is_background=each.is_background) for each in requests]
    background = {n for n, request in enumerate(served) if request.is_background}
    steps: list[TimedStep] = []
    open_ids: set[int] = set()
    if trace.concurrency is None:
        arrivals = deque(request.arrival or 0.0 for request in trace.requests)
    else:
        arrivals = deque([0.0] * trace.concurrency)  # when the free slots of a closed loop became free
    forwards = engine.stats().get("forward passes")
    start = time.perf_counter()

    def now() -> float:
        return time.perf_counter() - start

    def end(n: int, moment: float, error: str | None) -> None:
        served[n].ended, served[n].error = moment, error
        open_ids.discard(n)
        if requests[n].turns and error is None:
            waiting.appendleft(len(requests))
            requests.append(requests[n].next_turn(served[n].token_ids))
            served.append(ServedRequest(0.0, len(requests[-1].prompt_ids), turn=served[n].turn + 1))
        if trace.concurrency is not None and n not in background:
            arrivals.append(moment)

    while waiting or open_ids - background:
        while waiting and arrivals and arrivals[0] <= now():
            n = waiting.popleft()
            served[n].arrived = arrivals.popleft()
            request = requests[n]
            params = decoding(request.new_tokens, temperature=trace.temperature)
            try:
                engine.add_request(request.prompt_ids, params, str(n))
                open_ids.add(n)
            except InferError as error:
                end(n, now(), str(error))
        if not engine.has_work():
            if waiting:
                time.sleep(max(0.0, arrivals[0] - now()))
            continue
        started = now()
        outputs = engine.step()
        ended = now()
        if (record := engine.last_step) is not None:
            steps.append(TimedStep(started, ended, record))
            for request_id in (*(name for name, _ in record.prefilled), *record.failed):
                n = int(request_id)
                served[n].scheduled = served[n].scheduled or started
        for output in outputs:
            n = int(output.request_id)
            if output.token_id is not None:
                served[n].token_ids.append(output.token_id)
                served[n].token_times.append(ended)
            if output.finish_reason is not None:
                end(n, ended, output.error)
        if max_seconds is not None and ended >= max_seconds and any(request.token_ids for request in served):
            break
    for n in open_ids:
        engine.abort(str(n))
    num_forwards = None if forwards is None else engine.stats()["forward passes"] - forwards
    return ServedRun(served, steps or None, num_forwards, is_cut=bool(open_ids - background or waiting))


class BatchQueue:
    """A queue in front of a server that answers one batch of requests to its end, and then the next; a step is one
    forward pass. ``answer``: takes prompts ``[B]`` and the maximum number of new tokens, and yields the tokens ``[B]``
    of each step.
    """

    def __init__(self, answer: Callable[[list[list[int]], int], Generator[list[int]]], max_batch_size: int = 1) -> None:
        self.answer, self.max_batch_size = answer, max_batch_size
        self.waiting: deque[tuple[str, list[int], int]] = deque()  # id, prompt, new tokens
        self.rows: list[str] = []  # requests of the current batch, including finished ones
        self.open: dict[str, int] = {}  # for the unfinished ones: tokens to come
        self.last_step: StepRecord | None = None
        self.num_steps = 0

    def add_request(self, prompt: Sequence[int], params: SamplingParams, request_id: str | None = None) -> str:
        """Put a request at the end of the queue; it is answered greedily, ignoring end of sequence."""
        assert request_id is not None
        self.waiting.append((request_id, list(prompt), params.max_new_tokens))
        return request_id

    def step(self) -> list[StepOutput]:
        """The first tokens of the next batch, or one more of every current answer."""
        prompts: list[list[int]] = []
        if not self.open:
            taken = [self.waiting.popleft() for _ in range(min(len(self.waiting), self.max_batch_size))]
            self.rows, prompts = [entry[0] for entry in taken], [entry[1] for entry in taken]
            self.open = {request_id: new_tokens for request_id, _, new_tokens in taken}
            self.tokens = self.answer(prompts, max(self.open.values()))
        outputs = []
        for request_id, token_id in zip(self.rows, next(self.tokens), strict=True):
            if request_id in self.open:
                self.open[request_id] -= 1
                reason = None if self.open[request_id] else FinishReason.LENGTH
                outputs.append(StepOutput(request_id, token_id, "", reason))
        self.open = {request_id: left for request_id, left in self.open.items() if left}
        self.last_step = StepRecord(
            step=self.num_steps,
            prefilled=tuple(zip(self.rows, map(len, prompts), strict=False)),
            prefill_starts=(0,) * len(prompts),
            decoded=() if prompts else tuple(output.request_id for output in outputs),
            finished=tuple(output.request_id for output in outputs if output.finish_reason is not None),
            failed=(),
            num_waiting=len(self.waiting),
            num_running=len(self.open),
            kv_used_tokens=0,
            kv_capacity_tokens=0,
        )
        self.num_steps += 1
        return outputs

    def abort(self, request_id: str) -> None:
        """Drop a request; its row stays in the batch while others run."""
        self.waiting = deque(entry for entry in self.waiting if entry[0] != request_id)
        if self.open.pop(request_id, None) and not self.open:
            self.tokens.close()

    def has_work(self) -> bool:
        return bool(self.waiting or self.open)


class OneAtATime(BatchQueue):
    """An engine of a phase before 4, which has no ``step``, used as a server would use it."""

    def __init__(self, engine: Any) -> None:
        super().__init__(self._answer)
        self.engine = engine

    def stats(self) -> dict[str, int]:
        return {**self.engine.stats(), "forward passes": self.num_steps}

    def _answer(self, prompts: list[list[int]], new_tokens: int) -> Generator[list[int]]:
        with closing(self.engine.generate(prompts[0], decoding(new_tokens))) as outputs:
            for output in outputs:
                yield [output.token_id]
