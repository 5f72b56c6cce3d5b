"""The server that forks for each run of pytest: what a run gets, how it ends, and that nothing of it is left."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import psutil
import pytest

from tests.waiting import PATIENCE, wait_until
from tutorial.workshop.fork_server import IS_SUPPORTED, ForkedProcess, ForkServer

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not IS_SUPPORTED, reason="needs Linux")]
ROOT = Path(__file__).parents[2]
SLEEPS = "import time; time.sleep(600)"
ESCAPES = """
import os, pathlib, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        pathlib.Path("escaping").write_text(str(os.getpid()))
        os.rename("escaping", "escaped")
        time.sleep(600)
    os._exit(0)
while not pathlib.Path("escaped").exists():
    time.sleep(0.01)
"""
Start = Callable[..., ForkedProcess]


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    made = ForkServer(["torch", "psutil", "no_such_package"], {**os.environ, "ONLY": "the server's"})
    yield made
    made.close()


@pytest.fixture
def printed() -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as file:
        yield file


@pytest.fixture
def start(server: ForkServer, printed: IO[bytes], tmp_path: Path) -> Iterator[Start]:
    """Run one test of this body, in a folder of its own; it is ended with this test."""
    runs = []

    def started(body: str, before: Callable[[], None] | None = None, **environment: str) -> ForkedProcess:
        run = server.start(arguments(tmp_path, body), {"HOME": "/", **environment}, printed.fileno(), before)
        runs.append(run)
        return run

    yield started
    for run in runs:
        run.end()


def arguments(folder: Path, body: str) -> list[str]:
    file = folder / f"test_run_{len(list(folder.glob('test_*')))}.py"
    text = textwrap.indent(f"import os; os.chdir({str(folder)!r})\n{body}", "    ")
    file.write_text(f"def test_it():\n{text}\n")
    return ["-q", "-s", "-p", "no:cacheprovider", "--rootdir", str(folder), "-c", os.devnull, str(file)]


def text_of(printed: IO[bytes]) -> str:
    printed.seek(0)
    return printed.read().decode(errors="replace")


def test_a_run_has_its_own_environment_output_and_result(start: Start, printed: IO[bytes]) -> None:
    body = 'assert os.environ["MINE"] == "a run\'s"; assert "ONLY" not in os.environ; os.write(1, b"\\xff\\x00 said")'
    assert start(body, MINE="a run's").wait(PATIENCE) == 0
    assert "\ufffd\x00 said" in text_of(printed)
    assert "1 passed" in text_of(printed)
    assert start("assert False").wait(PATIENCE) == 1


def test_a_fork_begins_with_others_packages_and_none_of_this_project_s(start: Start, printed: IO[bytes]) -> None:
    body = """
    import sys
    assert {"torch", "psutil"} <= set(sys.modules)
    ours = {name.partition(".")[0] for name in sys.modules} & {"shared", "phases", "benchmarks", "tests", "conftest"}
    assert not ours
    assert not [name for name in sys.modules if name.startswith("tutorial.") and name != "tutorial.workshop"]
    assert len(os.listdir("/proc/self/task")) == 1
    assert not sys.modules["torch"].cuda.is_initialized()
    """
    assert start(textwrap.dedent(body)).wait(PATIENCE) == 0, text_of(printed)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("os._exit(7)", 7),
        ("os.abort()", -signal.SIGABRT),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("os.kill(os.getppid(), 9); import time; time.sleep(600)", -signal.SIGKILL),  # the supervisor
    ],
)
def test_a_run_that_ends_itself_says_how(start: Start, body: str, code: int) -> None:
    run = start(body)
    assert run.wait(PATIENCE) == code
    run.end()
    wait_until(lambda: not psutil.pid_exists(run.pid))


def test_a_run_that_hangs_is_ended_with_all_that_it_started(start: Start, tmp_path: Path) -> None:
    run = start(f"{ESCAPES}\n{SLEEPS}")
    with pytest.raises(subprocess.TimeoutExpired):
        run.wait(0.1)
    wait_until((tmp_path / "escaped").exists)
    escaped = int((tmp_path / "escaped").read_text())
    assert psutil.pid_exists(escaped)
    run.end()
    assert run.wait() == -signal.SIGKILL
    assert not psutil.pid_exists(escaped)
    assert not psutil.pid_exists(run.pid)


def test_a_run_that_passes_leaves_no_process(start: Start, tmp_path: Path) -> None:
    assert start(ESCAPES).wait(PATIENCE) == 0
    assert not psutil.pid_exists(int((tmp_path / "escaped").read_text()))


def test_runs_at_the_same_time_do_not_wait_for_each_other(start: Start) -> None:
    first = start(SLEEPS)
    assert start("pass").wait(PATIENCE) == 0
    with pytest.raises(subprocess.TimeoutExpired):
        first.wait(0)


def test_a_server_that_was_killed_is_started_again(server: ForkServer, start: Start) -> None:
    assert start("pass").wait(PATIENCE) == 0
    assert server._process is not None
    server._process.kill()
    server._process.wait()
    assert start("pass").wait(PATIENCE) == 0


def test_when_the_client_is_killed_its_runs_and_its_server_end(tmp_path: Path) -> None:
    code = f"""
import os, sys
from tutorial.workshop.fork_server import ForkServer
server = ForkServer(["psutil"], dict(os.environ))
run = server.start({arguments(tmp_path, SLEEPS)!r}, dict(os.environ), sys.stderr.fileno())
print(run.pid, server._process.pid, flush=True)
run.wait()
"""
    client = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert client.stdout is not None
    pids = [int(pid) for pid in client.stdout.readline().split()]
    assert len(pids) == 2
    client.kill()
    client.communicate()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
