"""What a token costs by the tokens of context before it, with a KV cache and without. Introduced in phase 3.

The phases take turns in one process: a trial loads each, measures it with the trial's prompts, and frees it, so that
memory holds one engine. Medians count.
"""

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.contenders import generating_lessons, speeds
from benchmarks.report import Report, rounded
from benchmarks.setup import Setup, check_least, free_memory
from benchmarks.timing import Run, SyntheticPrompts, answer_with, rotated, run, timed
from benchmarks.view import Bar, Bars, Column, Lines, Table, View, count, number, text, times
from shared.engine.config import EngineConfig
from shared.errors import ConfigError
from shared.lessons import find_lesson

PHASES, CONTEXT_LENGTHS = ("02", "03"), (16, 32, 64, 128, 256, 512)
PROMPT_TOKENS, NEW_TOKENS = 64, 16
POINT_TOKENS, POINT_BOUND = 16, (2, 0.5)
"""Maximum tokens that a point of the curve times; it ends after this many tokens, or this many seconds."""


def measure_contexts(
    model: str,
    *,
    phases: Sequence[str] = PHASES,
    prompt_tokens: int = PROMPT_TOKENS,
    new_tokens: int = NEW_TOKENS,
    trials: int = 3,
    context_lengths: Sequence[int] = CONTEXT_LENGTHS,
    **where: Any,
) -> Report:
    """Speed of one request, tokens computed, and milliseconds per token by context; ``where`` is as `Setup`
    takes it.

    Raises ConfigError, RequestError, ModelFolderError or CapacityError before anything is computed.
    """
    setup = Setup(model, **where)
    check_least(prompt_tokens=(prompt_tokens, 1), new_tokens=(new_tokens, 2), trials=(trials, 1))
    setup.check_length(prompt_tokens + new_tokens, f"prompt_tokens {prompt_tokens} and new_tokens {new_tokens}")
    contexts = _contexts(context_lengths, setup.shape.max_position_embeddings)
    names = [lesson.number for lesson in generating_lessons(phases)]
    config = setup.config(max_seq_len=max(prompt_tokens + new_tokens, *(n + POINT_TOKENS + 1 for n in contexts), 0))
    setup.check_memory(1, "close other programs")
    prompts = SyntheticPrompts(setup.shape.vocab_size, setup.seed)
    points = {str(length): prompts.draw(length) for length in contexts}
    engines: dict[str, EngineConfig] = {}
    runs: dict[str, list[Run]] = {name: [] for name in names}
    curves: dict[str, dict[str, float]] = {name: {} for name in names}
    with setup.running(len(names) * trials) as steps:
        for trial in range(trials):
            prompt = prompts.draw(prompt_tokens)
            for name in rotated(names, trial):
                with steps.step(f"phase {name}, trial {trial + 1} of {trials}"):
                    engine = find_lesson(name).engine_alone(config)
                    engines[name] = engine.config
                    run(engine, [1] * prompt_tokens, 2)  # warms up
                    runs[name].append(run(engine, prompt, new_tokens))
                    for length, ids in points.items() if trial == 0 else ():
                        point = timed(partial(answer_with, engine), ids, POINT_TOKENS + 1, *POINT_BOUND)
                        curves[name][length] = rounded(1e3 * statistics.median(point.intervals))
                    del engine
                    free_memory()
        results: dict[str, Any] = {}
        for name in names:
            told = speeds(runs[name])
            lowest = results.get(names[0], told)["decode_tokens_per_second"]
            results[name] = told | {
                "title": find_lesson(name).title,
                "speedup": rounded(told["decode_tokens_per_second"] / lowest),
                "equal_output": [each.token_ids for each in runs[name]] == [each.token_ids for each in runs[names[0]]],
                "ms_per_token": curves[name],
            }
        flags = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "trials": trials, "contexts": list(contexts)}
        return setup.report("contexts", engines, flags, results)


def _contexts(lengths: Sequence[int], limit: int) -> tuple[int, ...]:
    longest = limit - POINT_TOKENS - 1
    for length in lengths:
        if not 1 <= length <= longest:
            raise ConfigError(f"A context length is {length}; with this model it must be from 1 to {longest}.")
    return tuple(sorted(set(lengths)))


def view(report: Report) -> View:
    """The speed of one request with the tokens computed for it, and a token's cost by context."""
    flags = report.flags
    rows = [{"name": name} | result | result["ms_per_token"] for name, result in report.results.items()]
    phase, contexts = text("phase", lambda row: f"{row['name']} {row['title']}"), [str(n) for n in flags["contexts"]]
    columns = [
        phase,
        Column("tok/s", "decode_tokens_per_second"),
        Column("speedup", "speedup", times),
        Column("first token (ms)", "time_to_first_token_ms"),
        Column("tokens computed", "tokens_computed", count),
    ]
    lines = [(row["name"], [row[length] for length in contexts]) for row in rows]
    bars = [
        Bar(
            phase.cell(row),
            row["decode_tokens_per_second"],
            f"{number(row['decode_tokens_per_second'])} tok/s, {times(row['speedup'])}",
        )
        for row in rows
    ]
    different = [row["name"] for row in rows if not row["equal_output"]]
    size = f"{flags['prompt_tokens']} tokens in, {flags['new_tokens']} out, greedy, median of {flags['trials']}"
    curve = "Milliseconds a token, by tokens of context before it"
    return View(
        f"Context: {report.model['name']} on {report.machine_title}, {flags['dtype']}",
        [f"{size}, phases taking turns; {report.date[:10]}"],
        [Table("", columns, rows), Table(curve, [phase, *(Column(length, length) for length in contexts)], rows)],
        warnings=[f"Phase {', '.join(different)}: other tokens than the first phase's."] if different else [],
        panels=[Bars("One request", [("", bars)]), Lines(curve, flags["contexts"], lines)],
    )
