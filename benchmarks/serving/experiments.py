"""The experiments of the serving benchmark as one table, and what runs any of its rows. Introduced in phase 4.

Invariants: within an experiment every contender serves the same traces, in this process or in one server process that
is started as a user would; none is measured before it is warm; in turns, each contender begins a trial as often as
another, so that a busy moment of the machine meets all of them alike.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.report import rounded
from benchmarks.serving.contenders import Contender, Servers
from benchmarks.serving.results import figures, ratio
from benchmarks.timing import Steps, rotated
from benchmarks.workloads.serving import BLOCK_SIZE, ServingSize, Trace, Workload, make_trace
from shared.engine.config import SCHEDULER_POLICIES

SPEED, SATURATED = "output_tokens_per_second", "saturated_tokens_per_second"
WAITING = "tokens a second while requests wait"
CONTINUOUS = ("continuous", "paged", "newest")


@dataclass(frozen=True)
class Ratio:
    """``NAME_over_UNDER`` + ``suffix`` of every contender that is under no ratio itself.

    ``figure`` is a dotted key of a result; without one it is the median of the ratios of speeds within each trial.
    ``words``: what is compared.
    """

    under: str
    suffix: str = ""
    figure: str | None = None
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
    shows: tuple[str, ...]
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
        ("speeds", "latencies"), (Ratio("transformers", figure=SPEED), Ratio("vllm", figure=SPEED)), takes_rate=True
    ),
    Experiment("policies", ("w2", "w3"), SCHEDULER_POLICIES, ("fairness",), takes_rate=True),
    Experiment(
        "closed-loop", ("backlog",), ("static", *CONTINUOUS), ("loop",),
        (Ratio("static", "_saturated", words=WAITING),), in_turns=True, speed=SATURATED
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
    """Runs rows of the table; ``asked`` are the contenders of ``workloads``."""

    size: ServingSize
    lineup: Mapping[str, Contender]
    servers: Servers
    vocab_size: int
    seed: int
    asked: tuple[str, ...]
    rate: float | None = None
    max_seconds: float | None = None
    steps: Steps = field(default_factory=lambda: Steps(None, 0))
    serve: Any = None  # gives the ServedProcess, started when it is first asked for
    static_capacity: float | None = None  # requests a second, once it has been measured

    def contenders(self, experiment: Experiment) -> dict[str, Contender]:
        """Those of an experiment that there are, as it sets them."""
        names = self.asked if experiment.name == "workloads" else experiment.contenders
        found = {name: self.lineup[name] for name in names if name in self.lineup}
        for name, (title, settings) in (experiment.resized(self.size) if experiment.resized else {}).items():
            if name in found:
                phase = found[name].title.rpartition(" (")[2]
                found[name] = replace(found[name], title=f"{title} ({phase}", settings=settings)
        return found

    def num_runs(self, experiment: Experiment) -> int:
        trials = self.size.trials if experiment.in_turns else 1
        return len(experiment.workloads) * len(self.contenders(experiment)) * trials

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
            capacity = self._static_capacity()
            rate = experiment.load * capacity
            results = {"rate_requests_per_second": rounded(rate), "load": experiment.load}
            results["static_capacity_requests_per_second"] = rounded(capacity)
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
                median = rounded(statistics.median(speeds[name]))
                results[name] |= {"tokens_per_second_trials": speeds[name], "tokens_per_second_median": median}
        first = results[next(iter(contenders))]
        for name in contenders:
            results[name]["gain"] = ratio(results[name][SPEED], first[SPEED])
        if experiment.name == "closed-loop":
            self.static_capacity = self._in_requests(results["static"]["tokens_per_second_median"])
        return results | _ratios(experiment, results, speeds)

    def _measure(self, contender: Contender, batch: int, trace: Trace) -> dict[str, Any]:
        """One trace; over HTTP, what only an engine's steps tell is absent."""
        if contender.name != "http":
            return {"title": contender.title} | self.servers.get(contender, batch).measure(trace, self.max_seconds)
        process = self.serve()
        found = figures(process.serve(trace), self.size.server_batch, max_decode_interval=0)
        return {"title": contender.title} | found | {"client_processes": process.clients}

    def _static_capacity(self) -> float:
        """Requests a second of static batching while requests wait: of ``closed-loop``, or measured once."""
        if self.static_capacity is None:
            trace = make_trace(self.size.backlog, self.vocab_size, self.seed)
            with self.steps.step(f"{self.size.backlog.title}: {self.lineup['static'].title}"):
                run = self._measure(self.lineup["static"], self.size.max_batch_size, trace)
            self.static_capacity = self._in_requests(run[SATURATED])
        return self.static_capacity

    def _in_requests(self, tokens_per_second: float) -> float:
        trace = make_trace(self.size.backlog, self.vocab_size, self.seed)
        return tokens_per_second * len(trace.requests) / trace.new_tokens


def value_at(node: Any, key: str) -> Any:
    """The value at a dotted key, or None where there is none."""
    for part in key.split("."):
        node = (node or {}).get(part)
    return node


def _ratios(experiment: Experiment, results: dict[str, Any], speeds: Mapping[str, list[float]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    unders = {each.under for each in experiment.ratios}
    for each in experiment.ratios:
        for name in [name for name in speeds if name not in unders and each.under in speeds]:
            key = f"{name}_over_{each.under}{each.suffix}"
            if each.figure is not None:
                found[key] = ratio(value_at(results[name], each.figure), value_at(results[each.under], each.figure))
            else:
                shares = [mine / theirs for mine, theirs in zip(speeds[name], speeds[each.under], strict=True)]
                found |= {key: rounded(statistics.median(shares)), f"{key}_trials": [*map(rounded, shares)]}
    return found
