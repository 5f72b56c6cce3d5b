"""A server of forks that stays after a check, for the next one: where it listens, and when it ends.

It listens at a socket in a folder that only its user can enter. The name of the socket is a digest of all that the
server has read when it imported its packages: what is installed, the variables, its own source. It has imported nothing
else of the course, so that a change of the course needs no new server. A client that finds no server there binds the
socket and starts one, which inherits it, under a lock: two that begin at once get the same, and a client that comes
while the packages are being imported waits in the socket's queue. After a crash the socket refuses, and the next client
starts another server. Introduced in phase 1b. Invariant: a server computes nothing and so grows no further; it ends
when it has not been asked for `IDLE_SECONDS`, or when the machine has little memory left.
"""

import fcntl
import hashlib
import os
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shared.errors import ConfigError

IDLE = "INFER_WORKSHOP_IDLE"
"""The variable that holds the seconds after which a server that is not asked ends; 0: none stays."""
IDLE_SECONDS = 600.0
_READ_AT_IMPORT = ("CUDA", "HF_", "KMP_", "LD_", "MKL_", "OMP_", "PYTHON", "PYTORCH", "TORCH", "TRANSFORMERS", "TRITON")
"""Beginnings of the names of variables that may decide what an import does."""
_QUEUE = 64
_LONGEST = 60
"""Letters of a folder's path; a socket's may have 107 altogether."""


def idle_seconds() -> float:
    """How long a server stays, from the environment."""
    text = os.environ.get(IDLE) or str(IDLE_SECONDS)
    try:
        return max(0.0, float(text))
    except ValueError:
        raise ConfigError(f"{IDLE} is {text!r}; it must be a number of seconds, such as 600, or 0.") from None


def connect(
    packages: Sequence[str], environment: Mapping[str, str], start: Callable[[socket.socket], object]
) -> socket.socket:
    """A connection to the server of these packages and variables; if there is none, ``start`` starts it, and is given
    the socket at which it listens."""
    address = _address(packages, environment)
    if (connection := _connection(address)) is not None:
        return connection
    with address.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (connection := _connection(address)) is None:
            address.unlink(missing_ok=True)  # of a server that has ended
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.bind(str(address))
                listener.listen(_QUEUE)
                start(listener)
            connection = _connection(address)
    if connection is None:
        raise ChildProcessError(f"no server of the tests can be reached at {address}")
    return connection


def _connection(address: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(address))
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    return connection


def _address(packages: Sequence[str], environment: Mapping[str, str]) -> Path:
    from tutorial.workshop.course_state import state_of_the_installation

    read = sorted(item for item in environment.items() if item[0].startswith(_READ_AT_IMPORT))
    sources = [Path(__file__).read_bytes(), Path(__file__).with_name("fork_server.py").read_bytes()]
    what = repr((state_of_the_installation(), tuple(packages), read, sources))
    return _folder() / hashlib.sha256(what.encode()).hexdigest()[:16]


def _folder() -> Path:
    """A folder of the user's alone; ConfigError if there can be none, or another user made it."""
    wanted = (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp")  # the first fails after `su`
    own = next((name for name in wanted if len(name) <= _LONGEST and os.access(name, os.W_OK)), "/tmp")
    folder = Path(own) / f"infer-workshop-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        said = f"{folder} cannot be made ({error.strerror}); set TMPDIR to another folder, or {IDLE}=0."
        raise ConfigError(said) from None
    state = folder.lstat()
    if state.st_uid != os.getuid() or state.st_mode & 0o777 != 0o700 or folder.is_symlink():
        raise ConfigError(f"{folder} must be your own folder, with mode 700; remove what is there.")
    return folder
