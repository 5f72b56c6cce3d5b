"""Without Triton, as on macOS: the ops run in the place of kernels, and what needs a kernel skips and says why.

One process hides Triton. Here the same engine runs beside it: on a CPU both compute with the ops.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shared.engine.llm import LLM
from shared.sampling.params import SamplingParams

ROOT = Path(__file__).parents[2]
HIDDEN = """
import sys
sys.modules["triton"] = None  # an import of it fails, and it is not found

import contextlib, importlib, json, pkgutil
import pytest
import shared.kernels
from shared.engine.llm import LLM
from shared.sampling.params import SamplingParams

for module in pkgutil.iter_modules(shared.kernels.__path__):
    importlib.import_module(f"shared.kernels.{module.name}")

def generated(**settings):
    params = SamplingParams(temperature=0.0, max_new_tokens=6)
    return [answer.token_ids for answer in LLM(sys.argv[1], **settings).generate(["Once upon", "a time"], params)]

tokens = generated(), generated(attention_backend="flash")
import os
os.environ["TRITON_INTERPRET"] = "1"
try:
    generated()
    refused = None
except Exception as error:
    refused = f"{type(error).__name__}: {error}"
with contextlib.redirect_stdout(sys.stderr):
    options = ["-q", "-rs", "-p", "no:cacheprovider"]
    kernels = pytest.main([*options, "tests/kernels/test_gated.py"])
    pages = pytest.main([*options, "tutorial/phase_03_1.md", "-k", "run"])
print(json.dumps({"tokens": tokens, "refused": refused, "codes": [kernels, pages]}))
"""


@pytest.fixture(scope="module")
def hidden(tiny_checkpoints: dict[str, Path]) -> tuple[dict, str]:
    """What a process without Triton answers, and what pytest printed in it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_"))}
    command = [sys.executable, "-c", HIDDEN, str(tiny_checkpoints["gemma3_text"])]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_the_newest_engine_gives_the_same_tokens(hidden: tuple[dict, str], tiny_checkpoints: dict[str, Path]) -> None:
    params = SamplingParams(temperature=0.0, max_new_tokens=6)
    answers = LLM(tiny_checkpoints["gemma3_text"]).generate(["Once upon", "a time"], params)
    tokens = [answer.token_ids for answer in answers]
    assert hidden[0]["tokens"] == [tokens, tokens]


def test_the_interpreter_is_refused(hidden: tuple[dict, str]) -> None:
    refused = hidden[0]["refused"]
    assert refused.startswith("ConfigError: TRITON_INTERPRET is set, and that needs Triton, which is not installed")


def test_tests_and_pages_of_kernels_skip_and_say_why(hidden: tuple[dict, str]) -> None:
    answer, printed = hidden
    assert answer["codes"] == [0, 0], printed
    reasons = [line for line in printed.splitlines() if line.startswith("SKIPPED")]
    assert len(reasons) == 2, printed
    assert all("needs Triton, which is not installed" in reason for reason in reasons), printed
    assert "passed" not in printed


def test_no_module_needs_triton_to_be_imported() -> None:
    """``shared.kernels.launch`` tries to import it, for all others; a function may, where it is known to be there."""
    folders = ("shared", "phases", "benchmarks", "tutorial", "tests")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 300
    unconditional = re.compile(r"^(import|from) triton\b", re.MULTILINE)
    assert not [file for file in files if unconditional.search(file.read_text(encoding="utf-8"))]
