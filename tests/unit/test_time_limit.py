"""Which line is said to have been running when a test's time was over, from the stack that was written then."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.waiting import PATIENCE
from tutorial.workshop.check import CheckServer
from tutorial.workshop.exercises import ROOT, exercises, find_exercise
from tutorial.workshop.skeleton import filled
from tutorial.workshop.time_outs import stack_file, time_out
from tutorial.workshop.verdicts import Case, Outcome, Verdict
from tutorial.workshop.workspace import Workspace

BEGAN = [{"began": "tests/a.py::test_x", "processor": 5.0, "wall": 60.0}, {"test": "tests/a.py::test_y"}]


def stack(*frames: str) -> str:
    lines = [f"  File {frame} in f" for frame in frames]
    return "\n".join(["Thread 0x1 (most recent call first):", '  File "/usr/x.py", line 3 in wait', "", *lines, ""])


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """With a gap of 03x1, whose lines are the reference's when it runs, and a line of the learner's after it."""
    root = tmp_path / "größe"
    Workspace(root).start([find_exercise("03x1")])
    return root


def test_the_innermost_line_of_the_learner_s_is_named(workspace: Path, tmp_path: Path) -> None:
    file = workspace / find_exercise("03x1").path
    escaped = str(file).replace("ö", "\\xf6").replace("ß", "\\xdf")
    ran = filled(file.read_text(), (ROOT / "shared/cache/view/contiguous.py").read_text())[0].split("\n")
    of_reference = next(n for n, line in enumerate(ran, 1) if "return 2 * config.num_layers" in line)
    own = next(n for n, line in enumerate(ran, 1) if line.startswith("class ContiguousCache"))
    record = tmp_path / "record"
    frames = ['"/usr/lib/y.py", line 1', f'"{escaped}", line {of_reference}', f'"{escaped}", line {own}']
    stack_file(record, "wall").write_text(stack(*frames))
    found = time_out(record, BEGAN, workspace, gaps_raise=False)
    assert found is not None
    assert (found["test"], found["where"]) == ("tests/a.py::test_x", f"{file}:{own}")
    assert "did not finish within 60 s;" in found["error"]
    stack_file(record, "processor").write_text(stack(f'"{ROOT}/tests/a.py", line 7', '"/usr/lib/y.py", line 1'))
    found = time_out(record, BEGAN, workspace, gaps_raise=False)
    assert found is not None
    assert found["where"] is None
    assert found["details"] == [f"none of your lines was running, but {ROOT}/tests/a.py:7"]


def test_without_a_stack_no_test_ran_out_of_time(workspace: Path, tmp_path: Path) -> None:
    stack_file(tmp_path / "record", "wall").write_text("")
    assert time_out(tmp_path / "record", BEGAN, workspace, gaps_raise=False) is None


@pytest.mark.parametrize(("where", "first"), [("a.py:7", 1), (None, 0)], ids=["in the learner's", "in others"])
def test_the_case_that_ran_out_of_time_is_shown_first_where_the_learner_s_lines_were_running(
    where: str | None, first: int
) -> None:
    """In lines that wait for what the learner's did not give, the time says nothing that another failure does not."""
    late = Case("a.py::test_y[9]", "failed", "y", where=where, is_time_out=True)
    cases = [Case("a.py::test_x[1]", "failed", "x"), late]
    verdict = Verdict(find_exercise("03x1"), Outcome.FAILED, cases=tuple(cases))
    assert verdict.first_failure == cases[first]
    assert replace(verdict, cases=(late,)).first_failure == late


@pytest.mark.measured
def test_right_code_takes_a_tenth_of_its_time_at_most(tmp_path: Path) -> None:
    with CheckServer() as server:
        run = server.run(tmp_path, exercises(), time_factor=0.1, seconds=10 * PATIENCE)
    assert not [case for case in run.cases if case.is_time_out]
    assert len(run.cases) > 500
