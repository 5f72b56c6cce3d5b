"""The ladder: what each phase gains on this machine, one row per phase. Introduced in phase 3.

A row compares a phase with its predecessor in the quantity that the phase is about (`benchmarks.rungs`). A count is
exact and made once. Times are measured in pairs: both engines are in memory and take turns, so that other programs
disturb both equally. A row whose pairs differ, or during which other programs used the processors, is measured once
more, and says so if that did not help. Invariant: at most the two engines of a row are in memory; the next row keeps
the one that it shares.
"""

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
"""A row's largest ratio over its smallest above which its pairs count as different."""
MOST_OTHERS = 0.25
"""The share of all processors that other programs may use during a row."""


class Others:
    """The processor time that other programs have used since this object was made."""

    def __init__(self) -> None:
        self.started, self.own, self.all = time.perf_counter(), time.process_time(), _busy_seconds()

    def share(self) -> float:
        """A share of all processors of the machine, from 0 to 1."""
        seconds = _busy_seconds() - self.all - (time.process_time() - self.own)
        return max(0.0, seconds / (time.perf_counter() - self.started) / (psutil.cpu_count() or 1))


def _busy_seconds() -> float:
    found = psutil.cpu_times()
    return sum(found) - found.idle - getattr(found, "iowait", 0.0) - getattr(found, "guest", 0.0)


def measure_ladder(
    model: str, *, phases: Sequence[str] | None = None, is_quick: bool = False, pairs: int = PAIRS, **where: Any
) -> Report:
    """A row for each rung of these phases, by default of all phases, that this machine and model have; ``is_quick``
    leaves out most that are timed, ``where`` is as `Setup` takes it.

    Raises ConfigError, RequestError, ModelFolderError or CapacityError before anything is computed.
    """
    setup = Setup(model, **where)
    check_least(pairs=(pairs, 1))
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
    with setup.running(sum(2 + (pairs if rung.is_timed else 1) for rung in rungs)) as steps:
        for rung in rungs:
            for unused in engines.keys() - {rung.before, rung.after}:
                del engines[unused]
                free_memory()
            try:
                for each in (rung.before, rung.after):
                    with steps.step(f"phase {rung.phase}, {rung.what}: load phase {each.phase}"):
                        engines[each] = engines.get(each) or each.load(setup)
            except ConfigError:  # the model's shape excludes it: for example, groups of 4 bits that do not divide a row
                continue
            configs[rung.name] = engines[rung.after].config
            results[rung.name] = measure_rung(rung, (engines[rung.before], engines[rung.after]), pairs, steps)
        flags = {"pairs": pairs, "is_quick": is_quick}
        return setup.report("ladder", configs, flags, results)


def measure_rung(rung: Rung, engines: tuple[Any, Any], pairs: int, steps: Steps) -> dict[str, Any]:
    """A row of the results: the medians before and after, their ratio, the trials, and how steady they were."""
    found = _measured(rung, engines, pairs, 0, steps)
    if rung.is_timed and not found["is_steady"]:
        steps.total += pairs
        found = _measured(rung, engines, pairs, pairs, steps)
    return {
        "what": rung.what,
        "phase_before": rung.before.phase,
        "less_is_better": rung.less_is_better,
        "is_timed": rung.is_timed,
    } | found


def _measured(rung: Rung, engines: tuple[Any, Any], pairs: int, first: int, steps: Steps) -> dict[str, Any]:
    others, trials = Others(), []
    for pair in range(first, first + (pairs if rung.is_timed else 1)):
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
    warnings = [
        f"! Phase {', '.join(dict.fromkeys(unsteady))}: measured twice, and the pairs still differ by more than "
        f"{STEADY}× or other programs used the processors. Run it again when the machine is idle."
    ]
    return View(
        f"Ladder: {report.model['name']} on {report.machine_title}, {report.flags['dtype']}",
        [
            f"Each phase beside the one before it. Times: medians of {report.flags['pairs']} pairs, in turns; counts "
            "are exact.",
            f"{report.date[:10]}",
        ],
        [Table("", columns, rows, lambda row: "" if row.get("is_steady", True) else "yellow")],
        notes=_absent(report),
        warnings=warnings if unsteady else [],
        panels=[Bars("How many times better", [("", bars)])],
    )


def _absent(report: Report) -> list[str]:
    """What is said about phases that have no timed row here."""
    if report.device.startswith("cuda"):
        return []
    return ["3.1, 6.1 and 9 make a GPU faster, so on a CPU their rows count what they change; 12.1 needs several GPUs."]
