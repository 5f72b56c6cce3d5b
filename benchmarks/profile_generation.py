"""Where a decoded token's time goes: PyTorch's profiler over some steps of one phase. Introduced in phase 3.1.

Invariant: on a GPU, shares are relative to a token's time without the profiler, since kernels take the same time either
way; on a CPU, where the profiler slows every operation, they are relative to the sum of the operations.
"""

import re
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contenders import Turns, generating_lessons, load_engine
from benchmarks.report import Report, rounded
from benchmarks.setup import Setup, check_least
from benchmarks.step_trace import StepTrace, TraceWindow
from benchmarks.timing import Run
from benchmarks.view import Column, Table, View, number, percent, text
from shared.errors import ConfigError
from shared.lessons import Lesson, newest_lesson

LEAD = 3  # decoded tokens before the profiled steps
QUALIFIERS = re.compile(r"^void |\(anonymous namespace\)::|\b(at|native|c10|internal)::")
LONGEST = 72  # characters of a name in the table; a C++ kernel is reported by its whole signature, with hundreds


def measure_profile(
    model: str,
    *,
    phase: str | None = None,
    prompt_tokens: int | None = None,
    steps: int | None = None,
    trace: Path | None = None,
    **where: Any,
) -> Report:
    """Profile ``steps`` decode steps after ``prompt_tokens``, by default of the newest phase; ``trace`` names a file
    for the Chrome trace. Raises ConfigError, RequestError or ModelFolderError before anything is computed.
    """
    setup = Setup(model, **where)
    prompt_tokens = (256 if setup.is_gpu else 32) if prompt_tokens is None else prompt_tokens
    steps = (16 if setup.is_gpu else 4) if steps is None else steps
    check_least(prompt_tokens=(prompt_tokens, 1), steps=(steps, 1))
    (lesson,) = generating_lessons([newest_lesson().number if phase is None else phase])
    new_tokens = LEAD + steps + 1
    setup.check_length(prompt_tokens + new_tokens, f"prompt_tokens {prompt_tokens} and {new_tokens} new ones")
    if trace is not None and not (trace.parent.is_dir() and trace.name.endswith((".json", ".json.gz"))):
        raise ConfigError(
            f"The trace cannot go to {trace}; name a file ending in .json.gz or .json in a folder that is there."
        )
    config = setup.config(max_seq_len=prompt_tokens + new_tokens)

    with setup.running(4) as progress:
        turns = Turns(setup, progress)
        turns.load(lesson.number, partial(load_engine, lesson, config))
        turns.warm_up(prompt_tokens, new_tokens)
        plain = turns.round("without the profiler", prompt_tokens, new_tokens)[lesson.number]
        window = TraceWindow(LEAD, steps, setup.target, with_host=True)
        found = turns.trace(lesson.number, window, prompt_tokens, new_tokens)
        if trace is not None:
            window.profiler.export_chrome_trace(str(trace))
        return setup.report(
            f"profile-{lesson.number}",
            {lesson.number: config},
            {"phase": lesson.number, "prompt_tokens": prompt_tokens, "steps": steps},
            {lesson.number: results(lesson, plain, found)},
        )


def results(lesson: Lesson, plain: Run, trace: StepTrace) -> dict[str, Any]:
    """One token of the window: its time, the breakdown, and the table."""
    us_per_token = 1e6 * statistics.median(plain.intervals[LEAD - 1 : LEAD - 1 + trace.steps])
    rows, kernel_us = trace.rows(), trace.kernel_us_per_token
    whole = us_per_token if kernel_us is not None else sum(us for _, _, us in rows) / trace.steps
    return {
        "title": lesson.title,
        "us_per_token": rounded(us_per_token),
        "idle_us_per_token": None if kernel_us is None else rounded(max(0.0, us_per_token - kernel_us)),
        **trace.figures(),
        "rows": [
            {
                "name": name,
                "count_per_token": rounded(calls / trace.steps),
                "us_per_token": rounded(us / trace.steps),
                "share": rounded(us / trace.steps / whole) if whole else 0.0,
            }
            for name, calls, us in rows
        ],
    }


def view(report: Report, top: int = 40) -> View:
    """A token's time and how much of it ran where, followed by the ``top`` longest rows."""
    flags = report.flags
    result = report.results[flags["phase"]]
    is_gpu = result["kernel_us_per_token"] is not None
    facts = [f"A token takes {number(result['us_per_token'])} µs without the profiler."]
    if is_gpu:
        facts += [
            f"{result['kernels_per_token']:g} kernels run for {number(result['kernel_us_per_token'])} µs; for "
            f"{number(result['idle_us_per_token'])} µs no kernel runs, and the GPU waits for the host.",
            f"The host makes {result['host_launches_per_token']:g} launches, {result['own_launches_per_token']:g} of "
            f"them of kernels in shared/kernels; {result['copies_per_token']:g} copies and fills.",
        ]
    columns = [
        text("kernel" if is_gpu else "operation", lambda row: QUALIFIERS.sub("", row["name"])[:LONGEST]),
        Column("a token", "count_per_token", "{:g}".format),
        Column("µs a token", "us_per_token"),
        Column("share", "share", percent),
    ]
    rows, left = result["rows"][:top], result["rows"][top:]
    rest = f"{len(left)} more rows, {number(sum(row['us_per_token'] for row in left))} µs a token together."
    size = f"{flags['steps']} decode steps after {flags['prompt_tokens']} tokens, batch 1, {flags['dtype']}"
    demo = ", demo size (no GPU)" if flags["is_demo_size"] else ""
    return View(
        f"Profile: phase {flags['phase']} ({result['title']}), {report.model['name']} on {report.machine_title}",
        [f"{size}{demo}; {report.date[:10]}", "", *facts],
        [Table("", columns, rows)],
        notes=[rest if left else f"{len(rows)} rows, all shown."],
    )
