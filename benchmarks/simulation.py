"""Simulated fleets as tables. Follows phase 11."""

from collections.abc import Sequence
from typing import Any

from benchmarks.view import Column, Table, percent, text


def table(results: Sequence[dict[str, Any]]) -> Table:
    """A row for each number of replicas and router, as :func:`shared.simulation.results.serve` describes it."""

    def of(name: str, p: str) -> Any:
        return lambda row: row[name][p] if name in row else None

    columns = [
        Column("replicas", "replicas", "{:,}".format),
        text("router", "router"),
        Column("requests/s", "requests_per_second"),
        Column("queue, P99 ms", of("queue_wait_ms", "p99")),
        Column("first token, P50 ms", of("first_token_ms", "p50")),
        Column("P99 ms", of("first_token_ms", "p99")),
        Column("prompt tokens found", "hit_rate", percent),
        Column("busiest / mean", "balance"),
        Column("engine ms", "engine_ms"),
        Column("cost of 1,000", "cost_per_thousand"),
    ]
    return Table("", columns, results)
