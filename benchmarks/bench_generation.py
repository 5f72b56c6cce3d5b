"""One request alone (W1): phases, transformers and vLLM, interleaved, against the memory limit.

Introduced in phase 3.1. A speed's share of the limit is the bytes that a token must read (weights, and keys and values
at the answer's mean context) over the bandwidth measured in the same run. Invariant: a share above 1 means that
something was not counted.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from benchmarks.contenders import (
    Contender,
    Turns,
    choose_peers,
    generating_lessons,
    is_ours,
    load_engine,
    load_peers,
    speeds,
)
from benchmarks.hardware import Ceilings, measure_ceilings
from benchmarks.report import Report, rounded
from benchmarks.roofline import DecodeWork
from benchmarks.setup import Setup, check_least, check_positive
from benchmarks.step_trace import StepTrace, TraceWindow
from benchmarks.timing import Run
from benchmarks.view import NOTHING, Bar, Bars, Column, Row, Table, View, count, number, percent, text, times
from shared.engine.config import EngineConfig
from shared.lessons import newest_lesson


@dataclass(frozen=True)
class GenerationSize:
    """The amount of measurement."""

    prompt_tokens: int
    new_tokens: int
    trials: int


W1 = GenerationSize(prompt_tokens=256, new_tokens=256, trials=3)
DEMO = GenerationSize(prompt_tokens=32, new_tokens=16, trials=3)  # without a GPU: a minute, with the demo model
ANSWER_SECONDS = 15.0  # seconds of decoding after which a trial's answer is cut short
MOST_TRACED = 16  # decode steps in the middle of an answer, or a quarter of the answer
COUNTS = ("kernels", "copies", "host_launches", "own_launches")


def measure_generation(
    model: str,
    *,
    phases: Sequence[str] | None = None,
    peers: Sequence[str] | None = None,
    size: GenerationSize | None = None,
    pack_weights: bool = False,
    max_seconds: float = ANSWER_SECONDS,
    ceilings: Ceilings | None = None,
    **where: Any,
) -> Report:
    """Speed, share of the limit and work on the device of each contender, by default the uncached loop, the cached one,
    the newest phase and all peers; ``where`` is as `Setup` takes it.

    Raises ConfigError, RequestError, ModelFolderError or CapacityError before anything is computed.
    """
    setup = Setup(model, **where)
    size = size or (W1 if setup.is_gpu else DEMO)
    check_least(prompt_tokens=(size.prompt_tokens, 1), new_tokens=(size.new_tokens, 3), trials=(size.trials, 1))
    check_positive(max_seconds=max_seconds)
    longest = size.prompt_tokens + size.new_tokens
    setup.check_length(longest, f"prompt_tokens {size.prompt_tokens} and new_tokens {size.new_tokens}")
    rungs = generating_lessons(["02", "03", newest_lesson().number] if phases is None else phases)
    config = setup.config(max_seq_len=longest, pack_weights=pack_weights)
    for lesson in rungs:
        config.check(lesson.load("engine").SUPPORTED)
    peers = choose_peers(peers, setup.is_gpu)
    programs = list(dict.fromkeys(name.partition("_")[0] for name in peers))
    setup.check_memory(len(rungs) + len(programs), "name fewer phases with --phase, leave the peers out (--no-peers)")

    names = [lesson.number for lesson in rungs] + peers
    with setup.running(1 + len(rungs) + len(programs) + len(names) * (2 + size.trials)) as steps:
        with steps.step("the machine's ceilings"):
            ceilings = ceilings or measure_ceilings(setup.device)
            rate = ceilings.read_bytes_per_second
        turns = Turns(setup, steps, max_seconds)
        for lesson in rungs:
            turns.load(lesson.number, partial(load_engine, lesson, config))
        for program in programs:
            turns.load(program, partial(load_peers, program, peers, setup, longest))
        turns.warm_up(size.prompt_tokens, size.new_tokens)
        runs = turns.trials(size.trials, size.prompt_tokens, size.new_tokens)
        traced = min(MOST_TRACED, max(1, size.new_tokens // 4))
        results: dict[str, Any] = {}
        for name, contender in turns.contenders.items():
            window = TraceWindow((size.new_tokens - traced) // 2, traced, setup.target)
            trace = turns.trace(name, window, size.prompt_tokens, size.new_tokens)
            results[name] = _figures(contender, runs[name], runs[names[0]], trace, setup.work, size.prompt_tokens, rate)
        needed = limit_bytes(setup.work, size.prompt_tokens, size.new_tokens)
        results["ratios"] = _ratios(runs)
        results["limit"] = {"bytes_per_token": round(needed), "tokens_per_second": rounded(rate / needed)}
        results["ceilings"] = ceilings.results()
        return setup.report(
            "generation-packed" if pack_weights else "generation",
            {name: contender.settings for name, contender in turns.contenders.items()},
            asdict(size) | {"contenders": names, "pack_weights": pack_weights},
            results,
        )


def limit_bytes(work: DecodeWork, prompt_tokens: int, num_tokens: int, packed: float = 1.0) -> float:
    """Bytes that a decode step must read for an answer of ``num_tokens``, at its mean context; ``packed``: bytes of a
    packed weight over those of its dtype.
    """
    kv = work.mean_kv_bytes(prompt_tokens + 1, prompt_tokens + num_tokens - 1)
    return packed * (work.weight_bytes + work.row_bytes) + kv


def _figures(
    contender: Contender, own: list[Run], first: list[Run], trace: StepTrace, work: DecodeWork, prompt: int, rate: float
) -> dict[str, Any]:
    """Figures of ``own`` answers, of the ``first`` contender's answers to the same prompts, and of a trace; ``rate`` in
    bytes per second."""
    told = speeds(own)
    num_tokens = statistics.median_low(len(run.token_ids) for run in own)
    is_packed = isinstance(contender.settings, EngineConfig) and contender.settings.pack_weights
    packed = 2 / work.dtype.itemsize if is_packed else 1.0
    least_seconds = limit_bytes(work, prompt, num_tokens, packed) / rate
    kernel_us = trace.kernel_us_per_token
    pairs = [zip(a.token_ids, b.token_ids, strict=False) for a, b in zip(own, first, strict=True)]  # one may be shorter
    same = [[a == b for a, b in pair] for pair in pairs]
    equal, compared = min((([*found, False].index(False), len(found)) for found in same), key=lambda n: n[0] - n[1])
    return {
        "title": contender.title,
        **told,
        "ready_seconds": rounded(contender.ready_seconds),
        "ms_per_token": rounded(1e3 * statistics.median(gap for run in own for gap in run.intervals)),
        "share_of_bandwidth": rounded(least_seconds * told["decode_tokens_per_second"]),
        "new_tokens": num_tokens,
        "equal_tokens": equal,  # for the answer that differs earliest
        "compared_tokens": compared,
        "kernel_share_of_bandwidth": None if kernel_us is None else rounded(1e6 * least_seconds / kernel_us),
        **trace.figures(),
    }


def _ratios(runs: dict[str, list[Run]]) -> dict[str, float]:
    """Decode speed ratios of contenders, ours over a peer's and a later phase's over an earlier one's: the median over
    trials of the ratio within a trial.
    """
    found = {}
    names = list(runs)
    for index, name in enumerate(names):
        for other in names[:index]:
            over, under = (name, other) if is_ours(name) else (other, name)
            pairs = zip(runs[over], runs[under], strict=True)
            ratio = statistics.median(a.decode_tokens_per_second / b.decode_tokens_per_second for a, b in pairs)
            found[f"{over}_over_{under}"] = rounded(ratio)
    return found


def view(report: Report) -> View:
    """Speeds with their share of the limit, ratios, and work on the device if there is a GPU."""
    flags, results = report.flags, report.results
    rows = [results[name] | {"name": name} for name in flags["contenders"]]
    limit = results["limit"]
    title = text("", "title")
    speed = [
        title,
        Column("first token (ms)", "time_to_first_token_ms"),
        Column("decode (tok/s)", "decode_tokens_per_second"),
        Column("ms/token", "ms_per_token"),
        Column("share of limit", "share_of_bandwidth", percent),
        Column("tokens computed", "tokens_computed", count),
        *([Column("ready (s)", "ready_seconds")] if "ready_seconds" in rows[0] else []),
        text("same tokens", lambda row: f"{row['equal_tokens']} of {row['compared_tokens']}"),
    ]
    work = [
        title,
        Column("kernels (µs)", "kernel_us_per_token"),
        Column("share of limit", "kernel_share_of_bandwidth", percent),
        *(
            Column(key.replace("_", " "), f"{key}_per_token", lambda n: NOTHING if n is None else f"{n:g}")
            for key in COUNTS
        ),
    ]
    has_kernels = any(row["kernel_us_per_token"] is not None for row in rows)
    tables = [Table("Speed", speed, rows)]
    ratios = [{"pair": pair.replace("_", " "), "ratio": ratio} for pair, ratio in results["ratios"].items()]
    tables += [Table("Decode speed", [text("", "pair"), Column("ratio", "ratio", times)], ratios)] if ratios else []
    tables += [Table("Work on the GPU for one token", work, rows)] if has_kernels else []
    note = (
        f"The limit: {number(limit['tokens_per_second'])} tokens/s, from the weights, keys and values that a token "
        f"reads and the {number(results['ceilings']['read_gb_per_second'])} GB/s measured in this run."
    )
    packed = "Packed weights are half as many bytes, in the share of the limit too."
    size = f"{flags['prompt_tokens']} tokens in, {flags['new_tokens']} out, greedy, {flags['dtype']}"
    demo = ", demo size (no GPU)" if flags["is_demo_size"] else ""
    return View(
        f"Generation: {report.model['name']} on {report.machine_title}",
        [f"{size}, median of {flags['trials']}{demo}; {report.date[:10]}"],
        tables,
        notes=[note, packed] if flags.get("pack_weights") else [note],
        panels=[_panel(rows, limit)],
    )


def _panel(rows: Sequence[Row], limit: dict[str, Any]) -> Bars:
    """The speed divided by the limit."""
    newest = [row["name"] for row in rows if is_ours(row["name"])][-1]
    bars = []
    for row in rows:
        colour = "ours" if row["name"] == newest else "first" if is_ours(row["name"]) else "peer"
        tokens, share = row["decode_tokens_per_second"], percent(row["share_of_bandwidth"])
        bars.append(Bar(row["title"], tokens, f"{number(tokens)} tok/s, {share}", colour))
    line = limit["tokens_per_second"], f"limit {number(limit['tokens_per_second'])}"
    return Bars("Decode speed, and its share of the limit", [("", bars)], line)
