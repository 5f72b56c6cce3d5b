"""The results of a simulated trace: waits, first tokens, cache hits, balance, cost. Follows phase 11.

Invariant: requests that arrive before ``since``, while the caches are still filling, are excluded from every figure.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from shared.simulation.arrivals import Request
from shared.simulation.fleet import Fleet


def serve(fleet: Fleet, trace: Iterable[Request], since: float, price: float) -> dict[str, Any]:
    """Run a trace to its end, and summarize the requests that arrive from second ``since`` on.

    ``balance`` is the busiest replica's generated tokens divided by the mean; ``cost_per_thousand`` requests counts all
    replicas at ``price`` per hour, from ``since`` to the last arrival; ``engine_ms`` of a request is its share of the
    steps that ran. Times to the first token include ``StepTimes.request``.
    """
    rows, tokens, last, num = [], dict.fromkeys(fleet.replicas, 0), since, 0
    for request in fleet.run(trace):
        num += 1
        if request.arrival >= since:
            last = max(last, request.arrival)
            gap = (request.ended - request.first_token) / max(request.new_tokens - 1, 1)
            waited, first = request.scheduled - request.arrival, request.first_token - request.arrival
            rows.append(
                (waited, first, request.ended - request.arrival, gap, request.num_cached, request.prompt_tokens)
            )
            tokens[request.replica] = tokens.get(request.replica, 0) + request.new_tokens
    found: dict[str, Any] = {"replicas": fleet.plan.replicas, "router": fleet.plan.router, "requests": len(rows)}
    if not rows:
        return found
    waited, first, whole, gaps, cached, prompts = np.array(rows).T
    seconds, share = max(last - since, 1e-9), fleet.times.request
    busy = sum(replica.seconds_busy for replica in fleet.replicas.values())
    return found | {
        "requests_per_second": len(rows) / seconds,
        "queue_wait_ms": _percentiles(waited),
        "first_token_ms": _percentiles(first + share),
        "first_token_mean_ms": 1e3 * float((first + share).mean()),
        "between_tokens_ms": _percentiles(gaps),
        "request_ms": _percentiles(whole + share),
        "request_mean_ms": 1e3 * float((whole + share).mean()),
        "hit_rate": float(cached.sum() / prompts.sum()),
        "balance": max(tokens.values()) * fleet.plan.replicas / sum(tokens.values()),
        "engine_ms": 1e3 * busy / num,
        "cost_per_thousand": fleet.plan.replicas * price * seconds / 3600 / len(rows) * 1000,
    }


def _percentiles(seconds: np.ndarray) -> dict[str, float]:
    return {
        f"p{p}": float(1e3 * value) for p, value in zip((50, 95, 99), np.percentile(seconds, (50, 95, 99)), strict=True)
    }
