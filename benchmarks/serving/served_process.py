"""A phase's server as a process of its own, and a trace against it. Introduced in phase 4.

The server is started as a user would start it, by ``python -m`` with the phase's package. When a request was scheduled
is read from its log, one line a request; forward passes from ``/debug/engine``. Invariant: the process computes with as
many threads as the benchmark does, and is gone when the block ends, whatever happened inside.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.serving.load_generator import generate_load
from benchmarks.serving.run import ServedRun
from benchmarks.workloads.serving import Trace
from shared.errors import ConfigError
from shared.lessons import Lesson

ROOT = Path(__file__).parents[2]
MODEL = "benchmarked"
START_SECONDS = 300.0
END_SECONDS = 30.0
NEEDED = ("fastapi", "uvicorn", "prometheus_client", "httpx")


class ServedProcess:
    """A server that is ready; see :func:`served`."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path, url: str, clients: int) -> None:
        self.process, self.log, self.url, self.clients = process, log, url, clients
        self.num_runs = 0

    def serve(self, trace: Trace) -> ServedRun:
        """Serve a trace over HTTP, with each request's queue wait as the server logged it."""
        self.num_runs += 1
        run_id = f"run{self.num_runs}"
        before = self._num_forwards()
        run = generate_load(self.url, MODEL, trace, self.clients, run_id)
        run.num_forwards = self._num_forwards() - before
        for line in events(self.log, "request"):
            owner, _, place = line["request_id"].rpartition("-")
            if owner == run_id and line.get("queue_s") is not None:
                request = run.requests[int(place)]
                request.scheduled = request.arrived + line["queue_s"]
        return run

    def _num_forwards(self) -> int:
        with httpx.Client(base_url=self.url, timeout=60, trust_env=False) as client:
            return int(client.get("/debug/engine").raise_for_status().json()["stats"]["forward passes"])


def check_can_serve() -> None:
    """Raise ConfigError where a package is missing that the server or its client needs."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise ConfigError(
            f"Serving over HTTP needs {', '.join(missing)}, not installed here; install the project with its "
            "dependencies, or name contenders and experiments without HTTP."
        )


@contextmanager
def served(lesson: Lesson, folder: Path, options: Sequence[str], clients: int | None = None) -> Iterator[ServedProcess]:
    """A server of the model in ``folder`` by a phase, with these options of its command ``serve``.

    Raises ConfigError, with what the server said last, if it does not become ready.
    """
    clients = clients or max(1, min(4, (os.cpu_count() or 1) // 4))
    command = [sys.executable, "-m", lesson.module_name, "serve", str(folder), "--log-format", "json"]
    command += ["--served-model-name", MODEL, "--port", "0", *options]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": paths}
    with tempfile.TemporaryDirectory() as scratch, _orderly_end():
        log = Path(scratch) / "log"
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,  # Ctrl-C is for the benchmark, which then ends the server
            )
        try:
            yield ServedProcess(process, log, _url(process, log), clients)
        finally:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def _orderly_end() -> Iterator[None]:
    """SIGTERM unwinds the block like any exit, so that no server is left without its parent."""
    if threading.current_thread() is not threading.main_thread():  # where signals cannot be had
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
