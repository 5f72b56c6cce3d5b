"""A checkout and its environment: copied, linked and shared, each runs its own code and none touches another's.

The checkouts are small, with the real `constraints/environment.py` and an interpreter's real environment; there is no
pip in it, so that any try to install something fails. Where something is installed, its packages lie in a folder.
Marked slow: `make test` itself runs in an environment that was made so.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pip
import pytest

from tests.waiting import PATIENCE

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
MAKE = "constraints/environment.py"
CLI = "def app(prog_name):\n    print(prog_name, 'of', __file__)\n"
TOOL = "# -*- coding: utf-8 -*-\nimport shared.cli\nprint(shared.cli.__file__)\n"


def prepare(checkout: Path, folder: str = ".venv") -> subprocess.CompletedProcess[str]:
    """What ``make env`` runs."""
    python = checkout / folder / "bin" / "python"
    command = [str(python) if python.exists() else sys.executable, MAKE, folder]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=PATIENCE, env=outside())


def outside() -> dict[str, str]:
    """The variables of a shell in which no environment is active."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}


def said(*command: str | Path, cwd: Path = Path("/")) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=PATIENCE, env=outside())
    assert done.returncode == 0, done.stderr
    return done.stdout


def contents(folder: Path) -> dict[str, bytes | str]:
    """Every file and link, without bytecode."""
    files = (file for file in sorted(folder.rglob("*")) if "__pycache__" not in file.parts)
    return {
        str(file.relative_to(folder)): os.readlink(file) if file.is_symlink() else file.read_bytes()
        for file in files
        if file.is_symlink() or file.is_file()
    }


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose environment is ready: as after ``make env``, with nothing to install."""
    made = tmp_path / "course"
    (made / "shared").mkdir(parents=True)
    (made / "shared" / "cli.py").write_text(CLI)
    (made / "constraints").mkdir()
    shutil.copy(ROOT / MAKE, made / MAKE)
    (made / "constraints" / "constraints.txt").write_text("# none\n")
    (made / "pyproject.toml").write_text('[project]\nname = "course"\n')
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", made / ".venv"], check=True)
    tool = made / ".venv" / "bin" / "tool"
    tool.write_text(f"#!{made}/.venv/bin/python\n{TOOL}")
    tool.chmod(0o755)
    code = "from environment import *; Environment(ROOT / '.venv').finish()"
    subprocess.run([sys.executable, "-c", code], cwd=made / "constraints", check=True, env=outside())
    assert prepare(made).returncode == 0
    return made


def runs(checkout: Path) -> None:
    """Every way to start the course in this checkout starts this checkout's code."""
    cli = checkout / "shared" / "cli.py"
    scripts = checkout / ".venv" / "bin"
    assert said(scripts / "infer") == f"infer of {cli}\n"
    assert said(scripts / "tool") == f"{cli}\n"
    assert said(scripts / "python", "-c", TOOL) == f"{cli}\n"


def test_a_copy_runs_its_own_code_and_installs_nothing(checkout: Path) -> None:
    before = contents(checkout)
    copy = checkout.with_name("course copy")
    shutil.copytree(checkout, copy, symlinks=True, copy_function=shutil.copyfile)  # every file is newer, as with cp
    for script in (copy / ".venv" / "bin").iterdir():
        script.chmod(0o755)
    runs(copy)
    prepared = prepare(copy)
    assert prepared.returncode == 0, prepared.stderr
    runs(copy)
    activated = ". .venv/bin/activate; cd /; tool; command -v infer"
    assert said("bash", "-c", activated, cwd=copy) == f"{copy}/shared/cli.py\n{copy}/.venv/bin/infer\n"
    assert contents(checkout) == before
    again = contents(copy)
    assert prepare(copy).returncode == 0
    assert contents(copy) == again


def test_a_link_to_another_checkout_s_environment_is_used_and_never_written(checkout: Path) -> None:
    before = contents(checkout)
    second = checkout.with_name("second")
    shutil.copytree(checkout, second, ignore=lambda *_: [".venv"])
    (second / ".venv").symlink_to(checkout / ".venv")
    assert prepare(second).returncode == 0
    runs(second)
    (second / "constraints" / "constraints.txt").write_text("torch==1\n")
    refused = prepare(second)
    assert refused.returncode == 1
    assert f"is a link to {checkout}/.venv, which is not ready for this checkout; run make in" in refused.stderr
    assert contents(checkout) == before


def test_a_folder_outside_belongs_to_one_checkout(checkout: Path) -> None:
    before = contents(checkout)
    second = checkout.with_name("second")
    shutil.copytree(checkout, second, ignore=lambda *_: [".venv"])
    refused = prepare(second, f"../{checkout.name}/.venv")
    assert refused.returncode == 1
    assert "belongs to another checkout; choose another folder" in refused.stderr
    assert contents(checkout) == before


def test_what_is_not_ready_is_installed(checkout: Path) -> None:
    project = '[project]\nname = "course"\ndependencies = ["x"]\noptional-dependencies = {}\n'
    (checkout / "pyproject.toml").write_text(project)
    changed = prepare(checkout)
    assert changed.returncode != 0
    assert "No module named pip" in changed.stderr
    state = json.loads((checkout / ".venv" / ".ready").read_text())
    assert prepare(checkout).returncode != 0, "a failure is not recorded as ready"
    (checkout / "pyproject.toml").write_text('[project]\nname = "course"\n')
    assert prepare(checkout).returncode == 0
    assert json.loads((checkout / ".venv" / ".ready").read_text()) == state


def add_wheel(folder: Path, name: str, version: str) -> None:
    """Write a package with one empty module."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere PyTorch has one build")
@pytest.mark.parametrize(
    ("gpu_files", "variable", "build"),
    [((), "", "torch==2.13.0+cpu"), (("/",), "", "None"), ((), "cuda", "None"), (("/",), "cpu", "torch==2.13.0+cpu")],
)
def test_the_cpu_build_of_pytorch_is_for_machines_without_a_gpu_or_asked_for(
    gpu_files: tuple[str, ...], variable: str, build: str, checkout: Path
) -> None:
    (checkout / "constraints" / "constraints.txt").write_text("torch==2.13.0\n")
    code = f"import environment; environment.NVIDIA_FILES = {gpu_files}; print(environment.cpu_torch())"
    command = [checkout / ".venv/bin/python", "-c", code]
    variables = outside() | {"TORCH_BUILD": variable}
    done = subprocess.run(command, cwd=checkout / "constraints", capture_output=True, text=True, env=variables)
    assert done.stdout == f"{build}\n", done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere PyTorch has one build")
@pytest.mark.parametrize(("offered", "taken"), [(("cpu", "cu130"), "cpu"), (("cu130",), "cu130")])
def test_where_the_cpu_build_is_not_offered_the_other_is_installed(
    offered: tuple[str, ...], taken: str, checkout: Path
) -> None:
    wheels = checkout / "wheels"
    wheels.mkdir()
    for build in offered:
        add_wheel(wheels, "torch", f"2.13.0+{build}")
    add_wheel(wheels, "triton", "3.6.0")
    (packages,) = (checkout / ".venv").glob("lib/python*/site-packages")
    (packages / "pip").symlink_to(Path(pip.__file__).parent)
    project = '[project]\nname = "course"\ndependencies = ["torch>=2.11"]\noptional-dependencies = {}\n'
    (checkout / "pyproject.toml").write_text(project)
    (checkout / "constraints" / "constraints.txt").write_text("torch==2.13.0\n")
    code = (
        "import environment; environment.NVIDIA_FILES = (); "
        f"environment.Environment(environment.ROOT / '.venv').prepare(['--no-index', '--find-links', {str(wheels)!r}])"
    )
    variables = {name: value for name, value in outside().items() if not name.startswith("PIP_")}
    variables |= {"PIP_CONFIG_FILE": os.devnull, "TORCH_BUILD": ""}
    command = [checkout / ".venv/bin/python", "-c", code]
    constraints = checkout / "constraints"
    done = subprocess.run(command, cwd=constraints, capture_output=True, text=True, env=variables, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    version = "from importlib.metadata import version; print(version('torch'), version('triton'))"
    assert said(checkout / ".venv/bin/python", "-c", version) == f"2.13.0+{taken} 3.6.0\n"
    is_refused = taken != "cpu"
    assert ("pip did not install torch==2.13.0+cpu" in done.stdout) == is_refused
    assert ("    ERROR: No matching distribution found for torch==2.13.0+cpu" in done.stdout) == is_refused


@pytest.mark.parametrize(("installed", "other"), [("2.13.0+cpu", "cuda"), ("2.13.0+cu130", "cpu"), ("2.13.0", "cpu")])
def test_a_ready_environment_says_that_it_keeps_its_build(installed: str, other: str, checkout: Path) -> None:
    (packages,) = (checkout / ".venv").glob("lib/python*/site-packages")
    (packages / f"torch-{installed}.dist-info").mkdir()
    for asked in ("", "cpu", "cuda"):
        command = [checkout / ".venv/bin/python", MAKE, ".venv"]
        done = subprocess.run(
            command, cwd=checkout, capture_output=True, text=True, env=outside() | {"TORCH_BUILD": asked}
        )
        note = f"note: {checkout}/.venv is ready with PyTorch {installed} and stays so; for TORCH_BUILD={other}"
        assert done.returncode == 0
        assert (note in done.stderr) == (asked == other), done.stderr


def test_an_unknown_build_of_pytorch_is_refused(checkout: Path) -> None:
    code = "import environment; environment.cpu_torch()"
    variables = outside() | {"TORCH_BUILD": "rocm"}
    command = [checkout / ".venv/bin/python", "-c", code]
    refused = subprocess.run(command, cwd=checkout / "constraints", capture_output=True, text=True, env=variables)
    assert refused.returncode == 1
    assert "TORCH_BUILD is 'rocm'; it can be cpu or cuda" in refused.stderr


@pytest.mark.parametrize("version", ["(3, 9, 6)", "(3, 10, 14)"])
def test_an_old_python_is_refused_with_the_remedy(tmp_path: Path, version: str) -> None:
    (tmp_path / "constraints").mkdir()
    for file in (MAKE, "constraints/constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path / file)
    code = f"import sys; sys.version_info = {version}; sys.argv[1:] = ['.venv']; __file__ = {str(tmp_path / MAKE)!r}; "
    command = [sys.executable, "-c", code + f"exec(open({MAKE!r}).read())"]
    refused = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert refused.returncode == 1
    found = ".".join(version.strip("()").split(", "))
    assert f"error: Python {found} (" in refused.stderr
    assert "is too old; name a Python of at least 3.11: make PYTHON=python3.12" in refused.stderr


def test_the_container_of_codespaces_makes_the_environment_with_a_python_that_is_supported() -> None:
    described = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text(encoding="utf-8"))
    assert described["postCreateCommand"] == "make env"
    name, _, version = described["image"].rpartition(":")
    assert name == "mcr.microsoft.com/devcontainers/python"
    assert tuple(map(int, version.partition("-")[0].split("."))) >= (3, 11)
    assert described["remoteEnv"]["PATH"].startswith("${containerWorkspaceFolder}/.venv/bin:")
