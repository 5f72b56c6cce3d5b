"""What the page of a trace says of a step, and of a request in a step. Introduced in phase 4.

Invariant: each figure is one of the trace's; what the page draws and what it says cannot differ.
"""

from collections.abc import Iterator, Mapping, Sequence

from shared.grammar.progress import Position
from shared.tracing.lanes import LANES, activity_lanes
from shared.tracing.trace import CellKind, Outcome, Trace, TracedRequest

SHORT_NS = 10_000_000
"""Times below this have two decimals of a millisecond, others one."""


def step_texts(trace: Trace) -> list[str]:
    """For each step: its requests and what it did with them, its counters, and how long its parts took."""
    chunks = _chunks(trace)
    return [_step(trace, index, chunks) for index in range(len(trace.steps))]


def _step(trace: Trace, index: int, chunks: Mapping[tuple[str, int], str]) -> str:
    step, record = trace.steps[index], trace.steps[index].record
    prompts = [f"{name} ({chunks.get((name, index), some(count, 'token'))})" for name, count in record.prefilled]
    verified = {name: _drafts(accepted, rejected) for name, accepted, rejected in record.verified}
    decoded = [f"{name}: {verified[name]}" if verified.get(name) else name for name in record.decoded]
    names = {"preempted": record.preempted, "prefill": prompts, "decode": decoded}
    names |= {"finished": record.finished, "failed": record.failed}
    facts = [_milliseconds(step.ended_ns - step.started_ns)]
    facts += [f"{what} {', '.join(each)}" for what, each in names.items() if each]
    for lane in LANES:
        capacity = lane.capacity(trace)
        facts.append(f"{lane.name} {lane.value(step)}{f' of {capacity}' if capacity else ''}")
    for name, spans in activity_lanes(trace):
        parts = [f"{span.name} {_milliseconds(span.ended_ns - span.started_ns)}" for span in spans[index]]
        facts.append(f"{name}: {', '.join(parts) or 'nothing'}")
    return " · ".join(facts)


def request_texts(trace: Trace) -> list[dict[int, str]]:
    """For each request, by the steps that computed a part of it or gave it a token: what that was."""
    chunks = _chunks(trace)
    return [_request(trace, request, chunks) for request in trace.requests]


def _request(trace: Trace, request: TracedRequest, chunks: Mapping[tuple[str, int], str]) -> dict[int, str]:
    found: dict[int, str] = {}
    cached = request.num_cached_tokens
    for cell in trace.cells(request):
        if cell.kind is CellKind.PENDING:
            facts = ["pending: the token that the step before sampled arrives"]
        elif cell.kind is CellKind.RECOMPUTE:
            facts = [f"recompute of {some(cell.num_tokens, 'token')}: the prompt and the answer so far"]
        elif cell.kind is CellKind.PREFILL:
            whole = some(request.num_prompt_tokens, "prompt token")
            prompt = chunks.get((request.request_id, cell.step), whole)
            facts = [f"prefill of {prompt}"]
            if cached and not found:  # the first of its chunks
                facts.append(f"{some(cached, 'prompt token')} came from the cache")
        elif cell.kind is CellKind.DECODE:
            facts = ["decode", _drafts(cell.num_accepted_drafts, cell.num_rejected_drafts)]
        else:
            continue
        facts += _given(request, cell.step)
        found[cell.step] = " · ".join(filter(None, facts))
    return found


def _given(request: TracedRequest, step: int) -> Iterator[str]:
    """The tokens that the step gave, and the end."""
    for number, token in enumerate(request.tokens, start=1):
        if token.step == step:
            where = f", sampled {_position(token.position)}" if token.position is not None else ""
            yield f"token {number} of {len(request.tokens)} is “{token.text}” (id {token.token_id}){where}"
    if request.outcome is Outcome.FINISHED and request.end_step == step + 1:
        yield f"finished ({request.finish_reason})"


def _chunks(trace: Trace) -> dict[tuple[str, int], str]:
    """By request and step: the part of its prompt, or after a preemption of all its tokens, that is not the whole."""
    found = {}
    for request in trace.requests:
        for step, first, count in trace.chunks(request):
            total = max(request.num_prompt_tokens + sum(token.step < step for token in request.tokens), first + count)
            if count < total:
                found[request.request_id, step] = f"{token_range(first, count)} of {total}"
    return found


def _drafts(num_accepted: int, num_rejected: int) -> str:
    count = num_accepted + num_rejected
    return f"{num_accepted} of {some(count, 'draft')} accepted" if count else ""


def _position(position: Position) -> str:
    """Where a token was sampled: the automaton's state, what is open, how many tokens were allowed."""
    stack = position.stack
    opened = f"{len(stack)} open ({stack})" if stack else "nothing open"
    return f"in state {position.state}, {opened}, from {some(position.num_allowed, 'allowed token')}"


def _milliseconds(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:.{2 if nanoseconds < SHORT_NS else 1}f} ms"


def some(count: int, word: str) -> str:
    """A count with its word in the singular or the plural."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def token_range(first: int, count: int) -> str:
    """The tokens from an index on."""
    return f"token {first}" if count == 1 else f"tokens {first} to {first + count - 1}"


def listed(names: Sequence[str]) -> str:
    """Names as a sentence has them; no name at all is not one."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
