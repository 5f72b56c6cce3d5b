"""A run in the Trace Event Format, which Perfetto and Chrome open. Introduced in phase 4.

A run is a process; its threads are the engine's steps, the host's parts of them, the GPU if there is one, and one per
request; its counters are the lanes. Times are microseconds with three decimals, so nanoseconds are preserved. The
format is Google's "Trace Event Format" (2016).

Invariant: events of a thread never overlap, so a viewer cannot nest them wrongly.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

from shared.tracing.lanes import LANES, activity_lanes
from shared.tracing.trace import CellKind, Outcome, Trace, TracedRequest, TracedToken

STEPS_THREAD = 0
IDLE = (CellKind.QUEUE, CellKind.STALL, CellKind.PREEMPTED)
Event = dict[str, Any]


def chrome_trace(traces: Sequence[Trace]) -> dict[str, Any]:
    """The traces in the object form of the format: one process each, numbered from 1."""
    events = [event for pid, trace in enumerate(traces, start=1) for event in _events(trace, pid)]
    settings = {trace.title: dict(trace.settings) for trace in traces}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": settings}


def chrome_text(traces: Sequence[Trace]) -> str:
    """The trace as JSON text, one event per line."""
    whole = chrome_trace(traces)
    lines = ",\n".join(json.dumps(event, ensure_ascii=False) for event in whole.pop("traceEvents"))
    return f'{{"traceEvents": [\n{lines}\n],\n{json.dumps(whole, ensure_ascii=False)[1:]}\n'


def _events(trace: Trace, pid: int) -> Iterator[Event]:
    yield _name("process_name", pid, STEPS_THREAD, name=trace.title)
    yield _name("process_sort_index", pid, STEPS_THREAD, sort_index=pid)
    yield _name("thread_name", pid, STEPS_THREAD, name="steps")
    yield _name("thread_sort_index", pid, STEPS_THREAD, sort_index=0)
    for step in trace.steps:
        record = dataclasses.asdict(step.record)
        yield _span(f"step {step.record.step}", "step", pid, STEPS_THREAD, step.started_ns, step.ended_ns, record)
        for lane in LANES:
            values = {lane.name: lane.value(step)}
            yield {"name": lane.name, "cat": "lane", "ph": "C", "pid": pid, "ts": step.ended_ns / 1000, "args": values}
    activity = activity_lanes(trace)
    for tid, (name, spans) in enumerate(activity, start=STEPS_THREAD + 1):
        yield _name("thread_name", pid, tid, name=name)
        yield _name("thread_sort_index", pid, tid, sort_index=tid)
        for step, parts in zip(trace.steps, spans, strict=True):
            for part in parts:
                details = {"step": step.record.step}
                yield _span(part.name, name, pid, tid, part.started_ns, part.ended_ns, details)
    for tid, request in enumerate(trace.requests, start=STEPS_THREAD + 1 + len(activity)):
        yield _name("thread_name", pid, tid, name=f"request {request.request_id}")
        yield _name("thread_sort_index", pid, tid, sort_index=tid)
        yield from _request_events(trace, request, pid, tid)


def _request_events(trace: Trace, request: TracedRequest, pid: int, tid: int) -> Iterator[Event]:
    """The wait in the queue as one event, then one event for each step that ran or preempted the request, then the
    end."""
    cells = [cell for cell in trace.cells(request) if cell.kind not in IDLE]
    first_ns = trace.steps[cells[0].step].started_ns if cells else request.ended_ns
    queue_ns = first_ns if first_ns is not None else (trace.steps[-1].ended_ns if trace.steps else request.arrived_ns)
    details = {"prompt tokens": request.num_prompt_tokens, "max new tokens": request.max_new_tokens}
    yield _span("queue", "queue", pid, tid, request.arrived_ns, queue_ns, details)
    tokens: dict[int, list[TracedToken]] = {}
    for token in request.tokens:
        tokens.setdefault(token.step, []).append(token)
    for cell in cells:
        step = trace.steps[cell.step]
        args: dict[str, Any] = {"step": cell.step, "tokens": cell.num_tokens}
        if cell.num_drafts:
            args |= {"accepted drafts": cell.num_accepted_drafts, "rejected drafts": cell.num_rejected_drafts}
        if cell.step in tokens:
            ids = [token.token_id for token in tokens[cell.step]]
            args |= {"token ids": ids} if len(ids) > 1 else {"token id": ids[0]}
            args["text"] = "".join(token.text for token in tokens[cell.step])
            positions = [token.position._asdict() for token in tokens[cell.step] if token.position is not None]
            args |= {"grammar": positions} if positions else {}
        if cell.kind is CellKind.FAILED:
            args["error"] = request.error
        yield _span(cell.kind.value, cell.kind.value, pid, tid, step.started_ns, step.ended_ns, args)
    for index in trace.preemptions(request):
        step = trace.steps[index]
        at = {"pid": pid, "tid": tid, "ts": step.started_ns / 1000}
        yield {"name": "preempted", "cat": "preemption", "ph": "i", "s": "t", **at, "args": {"step": index}}
    if request.outcome is not Outcome.OPEN and request.ended_ns is not None:
        end = {"finish_reason": request.finish_reason, "generated tokens": len(request.tokens)}
        at = {"pid": pid, "tid": tid, "ts": request.ended_ns / 1000}
        yield {"name": request.outcome.value, "cat": "end", "ph": "i", "s": "t", **at, "args": end}


def _span(name: str, category: str, pid: int, tid: int, start_ns: int, end_ns: int, args: dict[str, Any]) -> Event:
    times = {"ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000}
    return {"name": name, "cat": category, "ph": "X", "pid": pid, "tid": tid, **times, "args": args}


def _name(kind: str, pid: int, tid: int, **args: str | int) -> Event:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": args}
