"""The experiments of the serving benchmark as one table, and what runs any of its rows. Introduced in phase 4.

Invariants: within an experiment every contender serves the same traces, in this process or in one server process that
is started as a user would; none is measured before it is warm; in turns, each contender begins a trial as often as
another, so that a busy moment of the machine meets all of them alike.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.report import ratio, rounded
from benchmarks.serving.contenders import Contender, Servers
from benchmarks.serving.results import figures
from benchmarks.timing import Steps, rotated
from benchmarks.workloads.serving import BLOCK_SIZE, ServingSize, Trace, Workload, make_trace
from shared.engine.config import SCHEDULER_POLICIES

SPEED, SATURATED = "output_tokens_per_second", "saturated_tokens_per_second"
WAITING = "tokens a second while requests wait"
CONTINUOUS = ("continuous", "paged", "newest")


@dataclass(frozen=True)
class Ratio:
    """``NAME_over_UNDER`` + ``suffix`` of every contender that is under no ratio itself; ``words``: what is compared.

    It is the median of the ratios within each trial; ``figure`` is a dotted key of a result.
    """

    under: str
    suffix: str = ""
    figure: str = SPEED
    words: str = "output tokens a second"


@dataclass(frozen=True)
class Experiment:
    """One question: its workloads (fields of ServingSize), contenders, how requests come, and what is reported.

    Args:
        in_turns: trials in which the contenders take turns; the one of median ``speed`` is reported.
        takes_rate: requests may come at the rate that the run asks for; otherwise in a closed loop.
        load: Poisson arrivals at this share of what static batching can do at most, measured in the same run.
        holds_all: batches as large as the requests that are open.
        resized: for some contenders another title, and settings that follow from the size; they are loaded alone.
        needs: contenders without which there is nothing to compare.
        shows: its tables in :mod:`benchmarks.serving.view`.
    """

    name: str
    workloads: tuple[str, ...]
    contenders: tuple[str, ...]
    shows: tuple[str, ...] = ()
    ratios: tuple[Ratio, ...] = ()
    in_turns: bool = False
    speed: str = SPEED
    takes_rate: bool = False
    load: float | None = None
    holds_all: bool = False
    resized: Callable[[ServingSize], Mapping[str, tuple[str, dict[str, Any]]]] | None = None
    needs: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")

    def batch(self, size: ServingSize, workload: Workload) -> int:
        return workload.concurrency if self.holds_all else size.max_batch_size


def same_memory(size: ServingSize) -> dict[str, tuple[str, dict[str, Any]]]:
    """The same bytes of KV cache: as regions for long requests, as regions for the trace's longest, and in blocks."""
    (num, wide), tight = size.wide_slots, size.capacity.longest
    blocks = {"max_seq_len": wide, "max_batch_size": size.capacity_batch, "block_size": BLOCK_SIZE}
    blocks["num_gpu_blocks"] = size.capacity_tokens // BLOCK_SIZE
    return {
        "wide_slots": (f"regions of {wide:,} tokens", {"max_seq_len": wide, "max_batch_size": num}),
        "tight_slots": (f"regions of {tight:,} tokens", {"max_seq_len": tight, "max_batch_size": num * wide // tight}),
    } | dict.fromkeys(("paged", "newest"), (f"blocks of {BLOCK_SIZE} tokens", blocks))


# fmt: off
EXPERIMENTS = (
    Experiment(
        "workloads", ("w1", "w2", "w3"), ("sequential", "transformers", "static", *CONTINUOUS, "vllm", "http"),
        ("speeds", "latencies"), (Ratio("transformers"), Ratio("vllm")), takes_rate=True
    ),
    Experiment("policies", ("w2", "w3"), SCHEDULER_POLICIES, ("fairness",), takes_rate=True),
    Experiment(
        "closed-loop", ("backlog",), ("static", *CONTINUOUS), ("loop",),
        (Ratio("static", "_saturated", SATURATED, WAITING),), in_turns=True, speed=SATURATED
    ),
    Experiment(
        "together", ("together",), ("static", *CONTINUOUS, "vllm"), ("speeds",), (Ratio("vllm"),),
        in_turns=True, holds_all=True
    ),
    Experiment(
        "capacity", ("capacity",), ("wide_slots", "tight_slots", "paged", "newest"), ("held", "costs"),
        tuple(
            Ratio(*about)
            for slots in ("wide_slots", "tight_slots")
            for about in (
                (slots, "_peak", "peak_concurrent", "requests at a time, at the peak"),
                (slots, "_throughput", SATURATED, WAITING)
            )
        ), resized=same_memory, needs=("paged",)
    ),
    Experiment("whole-step", ("w2",), CONTINUOUS, ("trials",), (Ratio("continuous"),), in_turns=True, needs=("paged",)),
    Experiment(
        "http-overhead", ("streams",), ("engine", "http"), ("speeds",), (Ratio("engine"),),
        in_turns=True, holds_all=True
    ),
    Experiment(
        "tail", ("tail",), ("static", "continuous"), ("latencies",),
        tuple(
            Ratio("static", f"_p99_{name}", f"{name}_ms.p99", f"P99 of {name.replace('_', ' ')}")
            for name in ("queue_wait", "request_latency", "time_to_first_token")
        ), load=0.8
    ),
)
# fmt: on


@dataclass
class Runner:
    """Runs experiments."""

    size: ServingSize
    lineup: Mapping[str, Contender]
    servers: Servers
    vocab_size: int
    seed: int
    rate: float | None = None
    max_seconds: float | None = None
    steps: Steps = field(default_factory=lambda: Steps(None, 0))
    serve: Any = None  # gives the ServedProcess, started when it is first asked for

    def contenders(self, experiment: Experiment) -> dict[str, Contender]:
        """Those of an experiment that there are, as it sets them."""
        found = {name: self.lineup[name] for name in experiment.contenders if name in self.lineup}
        for name, (title, settings) in (experiment.resized(self.size) if experiment.resized else {}).items():
            if name in found:
                phase = found[name].title.rpartition(" (")[2]
                found[name] = replace(found[name], title=f"{title} ({phase}", settings=settings)
        return found

    def num_runs(self, experiment: Experiment) -> int:
        trials = self.size.trials if experiment.in_turns else 1
        return len(experiment.workloads) * len(self.contenders(experiment)) * trials + (experiment.load is not None)

    def run(self, experiment: Experiment) -> dict[str, Any]:
        """An experiment's results, by workload if it has several."""
        try:
            found = {name: self._on(experiment, getattr(self.size, name)) for name in experiment.workloads}
        finally:
            self.servers.drop()
        return found if len(found) > 1 else found[experiment.workloads[0]]

    def _on(self, experiment: Experiment, workload: Workload) -> dict[str, Any]:
        contenders, batch = self.contenders(experiment), experiment.batch(self.size, workload)
        rate = self.rate if experiment.takes_rate else None
        results: dict[str, Any] = {}
        if experiment.load is not None:
            rate = experiment.load * self._static_capacity()
            results = {"rate_requests_per_second": rounded(rate), "load": experiment.load}
        if experiment.in_turns:  # all are loaded before the first is measured
            for contender in contenders.values():
                _ = self.serve() if contender.name == "http" else self.servers.get(contender, batch)
        trials: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
        for trial in range(self.size.trials if experiment.in_turns else 1):
            trace = make_trace(workload, self.vocab_size, self.seed + trial, rate)
            for name in rotated(tuple(contenders), trial):
                with self.steps.step(f"{workload.title}: {contenders[name].title}"):
                    trials[name].append(self._measure(contenders[name], batch, trace))
                    if experiment.resized:
                        self.servers.drop()
        speeds = {name: [run[experiment.speed] for run in runs] for name, runs in trials.items()}
        for name, runs in trials.items():
            results[name] = runs[speeds[name].index(statistics.median_low(speeds[name]))]
            if experiment.in_turns:
                results[name]["tokens_per_second_trials"] = speeds[name]
        first = results[next(iter(contenders))]
        for name in contenders:
            results[name]["gain"] = ratio(results[name][SPEED], first[SPEED])
        return results | ratios(experiment, trials)

    def _measure(self, contender: Contender, batch: int, trace: Trace) -> dict[str, Any]:
        """One trace; over HTTP, what only an engine's steps tell is absent."""
        if contender.name == "http":
            found = figures(self.serve().serve(trace), self.size.server_batch, max_decode_interval=0)
        else:
            found = self.servers.get(contender, batch).measure(trace, self.max_seconds)
        return {"title": contender.title} | found

    def _static_capacity(self) -> float:
        """Requests a second of static batching while requests wait."""
        trace, static = make_trace(self.size.backlog, self.vocab_size, self.seed), self.lineup["static"]
        with self.steps.step(f"{self.size.backlog.title}: {static.title}"):
            run = self._measure(static, self.size.max_batch_size, trace)
        return float(run[SATURATED]) * len(trace.requests) / trace.new_tokens


def value_at(node: Any, key: str) -> Any:
    """The value at a dotted key, or None where there is none."""
    for part in key.split("."):
        node = (node or {}).get(part)
    return node


def ratios(experiment: Experiment, trials: Mapping[str, list[dict[str, Any]]]) -> dict[str, float | None]:
    """The ratios of an experiment, from each contender's runs, one of each trial."""
    found: dict[str, float | None] = {}
    unders = {each.under for each in experiment.ratios}
    for each in experiment.ratios:
        for name in [name for name in trials if name not in unders and each.under in trials]:
            pairs = zip(trials[name], trials[each.under], strict=True)
            shares = [ratio(value_at(mine, each.figure), value_at(theirs, each.figure)) for mine, theirs in pairs]
            known = [share for share in shares if share is not None]
            found[f"{name}_over_{each.under}{each.suffix}"] = rounded(statistics.median(known)) if known else None
    return found
