"""The server of forks that stays after a check: who shares it, what starts another, when it ends. Real processes."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from shared.errors import ConfigError
from tests.waiting import PATIENCE, wait_until
from tutorial.workshop import fork_server, warm_server
from tutorial.workshop.fork_server import IS_SUPPORTED, LEAST_MEMORY, ForkServer

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not IS_SUPPORTED, reason="needs Linux")]
ROOT = Path(__file__).parents[2]
SAYS_ITS_SERVER = """
import os, psutil
def test_run():
    run = psutil.Process()
    while "workshop.fork_server" in " ".join(run.parent().cmdline()):
        run = run.parent()
    os.write(1, f"server {run.pid} ".encode())
"""


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The variables of servers of this test alone, which end with it."""
    with tempfile.TemporaryDirectory(prefix="warm-", dir="/tmp") as folder:  # the path of a socket must be short
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        made = {**os.environ, "HF_HOME": folder}  # a variable of the name
        yield made
        for process in psutil.process_iter():
            try:
                if process.environ().get("HF_HOME") == folder:
                    process.kill()
            except psutil.Error:
                continue


@pytest.fixture
def server_of(environment: dict[str, str], tmp_path: Path) -> Callable[..., int]:
    """The process id of the server that runs a test for a client."""
    (tmp_path / "test_it.py").write_text(SAYS_ITS_SERVER)
    arguments = [*("-q", "-s", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir"), str(tmp_path)]

    def asked(idle_seconds: float = PATIENCE, later: Sequence[str] = (), **variables: str) -> int:
        client = ForkServer(["psutil"], environment | variables, idle_seconds, later)
        with tempfile.TemporaryFile() as printed:
            run = client.start([*arguments, str(tmp_path / "test_it.py")], dict(os.environ), printed.fileno())
            assert run.wait(PATIENCE) == 0
            printed.seek(0)
            return int(printed.read().decode().partition("server ")[2].split()[0])

    return asked


def test_clients_of_the_same_variables_share_a_server_that_stays(server_of: Callable[..., int]) -> None:
    first = server_of()
    assert server_of() == first
    assert server_of(TRITON_INTERPRET="1") != first
    assert server_of(EDITOR="vi") == first, "a variable that no import reads"
    assert psutil.pid_exists(first)


def test_clients_that_begin_at_once_start_one_server(server_of: Callable[..., int]) -> None:
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(server_of())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert len(set(found)) == 1


def test_after_a_crash_the_next_client_starts_another(server_of: Callable[..., int]) -> None:
    first = server_of()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(first) or psutil.Process(first).status() == psutil.STATUS_ZOMBIE)
    assert server_of() != first


def test_a_server_that_is_not_asked_ends(server_of: Callable[..., int]) -> None:
    first = server_of(idle_seconds=0.2)
    wait_until(lambda: not psutil.pid_exists(first) or psutil.Process(first).status() == psutil.STATUS_ZOMBIE)
    assert server_of() != first


def test_a_server_ends_when_the_machine_has_little_memory_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not while a client waits."""
    monkeypatch.setattr(fork_server, "_SECONDS_PER_LOOK", 0.001)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert fork_server._is_wanted(listener, 0.01) is False, "no client came"
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=LEAST_MEMORY - 1))
        assert fork_server._is_wanted(listener, 1000 * PATIENCE) is False
        with socket.create_connection(listener.getsockname()):
            assert fork_server._is_wanted(listener, 1000 * PATIENCE) is True


def test_no_run_waits_for_what_few_runs_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is imported while no client waits and no run goes on."""
    has_ended: list[bool] = []
    monkeypatch.setattr(fork_server, "_QUIET_SECONDS", 0.001)
    monkeypatch.setattr(fork_server, "_import", lambda _: has_ended.append(run.poll() is not None))
    run = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    left, runs = ["first", "second"], [os.pidfd_open(run.pid)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()):
            fork_server._import_while_quiet(listener, left, runs)
            assert left == ["first", "second"]
            listener.accept()[0].close()
        assert run.stdin is not None
        threading.Timer(0.1, run.stdin.close).start()
        fork_server._import_while_quiet(listener, left, runs)
    assert (left, runs, has_ended) == ([], [], [True, True])


def test_a_server_that_stays_imports_the_rest(server_of: Callable[..., int]) -> None:
    maps = Path("/proc", str(server_of(later=["numpy"])), "maps")
    wait_until(lambda: "numpy" in maps.read_text())


def test_a_client_that_sends_nothing_holds_up_no_other(server_of: Callable[..., int], environment: dict) -> None:
    first = server_of()
    with warm_server.connect(["psutil"], environment | ForkServer([], {}).environment, no_start):
        assert server_of() == first


def test_a_server_survives_its_first_client_and_holds_none_of_its_pipes(
    server_of: Callable[..., int], environment: dict[str, str], tmp_path: Path
) -> None:
    code = f"""
import os
from tutorial.workshop.fork_server import ForkServer
arguments = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, {str(tmp_path / "test_it.py")!r}]
run = ForkServer(["psutil"], dict(os.environ), {PATIENCE}).start(arguments, dict(os.environ), 2)
print(run.wait())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.stdout == "0\n", done.stderr
    assert server_of() in [process.pid for process in psutil.process_iter() if _is_of(process, environment)]


def test_a_folder_that_others_can_enter_is_refused(environment: dict[str, str]) -> None:
    folder = Path(environment["HF_HOME"]) / f"infer-workshop-{os.getuid()}"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="must be your own folder"):
        warm_server.connect(["psutil"], environment, no_start)


@pytest.mark.parametrize("runtime", ["missing", "", "x" * 60])
def test_without_a_runtime_folder_of_the_user_s_the_socket_is_among_temporary_files(
    environment: dict[str, str], runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ("x" * 60)).mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / runtime) if runtime else "")
    monkeypatch.setattr(tempfile, "tempdir", environment["HF_HOME"])
    assert warm_server._folder() == Path(environment["HF_HOME"]) / f"infer-workshop-{os.getuid()}"


@pytest.mark.parametrize(("text", "seconds"), [("", 600.0), ("0", 0.0), ("30", 30.0)])
def test_how_long_a_server_stays_is_a_variable(text: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(warm_server.IDLE, text)
    assert warm_server.idle_seconds() == seconds
    monkeypatch.setenv(warm_server.IDLE, "long")
    with pytest.raises(ConfigError, match="must be a number of seconds"):
        warm_server.idle_seconds()


def no_start(listener: object) -> None:
    pytest.fail("no server is to be started")


def _is_of(process: psutil.Process, environment: dict[str, str]) -> bool:
    try:
        return process.environ().get("HF_HOME") == environment["HF_HOME"]
    except psutil.Error:
        return False
