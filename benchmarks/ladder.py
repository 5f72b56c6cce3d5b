"""The ladder: what each phase gains on this machine, one row a phase. Introduced in phase 3.

A row compares a phase with its predecessor in the quantity that the phase is about (`benchmarks.rungs`). A count is
exact and made once. Times are measured in pairs: both engines are in memory and take turns, so that other programs
disturb both sides alike. A row whose pairs differ, or beside which other programs computed, is measured once more, and
then says so. Where the time is limited, rows have fewer pairs, which they say too. Invariant: at most the two engines
of a row are in memory; the next row keeps the one that it shares.
"""

import math
import statistics
import time
from collections.abc import Sequence
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

PAIRS = 3
STEADY = 1.5
"""The largest ratio of a row over its smallest, above which the pairs differ."""
MOST_OTHERS = 0.25
"""The share of all processors that other programs may use beside a row."""


class Others:
    """The processors that other programs have used since this was made."""

    def __init__(self) -> None:
        self.started, self.own, self.all = time.perf_counter(), time.process_time(), _busy_seconds()

    def share(self) -> float:
        """Of all processors of the machine, from 0 to 1."""
        seconds = _busy_seconds() - self.all - (time.process_time() - self.own)
        return max(0.0, seconds / (time.perf_counter() - self.started) / (psutil.cpu_count() or 1))


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
            "11.1 needs a trained adapter of the model, and 12.1 two GPUs"
            + ("; --quick leaves out most rows that are timed." if is_quick else ".")
        )
    engines: dict[Side, Any] = {}
    configs: dict[str, EngineConfig] = {}
    results: dict[str, Any] = {}
    late: list[str] = []
    with setup.running(sum(_num_steps(rung, pairs) for rung in rungs)) as steps:
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
                results[rung.name] = measure_rung(rung, both, pairs, steps, last)
        flags = {"pairs": pairs, "is_quick": is_quick, "seconds": seconds, "late": late}
        return setup.report("ladder", configs, flags, results)


def _num_steps(rung: Rung, pairs: int) -> int:
    """Steps of a row at most: two engines are loaded, and a timed row may be measured twice."""
    return 2 + (2 * pairs if rung.is_timed else 1)


def measure_rung(
    rung: Rung, engines: tuple[Any, Any], pairs: int, steps: Steps, last: float = math.inf
) -> dict[str, Any]:
    """A row of the results: the medians before and after, their ratio, the trials, and how steady they were. No pair
    but the first begins after the moment ``last``."""
    found = _measured(rung, engines, range(pairs), steps, last)
    if rung.is_timed and not found["is_steady"] and time.perf_counter() < last:
        found = _measured(rung, engines, range(pairs, 2 * pairs), steps, last)
    return {
        "what": rung.what,
        "phase_before": rung.before.phase,
        "less_is_better": rung.less_is_better,
        "is_timed": rung.is_timed,
    } | found


def _measured(rung: Rung, engines: tuple[Any, Any], pairs: range, steps: Steps, last: float) -> dict[str, Any]:
    others, trials = Others(), list[tuple[float, float]]()
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
    spread, share = gains[-1] / gains[0], others.share()
    steady = {"gains": [rounded(gains[0]), rounded(gains[-1])], "others": rounded(share)}
    return found | steady | {"is_steady": spread <= STEADY and share <= MOST_OTHERS}


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
        text("phases", lambda row: f"{row['phase_before']} → {row['phase']}"),
        text("what changes", "what"),
        Column("before", value("before"), form=str),
        Column("after", value("after"), form=str),
        Column("gain", "gain", times),
        Column("of the pairs", spread, form=str),
    ]
    bars = [
        Bar(f"{row['phase']} {row['what']}", row["gain"], times(row["gain"])) for row in rows if row["gain"] is not None
    ]
    unsteady = [row["phase"] for row in rows if not row.get("is_steady", True)]
    short = [row["phase"] for row in rows if row["is_timed"] and len(row["trials"]) < report.flags["pairs"]]
    said = {
        f"the pairs differ by more than {STEADY}×, or other programs used the processors. Run it again when the "
        "machine is idle.": unsteady,
        f"the time was over before all {report.flags['pairs']} pairs were measured.": short,
    }
    warnings = [f"! Phase {', '.join(dict.fromkeys(phases))}: {why}" for why, phases in said.items() if phases]
    warnings += [f"! The time was over before {row} began." for row in report.flags["late"]]
    return View(
        f"Ladder: {report.model['name']} on {report.machine_title}, {report.flags['dtype']}",
        [
            f"Each phase beside the one before it. Times: medians of {report.flags['pairs']} pairs, in turns; counts "
            "are exact.",
            f"{report.date[:10]}",
        ],
        [Table("", columns, rows, lambda row: "" if row.get("is_steady", True) else "yellow")],
        notes=_absent(report),
        warnings=warnings,
        panels=[Bars("How many times better", [("", bars)])],
    )


def _absent(report: Report) -> list[str]:
    """What is said of phases that have no row of times here."""
    if report.device.startswith("cuda"):
        return []
    return ["3.1, 6.1 and 9 make a GPU faster, so on a CPU their rows count what they change; 12.1 needs several GPUs."]
