"""The outcome of a trace and its figures: latencies, throughput, fairness, use of the batch. Introduced in phase 4.

Times are seconds from the start of the trace, as the client sees them. A request's time to the first token and its
total latency are counted from its arrival; its queue wait ends when the first step that computed it began. Times
between tokens include all requests together. If requests decode in the background, times between tokens are theirs, and
all other figures are those of the other requests. Only requests with a complete answer count in latencies; throughput
counts all tokens.

There are two kinds of starvation. A decode stall: a decoding request got no token for more than ``max_decode_interval``
steps. An overtaken request: more than ``max_batch_size`` later requests were started in an earlier step. A preempted
request counts as started when it was first computed; until it is recomputed it waits, which is not a stall.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.report import rounded
from shared.engine.record import StepRecord


@dataclass
class ServedRequest:
    """One request. ``scheduled``: when the first step that computed it began; ``error``: why it has no complete answer;
    ``turn``: the turn of its conversation. A background request decodes only so that others are served alongside it.
    """

    arrived: float
    num_prompt_tokens: int
    scheduled: float | None = None
    token_times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    ended: float | None = None
    error: str | None = None
    is_background: bool = False
    turn: int = 0


@dataclass(frozen=True)
class TimedStep:
    """A step's record and when it ran."""

    started: float
    ended: float
    record: StepRecord


@dataclass
class ServedRun:
    """A served trace; requests are in its order. ``steps`` and ``num_forwards`` are None if they cannot be observed:
    over HTTP, or inside a peer. ``is_cut``: the run was cut short.
    """

    requests: list[ServedRequest]
    steps: list[TimedStep] | None
    num_forwards: int | None
    is_cut: bool = False

    @property
    def seconds(self) -> float:
        """Until the last token."""
        return max((request.token_times[-1] for request in self.requests if request.token_times), default=0.0)

    @property
    def num_tokens(self) -> int:
        return sum(len(request.token_ids) for request in self.requests)

    @property
    def finished(self) -> list[ServedRequest]:
        """Requests with a complete answer, without the background."""
        ended = [request for request in self.requests if request.ended is not None and not request.is_background]
        return [request for request in ended if request.error is None]


def percentiles(seconds: list[float]) -> dict[str, float] | None:
    """P50, P95 and P99 in milliseconds; None without values."""
    return {f"p{n}": rounded(float(1e3 * np.percentile(seconds, n))) for n in (50, 95, 99)} if seconds else None


def figures(run: ServedRun, max_batch_size: int, max_decode_interval: int) -> dict[str, Any]:
    """All figures of a run; those that only an engine's steps show are None if steps were not observed."""
    done = run.finished
    seconds, steps = run.seconds, run.steps or []
    decoding = [request for request in run.requests if request.is_background] or done
    gaps = [b - a for request in decoding for a, b in zip(request.token_times, request.token_times[1:], strict=False)]
    of_steps = {
        "steps": len(steps),
        # of the tokens that the same number of steps would have given with every row of the batch in use: the share
        # actually given
        "slot_utilisation": _mean([len(s.record.prefilled) + len(s.record.decoded) for s in steps]) / max_batch_size,
        "decode_stalls": decode_stalls(steps, max_decode_interval),
        "requests_overtaken": requests_overtaken(steps, bound=max_batch_size),
        "preemptions": sum(len(step.record.preempted) for step in steps),
        "tokens_recomputed": tokens_recomputed(steps),
        "prompt_tokens_by_turn": by_turn(run),
        "mean_step_ms": 1e3 * _mean([step.ended - step.started for step in steps]),
    } | saturated_figures(run)
    return {
        "num_requests": len(run.requests),
        "num_finished": len(done),
        "num_errors": sum(request.error is not None for request in run.requests),
        "is_cut": run.is_cut,
        "output_tokens": run.num_tokens,
        "seconds": rounded(seconds),
        "output_tokens_per_second": rounded(run.num_tokens / seconds) if seconds else 0.0,
        "decode_tokens_per_second": decode_speed(done),
        "requests_per_second": rounded(len(done) / seconds) if seconds else 0.0,
        "time_to_first_token_ms": percentiles([r.token_times[0] - r.arrived for r in done if r.token_times]),
        "inter_token_latency_ms": percentiles(gaps),
        "request_latency_ms": percentiles([r.ended - r.arrived for r in done if r.ended is not None]),
        "queue_wait_ms": percentiles([r.scheduled - r.arrived for r in done if r.scheduled is not None]),
        "forward_passes": run.num_forwards,
        "max_batch_size": max_batch_size,
    } | {name: (rounded(n) if isinstance(n, float) else n) if steps else None for name, n in of_steps.items()}


def decode_speed(done: list[ServedRequest]) -> float | None:
    """Tokens per second while all requests decode: from the last first token to the first end; None if there is no such
    time."""
    begun = max((request.token_times[0] for request in done if request.token_times), default=0.0)
    ended = min((request.token_times[-1] for request in done if request.token_times), default=0.0)
    tokens = sum(begun < moment <= ended for request in done for moment in request.token_times)
    return rounded(tokens / (ended - begun)) if ended > begun else None


def saturated_figures(run: ServedRun) -> dict[str, Any]:
    """How many requests held memory at a time, the share of that memory that held a token, and how fast they were. All
    of this is up to the last step that left requests waiting, or to the end if none did.
    """
    steps = run.steps or []
    last = max((n for n, step in enumerate(steps) if step.record.num_waiting), default=len(steps) - 1)
    steps = steps[: last + 1]
    held = [step.record.num_running + len(step.record.finished) + len(step.record.failed) for step in steps]
    ended, capacity = (steps[-1].ended, steps[-1].record.kv_capacity_tokens) if steps else (0.0, 0)
    tokens = sum(moment <= ended for request in run.requests for moment in request.token_times)
    return {
        "peak_concurrent": max(held, default=0),
        "mean_concurrent": _mean(held),
        "saturated_kv_utilisation": _mean([s.record.kv_used_tokens for s in steps]) / capacity if capacity else None,
        "saturated_tokens_per_second": tokens / ended if ended else 0.0,
    }


def by_turn(run: ServedRun) -> list[float]:
    """The prompt tokens computed for a request: for each turn, the mean over its conversations."""
    computed: Counter[str] = Counter()
    for step in run.steps or ():
        computed.update(dict(step.record.prefilled))
    turns = [request.turn for request in run.requests]
    return [_mean([computed[str(n)] for n, of in enumerate(turns) if of == turn]) for turn in sorted({*turns})]


def decode_stalls(steps: list[TimedStep], max_decode_interval: int) -> int:
    """How often a decoding request got its next token more than this many steps after the previous one."""
    last: dict[str, int] = {}
    stalls = 0
    for n, step in enumerate(steps):
        for request_id in step.record.decoded:
            stalls += n - last[request_id] > max_decode_interval
            last[request_id] = n
        last |= {request_id: n for request_id, _ in step.record.prefilled}
    return stalls


def requests_overtaken(steps: list[TimedStep], bound: int) -> int:
    """Requests that were started after more than ``bound`` later ones; ids count in order of arrival."""
    begun: dict[int, int] = {}
    for n, step in enumerate(steps):
        for name, _ in step.record.prefilled:
            begun.setdefault(int(name), n)
    return sum(sum(later > mine and begun[later] < begun[mine] for later in begun) > bound for mine in begun)


def tokens_recomputed(steps: list[TimedStep]) -> int:
    """Tokens that had been computed, and were lost when their request was preempted."""
    computed: dict[str, int] = {}  # for each request, the maximum number that it ever had
    found = 0
    for step in steps:
        for (name, num_tokens), start in zip(step.record.prefilled, step.record.prefill_starts, strict=True):
            most = computed.get(name, 0)
            found += max(0, min(most, start + num_tokens) - start)
            computed[name] = max(most, start + num_tokens)
        for name in step.record.decoded:  # after all the tokens that it had
            computed[name] = computed.get(name, 0) + 1
    return found


def _mean(values: list[Any]) -> float:
    return float(np.mean(values)) if values else 0.0
