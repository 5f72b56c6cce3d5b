"""The matrix: every phase that generates, in every configuration of its own, on W1, W2 and W3. Introduced in phase
4.

A row is a phase with its defaults, or with one setting of :data:`ALTERNATIVES`. A cell has the throughput, with the
gain over the first row and over the previous phase. Invariant: every cell of a column served the same trace.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.contenders import generating_lessons
from benchmarks.report import Report, ratio
from benchmarks.serving.contenders import Contender, Servers
from benchmarks.serving.experiments import SPEED, Experiment, Runner
from benchmarks.serving.view import LATENCIES, NAME, TOKENS, subtitles
from benchmarks.setup import Setup, check_positive
from benchmarks.view import Bar, Bars, Column, Table, View, number, percentiles, times
from benchmarks.workloads.serving import default_size
from shared.lessons import Lesson, lessons

ALTERNATIVES: dict[str, tuple[dict[str, Any], ...]] = {
    "05": ({"scheduler_policy": "prefill_first"}, {"scheduler_policy": "decode_round_robin"}),
    "06": ({"kv_cache_backend": "contiguous"},),
    "06.1": ({"attention_backend": "flash"},),
    "07": ({"use_chunked_prefill": False},),
    "08": ({"use_prefix_caching": False},),
    "09": ({"use_cuda_graphs": False},),
    "10": ({"quantization": "fp8"}, {"quantization": "int8"}),
}
"""For each phase, settings that differ from its defaults in what the phase introduces: usually the phase without it."""
GPU_ONLY = ("attention_backend", "use_cuda_graphs")  # settings that make no difference on a CPU
WORKLOADS = ("w1", "w2", "w3")


def configurations(found: Sequence[Lesson], is_gpu: bool) -> list[tuple[Lesson, Contender]]:
    """The rows of these phases, each phase's defaults first, named as ``05`` and ``05 scheduler_policy=fcfs``."""
    rows = []
    for lesson in found:
        for settings in ({}, *ALTERNATIVES.get(lesson.number, ())):
            if is_gpu or not set(settings) & set(GPU_ONLY):
                name = " ".join([lesson.number, *(f"{field}={value}" for field, value in settings.items())])
                rows.append((lesson, Contender(name, f"{lesson.number} {lesson.title}", lesson.engine, settings)))
    return rows


def run_matrix(setup: Setup, *, phases: Sequence[str] | None = None, max_seconds: float = 20.0) -> Report:
    """Measure the configurations of phases, by default of the main line, one engine after another; a cell is cut short
    after ``max_seconds``. If phases are selected, the report's name has them. Raises ConfigError, RequestError or
    ModelFolderError before anything is computed.
    """
    check_positive(max_seconds=max_seconds)
    size = default_size(setup.device)
    able = [lesson.number for lesson in lessons() if lesson.generates and not lesson.is_side_track]
    rows = configurations(generating_lessons(able if phases is None else phases), setup.is_gpu)
    workloads = {name: getattr(size, name) for name in WORKLOADS}
    longest = max(workload.longest for workload in workloads.values())
    setup.check_length(longest, "The longest prompt and answer of the workloads")
    lineup, servers = {row.name: row for _, row in rows}, Servers(setup.config())
    results: dict[str, Any] = {}
    with setup.running(len(rows) * len(workloads)) as steps:
        runner = Runner(size, lineup, servers, setup.shape.vocab_size, setup.seed, max_seconds=max_seconds, steps=steps)
        for lesson, row in rows:
            try:
                cells = runner.run(Experiment(row.name, WORKLOADS, (row.name,)))
            except KeyboardInterrupt:
                if not results:
                    raise
                break  # the report has the rows that are complete
            results[row.name] = {"title": row.title, "phase": lesson.number, "settings": dict(row.settings)}
            results[row.name] |= {name: cells[name][row.name] for name in WORKLOADS}
        add_gains(results)
        flags = {
            "configurations": list(results),
            "max_batch_size": size.max_batch_size,
            "max_seconds": max_seconds,
            "workloads": {name: asdict(each) | {"about": each.describe()} for name, each in workloads.items()},
        }
        return setup.report("-".join(["matrix", *(phases or ())]), servers.configs, flags, results)


def add_gains(results: dict[str, Any]) -> None:
    """Set each cell's gain over the first row's, and over that of the previous phase with defaults."""
    first, before, default = next(iter(results.values())), None, None
    for result in results.values():
        if not result["settings"]:
            before, default = default, result
        for name in WORKLOADS:
            speed = result[name][SPEED]
            result[name]["gain_over_first"] = ratio(speed, first[name][SPEED])
            result[name]["gain_over_previous"] = ratio(speed, before and before[name][SPEED])


def view(report: Report) -> View:
    """A report of `run_matrix`: a table and a group of bars for each workload."""
    columns = [NAME, TOKENS, Column("over the first", "gain_over_first", times)]
    columns.append(Column("over the phase before", "gain_over_previous", times))
    for key in ("time_to_first_token_ms", "inter_token_latency_ms"):
        columns.append(Column(f"{LATENCIES[key]}, P50 / P95 / P99 (ms)", key, percentiles))
    tables, groups, num_cut = [], [], 0
    for name, workload in report.flags["workloads"].items():
        rows = []
        for row, result in report.results.items():
            cut = " *" if result[name]["is_cut"] else ""
            num_cut += bool(cut)
            rows.append(result[name] | {"title": (row if result["settings"] else result["title"]) + cut})
        tables.append(Table(f"{workload['title']}: {workload['about']}", columns, rows))
        groups.append((workload["title"], [Bar(row["title"], row[SPEED], number(row[SPEED])) for row in rows]))
    notes = [f"* broken off after {report.flags['max_seconds']:g} s"] if num_cut else []
    title = f"Matrix: {report.model['name']} on {report.machine_title}"
    return View(title, subtitles(report), tables, notes, panels=[Bars("Output tokens a second", groups)])
