"""What the experiments of the serving benchmark share: sizes, contenders, the server, how far they are.

Introduced in phase 4. Invariants: a trace is drawn once for all who serve it; a measurement is one step of the progress
display, with the loading of its contender in it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.serving.contenders import Servers
from benchmarks.serving.results import figures
from benchmarks.serving.run import ServedRun
from benchmarks.serving.served_process import ServedProcess
from benchmarks.timing import Steps
from benchmarks.workloads.serving import ServingSize, Trace, Workload, make_trace


@dataclass
class Bench:
    """Handed to every experiment."""

    size: ServingSize
    servers: Servers
    ways: tuple[str, ...]
    contenders: tuple[str, ...]
    vocab_size: int
    seed: int
    rate: float | None
    max_seconds: float | None
    serve: Callable[[], ServedProcess]  # the process over HTTP, started when it is first asked for
    steps: Steps
    capacity: float | None = None  # requests a second that static batching can do, once it has been measured

    def trace(self, workload: Workload, trial: int = 0, rate: float | None = None) -> Trace:
        return make_trace(workload, self.vocab_size, self.seed + trial, rate)

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        with self.steps.step(text):
            yield

    def measure(self, name: str, batch: int, trace: Trace, what: str) -> tuple[ServedRun, dict[str, Any]]:
        with self.step(f"{what}: {name}"):
            return self.servers.get(name, batch).measure(trace, self.max_seconds)

    def measure_http(self, trace: Trace, what: str) -> tuple[ServedRun, dict[str, Any]]:
        """The same over HTTP, by the newest phase; what only an engine's steps tell is absent."""
        with self.step(f"{what}: over HTTP"):
            run = self.serve().serve(trace)
        title = f"continuous, over HTTP (phase {self.servers.lineup.newest.number})"
        return run, {"title": title} | figures(run, http_batch(self.size), 0)


def http_batch(size: ServingSize) -> int:
    """The server's batch: it must hold the streams of every experiment that uses it."""
    return max(size.max_batch_size, size.streams.concurrency)
