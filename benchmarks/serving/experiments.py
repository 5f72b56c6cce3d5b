"""The experiments of the serving benchmark as one table, and what runs any of its rows. Introduced in phase 4.

Invariants: within an experiment every contender serves the same traces, and none is measured before it is warm; if they
are interleaved, each contender begins a trial equally often.
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
DECODE = "decode_tokens_per_second"
WAITING = "tokens a second while requests wait"
CONTINUOUS = ("continuous", "paged", "newest")
Sized = Mapping[str, tuple[str, str, dict[str, Any]]]


@dataclass(frozen=True)
class Ratio:
    """``NAME_over_UNDER`` + ``suffix`` for every contender that is not itself the denominator of a ratio: the median of
    the ratios within each trial. ``…_range`` has the smallest and the largest ratio. ``figure`` is a dotted key of a
    result, and ``words`` its name.
    """

    under: str
    suffix: str = ""
    figure: str = SPEED
    words: str = "output tokens a second"


@dataclass(frozen=True)
class Experiment:
    """One question: its workloads (fields of ServingSize), contenders, how requests arrive, and what is reported.

    Args:
        in_turns: the number of trials in which contenders take turns; the trial with the median ``speed`` is reported.
        takes_rate: requests may arrive at the rate that the run asks for; otherwise they arrive in a closed loop.
        load: Poisson arrivals at a share of a contender's rate in a closed loop of a workload in the same run.
        holds_all: batches as large as the requests that are open.
        sized: further contenders, by name: one of the line-up, another title ("": its own), and settings that follow
            from the size.
        one_by_one: each contender is loaded alone.
        alone: contenders that serve only the background requests of the workload.
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
    load: tuple[float, str, str] | None = None
    holds_all: bool = False
    sized: Callable[[ServingSize], Sized] = lambda size: {}
    one_by_one: bool = False
    alone: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")

    def served(self, size: ServingSize) -> dict[str, Workload]:
        """Its workloads, by the field of the size, with the one that the load is measured on."""
        return {name: getattr(size, name) for name in (*self.workloads, *(self.load or ())[1:2])}

    def longest(self, size: ServingSize) -> int:
        """Tokens of the longest prompt and answer that its engines can hold."""
        return max(workload.longest for workload in self.served(size).values())

    def batch(self, size: ServingSize) -> int:
        """The same for all its workloads, so that each contender is loaded once."""
        concurrency = max(getattr(size, name).concurrency for name in self.workloads)
        return concurrency if self.holds_all else size.max_batch_size


def same_memory(size: ServingSize) -> Sized:
    """The same number of bytes of KV cache: as regions for long requests, as regions for the trace's longest request,
    and as blocks."""
    (num, wide), tight = size.wide_slots, size.capacity.longest
    blocks = {"max_seq_len": wide, "max_batch_size": size.capacity_batch, "block_size": BLOCK_SIZE}
    blocks["num_gpu_blocks"] = size.capacity_tokens // BLOCK_SIZE
    regions = {"wide_slots": (wide, num), "tight_slots": (tight, num * wide // tight)}
    return {
        name: ("continuous", f"regions of {length:,} tokens", {"max_seq_len": length, "max_batch_size": batch})
        for name, (length, batch) in regions.items()
    } | {name: (name, f"blocks of {BLOCK_SIZE} tokens", blocks) for name in ("paged", "newest")}


def one_chunk(size: ServingSize) -> Sized:
    """One chunk of this size per step, during long prompts and without."""
    settings = {"prefill_chunk_size": size.chunk}
    titles = {"alone": "decoding alone", "one_chunk": f"one chunk of {size.chunk} tokens a step"}
    return {name: (name, title, settings) for name, title in titles.items()}


def chunk_sizes(size: ServingSize) -> Sized:
    """One chunk per step, of each size of the curve."""
    return {f"chunk_{n}": ("one_chunk", f"chunks of {n:,} tokens", {"prefill_chunk_size": n}) for n in size.chunk_sizes}


def enough_blocks(size: ServingSize) -> Sized:
    """Memory for what the sampled requests hold at the same time; with their whole lengths, two engines would not
    fit."""
    settings = {"num_gpu_blocks": size.sampled_blocks}
    return {name: (name, "", settings) for name in ("newest", "vllm")}


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
        "decode", ("decode_one", "decode_few", "decode_tens", "decode_most"), ("newest", "vllm"), ("decode",),
        (Ratio("vllm"), Ratio("vllm", "_decode", DECODE, "decoded tokens a second")),
        in_turns=True, holds_all=True, needs=("newest",)
    ),
    Experiment(
        "sampled", ("sampled",), ("newest", "vllm"), ("speeds",), (Ratio("vllm"),),
        in_turns=True, holds_all=True, sized=enough_blocks, needs=("newest",)
    ),
    Experiment(
        "capacity", ("capacity",), (), ("held", "costs"),
        tuple(
            Ratio(*options)
            for slots in ("wide_slots", "tight_slots")
            for options in (
                (slots, "_peak", "peak_concurrent", "requests at a time, at the peak"),
                (slots, "_throughput", SATURATED, WAITING)
            )
        ), sized=same_memory, one_by_one=True, needs=("paged",)
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
        ), load=(0.8, "backlog", "static")
    ),
    Experiment(
        "pairs", ("decode", "w2"), ("unchunked", "whole", "uncached", "newest"), ("trials",),
        (Ratio("unchunked"), Ratio("whole"), Ratio("uncached")), in_turns=True, holds_all=True, needs=("whole",)
    ),
    Experiment(
        "long-prompts", ("long_prompts",), ("unchunked", "whole"), ("latencies",),
        (Ratio("alone", "_p99", "inter_token_latency_ms.p99", "P99 between tokens"),),
        in_turns=True, load=(0.7, "long_prompts", "one_chunk"), holds_all=True, sized=one_chunk, alone=("alone",),
        needs=("whole",)
    ),
    Experiment(
        "chunk-size", ("one_prompt",), (), ("latencies",), holds_all=True, sized=chunk_sizes, one_by_one=True,
        needs=("whole",)
    ),
    Experiment(
        "prefixes", ("w4", "one_prefix", "conversation", "agents"), ("uncached", "newest"),
        ("latencies", "speeds", "turns"),
        tuple(
            Ratio("uncached", *options)
            for options in (
                ("_first_token", "time_to_first_token_ms.p50", "P50 of the first token"),
                ("_requests", "requests_per_second", "requests a second"),
            )
        ), in_turns=True, holds_all=True, needs=("uncached",)
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
    serve: Any = None  # provides the ServedProcess, started on first use

    def contenders(self, experiment: Experiment) -> dict[str, Contender]:
        """The existing contenders of an experiment, with its settings."""
        found = {name: self.lineup[name] for name in experiment.contenders if name in self.lineup}
        for name, (base, title, settings) in experiment.sized(self.size).items():
            if base in self.lineup:
                from_line, phase = self.lineup[base], self.lineup[base].title.rpartition(" (")[2]
                title = f"{title} ({phase}" if title else from_line.title
                found[name] = replace(from_line, title=title, settings={**from_line.settings, **settings})
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
        contenders, batch = self.contenders(experiment), experiment.batch(self.size)
        longest = experiment.longest(self.size)
        rate = self.rate if experiment.takes_rate else None
        results: dict[str, Any] = {}
        if experiment.load is not None:
            share, of, name = experiment.load
            trace = make_trace(getattr(self.size, of), self.vocab_size, self.seed)
            with self.steps.step(f"{workload.title}, a closed loop: {contenders[name].title}"):
                at_most = self._measure(contenders[name], batch, longest, trace)["requests_per_second"]
            rate = share * at_most
            results = {"rate_requests_per_second": rounded(rate), "load": share}
        if experiment.in_turns:  # all are loaded before the first is measured
            for contender in contenders.values():
                _ = self.serve() if contender.name == "http" else self.servers.get(contender, batch, longest)
        trials: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
        for trial in range(self.size.trials if experiment.in_turns else 1):
            for name in rotated(tuple(contenders), trial):
                if name in experiment.alone and workload.beside:
                    trace = make_trace(workload.beside, self.vocab_size, self.seed + trial)
                else:
                    trace = make_trace(workload, self.vocab_size, self.seed + trial, rate)
                with self.steps.step(f"{workload.title}: {contenders[name].title}"):
                    trials[name].append(self._measure(contenders[name], batch, longest, trace))
                    if experiment.one_by_one:
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

    def _measure(self, contender: Contender, batch: int, longest: int, trace: Trace) -> dict[str, Any]:
        """One trace; over HTTP, figures that only an engine's steps show are absent."""
        if contender.name == "http":
            found = figures(self.serve().serve(trace), self.size.server_batch, max_decode_interval=0)
        else:
            found = self.servers.get(contender, batch, longest).measure(trace, self.max_seconds)
        return {"title": contender.title, "settings": dict(contender.settings)} | found


def value_at(node: Any, key: str) -> Any:
    """The value at a dotted key, or None if there is none."""
    for part in key.split("."):
        node = (node or {}).get(part)
    return node


def ratios(experiment: Experiment, trials: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The ratios of an experiment, from each contender's runs (one per trial)."""
    found: dict[str, Any] = {}
    unders = {each.under for each in experiment.ratios}
    for each in experiment.ratios:
        for name in [name for name in trials if name not in unders and each.under in trials]:
            pairs = zip(trials[name], trials[each.under], strict=True)
            shares = [ratio(value_at(mine, each.figure), value_at(theirs, each.figure)) for mine, theirs in pairs]
            known = [share for share in shares if share is not None]
            key = f"{name}_over_{each.under}{each.suffix}"
            found[key] = rounded(statistics.median(known)) if known else None
            if len(known) > 1:
                found[f"{key}_range"] = [min(known), max(known)]
    return found
