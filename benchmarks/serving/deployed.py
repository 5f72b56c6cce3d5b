"""``infer deploy`` as a process of its own, for the benchmarks of replicas. Follows phase 11.

Invariant: Ray and all that it started are gone when the block ends.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch

from benchmarks.serving.http_load import MODEL, ROOT, START_SECONDS
from shared.errors import ConfigError

INFER = (sys.executable, "-c", "from shared.cli import app; app(prog_name='infer')")


@contextmanager
def deployed(folder: Path, options: Sequence[str]) -> Iterator[str]:
    """The URL of a model on replicas of the newest phase; ``options`` are those of ``infer deploy``.

    Raises ConfigError if it does not become ready.
    """
    command = [*INFER, "deploy", str(folder), "--served-model-name", MODEL, "--port", "0", *options]
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        with log.open("wb") as stderr:  # in its own session: Ctrl-C is for the benchmark, which then ends Ray
            null = subprocess.DEVNULL
            process = subprocess.Popen(
                command, env=environment(), stdout=null, stderr=stderr, cwd=ROOT, start_new_session=True
            )
        try:
            yield _url(process, log)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(START_SECONDS)


def environment() -> dict[str, str]:
    """Of a process that computes with as many threads as this one."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": paths}


def samples(url: str, name: str) -> dict[str, float]:
    """The values of a metric, by replica."""
    text = httpx.get(f"{url}/metrics", trust_env=False, timeout=START_SECONDS).text
    found = re.findall(rf'^{name}{{.*replica="(\w+)".*}} (\S+)$', text, re.MULTILINE)
    return {replica: float(value) for replica, value in found}


def _url(process: "subprocess.Popen[bytes]", log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"is served at (\S+)", log.read_text()):
            return found[1]
        time.sleep(0.1)
    said = log.read_text().strip().splitlines()
    raise ConfigError(f"infer deploy did not become ready: {said[-1] if said else 'it said nothing'}")
