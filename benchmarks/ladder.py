"""The ladder: each phase's speed with one request and with 16, and a token's cost by context; for phases whose gain is
an option (10 on), the option compared with the default. Introduced in phase 3.

The phases are interleaved in one process: a trial loads each, measures it with the trial's prompts, and frees it, so
that memory holds one engine. Medians count. Invariant: phases that serve many requests have equally large KV caches.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from benchmarks.contenders import generating_lessons, speeds
from benchmarks.options import measure_options, options_of
from benchmarks.report import Report, rounded
from benchmarks.serving.contenders import has_continuous
from benchmarks.serving.engine_load import OneAtATime, drive
from benchmarks.serving.results import ServedRun
from benchmarks.setup import Setup, check_least, free_memory
from benchmarks.timing import Run, SyntheticPrompts, answer_with, rotated, run, timed
from benchmarks.view import NOTHING, Bar, Bars, Column, Lines, Row, Table, View, count, number, quantity, text, times
from benchmarks.workloads.serving import Workload, make_trace
from shared.engine.config import EngineConfig
from shared.engine.warm_up import warm_up
from shared.errors import ConfigError
from shared.lessons import Lesson, find_lesson
from shared.models.config import ModelConfig
from shared.tracks.ranks.shard import possible_sizes


@dataclass(frozen=True)
class LadderSize:
    """How much is measured; ``context_lengths`` None means those of ``CONTEXT_LENGTHS`` that the model can hold."""

    prompt_tokens: int = 64
    new_tokens: int = 16
    trials: int = 3
    context_lengths: tuple[int, ...] | None = None


CONTEXT_LENGTHS = (16, 32, 64, 128, 256, 512)
DEFAULT = LadderSize()
QUICK = LadderSize(prompt_tokens=32, new_tokens=12, trials=1, context_lengths=())
TOGETHER, TOGETHER_SECONDS = Workload("together", "16 at a time", 32, 16, (8, 24), (4, 48)), 8.0
"""Requests of 16 clients; after so many seconds a phase is judged by the tokens that it has given."""
BESIDE = Workload(
    "beside", "Prompts of 192 tokens", 3, 3 + 1, (192, 192), (2, 2), beside=replace(TOGETHER, num_requests=3)
)
TURNS = Workload("turns", "A second turn", 1, 1, (96, 96), (2, 2), turns=2, turn_tokens=(8, 8))
CHUNK = 64  # tokens of a chunk, in phases with chunks: the prompt takes three beside decoding requests
ARRIVALS = 2.0  # prompts per second; the first ones arrive together with the others
REGIONS, REGION_TOKENS = 4, 256
"""The KV cache of a phase that serves many requests: so many regions of at least so many tokens, or as many blocks."""
POINT_TOKENS, POINT_BOUND = 16, (2, 0.5)
"""Most tokens that a point of the curve times; it ends after so many tokens and seconds."""


def measure_ladder(
    model: str,
    *,
    prompt_tokens: int = DEFAULT.prompt_tokens,
    new_tokens: int = DEFAULT.new_tokens,
    trials: int = DEFAULT.trials,
    phases: Sequence[str] | None = None,
    context_lengths: Sequence[int] | None = None,
    **where: Any,
) -> Report:
    """Speed with one request and with 16, time to first token, tokens computed, and milliseconds per token by context,
    by default of every phase that generates; ``where`` is as `Setup` takes it.

    Raises ConfigError, RequestError, ModelFolderError or CapacityError before anything is computed.
    """
    setup = Setup(model, **where)
    check_least(prompt_tokens=(prompt_tokens, 1), new_tokens=(new_tokens, 2), trials=(trials, 1))
    setup.check_length(prompt_tokens + new_tokens, f"prompt_tokens {prompt_tokens} and new_tokens {new_tokens}")
    setup.check_length(max(TOGETHER.longest, BESIDE.longest), "The longest prompt and answer of many requests")
    limit = setup.shape.max_position_embeddings
    contexts = _contexts(context_lengths, limit)
    rungs = generating_lessons(phases)
    if phases is None:
        rungs = [lesson for lesson in rungs if not has_ranks(lesson) or most_ranks(setup.shape, setup.target) > 1]
    longest = max(prompt_tokens + new_tokens, REGION_TOKENS, *(length + POINT_TOKENS + 1 for length in contexts))
    config = setup.config(max_seq_len=min(longest, limit))
    setup.check_memory(1, "close other programs")

    vocab_size, seed = setup.shape.vocab_size, setup.seed
    prompts = SyntheticPrompts(vocab_size, seed)
    points = {str(length): prompts.draw(length) for length in contexts}
    engines: dict[str, EngineConfig] = {}
    runs: dict[str, list[Run]] = {lesson.number: [] for lesson in rungs}
    curves: dict[str, dict[str, float]] = {name: {} for name in runs}
    many: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    with setup.running((3 * len(rungs) + len(options_of(rungs))) * trials) as steps:
        for trial in range(trials):
            prompt = prompts.draw(prompt_tokens)
            loads = (TOGETHER, None), (BESIDE, ARRIVALS), (TURNS, None)
            together, beside, turns = (make_trace(load, vocab_size, seed + trial, rate) for load, rate in loads)
            for name in rotated(tuple(runs), trial):
                what = f"phase {name}, trial {trial + 1} of {trials}"
                with steps.step(f"{what}: load"):
                    engine, queue = load_rung(find_lesson(name), config, most_ranks(setup.shape, setup.target))
                    engines[name] = engine.config
                    run(engine, [1] * prompt_tokens, 2)  # warms up
                with steps.step(f"{what}: one request"):
                    runs[name].append(run(engine, prompt, new_tokens))
                    for length, ids in points.items() if trial == 0 else ():
                        point = timed(partial(answer_with, engine), ids, POINT_TOKENS + 1, *POINT_BOUND)
                        curves[name][length] = rounded(1e3 * statistics.median(point.intervals))
                with steps.step(f"{what}: {TOGETHER.title}"):
                    served = drive(queue, together, TOGETHER_SECONDS)
                    found = {"together_tokens_per_second": served.num_tokens / served.seconds}
                    found["tokens_per_forward"] = served.num_tokens / (served.num_forwards or 1)
                    if has_continuous(find_lesson(name)):
                        found["longest_wait_ms"] = 1e3 * longest_wait(drive(queue, beside))
                    second = drive(queue, turns).requests[1]
                    found["second_turn_ms"] = 1e3 * (second.token_times[0] - second.arrived)
                    many[name].append(found)
                del engine, queue
                free_memory()
        options = measure_options(setup, rungs, trials, steps)
        results: dict[str, Any] = {}
        for lesson in rungs:
            name, first = lesson.number, rungs[0].number
            told = speeds(runs[name])
            told |= {key: rounded(statistics.median(each[key] for each in many[name])) for key in many[name][0]}
            lowest = results.get(first, told)
            results[name] = told | {
                "title": lesson.title,
                "bought": lesson.bought,
                "longest_wait_ms": told.get("longest_wait_ms"),
                "speedup": rounded(told["decode_tokens_per_second"] / lowest["decode_tokens_per_second"]),
                "together_speedup": rounded(told["together_tokens_per_second"] / lowest["together_tokens_per_second"]),
                "equal_output": [each.token_ids for each in runs[name]] == [each.token_ids for each in runs[first]],
                "ms_per_token": curves[name],
            }
            if name in options:
                results[name]["options"] = options[name]
        flags = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "trials": trials, "contexts": list(contexts)}
        return setup.report("ladder", engines, flags | {"together": TOGETHER.describe()}, results)


def longest_wait(run: ServedRun) -> float:
    """The maximum seconds between two tokens of a request that decodes beside a prompt."""
    return max(b - a for each in run.requests if each.is_background for a, b in pairwise(each.token_times))


def has_ranks(lesson: Lesson) -> bool:
    """Whether a phase can share the model over several GPUs."""
    return "tensor_parallel_size" in lesson.load("engine").SUPPORTED


def most_ranks(shape: ModelConfig, device: torch.device) -> int:
    """The GPUs over which the model can be shared: as many as exist and its heads allow; 1 on a CPU."""
    num_gpus = torch.cuda.device_count() if device.type == "cuda" else 1
    return max(size for size in possible_sizes(shape) if size <= num_gpus)


def load_rung(lesson: Lesson, config: EngineConfig, num_ranks: int = 1) -> tuple[Any, Any]:
    """A phase's engine, and the queue in front of it that many requests join: the engine itself if it has one."""
    if has_ranks(lesson):
        config = replace(config, tensor_parallel_size=num_ranks)
    if "prefill_chunk_size" in lesson.load("engine").SUPPORTED:
        config = replace(config, prefill_chunk_size=CHUNK)
    engine = lesson.engine_within(config, REGIONS, TOGETHER.concurrency)
    if not hasattr(engine, "step"):
        return engine, OneAtATime(engine)
    warm_up(engine)
    return engine, engine


def _whole(blocks: float | None) -> str:
    return count(None if blocks is None else round(blocks))


def _contexts(lengths: Sequence[int] | None, limit: int) -> tuple[int, ...]:
    longest = limit - POINT_TOKENS - 1
    if lengths is None:
        return tuple(length for length in CONTEXT_LENGTHS if length <= longest)
    for length in lengths:
        if not 1 <= length <= longest:
            raise ConfigError(f"A context length is {length}; with this model it must be from 1 to {longest}.")
    return tuple(sorted(set(lengths)))


def view(report: Report) -> View:
    """Bars of the speeds with the facts that explain them, what each phase gained, and a token's cost by context."""
    flags = report.flags
    rows = [{"name": name} | result | result["ms_per_token"] for name, result in report.results.items()]
    newest = rows[-1]["name"]

    def style(row: Row) -> str:
        return "bold green" if row["name"] == newest else ""

    phase, contexts = text("phase", lambda row: f"{row['name']} {row['title']}"), [str(n) for n in flags["contexts"]]
    computed = [
        Column("first token (ms)", "time_to_first_token_ms"),
        Column("tokens computed", "tokens_computed", count),
    ]
    passes = [Column("tokens a forward pass", "tokens_per_forward")]
    waits = Column("beside a long prompt", "longest_wait_ms"), Column("first token of a second turn", "second_turn_ms")
    shown = {
        "One request": ("decode_tokens_per_second", "speedup", computed),
        TOGETHER.title: ("together_tokens_per_second", "together_speedup", passes),
    }
    tables, panels = list[Table](), list[Bars | Lines]()
    for heading, (speed, speedup, more) in shown.items():
        columns = [phase, Column("", speed, is_bar=True), Column("tok/s", speed), Column("speedup", speedup, times)]
        tables.append(Table(heading, [*columns, *more], rows, style))
        bars = []
        for row in rows:
            reached, colour = f"{number(row[speed])} tok/s, {times(row[speedup])}", "ours" if style(row) else "first"
            bars.append(Bar(phase.cell(row), row[speed], reached, colour))
        panels.append(Bars(heading, [("", bars)]))
    tables.append(Table("The longest wait, ms", [phase, *waits], rows, style))
    tables.append(Table("What each phase bought", [text("phase", "name"), text("", "bought")], rows, style))
    asked = [{"phase": row["name"]} | option for row in rows for option in row.get("options", [])]
    if asked:
        columns = [
            text("phase", lambda row: f"{row['phase']} {row['title']}"),
            Column("tok/s", "tokens_per_second"),
            Column("speedup", "speedup", times),
            Column("tokens a forward pass", "tokens_per_forward"),
            Column("KV blocks, first half", "half_kv_blocks", _whole),
            Column("KV blocks", "kv_blocks", _whole),
            Column("weights", "weight_bytes", partial(quantity, unit="B")),
            Column("readable", "valid_share", lambda share: NOTHING if share is None else f"{100 * share:.0f} %"),
        ]
        tables.append(Table("What a phase buys if it is asked", columns, asked))
    if contexts:
        points = [Column(length, length) for length in contexts]
        tables.append(Table("Milliseconds a token, by tokens of context before it", [phase, *points], rows, style))
        lines = [(row["name"], [row[length] for length in contexts]) for row in rows]
        panels.append(Lines("Milliseconds a token, by tokens of context", flags["contexts"], lines))
    different = [row["name"] for row in rows if not row["equal_output"]]
    trials = f"median of {flags['trials']}" if flags["trials"] > 1 else "one trial"
    size = f"{flags['prompt_tokens']} tokens in, {flags['new_tokens']} out, greedy, {trials}, phases taking turns"
    return View(
        f"Speed: {report.model['name']} on {report.machine_title}, {flags['dtype']}",
        [
            f"One request: {size}; {report.date[:10]}",
            f"{TOGETHER.title}: {flags['together']}; the same bytes of KV cache",
            f"Waits: between two tokens of 3 requests while prompts of {BESIDE.prompt_tokens[1]} tokens arrive, in "
            f"chunks of {CHUNK} where there are chunks; for the first token after a conversation of 106 tokens",
        ],
        tables,
        warnings=[f"Phase {', '.join(different)}: other tokens than the first phase's."] if different else [],
        panels=panels,
    )
