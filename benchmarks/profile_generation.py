"""Where a decoded token's time goes: PyTorch's profiler over some steps of one phase. Introduced in phase 3.1.

Two answers to the same kind of prompt: one without the profiler, for the true time of a token, and one with it, for
what ran. On a GPU the table is of kernels, and the time in which no kernel ran is what the host cost; on a CPU it is of
PyTorch's operations. The Chrome trace shows every call on a time line.

Invariant: shares are of the time of a token measured without the profiler on a GPU, where kernels take the same time
either way; on a CPU, where the profiler slows every operation, of the operations' own sum.
"""

import re
import statistics
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contenders import Turns, generating_lessons, load_engine
from benchmarks.generation.step_trace import StepTrace, TraceWindow
from benchmarks.report import Report, rounded
from benchmarks.setup import Setup, check_least
from benchmarks.timing import Run
from benchmarks.view import Column, Table, View, number, percent, text
from shared.errors import ConfigError
from shared.lessons import Lesson, newest_lesson

LEAD = 3
"""Decoded tokens before the profiled steps."""


def measure_profile(
    model: str,
    *,
    phase: str | None = None,
    prompt_tokens: int | None = None,
    steps: int | None = None,
    trace: Path | None = None,
    **where: Any,
) -> Report:
    """Profile ``steps`` decode steps behind ``prompt_tokens``; ``trace`` names a file for the Chrome trace.

    The defaults are 256 tokens and 16 steps on a GPU, 32 and 4 on a CPU; the phase is the newest of the main line.
    ``where``: device, dtype, threads, seed and progress, as `Setup` takes them.
    Raises ConfigError, RequestError or ModelFolderError before anything is computed.
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
    """One token of the window: its time, where it went, and the table."""
    us_per_token = 1e6 * statistics.median(plain.intervals[LEAD - 1 : LEAD - 1 + trace.steps])
    rows, kernel_us = merged(trace.rows()), trace.kernel_us_per_token
    whole = us_per_token if kernel_us is not None else sum(us for _, _, us in rows) / trace.steps
    return {
        "title": lesson.title,
        "us_per_token": rounded(us_per_token),
        "profiled_us_per_token": rounded(1e6 * trace.seconds / trace.steps),
        "idle_us_per_token": None if kernel_us is None else rounded(max(0.0, us_per_token - kernel_us)),
        "host_us_per_token": rounded(trace.host_us_per_token),
        **trace.figures(),
        "rows": [
            {
                "name": name,
                "count_per_token": rounded(calls / trace.steps),
                "us_per_token": rounded(us / trace.steps),
                "us_each": rounded(us / calls),
                "share": rounded(us / trace.steps / whole) if whole else 0.0,
            }
            for name, calls, us in rows
        ],
    }


def merged(rows: Iterable[tuple[str, int, float]]) -> list[tuple[str, int, float]]:
    """Rows of the same short name as one, the longest first."""
    found: dict[str, tuple[int, float]] = {}
    for name, calls, us in rows:
        before = found.get(short_name(name), (0, 0.0))
        found[short_name(name)] = before[0] + calls, before[1] + us
    return sorted(((name, *sums) for name, sums in found.items()), key=lambda row: -row[2])


_TEMPLATE = re.compile(r"<[^<>]*>")
_TELLING = re.compile(r"\b(?:\w+Functor(?:_\w+)?|\w+_kernel_cuda|\w+Ops?|cutlass_\w{8,})\b")
_WRAPPERS = {"ReduceOp", "BinaryFunctor", "AUnaryFunctor", "BUnaryFunctor"}  # what they wrap is told behind them
_GENERIC = {"kernel", "run", "operator", "device_kernel", "Kernel", "Kernel2"}  # names that say nothing by themselves
LONGEST = 72


def short_name(name: str) -> str:
    """A kernel's name without types, namespaces and arguments; at most `LONGEST` characters.

    A C++ kernel is reported by its whole signature, hundreds of characters, of which one part tells what it does: the
    functor. So a signature becomes ``elementwise_kernel [CUDAFunctor_add]``; names of PyTorch's operations, of copies
    and of Triton's kernels stay as they are.
    """
    if ("::" in name or "<" in name) and not name.startswith("aten::"):
        name = name.replace("(anonymous namespace)::", "").replace("->", "")
        bare = name
        while (shorter := _TEMPLATE.sub("", bare)) != bare:
            bare = shorter
        path = bare.partition("(")[0].strip().split(" ")[-1].split("::")
        base = "::".join(path[-2:]) if path[-1] in _GENERIC and len(path) > 1 else path[-1]
        found = _TELLING.findall(name, name.find(path[-1]) + len(path[-1]))
        telling = next((functor for functor in found if functor not in _WRAPPERS), None)
        name = f"{base} [{telling}]" if telling else base
    return name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"


def view(report: Report, top: int = 40) -> View:
    """What a token took and how much of that ran where, then the ``top`` longest rows."""
    flags = report.flags
    result = report.results[flags["phase"]]
    is_gpu = result["kernel_us_per_token"] is not None
    facts = [
        f"A token takes {number(result['us_per_token'])} µs without the profiler, "
        f"{number(result['profiled_us_per_token'])} µs with it.",
        f"The host works for {number(result['host_us_per_token'])} µs of it in PyTorch's operations, profiled.",
    ]
    if is_gpu:
        facts[1:1] = [
            f"{result['kernels_per_token']:g} kernels run for {number(result['kernel_us_per_token'])} µs; for "
            f"{number(result['idle_us_per_token'])} µs no kernel runs, and the GPU waits for the host.",
            f"The host makes {result['host_launches_per_token']:g} launches, {result['own_launches_per_token']:g} of "
            f"them of kernels in shared/kernels; {result['copies_per_token']:g} copies and fills.",
        ]
    columns = [
        text("kernel" if is_gpu else "operation", "name"),
        Column("a token", "count_per_token", "{:g}".format),
        Column("µs a token", "us_per_token"),
        Column("µs each", "us_each"),
        Column("share", "share", percent),
    ]
    rows, left = result["rows"][:top], result["rows"][top:]
    rest = f"{len(left)} more rows, {number(sum(row['us_per_token'] for row in left))} µs a token together."
    size = f"{flags['steps']} decode steps behind {flags['prompt_tokens']} tokens, batch 1, {flags['dtype']}"
    demo = ", demo size (no GPU)" if flags["is_demo_size"] else ""
    return View(
        f"Profile: phase {flags['phase']} ({result['title']}), {report.model['name']} on {report.machine_title}",
        [f"{size}{demo}; {report.date[:10]}", "", *facts],
        [Table("", columns, rows)],
        notes=[rest if left else f"{len(rows)} rows, all shown."],
    )
