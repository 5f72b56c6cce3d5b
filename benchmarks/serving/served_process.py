"""A phase's server as a process of its own, and a trace against it. Introduced in phase 4.

The server is started as a user would start it, by ``python -m`` with the phase's package. When a request was scheduled
is read from its log, one line a request. Invariant: the process computes with as many threads as the benchmark does,
and is gone when the block ends, whatever happened inside.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.serving.load_generator import generate_load
from benchmarks.serving.run import ServedRun
from benchmarks.workloads.serving import Trace
from shared.errors import ConfigError
from shared.lessons import Lesson

ROOT = Path(__file__).parents[2]
MODEL = "benchmarked"
START_SECONDS = 300.0


@dataclass
class ServedProcess:
    """A server that is ready; see :func:`served`."""

    pid: int
    log: Path
    url: str
    num_runs: int = 0

    def serve(self, trace: Trace) -> ServedRun:
        """Serve a trace over HTTP, with each request's queue wait as the server logged it."""
        self.num_runs += 1
        run = asyncio.run(generate_load(self.url, MODEL, trace, f"run{self.num_runs}"))
        for _attempt in range(500):  # a line may be written a moment after the end of its stream
            for line in events(self.log, "request"):
                owner, _, place = line["request_id"].rpartition("-")
                if owner == f"run{self.num_runs}" and line.get("queue_s") is not None:
                    request = run.requests[int(place)]
                    request.scheduled = request.arrived + line["queue_s"]
            if all(request.scheduled is not None for request in run.finished):
                break
            time.sleep(0.01)
        return run


@contextmanager
def served(lesson: Lesson, folder: Path, options: Sequence[str]) -> Iterator[ServedProcess]:
    """A server of the model in ``folder`` by a phase, with these options of its command ``serve``.

    SIGTERM ends the block like any exception. Raises ConfigError, with the last line of the server's log, if it does
    not become ready.
    """
    command = [sys.executable, "-m", lesson.module_name, "serve", str(folder), "--log-format", "json"]
    command += ["--served-model-name", MODEL, "--port", "0", *options]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": paths}
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        with log.open("wb") as stderr:  # in its own session: Ctrl-C is for the benchmark, which then ends the server
            null = subprocess.DEVNULL
            process = subprocess.Popen(command, env=environment, stdout=null, stderr=stderr, start_new_session=True)
        try:
            yield ServedProcess(process.pid, log, _url(process, log))
        finally:
            signal.signal(signal.SIGTERM, before)
            process.kill()
            process.wait()


def events(log: Path, name: str) -> list[dict[str, Any]]:
    """The log's lines about one kind of event; a line that is being written is left out."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}\n")]
    return [line for line in found if line["event"] == name]


def _url(process: "subprocess.Popen[bytes]", log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if ready := events(log, "ready"):
            return str(ready[0]["url"])
        time.sleep(0.05)
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    why = said[-1] if said else f"it said nothing in {START_SECONDS:.0f} s"
    raise ConfigError(f"The server did not become ready: {why}")
