"""The ladder: what each phase gains on this machine, one row per phase. Introduced in phase 3.

A row compares a phase with its predecessor in the quantity that the phase is about (`benchmarks.rungs`). A count is
exact and made once. Times are measured in pairs: both engines are in memory, compute with as many threads as other
programs leave, and take turns, so that those programs disturb both sides alike. A row whose pairs differ, or beside
which other programs used its processors, is measured once more, and then says so. Where the time is limited, rows have
fewer pairs, which they say too. Invariant: at most the two engines of a row are in memory; the next row keeps the one
that it shares.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil

from benchmarks.contenders import generating_lessons
from benchmarks.report import Report, rounded
from benchmarks.rungs import RUNGS, Rung, Side
from benchmarks.setup import Setup, check_least, free_memory
from benchmarks.timing import Steps
from benchmarks.view import Bar, Bars, Column, Row, Table, View, text, times
from shared.engine.config import EngineConfig
from shared.errors import ConfigError
from shared.lessons import find_lesson
from shared.loading.cpu_threads import fixed_threads, most_threads

PAIRS = 3
STEADY = 1.5
"""The largest ratio of a row over its smallest, above which the pairs differ."""
MOST_SHARED = 0.25
"""The share of a row's processors that other programs may use."""
LEAST_SECONDS = 0.25
"""The shortest time over which the use of processors is known: the system counts it in ticks of 0.01 s."""


class Others:
    """The processor time that other programs have used since this object was made."""

    def __init__(self) -> None:
        self.started, self.own, self.all = time.perf_counter(), time.process_time(), _busy_seconds()

    def left(self) -> float | None:
        """How many processors of the machine they left; None if this object was made less than `LEAST_SECONDS` ago."""
        if (elapsed := time.perf_counter() - self.started) < LEAST_SECONDS:
            return None
        seconds = _busy_seconds() - self.all - (time.process_time() - self.own)
        return (psutil.cpu_count() or 1) - max(0.0, seconds / elapsed)


class Threads:
    """How many threads the engines of a row compute with, from ``least`` to ``most``."""

    def __init__(self, least: int, most: int, fix: Callable[[int], None]) -> None:
        self.least, self.most, self.fix, self.others = least, most, fix, Others()
        self.number = most

    def choose(self) -> int:
        """As many as other programs have left processors since the last call; after a moment, as many as before."""
        if (left := self.others.left()) is not None:
            self.number = max(self.least, min(self.most, round(left)))
        self.fix(self.number)
        self.others = Others()
        return self.number

    def shared(self) -> float:
        """The share of the chosen number of processors that other programs have used since `choose`."""
        return 0.0 if (left := self.others.left()) is None else max(0.0, 1 - left / self.number)


def _busy_seconds() -> float:
    found = psutil.cpu_times()
    return sum(found) - found.idle - getattr(found, "iowait", 0.0) - getattr(found, "guest", 0.0)


def measure_ladder(
    model: str,
    *,
    phases: Sequence[str] | None = None,
    is_quick: bool = False,
    pairs: int = PAIRS,
    seconds: float | None = None,
    **where: Any,
) -> Report:
    """A row for each rung of these phases, by default of all, that this machine and model have.

    Args:
        is_quick: leave out most rows that are timed.
        seconds: after so many, no row and no further pair of a row begins; the first row has one pair in any case.
        where: as `Setup` takes it.

    Raises ConfigError, RequestError, ModelFolderError or CapacityError before anything is computed.
    """
    last = math.inf if seconds is None else time.perf_counter() + seconds
    setup = Setup(model, **where)
    check_least(pairs=(pairs, 1), seconds=(seconds, 0))
    asked = {lesson.number for lesson in generating_lessons(phases)}
    setup.check_memory(2, "close other programs")
    rungs = [
        rung
        for rung in RUNGS
        if rung.phase in asked and rung.fits(setup) and (rung.is_quick or not rung.is_timed or not is_quick)
    ]
    if not rungs:
        raise ConfigError(
            f"The ladder has no row for phase {', '.join(sorted(asked))} on this machine: phase 02 is where it begins, "
            "11.1 needs a trained adapter of the model, and 12.1 a CPU or two GPUs"
            + ("; --quick leaves out most rows that are timed." if is_quick else ".")
        )
    engines: dict[Side, Any] = {}
    configs: dict[str, EngineConfig] = {}
    results: dict[str, Any] = {}
    late: list[str] = []
    with setup.running(sum(_num_steps(rung, pairs) for rung in rungs)) as steps, fixed_threads() as fix:
        most = setup.threads or most_threads()
        is_fixed = setup.is_gpu or "OMP_NUM_THREADS" in os.environ  # then no model chooses
        threads = Threads(most if is_fixed else 1, most, fix)
        for rung in rungs:
            if results and time.perf_counter() >= last:
                late.append(f"{rung.phase} {rung.what}")
                continue
            for unused in engines.keys() - {rung.before, rung.after}:
                del engines[unused]
                free_memory()
            with steps.part(_num_steps(rung, pairs)):
                try:
                    for each in (rung.before, rung.after):
                        with steps.step(f"phase {rung.phase}, {rung.what}: load phase {each.phase}"):
                            engines[each] = engines.get(each) or each.load(setup)
                except ConfigError:  # the model's shape excludes it: groups of 4 bits that do not divide a row, say
                    continue
                configs[rung.name] = engines[rung.after].config
                both = engines[rung.before], engines[rung.after]
                results[rung.name] = measure_rung(rung, both, pairs, steps, threads, last)
        flags = {"pairs": pairs, "is_quick": is_quick, "seconds": seconds, "late": late}
        return setup.report("ladder", configs, flags, results)


def _num_steps(rung: Rung, pairs: int) -> int:
    """Steps of a row at most: two engines are loaded, and a timed row may be measured twice."""
    return 2 + (2 * pairs if rung.is_timed else 1)


def measure_rung(
    rung: Rung, engines: tuple[Any, Any], pairs: int, steps: Steps, threads: Threads, last: float = math.inf
) -> dict[str, Any]:
    """A row of the results: the medians before and after, their ratio, the trials, and how steady they were. No pair
    but the first begins after the moment ``last``; a repetition that ends there too early is not used."""
    found = _measured(rung, engines, range(pairs), steps, threads, last)
    if rung.is_timed and not found["is_steady"] and time.perf_counter() < last:
        again = _measured(rung, engines, range(pairs, 2 * pairs), steps, threads, last)
        if len(again["trials"]) == pairs:  # a few pairs agree more easily, and say less
            found = again
    return {
        "what": rung.what,
        "phase_before": rung.before.phase,
        "less_is_better": rung.less_is_better,
        "is_timed": rung.is_timed,
    } | found


def _measured(
    rung: Rung, engines: tuple[Any, Any], pairs: range, steps: Steps, threads: Threads, last: float
) -> dict[str, Any]:
    number = threads.choose()
    trials: list[tuple[float, float]] = []
    for pair in pairs if rung.is_timed else pairs[:1]:
        if trials and time.perf_counter() >= last:
            break
        with steps.step(f"phase {rung.phase}, {rung.what}" + (f": pair {pair + 1}" if rung.is_timed else "")):
            trials.append(rung.measured(engines, pair))
    before, after = (statistics.median(each) for each in zip(*trials, strict=True))
    ratios = [rung.gain(*each) for each in trials]
    gains = sorted(each for each in ratios if each is not None)
    found = {
        "before": rounded(before),
        "after": rounded(after),
        "gain": rounded(statistics.median(gains)) if gains else None,
        "trials": [[rounded(a), rounded(b)] for a, b in trials],
    }
    if not rung.is_timed:
        return found
    shared = threads.shared()
    is_steady = gains[-1] / gains[0] <= STEADY and shared <= MOST_SHARED
    ends = [rounded(gains[0]), rounded(gains[-1])]
    return found | {"gains": ends, "threads": number, "shared": rounded(shared), "is_steady": is_steady}


def view(report: Report) -> View:
    """One table, and the gains as bars."""
    rungs = {rung.name: rung for rung in RUNGS if rung.name in report.results}
    forms = {(rung.name, rung.what): rung.form for rung in RUNGS}
    rows: list[Row] = [
        {"name": name, "title": find_lesson(rungs[name].phase).title, "phase": rungs[name].phase} | result
        for name, result in report.results.items()
    ]

    def value(key: str) -> Any:
        return lambda row: forms[row["name"], row["what"]](row[key])

    def spread(row: Row) -> str:
        if not row["is_timed"]:
            return "exact"
        lowest, highest = row["gains"]
        return f"{lowest:.2f} to {highest:.2f}" + ("" if row["is_steady"] else " !")

    columns = [
        text("phase", lambda row: f"{row['phase']} {row['title']}"),
        text("what is measured", "what"),
        Column("before", value("before"), form=str),
        Column("after", value("after"), form=str),
        Column("gain", "gain", times),
        Column("spread", spread, form=str),
    ]
    bars = [
        Bar(f"{row['phase']} {row['what']}", row["gain"], times(row["gain"])) for row in rows if row["gain"] is not None
    ]
    timed = [row for row in rows if row["is_timed"]]
    unsteady = [row for row in timed if not row["is_steady"]]
    num_pairs, most = report.flags["pairs"], report.flags["threads"]
    said = {
        "other programs used the processors meanwhile, so the gain on an idle machine may be another.": [
            row for row in unsteady if row["shared"] > MOST_SHARED
        ],
        f"the pairs differ by more than {STEADY}×.": [
            row for row in unsteady if row["gains"][1] / row["gains"][0] > STEADY
        ],
        f"the time was over before all {num_pairs} pairs were measured.": [
            row for row in timed if len(row["trials"]) < num_pairs
        ],
    }
    warnings = [
        f"! Phase {', '.join(dict.fromkeys(row['phase'] for row in found))}: {why}"
        for why, found in said.items()
        if found
    ]
    warnings += [f"! The time was over before {row} began." for row in report.flags["late"]]
    return View(
        f"Ladder: {report.model['name']} on {report.machine_title}, {report.flags['dtype']}",
        [
            f"Each phase beside the one before it. Times: medians of {num_pairs} pairs, in turns; counts are exact.",
            f"{report.date[:10]}",
        ],
        [Table("", columns, rows, lambda row: "" if row.get("is_steady", True) else "yellow")],
        notes=[*_shared(timed, most), *_absent(report)],
        warnings=warnings,
        panels=[Bars("How many times better", [("", bars)])],
    )


def _shared(timed: Sequence[Row], most: int) -> list[str]:
    """What is said of rows that had fewer threads than an idle machine gives."""
    return [
        f"Phase {', '.join(dict.fromkeys(row['phase'] for row in timed if row['threads'] == number))}: timed with "
        f"{number} of {most} threads, because other programs used the other processors."
        for number in sorted({row["threads"] for row in timed if row["threads"] < most})
    ]


def _absent(report: Report) -> list[str]:
    """What is said about phases that have no timed row here."""
    if report.device.startswith("cuda"):
        return []
    return ["3.1, 6.1, 9 and 12.1 make GPUs faster, so on a CPU their rows count what they change."]
