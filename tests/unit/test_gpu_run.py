"""A run on a GPU shows failures at once and sums up, also when its time is up while a test hangs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu_run import TIME_IS_UP

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

def test_right(): pass

@pytest.mark.skip(reason="needs 2 GPUs")
def test_skipped(): pass

def test_wrong(): assert 1 == 2, __file__
"""
ENDLESS = """
import threading

def test_endless(request):
    run = request.config.pluginmanager.get_plugin("gpu-run")
    threading.Thread(target=run.end).start()
    threading.Event().wait()

def test_late(): pass
"""


@pytest.mark.parametrize("is_in_time", [True, False], ids=["in time", "time is up"])
def test_the_summary_says_what_became_of_each_test(tmp_path: Path, is_in_time: bool) -> None:
    (tmp_path / "test_some.py").write_text(TESTS if is_in_time else TESTS + ENDLESS, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "tests.gpu_run", "-n0", "-p", "no:cacheprovider"]
    limits = ["--rootdir", tmp_path, "--seconds", "600", "--summary", tmp_path / "reports" / "gpu.json", tmp_path]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *map(str, limits)], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == (1 if is_in_time else TIME_IS_UP), done.stdout + done.stderr
    summary = json.loads((tmp_path / "reports" / "gpu.json").read_text(encoding="utf-8"))
    late = [] if is_in_time else ["test_some.py::test_late"]
    endless = [] if is_in_time else ["test_some.py::test_endless"]
    counts = {"passed": 1, "failed": 1, "skipped": 1, "running": len(endless), "not reached": len(late)}
    assert (summary["counts"], summary["running"], summary["not_reached"]) == (counts, endless, late)
    assert "| 1 | 1 | 1 |" in (tmp_path / "reports" / "gpu.md").read_text(encoding="utf-8")
    assert list(summary["failed"]) == ["test_some.py::test_wrong"]
    assert "test_some.py" in summary["failed"]["test_some.py::test_wrong"]
    assert str(tmp_path) not in summary["failed"]["test_some.py::test_wrong"]
    assert summary["skipped"] == {"Skipped: needs 2 GPUs": 1}
    assert {"torch", "python"} <= set(summary["versions"])
    shown = done.stdout
    assert shown.count("assert 1 == 2") >= 1, "the failure is shown"
    assert shown.index("FAILED test_some.py::test_wrong") < shown.index("1 passed, 1 failed, 1 skipped")
