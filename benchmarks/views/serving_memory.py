"""Tables and notes of the experiments on memory. Introduced in phase 6.

Invariant: everything shown is read from the report; nothing is measured or recomputed here.
"""

from typing import Any

from benchmarks.report import Report
from benchmarks.views.ladder import figure
from benchmarks.views.table import NOTHING, Row, Shown, count, percent


def memory_tables(report: Report) -> list[Shown]:
    """Of ``capacity`` and ``whole-step``, whichever were run."""
    about = report.flags["workloads"]
    found: list[Shown] = []
    if capacity := report.results.get("capacity"):
        entry = about["capacity"]
        memory = f"{capacity['kv_tokens']:,} tokens of KV memory ({capacity['kv_bytes'] / 1e6:,.1f} MB) for each"
        heading = f"{entry['title']}: {memory}; {entry['about']}"
        found += [(heading, *_held(_runs(capacity))), ("Capacity: what it costs", *_costs(_runs(capacity)))]
    if whole := report.results.get("whole_step"):
        heading = f"Whole step: {about['w2']['about']}, memory for all, {report.flags['trials']} trials in turns"
        found.append((heading, *_medians(whole)))
    return found


def memory_notes(report: Report) -> list[str]:
    """What the ratios say."""
    found = []
    if capacity := report.results.get("capacity"):
        slots = [capacity[name]["title"].partition(" (")[0] for name in ("wide_slots", "tight_slots")]
        for name in _in_blocks(capacity):
            peaks, speeds = (
                [_times(capacity[f"{name}_over_{of}_{what}"]) for of in ("wide_slots", "tight_slots")]
                for what in ("peak", "throughput")
            )
            found.append(
                f"At the peak {capacity[name]['title']} hold {peaks[0]} the requests that {slots[0]} hold in the same "
                f"memory, and {peaks[1]} those of {slots[1]}; while requests wait they give {speeds[0]} and "
                f"{speeds[1]} the tokens a second."
            )
    if whole := report.results.get("whole_step"):
        for name in _in_blocks(whole):
            found.append(
                f"With memory for all, {whole[name]['title']} gives {_times(whole[f'{name}_over_continuous'])} the "
                f"tokens of {whole['continuous']['title']} (median of {report.flags['trials']} trials)."
            )
    return found


def _runs(experiment: dict[str, Any]) -> list[dict[str, Any]]:
    return [run for run in experiment.values() if isinstance(run, dict)]


def _in_blocks(experiment: dict[str, Any]) -> list[str]:
    return [name for name in ("paged", "newest") if name in experiment]


def _held(runs: list[dict[str, Any]]) -> tuple[Row, list[Row]]:
    columns = ["", "at a time, peak", "mean", "batch of up to", "memory written", "tokens/s while requests wait"]
    rows = [
        [
            run["title"],
            count(run["peak_concurrent"]),
            figure(run["mean_concurrent"]),
            count(run["max_batch_size"]),
            percent(run["saturated_kv_utilisation"]),
            figure(run["saturated_tokens_per_second"]),
        ]
        for run in runs
    ]
    return columns, rows


def _costs(runs: list[dict[str, Any]]) -> tuple[Row, list[Row]]:
    columns = ["", "failed", "preemptions", "tokens recomputed", "tokens computed", "ms/step", "tokens/s, whole trace"]
    rows = [
        [
            run["title"],
            *(count(run[key]) for key in ("num_errors", "preemptions", "tokens_recomputed", "tokens_computed")),
            figure(run["mean_step_ms"]),
            figure(run["output_tokens_per_second"]),
        ]
        for run in runs
    ]
    return columns, rows


def _medians(whole: dict[str, Any]) -> tuple[Row, list[Row]]:
    columns = ["", "tokens/s, median", "over slots", "tokens/s of each trial"]
    rows = [
        [
            whole[name]["title"],
            figure(whole[name]["tokens_per_second_median"]),
            NOTHING if name == "continuous" else _times(whole[f"{name}_over_continuous"]),
            " / ".join(map(figure, whole[name]["tokens_per_second_trials"])),
        ]
        for name in ("continuous", *_in_blocks(whole))
    ]
    return columns, rows


def _times(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}×"
