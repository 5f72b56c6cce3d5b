"""What a served trace says: latencies, throughput, fairness, and how full the batch was. Introduced in phase 4.

A request's first token counts from its arrival, so does its whole latency; its queue wait ends where the first step
that computed it began. Inter-token latencies are the gaps of all requests together. A percentile is interpolated
linearly between the two nearest values. Only requests with a whole answer count in latencies; throughput counts all
tokens.

Two incidents are starvation. A stall: a decoding request got no token for more than ``max_decode_interval`` steps. A
request overtaken: more than ``max_batch_size`` requests that came later were begun in an earlier step. A request that
was preempted is begun where it was first computed; until it is computed anew it waits and is no decoding request, so
its wait is no stall: it is seen in the gaps between tokens. Invariant: every figure follows from the run and the two
bounds; nothing here looks at a clock.
"""

from typing import Any

import numpy as np

from benchmarks.report import rounded
from benchmarks.serving.run import ServedRun, TimedStep

PERCENTILES = (50, 95, 99)
STEP_FIGURES = (
    "steps",
    "slot_utilisation",
    "kv_utilisation",
    "decode_stalls",
    "requests_overtaken",
    "preemptions",
    "tokens_recomputed",
    "mean_step_ms",
)
"""What only an engine's steps tell."""


def percentiles(seconds: list[float]) -> dict[str, float] | None:
    """P50, P95 and P99 in milliseconds; None of no values."""
    if not seconds:
        return None
    values = 1e3 * np.percentile(seconds, PERCENTILES)
    return {f"p{n}": rounded(float(value)) for n, value in zip(PERCENTILES, values, strict=True)}


def figures(run: ServedRun, max_batch_size: int, max_decode_interval: int) -> dict[str, Any]:
    """Everything about a run; what only an engine's steps tell is None where they were not seen."""
    done = run.finished
    seconds = run.seconds
    gaps = [b - a for request in done for a, b in zip(request.token_times, request.token_times[1:], strict=False)]
    waits = [request.scheduled - request.arrived for request in done if request.scheduled is not None]
    return {
        "num_requests": len(run.requests),
        "num_finished": len(done),
        "num_errors": sum(request.error is not None for request in run.requests),
        "is_cut": run.is_cut,
        "output_tokens": run.num_tokens,
        "seconds": rounded(seconds),
        "output_tokens_per_second": rounded(output_tokens_per_second(run)),
        "requests_per_second": rounded(len(done) / seconds) if seconds else 0.0,
        "time_to_first_token_ms": percentiles([r.token_times[0] - r.arrived for r in done if r.token_times]),
        "inter_token_latency_ms": percentiles(gaps),
        "request_latency_ms": percentiles([r.ended - r.arrived for r in done if r.ended is not None]),
        "queue_wait_ms": percentiles(waits),
        "forward_passes": run.num_forwards,
    } | _step_figures(run, max_batch_size, max_decode_interval)


def _step_figures(run: ServedRun, max_batch_size: int, max_decode_interval: int) -> dict[str, Any]:
    steps = run.steps
    if not steps:
        return dict.fromkeys(STEP_FIGURES)
    return {
        "steps": len(steps),
        "slot_utilisation": rounded(slot_utilisation(steps, max_batch_size)),
        "kv_utilisation": kv_utilisation(steps),
        "decode_stalls": decode_stalls(steps, max_decode_interval),
        "requests_overtaken": requests_overtaken(steps, bound=max_batch_size),
        "preemptions": sum(len(step.record.preempted) for step in steps),
        "tokens_recomputed": tokens_recomputed(steps),
        "mean_step_ms": rounded(1e3 * float(np.mean([step.ended - step.started for step in steps]))),
    }


def kv_utilisation(steps: list[TimedStep]) -> float | None:
    """Share of the KV memory that holds a token, the mean over steps; None where there is no such memory."""
    capacity = steps[-1].record.kv_capacity_tokens
    held = float(np.mean([step.record.kv_used_tokens for step in steps]))
    return rounded(held / capacity) if capacity else None


def slot_utilisation(steps: list[TimedStep], max_batch_size: int) -> float:
    """Of the tokens that as many steps could have given, were every place of the batch taken, the share given."""
    given = sum(len(step.record.prefilled) + len(step.record.decoded) for step in steps)
    return given / (len(steps) * max_batch_size)


def decode_stalls(steps: list[TimedStep], max_decode_interval: int) -> int:
    """Times that a decoding request got its next token more than so many steps after the last."""
    last: dict[str, int] = {}
    stalls = 0
    for n, step in enumerate(steps):
        for request_id in step.record.decoded:
            stalls += n - last[request_id] > max_decode_interval
            last[request_id] = n
        last |= {request_id: n for request_id, _ in step.record.prefilled}
    return stalls


def requests_overtaken(steps: list[TimedStep], bound: int) -> int:
    """Requests before which more than ``bound`` others were begun that came later; ids count in order of arrival."""
    begun: dict[int, int] = {}
    for n, step in enumerate(steps):
        for name, _ in step.record.prefilled:
            begun.setdefault(int(name), n)
    order = sorted(begun)
    found = 0
    for place, mine in enumerate(order):
        found += sum(begun[later] < begun[mine] for later in order[place + 1 :]) > bound
    return found


def tokens_recomputed(steps: list[TimedStep]) -> int:
    """Tokens that had been computed before, and lost when their request was preempted."""
    computed: dict[str, int] = {}  # of each request, in the memory
    most: dict[str, int] = {}  # ever
    found = 0
    for step in steps:
        computed |= dict.fromkeys(step.record.preempted, 0)
        for name, num_tokens in (*step.record.prefilled, *((name, 1) for name in step.record.decoded)):
            before = computed.get(name, 0)
            computed[name] = before + num_tokens
            found += max(0, min(most.get(name, 0), computed[name]) - before)
            most[name] = max(most.get(name, 0), computed[name])
    return found


def output_tokens_per_second(run: ServedRun) -> float:
    """Throughput of the whole run."""
    return run.num_tokens / run.seconds if run.seconds else 0.0


def saturated_steps(steps: list[TimedStep]) -> list[TimedStep]:
    """Those up to the last that left any waiting, or all if none did.

    What follows, the last batch emptying, says how long the trace is and not how fast the engine.
    """
    last = max((n for n, step in enumerate(steps) if step.record.num_waiting), default=len(steps) - 1)
    return steps[: last + 1]


def saturated_tokens_per_second(run: ServedRun) -> float:
    """Throughput while requests waited: tokens of the saturated steps over their time."""
    ended = saturated_steps(run.steps or [])[-1].ended
    return sum(moment <= ended for request in run.requests for moment in request.token_times) / ended


def saturated_figures(run: ServedRun) -> dict[str, Any]:
    """How many held memory at a time, how full it was and how fast they were, while requests waited."""
    steps = saturated_steps(run.steps or [])
    held = [step.record.num_running + len(step.record.finished) + len(step.record.failed) for step in steps]
    return {
        "peak_concurrent": max(held),
        "mean_concurrent": rounded(float(np.mean(held))),
        "saturated_kv_utilisation": kv_utilisation(steps),
        "saturated_tokens_per_second": rounded(saturated_tokens_per_second(run)),
    }


def ratio(over: float | None, under: float | None) -> float | None:
    """The quotient, rounded; None where there is none."""
    return rounded(over / under) if over is not None and under else None
