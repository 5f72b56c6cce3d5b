"""Records runs that are compared: a warm-up round, then interleaved trials. Introduced in phase 5.

A run's tokens are the same in every trial, and so are its steps, unless the engine adapts the number of its drafts
(phase 11). Times are not: the first run in a process is slower.
Invariant: every run is warmed up before the first trial, and the runs take turns in going first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shared.tracing.profiler import Profiler
from shared.tracing.recorder import Recorder
from shared.tracing.trace import Trace
from shared.tracing.workload import Arrival, run

TRIALS = 3


@dataclass(frozen=True)
class TracedRun:
    """A title, a warm engine, the requests, and the settings that the page shows."""

    title: str
    engine: Any
    arrivals: Sequence[Arrival]
    settings: dict[str, str | int | float | None]


def record(runs: Sequence[TracedRun]) -> list[Trace]:
    """The trace of each run; for compared runs, with the times of the median trial.

    The blocks are those of the first round, since a pool reuses freed blocks in a different order. No run finds
    prefixes of an earlier round in the cache.
    """
    rounds: list[list[Trace]] = [[] for _ in runs]
    for number in range(1 + TRIALS if len(runs) > 1 else 1):
        for index in (n % len(runs) for n in range(number, number + len(runs))):
            runs[index].engine.pool.drop_cached()
            recorder = Recorder(runs[index].engine)
            with Profiler(runs[index].engine) as profile:
                run(recorder, runs[index].arrivals)
            settings = runs[index].settings | (profile.stats() if any(profile.acceptance) else {})
            rounds[index].append(recorder.trace(runs[index].title, **settings))
    return [_median(each[0], each[1:] or each) for each in rounds]


def _median(first: Trace, trials: Sequence[Trace]) -> Trace:
    """The median trial, with the blocks of the first round, or with its own if its steps differ."""
    median = sorted(trials, key=lambda trace: trace.totals.seconds)[len(trials) // 2]
    if [each.record for each in median.steps] != [each.record for each in first.steps]:
        return median
    pairs = zip(first.steps, median.steps, strict=True)
    return replace(median, steps=tuple(replace(timed, memory=held.memory) for held, timed in pairs))
