"""Every kernel compiles for GPUs, on a machine without one.

The first run takes two minutes. Later ones find in Triton's own cache what has not changed: its keys are the texts of
kernels, the types of their arguments, the options and Triton itself.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shared.kernels.launch import INTERPRETED

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="on a GPU every kernel test compiles")
def test_each_kernel_compiles():
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "shared").rglob("kernels/**/*.py")]
    kernels = {name for text in texts for name in re.findall(r"^def (\w+_kernel)\(", text, re.MULTILINE)}
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    program = [sys.executable, "-m", "tests.kernels.compilation"]
    process = subprocess.run(program, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-3000:]
    assert set(process.stdout.split()) == kernels
