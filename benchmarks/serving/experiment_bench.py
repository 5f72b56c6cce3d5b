"""What the experiments of the serving benchmark share: sizes, contenders, the server, how far they are.

Introduced in phase 4. Invariants: a trace is drawn once for all who serve it; a measurement is one step of the progress
display, with the loading of its contender in it.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.report import rounded
from benchmarks.serving.contenders import Servers
from benchmarks.serving.results import figures, output_tokens_per_second
from benchmarks.serving.run import ServedRun
from benchmarks.serving.served_process import ServedProcess
from benchmarks.timing import Steps, rotated
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

    def in_turns(
        self,
        names: Sequence[str],
        batch: int,
        workload: Workload,
        what: str,
        speed: Callable[[ServedRun], float] = output_tokens_per_second,
    ) -> dict[str, dict[str, Any]]:
        """Each contender's trial of median ``speed``, with the speeds of all; a trial has one trace for everybody.

        A contender begins a trial as often as another, and all are loaded before the first, so that a busy moment of
        the machine meets whoever has its turn, and not one of them for good.
        """
        for name in names:
            self.servers.get(name, batch)
        found: dict[str, list[tuple[float, dict[str, Any]]]] = {name: [] for name in names}
        for trial in range(self.size.trials):
            trace = self.trace(workload, trial)
            for name in rotated(names, trial):
                run, result = self.measure(name, batch, trace, f"{what}, trial {trial + 1}")
                found[name].append((speed(run), result))
        return {name: _median_trial(trials) for name, trials in found.items()}

    def measure_http(self, trace: Trace, what: str) -> tuple[ServedRun, dict[str, Any]]:
        """The same over HTTP, by the newest phase; what only an engine's steps tell is absent."""
        with self.step(f"{what}: over HTTP"):
            run = self.serve().serve(trace)
        title = f"continuous, over HTTP (phase {self.servers.lineup.newest.number})"
        return run, {"title": title} | figures(run, http_batch(self.size), 0)


def _median_trial(trials: list[tuple[float, dict[str, Any]]]) -> dict[str, Any]:
    """The trial in the middle, or the slower of two that are, with the speed of each and their median."""
    speeds = [speed for speed, _ in trials]
    _, middle = trials[speeds.index(statistics.median_low(speeds))]
    return middle | {
        "tokens_per_second_trials": list(map(rounded, speeds)),
        "tokens_per_second_median": rounded(statistics.median(speeds)),
    }


def trial_ratios(over: dict[str, Any], under: dict[str, Any]) -> list[float]:
    """Of two contenders of ``Bench.in_turns``, the ratio of their speeds in each trial."""
    pairs = zip(over["tokens_per_second_trials"], under["tokens_per_second_trials"], strict=True)
    return [mine / other for mine, other in pairs]


def http_batch(size: ServingSize) -> int:
    """The server's batch: it must hold the streams of every experiment that uses it."""
    return max(size.max_batch_size, size.streams.concurrency)
