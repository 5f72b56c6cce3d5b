"""What a run may use, kept against real processes that want more; and a process that may not reach the network.

Limits on one allocation, a file and the number of processes are kept in tests/integration/test_classroom.py.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import tutorial.workshop.limits as limits_module
from tests.waiting import PATIENCE, wait_until
from tutorial.workshop.check import RunEndedError
from tutorial.workshop.limits import Limits, Watch, end_processes

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SMALL = Limits(seconds=0.4, memory=0.25)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes of a test, each in a group of its own, ended with it."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    end_processes("INFER_WORKSPACE", str(tmp_path))


def start(
    processes: list[subprocess.Popen[bytes]], code: str, folder: Path, limits: Limits = SMALL
) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "INFER_WORKSPACE": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=partial(limits.apply, 1),
    )
    processes.append(process)
    return process


def watched(process: subprocess.Popen[bytes], watch: Watch, record: Path) -> str:
    """Look at a process until the watch says why it must end."""
    reasons: list[str] = []

    def must_end() -> bool:
        try:
            watch(process.pid, record)
        except RunEndedError as reason:
            reasons.append(str(reason))
        return bool(reasons) or process.poll() is not None

    wait_until(must_end)
    assert reasons, f"ended by itself: {process.stderr.read().decode()}"
    return reasons[0]


def test_processor_time_ends_a_process_that_is_not_watched(
    started: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits_module, "SECONDS_TO_START", 0.0)
    monkeypatch.setattr(limits_module, "GRACE", 0.0)
    code = "import collections, itertools; collections.deque(itertools.repeat(0), maxlen=0)"
    process = start(started, code, tmp_path, Limits(seconds=0.5, memory=1.0))
    assert process.wait(PATIENCE) < 0


HOLDS_MUCH = """
import os, time
block = bytearray(100 << 20)
for _ in range(2): os.fork()
block[::4096] = block[::4096]
time.sleep(600)
"""


def test_the_memory_of_processes_counts_together(started: list, tmp_path: Path) -> None:
    process = start(started, HOLDS_MUCH, tmp_path)
    reason = watched(process, Watch(Limits(60, 0.25), threading.Event()), tmp_path / "record")
    assert reason.endswith("GiB, more than 0.25")


def test_a_test_may_take_its_time_and_no_more(started: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time since the last test counts, not since the start."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(limits_module, "time", clock)
    process = start(started, "import time; time.sleep(600)", tmp_path)
    watch = Watch(Limits(seconds=1.0, memory=8), threading.Event())
    record = tmp_path / "record"
    for num_tests in range(1, 5):
        record.write_text(num_tests * "line\n")
        watch(process.pid, record)
        clock.now += 0.9
        watch(process.pid, record)
    clock.now += 0.2
    with pytest.raises(RunEndedError, match=r"^a test had not ended after 1 s$"):
        watch(process.pid, record)


def test_loading_has_a_limit_of_its_own_and_an_interruption_needs_none(
    started: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits_module, "SECONDS_TO_START", 0.1)
    process, stop = start(started, "import time; time.sleep(600)", tmp_path), threading.Event()
    watch = Watch(Limits(seconds=0.01, memory=8), stop)
    assert watched(process, watch, tmp_path / "record") == "its modules were not loaded after 0.1 s"
    stop.set()
    assert watched(process, watch, tmp_path / "record") == "the grading was interrupted"


def test_a_process_that_left_its_group_and_parent_is_ended(started: list, tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "open('pid', 'w').write(str(child.pid))"
    )
    process = start(started, code, tmp_path, Limits())
    assert process.wait(PATIENCE) == 0
    stray = psutil.Process(int((tmp_path / "pid").read_text()))
    assert stray.is_running()
    end_processes("INFER_WORKSPACE", str(tmp_path))
    stray.wait(PATIENCE)
    assert not psutil.pid_exists(stray.pid)


def test_without_a_network_only_this_machine_can_be_reached() -> None:
    program = """
import tutorial.workshop.offline, socket, urllib.request
for reach in (
    lambda: socket.create_connection(("192.0.2.1", 80), timeout=1),
    lambda: socket.getaddrinfo("example.org", 443),
    lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.1", 9)),
    lambda: urllib.request.urlopen("http://192.0.2.1/"),
):
    try:
        reach()
    except OSError as error:  # urllib wraps what it gets
        assert "this runs without a network" in str(error), error
    else:
        raise AssertionError("not refused")
for host in ("127.0.0.1", "localhost"):
    server = socket.create_server((host, 0))
    socket.create_connection(server.getsockname())
ours, theirs = socket.socketpair()
ours.send(b"x")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
