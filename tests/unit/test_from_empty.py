"""The pages "from an empty file": the file that each builds passes its phase's tests, and a mistake is explained.

Each run is a fork of one server, as those of the workshop's checks are.
"""

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import PATIENCE
from tutorial.checker.chapter import read_chapter
from tutorial.checker.files import page_files, write_files
from tutorial.workshop.fork_server import IS_SUPPORTED, ForkServer
from tutorial.workshop.from_empty_mistakes import page_mistakes
from tutorial.workshop.mistakes import MOST_ALIKE, are_alike
from tutorial.workshop.verdicts import Case

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not IS_SUPPORTED, reason="needs Linux")]
ROOT = Path(__file__).parents[2]
PAGES = {
    page.name.removeprefix("phase_").removesuffix("_from_empty.md"): page
    for page in (ROOT / "tutorial").glob("*_from_empty.md")
}
PACKAGES = ("torch", "transformers.models.llama.modeling_llama", "safetensors.torch")

# By page: a line of its file, the mistake that the page shows in its place, and what the check says.
MISTAKES = {
    "01a": ("triu(1 + len(k) - len(q))", "triu(len(k))", "right: token 17"),
    "01b": ("in self.layers:", "in self.layers[1:]:", "none is right"),
    "02": ("mass_before >=", "mass_before + probabilities >=", "its probability is"),
    "03": ("torch.arange(start, len(ids))", "torch.arange(len(ids) - start)", "token 1: expected"),
}
# A line of a page's file, and another way to write it that is right too.
RIGHT = {
    "a power of a negative exponent": (
        "01a",
        "1.0 / theta ** (torch.arange(0, D, 2) / D)",
        "theta ** (-torch.arange(0, D, 2) / D)",
    ),
    "a norm by its reciprocal": (
        "01a",
        "x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight",
        "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight",
    ),
}


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    made = ForkServer(PACKAGES, dict(os.environ))
    yield made
    made.close()


Check = Callable[..., tuple[int, str]]
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")


@pytest.fixture
def run(server: ForkServer) -> Check:
    """Run ``pytest phases/phase_PHASE --from-empty FILE``: exit code and output."""

    def run(phase: str, file: Path, *options: str, patience: float = PATIENCE, **variables: str) -> tuple[int, str]:
        arguments = ["-p", "no:cacheprovider", "-m", "not demo", f"phases/phase_{phase}", "--from-empty", str(file)]
        with tempfile.TemporaryFile() as printed:
            process = server.start([*arguments, *options], {**os.environ, **variables}, printed.fileno())
            try:
                code = process.wait(patience)
            finally:
                process.end()
            printed.seek(0)
            return code, printed.read().decode()

    return run


@pytest.fixture
def check(run: Check, tmp_path: Path) -> Check:
    """Run the tests of a phase on its page's file, with a text replaced."""

    def check(phase: str, old: str = "", new: str = "", *options: str, **more: Any) -> tuple[int, str]:
        write_files(PAGES[phase], tmp_path)
        (name,) = page_files(PAGES[phase])
        text = (tmp_path / name).read_text()
        assert old in text
        (tmp_path / name).write_text(text.replace(old, new) if old else text)
        return run(phase, tmp_path / name, *options, **more)

    return check


@pytest.mark.parametrize("phase", sorted(PAGES))
def test_the_file_of_a_page_passes_the_tests_of_its_phase(check: Check, phase: str) -> None:
    code, output = check(phase)
    assert code == 0, output
    assert "passed" in output


def assert_shown(shown: Sequence[str], output: str) -> None:
    """The output has these lines, but for a thousandth of each number: the last digits of a difference, and how many
    elements are beyond a bound, depend on the processor."""

    def parts(line: str) -> tuple[str, list[float]]:
        return NUMBER.sub("#", line), [float(number.replace(",", "")) for number in NUMBER.findall(line)]

    lines = [parts(line) for line in output.splitlines()]
    for line in shown:
        text, numbers = parts(line)
        assert any(text == other and numbers == pytest.approx(found, rel=1e-3) for other, found in lines), output


@pytest.mark.parametrize("way", RIGHT)
def test_another_way_that_is_right_passes(check: Check, way: str) -> None:
    code, output = check(*RIGHT[way])
    assert code == 0, output


def test_a_mistake_that_is_not_known_is_said_alone(check: Check) -> None:
    code, output = check("01a", "return self(x, positions)", "return x[0]")
    assert code == 1, output
    assert "shape [18, 576] (token, dim), got [576]" in output, output
    assert "This looks like: " not in output, output


@pytest.mark.parametrize("phase", sorted(PAGES))
def test_a_mistake_is_explained_and_every_known_one_of_its_page_is_recognised(
    check: Check, tmp_path: Path, phase: str
) -> None:
    """A file with the mistake of a page is compared with all that are known: all fail, and few are alike."""
    old, new, message = MISTAKES[phase]
    proof, patience = tmp_path / "proof.json", PATIENCE * len(page_mistakes(phase))
    options, variables = ("-p", "tests.from_empty_proof"), {"INFER_FROM_EMPTY_PROOF": str(proof)}
    code, output = check(phase, old, new, *options, patience=patience, **variables)
    assert code == 1, output
    assert message in output, output
    assert "This looks like: " in output, output
    (shown,) = (fence.body for fence in read_chapter(PAGES[phase]).fences if fence.kind == "plain")
    assert_shown(shown, output)
    found = [(says, [Case(**case) for case in cases]) for says, cases in json.loads(proof.read_text())]
    assert [says for says, _ in found] == [mistake.says for mistake in page_mistakes(phase)]
    assert len(found) >= 5
    for says, cases in found:
        assert any(case.outcome == "failed" for case in cases), (says, cases)
        alike = {other for other, its_cases in found if are_alike(cases, its_cases)}
        assert says in alike
        assert len(alike) <= MOST_ALIKE, (says, alike)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import torch\n", "defines no class Engine"),
        ("x = 1\nundefined\n", "NameError: name 'undefined' is not defined (line 2)"),
        ("def f(:\n", "line 1"),
        (None, "is no Python file"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_one_line(
    run: Check, tmp_path: Path, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    code, output = run("01a", tmp_path / "mine.py")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert message in output
