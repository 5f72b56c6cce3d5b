"""Where to look in a trace: the step at which something happens, described in a sentence. Introduced in phase 6.

The page shows the sentence as a caption, and its slider starts at that step. Invariant: the sentence describes
something visible in the timeline at that step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.tracing.told import listed, some, token_range
from shared.tracing.trace import CellKind, Trace


@dataclass(frozen=True)
class Focus:
    """A step of the trace, and what to look at there."""

    step: int
    text: str


def focus(trace: Trace) -> Focus:
    """The first of these that occurs in the run: a token sampled deep inside a grammar, accepted drafts, a compression,
    a prompt that begins in the cache, a preemption, a stalled request, a chunk of a prompt alongside decoding, empty
    rows while requests wait, a wait.
    """
    sampled = [(token.position, token.step, each) for each in trace.requests for token in each.tokens if token.position]
    if sampled:
        position, step, request = max(sampled, key=lambda found: len(found[0].stack))
        name, (state, _, number) = request.request_id, position
        tokens = some(number, "allowed token")
        return Focus(step, f"step {step} samples for request {name} in state {state} of its grammar, from {tokens}.")
    verified = [(step, *counts) for step, each in enumerate(trace.steps) for counts in each.record.verified]
    step, name, num_accepted, num_rejected = max(verified, key=lambda counts: counts[2], default=(0, "", 0, 0))
    if num_accepted:
        drafts = some(num_accepted + num_rejected, "draft")
        return Focus(step, f"step {step} verifies {drafts} of request {name}, and accepts {num_accepted}.")
    compressed = [(step, *one) for step, each in enumerate(trace.steps) for one in each.record.compressed]
    if compressed:
        step, name, num_tokens, kept = compressed[0]
        counts = " to ".join(map(str, sorted({min(map(min, kept)), max(map(max, kept))})))
        tokens = f"{counts} of {some(num_tokens, 'token')}"
        return Focus(step, f"before step {step} request {name} is compressed: its heads keep {tokens}.")
    found = {
        next(step for kind, step, _ in trace.runs(request) if kind is not CellKind.QUEUE): request
        for request in reversed(trace.requests)
        if request.num_cached_tokens
    }
    if found:
        step = min(found)
        name, count, length = found[step].request_id, found[step].num_cached_tokens, found[step].num_prompt_tokens
        tokens = f"{count} of its {length} prompt tokens"
        return Focus(step, f"in step {step} request {name} begins, with {tokens} from the cache.")
    for request in trace.requests:
        for step in trace.preemptions(request)[:1]:
            again = next((n for kind, n, _ in trace.runs(request) if kind is CellKind.RECOMPUTE and n > step), None)
            then = "" if again is None else f" Step {again} recomputes its tokens."
            return Focus(step, f"in step {step} blocks run out, and request {request.request_id} is preempted.{then}")
    for request in trace.requests:
        for kind, step, after in trace.runs(request):
            if kind is CellKind.STALL:
                prompts = [name for name, _ in trace.steps[step].record.prefilled]
                beside = f" during the prefill of {_requests(prompts)}" if prompts else ""
                steps = some(after - step, "step")
                return Focus(step, f"from step {step} on request {request.request_id} stalls for {steps}{beside}.")
    chunks = [(request, *chunk) for request in trace.requests for chunk in trace.chunks(request) if chunk[1]]
    decoding = [len(trace.steps[step].record.decoded) for _, step, _, _ in chunks]
    if most := max(decoding, default=0):
        request, step, first, num_tokens = chunks[decoding.index(most)]
        others = "1 request decodes" if most == 1 else f"{most} requests decode"
        part = f"{token_range(first, num_tokens)} of the prompt of request {request.request_id}"
        return Focus(step, f"step {step} computes a chunk, {part}, while {others}.")
    empty = [
        (trace.max_batch_size - step.num_served) if step.record.num_waiting and step.num_served else 0
        for step in trace.steps
    ]
    if max(empty, default=0) > 0:
        step = empty.index(max(empty))
        waiting = trace.steps[step].record.num_waiting
        others = "1 request waits" if waiting == 1 else f"{waiting} requests wait"
        is_static = trace.settings.get("batching mode") == "static"
        pending = [
            request.request_id
            for request in trace.requests
            if any(cell.kind is CellKind.PENDING and cell.step == step for cell in trace.cells(request))
        ]
        why = "the batch has to end first" if is_static else "the KV cache has no free blocks for the next"
        if pending:
            why = f"the last token of {_requests(pending)} is pending"
        served = trace.steps[step].num_served
        return Focus(step, f"step {step} runs {served} of {trace.max_batch_size} rows while {others}: {why}.")
    waits = {request.request_id: trace.runs(request)[:1] for request in trace.requests}
    ends = {name: runs[0][2] for name, runs in waits.items() if runs and runs[0][0] is CellKind.QUEUE}
    if ends:
        name, step = max(ends.items(), key=lambda entry: entry[1])
        step = min(step, len(trace.steps) - 1)
        return Focus(step, f"request {name} waits until step {step}, when a finished request frees its memory.")
    held = [step.memory.num_held if step.memory is not None else step.num_served for step in trace.steps]
    step = held.index(max(held)) if held else 0
    return Focus(step, f"no request waits; step {step} holds the most memory.")


def _requests(names: Sequence[str]) -> str:
    return f"request{'' if len(names) == 1 else 's'} {listed(names)}"
