"""A plugin for runs on a GPU that must end in time: each failure at once, and a summary whatever happens.

    pytest -p tests.gpu_run --seconds 480 --summary gpu.json -m "gpu and not measured" -n 8 --dist worksteal

When the time is up the processes are ended, and the summary still says what passed, what failed, what ran and what was
not reached. The summary as JSON carries the commit, the machine and the versions.

Invariant: between two tests a process caches little memory of the GPU, since eight of them share it.
"""

import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks.machine import describe_machine, machine_title

TIME_IS_UP = 7
"""The exit status of a run that did not finish; pytest's own end at 5."""
MOST_SLOWEST = 20
MOST_KEPT = 2**30  # bytes that PyTorch may cache between two tests: to look for garbage takes a while


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("runs on a GPU")
    group.addoption("--seconds", type=float, metavar="N", help="end the run after so many seconds, with a summary")
    group.addoption("--summary", type=Path, metavar="FILE.json", help="write the summary, and beside it a table")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the process that hears of all tests
        config.option.no_summary = True  # failures have been shown
        config.pluginmanager.register(GpuRun(config), "gpu-run")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > MOST_KEPT:
        gc.collect()
        torch.cuda.empty_cache()


class GpuRun:
    """What became of each test so far."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.started = config, time.monotonic()
        self.collected: list[str] = []
        self.outcomes: dict[str, str] = {}
        self.seconds: Counter[str] = Counter()
        self.running: dict[str, None] = {}
        self.failures: dict[str, str] = {}
        self.skipped: Counter[str] = Counter()
        self.lock, self.is_reported = threading.Lock(), False
        if config.option.seconds is not None:
            timer = threading.Timer(config.option.seconds, self.end)
            timer.daemon = True
            timer.start()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collected = [item.nodeid for item in session.items] or self.collected

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self.collected = list(ids)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.running[nodeid] = None

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.running.pop(nodeid, None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Set-up, test and tear-down report in turn; a failure is not overwritten."""
        self.seconds[report.nodeid] += report.duration
        if self.outcomes.get(report.nodeid) != "failed" and (report.when == "call" or not report.passed):
            self.outcomes[report.nodeid] = report.outcome
        if report.skipped:
            self.skipped[report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)] += 1
        elif report.failed:
            self.failures[report.nodeid] = without_paths(report.longreprtext)
            self.show(f"\nFAILED {report.nodeid}\n{report.longreprtext}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.outcomes[report.nodeid] = "failed"
            self.failures[report.nodeid] = without_paths(report.longreprtext)
            self.show(f"\nFAILED to collect {report.nodeid}\n{report.longreprtext}")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        self.report()

    def end(self) -> None:
        """The time is up: report, and end this process and its workers, whatever they do."""
        self.report()
        for process in psutil.Process().children(recursive=True):
            process.kill()
        os._exit(TIME_IS_UP)

    def report(self) -> None:
        """Show the summary and write it, once."""
        with self.lock:
            if self.is_reported:
                return
            self.is_reported = True
            summary = self.summary()
            counts = ", ".join(f"{count} {outcome}" for outcome, count in summary["counts"].items())
            lines = [f"\n{counts} in {summary['seconds']} s"]
            lines += [f"{seconds:7.1f} s {test}" for test, seconds in summary["slowest"].items()]
            for kind in ("failed", "running", "not_reached"):
                lines += [f"{kind.replace('_', ' ')}: {test}" for test in summary[kind]]
            self.show("\n".join(lines))
            if (path := self.config.option.summary) is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
                path.with_suffix(".md").write_text(page(summary), encoding="utf-8")

    def summary(self) -> dict[str, Any]:
        """Counts and names of tests, what they ran on, and how long the slowest took; with the fields of a report."""
        outcomes, running = dict(self.outcomes), list(self.running)
        met = {*outcomes, *running}
        not_reached = [test for test in self.collected if test not in met]
        counts = Counter(outcomes.values())
        options = describe_machine()
        return {
            "name": "gpu suite",
            "model": {},
            "engines": {},
            "machine_title": machine_title("cuda" if torch.cuda.is_available() else "cpu"),
            "commit": commit(),
            "versions": options.pop("versions"),
            "machine": options,
            "seconds": round(time.monotonic() - self.started, 1),
            "limit_seconds": self.config.option.seconds,
            "selection": self.config.option.markexpr,
            "processes": getattr(self.config.option, "numprocesses", None) or 1,
            "counts": {
                **{outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")},
                "running": len([test for test in running if test not in outcomes]),
                "not reached": len(not_reached),
            },
            "failed": dict(self.failures),
            "skipped": dict(self.skipped),
            "running": running,
            "not_reached": not_reached,
            "slowest": {test: round(seconds, 1) for test, seconds in self.seconds.most_common(MOST_SLOWEST)},
        }

    def show(self, text: str) -> None:
        """Print at once, past what pytest captures."""
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        with self.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
            reporter.write_line(text)
            reporter.flush()


def page(summary: dict[str, Any]) -> str:
    """A summary in Markdown, without its failures."""
    counts, slowest = summary["counts"], summary["slowest"]
    return "\n".join(
        [
            f"# GPU suite on {summary['machine_title']}\n",
            f"Commit `{summary['commit']}`, tests marked `{summary['selection']}`, {summary['processes']} processes, "
            f"{summary['seconds']} s\n",
            f"| {' | '.join(counts)} |",
            f"|{'---:|' * len(counts)}",
            f"| {' | '.join(f'{count:,}' for count in counts.values())} |\n",
            "| seconds | slowest tests |",
            "|---:|---|",
            *(f"| {seconds} | `{test}` |" for test, seconds in slowest.items()),
            "",
        ]
    )


def without_paths(text: str) -> str:
    """A failure's text, with files named from the folder of the run or of their package: a report holds no path."""
    for folder in sorted({os.getcwd(), *filter(os.path.isabs, sys.path)}, key=len, reverse=True):
        text = text.replace(f"{folder}/", "")
    return text


def commit() -> str | None:
    """INFER_COMMIT, for a copy of a tree; else the commit of the repository, with ``-dirty`` if files differ."""
    if given := os.environ.get("INFER_COMMIT"):
        return given
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None
