"""The ladder: decode speed of each phase, and what a token costs as its context grows. Introduced in phase 3.

Every phase answers the same synthetic prompts, greedily and past any end of sequence, inside one process, and they take
turns (`benchmarks.contenders.Turns`); medians count. Invariant: nothing is computed before every setting has been
checked.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.contenders import Turns, generating_lessons, load_engine, speeds
from benchmarks.report import Report, rounded
from benchmarks.setup import Setup, check_least
from benchmarks.view import Bar, Bars, Column, Lines, Row, Table, View, count, number, text, times
from shared.engine.config import DEFAULT_MAX_SEQ_LEN
from shared.errors import ConfigError, RequestError


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
POINT_TOKENS, POINT_BOUND = 16, (2, 0.5)
"""Most tokens that a point of the curve times; it ends after so many tokens and seconds."""
WARM_UP_TOKENS = 3


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
    """Decode speed, time to first token, tokens computed, and milliseconds a token by context, of each phase.

    Args:
        prompt_tokens, new_tokens: of each answer; at least 1 and 2 (speed needs an interval).
        phases: numbers of phases that generate; by default all there are.
        context_lengths: tokens before the first timed one, for the curve; none for an empty sequence.
        where: device, dtype, threads, seed and progress, as `Setup` takes them.

    Raises:
        ConfigError, RequestError, ModelFolderError, CapacityError: before anything is computed.
    """
    setup = Setup(model, **where)
    check_least(prompt_tokens=(prompt_tokens, 1), new_tokens=(new_tokens, 2), trials=(trials, 1))
    setup.check_length(prompt_tokens + new_tokens, f"prompt_tokens {prompt_tokens} and new_tokens {new_tokens}")
    contexts = _contexts(context_lengths, setup.shape.max_position_embeddings)
    rungs = generating_lessons(phases)
    longest = max([prompt_tokens + new_tokens, *(length + POINT_TOKENS + 1 for length in contexts)])
    config = setup.config(max_seq_len=longest if longest > DEFAULT_MAX_SEQ_LEN else None)
    setup.check_memory(len(rungs), "name fewer phases with --phase")

    with setup.running(len(rungs) * (2 + trials + len(contexts))) as steps:
        turns = Turns(setup, steps)
        for lesson in rungs:
            turns.load(lesson.number, partial(load_engine, lesson, config))
        turns.warm_up(prompt_tokens, min(new_tokens, WARM_UP_TOKENS))
        runs = turns.trials(trials, prompt_tokens, new_tokens)
        curve = {
            str(length): turns.round(f"{length} tokens of context", length, POINT_TOKENS + 1, POINT_BOUND)
            for length in contexts
        }
        first = rungs[0].number
        results: dict[str, Any] = {}
        for lesson in rungs:
            own, told = runs[lesson.number], speeds(runs[lesson.number])
            gaps = {length: point[lesson.number].intervals for length, point in curve.items()}
            results[lesson.number] = {
                "title": lesson.title,
                **told,
                "speedup": rounded(told["decode_tokens_per_second"] / speeds(runs[first])["decode_tokens_per_second"]),
                "equal_output": [run.token_ids for run in own] == [run.token_ids for run in runs[first]],
                "ms_per_token": {length: rounded(1e3 * statistics.median(found)) for length, found in gaps.items()},
            }
        flags = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "trials": trials, "contexts": list(contexts)}
        engines = {name: contender.settings for name, contender in turns.contenders.items()}
        return setup.report("ladder", engines, flags, results)


def _contexts(lengths: Sequence[int] | None, limit: int) -> tuple[int, ...]:
    longest = limit - POINT_TOKENS - 1
    if lengths is None:
        return tuple(length for length in CONTEXT_LENGTHS if length <= longest)
    for length in lengths:
        if length < 1:
            raise ConfigError(f"A context length is {length}; it must be at least 1.")
        if length > longest:
            raise RequestError(
                f"A context length is {length}; this model holds {limit} tokens and a point times up to "
                f"{POINT_TOKENS + 1} more, so ask for at most {longest}."
            )
    return tuple(sorted(set(lengths)))


def trials(flags: dict[str, Any]) -> str:
    """How the shown figures come from the trials."""
    return f"median of {flags['trials']}" if flags["trials"] > 1 else "one trial"


def view(report: Report) -> View:
    """Bars of decode speed with the facts that explain them, and the cost of a token by context."""
    flags = report.flags
    rows = [{"name": name} | result | result["ms_per_token"] for name, result in report.results.items()]
    newest = rows[-1]["name"]

    def style(row: Row) -> str:
        return "bold green" if row["name"] == newest else ""

    phase, speed = text("phase", lambda row: f"{row['name']} {row['title']}"), "decode_tokens_per_second"
    columns = [
        phase,
        Column("", speed, is_bar=True),
        Column("tok/s", speed),
        Column("speedup", "speedup", times),
        Column("first token (ms)", "time_to_first_token_ms"),
        Column("tokens computed", "tokens_computed", count),
    ]
    tables = [Table("", columns, rows, style)]
    contexts = [str(length) for length in flags["contexts"]]
    if contexts:
        points = [Column(length, length) for length in contexts]
        tables.append(Table("Milliseconds a token, by tokens of context before it", [phase, *points], rows, style))
    different = [row["name"] for row in rows if not row["equal_output"]]
    bars, lines = [], []
    for row in rows:
        reached, colour = f"{number(row[speed])} tok/s, {times(row['speedup'])}", "ours" if style(row) else "first"
        bars.append(Bar(phase.cell(row), row[speed], reached, colour))
        lines.append((row["name"], [row[length] for length in contexts]))
    curve = Lines("Milliseconds a token, by tokens of context", flags["contexts"], lines)
    size = f"{flags['prompt_tokens']} tokens in, {flags['new_tokens']} out, greedy, {trials(flags)}"
    return View(
        f"Decode speed: {report.model['name']} on {report.machine_title}, {flags['dtype']}",
        [f"{size}, phases taking turns; {report.date[:10]}"],
        tables,
        warnings=[f"Phase {', '.join(different)}: other tokens than the first phase's."] if different else [],
        panels=[Bars("Decode speed", [("", bars)]), *([curve] if contexts else [])],
    )
