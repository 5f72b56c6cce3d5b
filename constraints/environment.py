"""Makes the environment of this checkout, unless it is ready. ``make`` runs this before every target:

    python3 constraints/environment.py FOLDER [OPTIONS OF PIP]

pip installs what ``pyproject.toml`` asks for, in the versions of ``constraints.txt``, but not the course itself: a
``.pth`` file with a relative path makes its modules importable, and scripts find their Python beside them. So a copy of
the checkout runs its own code in its own environment, and nothing is installed again. ``FOLDER/.ready`` records what
the environment was made for. Invariant: it compares contents and places, never times, which a copy changes; and an
environment that belongs to another checkout is not written to.
"""

from __future__ import annotations  # an old Python has to come as far as the message that refuses it

import hashlib
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints" / "constraints.txt"
REQUIREMENTS = (ROOT / "pyproject.toml", CONSTRAINTS)
OLDEST_PYTHON = (3, 11)
TRITON = "triton==3.6.0"  # beside PyTorch's CPU build, which brings none; for macOS there is none
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # where PyTorch keeps that build, gigabytes smaller
NVIDIA_FILES = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/usr/lib/wsl/lib/nvidia-smi")

SCRIPT = """\
#!/bin/sh
exec "$(dirname "$0")/python" -P -c 'from shared.cli import app; app(prog_name="infer")' "$@"
"""
# The first line of a script that pip writes, or three where the path has a space. Both name its Python in full.
_INTERPRETER = re.compile(rb"\A#!(?:/bin/sh\n'''exec' .*\n' '''|.*python.*)\n")
_PYTHON_BESIDE = b"#!/bin/sh\n'''exec' \"$(dirname \"$0\")/python\" \"$0\" \"$@\"\n' '''\n"


class Environment:
    """The environment in ``folder``, as this checkout wants it and as it was recorded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.place = folder.resolve()
        self.python = folder / "bin" / "python"
        digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in REQUIREMENTS]
        self.wanted = {
            "place": str(self.place),
            "checkout": os.path.relpath(ROOT, folder),
            "python": ".".join(map(str, sys.version_info[:2])),
            "requirements": " ".join(digests),
        }
        try:
            self.recorded = json.loads((folder / ".ready").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self.recorded = {}

    def prepare(self, pip_options: list[str]) -> None:
        """Do what is missing, if anything is."""
        if self.recorded == self.wanted and self.python.exists():
            self.compare_build()
            return
        if self.folder.is_symlink():
            sys.exit(
                f"error: {self.folder} is a link to {self.place}, which is not ready for this checkout; run make in "
                "the checkout that it belongs to, or remove the link to make an environment here."
            )
        if self.recorded.get("checkout", self.wanted["checkout"]) != self.wanted["checkout"]:
            sys.exit(
                f"error: the environment in {self.folder} belongs to another checkout; choose another folder, as in "
                "make VENV=.venv, or remove it."
            )
        if not self.python.exists() or self.recorded.get("python", self.wanted["python"]) != self.wanted["python"]:
            # There is none, or the system's Python is another one now.
            check_python()
            print(f"making the environment in {self.folder} (once; PyTorch is large)", flush=True)
            self.make(*(["--clear"] if (self.folder / "pyvenv.cfg").exists() else []))
            self.recorded = {}
        elif self.recorded and self.recorded["place"] != self.wanted["place"]:
            self.make("--without-pip")  # a copy: writes the scripts that activate it again, and touches no package
        if self.recorded.get("requirements") != self.wanted["requirements"]:
            self.install(pip_options)
        self.finish()

    def compare_build(self) -> None:
        """Say so where ``TORCH_BUILD`` asks for another PyTorch than the one that is installed, which stays."""
        asked = asked_build()
        for info in self.folder.glob("lib/python*/site-packages/torch-*.dist-info") if asked else ():
            version = info.name[len("torch-") : -len(".dist-info")]
            if version.endswith("+cpu") != (asked == "cpu"):
                print(
                    f"note: {self.folder} is ready with PyTorch {version} and stays so; for TORCH_BUILD={asked} make "
                    f"it again: make clean, then make env TORCH_BUILD={asked}",
                    file=sys.stderr,
                )

    def make(self, *options: str) -> None:
        """Make the environment of this Python, or with ``--without-pip`` write its own files anew."""
        subprocess.run([sys.executable, "-m", "venv", *options, str(self.place)], check=True)

    def install(self, pip_options: list[str]) -> None:
        """Install the requirements: PyTorch's CPU build where that is enough, and a Triton where it brought none."""
        pip = [str(self.python), "-m", "pip", "install", "--disable-pip-version-check", *pip_options]
        if cpu_build := cpu_torch():
            offered = ["--no-deps", "--retries", "1", "--extra-index-url", TORCH_CPU_INDEX, cpu_build]
            tried = subprocess.run([*pip, *offered], stderr=subprocess.PIPE, text=True, check=False)
            if tried.returncode:
                print(f"pip did not install {cpu_build}; taking the default build, which is larger. It said:")
                print(textwrap.indent(tried.stderr.strip(), "    "), flush=True)
        subprocess.run([*pip, "--constraint", str(CONSTRAINTS), *requirements()], check=True)
        look = [str(self.python), "-c", "import triton"]
        if sys.platform == "linux" and subprocess.run(look, stderr=subprocess.DEVNULL, check=False).returncode:
            subprocess.run([*pip, "--no-deps", TRITON], check=True)

    def finish(self) -> None:
        """Make the environment and the checkout independent of where they lie, and record that it is ready."""
        (packages,) = self.folder.glob("lib/python*/site-packages")
        (packages / "infer.pth").write_text(os.path.relpath(ROOT, packages) + "\n", encoding="utf-8")
        (self.folder / "bin" / "infer").write_text(SCRIPT, encoding="utf-8")
        (self.folder / "bin" / "infer").chmod(0o755)
        for script in (self.folder / "bin").iterdir():
            content = b"" if script.is_symlink() or not script.is_file() else script.read_bytes()
            if _INTERPRETER.match(content):
                script.write_bytes(_INTERPRETER.sub(lambda _: _PYTHON_BESIDE, content))
        (self.folder / ".ready").write_text(json.dumps(self.wanted, indent=2) + "\n", encoding="utf-8")


def requirements() -> list[str]:
    """What the project needs with its extras, but for Ray: half a gigabyte for one command."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = [
        project["dependencies"],
        *(needs for extra, needs in project["optional-dependencies"].items() if extra != "ray"),
    ]
    needs = [need for each in lists for need in each]
    return [need for need in needs if not need.startswith(project["name"])]  # an extra may name another one


def asked_build() -> str:
    """``TORCH_BUILD``: cpu, cuda, or nothing where the machine decides. Another value ends the process."""
    build = os.environ.get("TORCH_BUILD", "")
    if build not in ("", "cpu", "cuda"):
        sys.exit(f"error: TORCH_BUILD is {build!r}; it can be cpu or cuda, or absent, which looks for an NVIDIA GPU.")
    return build


def cpu_torch() -> str | None:
    """PyTorch's CPU build in the pinned version, or None: where there is a GPU, or where ``TORCH_BUILD`` says cuda."""
    build = asked_build()
    pinned = re.search(r"^torch==(\S+)$", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE)
    if pinned is None or sys.platform != "linux" or build == "cuda":
        return None
    has_gpu = any(map(os.path.exists, NVIDIA_FILES))
    return None if has_gpu and not build else f"torch=={pinned[1]}+cpu"


def check_python() -> None:
    """End the process if this Python cannot make environments."""
    name = f"Python {'.'.join(map(str, sys.version_info[:3]))} ({sys.executable})"
    if sys.version_info < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        sys.exit(f"error: {name} is too old; name a Python of at least {oldest}: make PYTHON=python3.12 ...")
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        sys.exit(f"error: {name} cannot make environments; install its venv package (on Debian: python3-venv).")


if __name__ == "__main__":
    try:
        Environment(Path(os.path.abspath(sys.argv[1]))).prepare(sys.argv[2:])
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
