"""Every bug hunt proved: its tests find the planted fault, and its report shows the symptom with it and none without.

All faults share one run of pytest, as known mistakes do, and so do the references in their place; the reports run in
forks of the same server.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shared.cli import app
from shared.kernels import NO_TRITON
from tests.integration.report_run import run_report
from tests.waiting import PATIENCE
from tutorial.workshop import check, grading
from tutorial.workshop import hunts as hunts_module
from tutorial.workshop.check import CheckServer, Run, can_be_checked
from tutorial.workshop.exercises import ROOT, find_exercise
from tutorial.workshop.grading import grade
from tutorial.workshop.hunts import Hunt, HuntFolder, find_hunts, hunts, report_variables
from tutorial.workshop.verdicts import Outcome, Verdict
from tutorial.workshop.version_runs import run_versions

pytestmark = pytest.mark.slow


def by_number(hunt: Hunt) -> str:
    return hunt.number


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, check_server: CheckServer) -> dict[str, Run]:
    """By number, what the tests of each collected hunt say of its fault."""
    here = [item for item in request.session.items if item.path == request.path and "runs" in item.fixturenames]
    own = [item.callspec.params["hunt"] for item in here]
    wanted = [hunt for hunt in own if can_be_checked(hunt.judged(hunt.tests))]
    versions = [(hunt.judged(hunt.tests), hunt.planted(hunt.module)) for hunt in wanted]
    return dict(zip(map(by_number, wanted), run_versions(check_server, versions), strict=True))


@pytest.mark.parametrize("hunt", hunts(), ids=by_number)
def test_every_test_of_a_hunt_finds_its_fault(hunt: Hunt, runs: dict[str, Run]) -> None:
    if not can_be_checked(hunt.judged(hunt.tests)):
        pytest.skip(f"{NO_TRITON}")
    (verdict,) = runs[hunt.number].verdicts
    assert verdict.outcome is Outcome.FAILED, verdict.reason
    for test in hunt.tests:
        assert any(name.startswith(test) for name in runs[hunt.number].errors), f"{test} does not find it"


@pytest.fixture(scope="module")
def solved(check_server: CheckServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    """By number, what all tests of its phase say of a hunt, in a workspace that holds what every hunt plants with the
    reference's text."""
    root = tmp_path_factory.mktemp("solved")
    for path in sorted({path for hunt in hunts() for path in hunt.paths}):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text((ROOT / path).read_text())
    judged = [hunt.judged(hunt.tests_of_phase) for hunt in hunts() if can_be_checked(hunt.judged(hunt.tests))]
    run = check_server.run(root, judged, gaps_raise=True)
    return {verdict.exercise.number: verdict for verdict in run.verdicts}


@pytest.mark.parametrize("hunt", hunts(), ids=by_number)
def test_the_reference_in_the_place_of_what_is_planted_solves_a_hunt(hunt: Hunt, solved: dict[str, Verdict]) -> None:
    if not can_be_checked(hunt.judged(hunt.tests)):
        pytest.skip(f"{NO_TRITON}")
    verdict = solved[hunt.number]
    assert verdict.outcome is Outcome.PASSED, (verdict.test, verdict.reason)


@pytest.fixture
def report(check_server: CheckServer) -> Callable[[Hunt, Path], tuple[int, str]]:
    """Runs a hunt's report on the modules in a folder: the exit code, and what was printed."""

    def run(hunt: Hunt, root: Path) -> tuple[int, str]:
        before, variables = partial(run_report, str(hunt.report)), report_variables(hunt, root)
        with tempfile.TemporaryFile() as printed:
            process = check_server._start([], variables, hunt.is_interpreted, printed.fileno(), before)
            code = process.wait(PATIENCE)
            printed.seek(0)
            return code, printed.read().decode()

    return run


@pytest.mark.parametrize("hunt", hunts(), ids=by_number)
def test_a_report_shows_its_symptom_while_the_fault_is_there(
    hunt: Hunt, report: Callable[[Hunt, Path], tuple[int, str]], tmp_path: Path
) -> None:
    if hunt.is_interpreted and NO_TRITON:
        pytest.skip(f"{NO_TRITON}")
    folder = HuntFolder(tmp_path, hunt)
    folder.plant()
    code, printed = report(hunt, folder.root)
    assert code == 1, printed
    assert "Traceback" not in printed
    (folder.root / hunt.module).write_text((ROOT / hunt.module).read_text())
    code, printed = report(hunt, folder.root)
    assert code == 0, printed


def bug(workspace: Path, *arguments: str) -> tuple[int, str]:
    """``infer workshop bug`` in this process."""
    environment = {"INFER_WORKSPACE": str(workspace), "NO_COLOR": "1"}
    done = CliRunner().invoke(app, ["workshop", "bug", *arguments], env=environment)
    return done.exit_code, done.output


def test_from_planted_to_solved(one_server: CheckServer, tmp_path: Path) -> None:
    hunt = find_hunts("07b1")[0]
    code, printed = bug(tmp_path, "7")
    assert code == 0
    assert "Under load new prompts get no answer at all" in printed
    assert hunt.module not in printed
    code, printed = bug(tmp_path, "07b1", "--check")
    assert code == 1
    assert "test_the_sizes_of_chunks" in printed
    module = tmp_path / "bugs/07b1" / hunt.module
    # Another mistake, which the test that finds the fault does not notice, and others of the phase do.
    right = (ROOT / hunt.module).read_text()
    other = right.replace(
        "request in running if request.is_prefilling]", "request in running if request.is_prefilling][:1]"
    )
    assert other != right
    module.write_text(other)
    code, printed = bug(tmp_path, "07b1", "--check")
    assert code == 1
    assert "0 of 1 solved" in bug(tmp_path, "07b1", "--list")[1]
    module.write_text(right)
    code, printed = bug(tmp_path, "07b1", "--check")
    assert code == 0, printed
    assert f"the promise that was broken, in {hunt.module}: {hunt.breaks}" in printed
    assert "1 of 1 solved" in bug(tmp_path, "07b1", "--list")[1]
    assert "07b2" in bug(tmp_path, "07")[1], "the next bug of a phase is one that is left"


def test_a_report_runs_on_the_learner_s_copy(tmp_path: Path) -> None:
    """In a process of its own, as the command starts it."""
    bug(tmp_path, "10b1")
    hunt = find_hunts("10b1")[0]
    assert bug(tmp_path, "10b1", "--run")[0] == 1
    (tmp_path / "bugs/10b1" / hunt.module).write_text((ROOT / hunt.module).read_text())
    assert bug(tmp_path, "10b1", "--run")[0] == 0


def test_hunts_that_were_handed_in_are_graded(one_server: CheckServer, tmp_path: Path) -> None:
    (hunt,) = find_hunts("10b1")
    for name in ("ada", "bob"):
        HuntFolder(tmp_path / name, hunt).plant()
    (tmp_path / "ada/bugs/10b1" / hunt.module).write_text((ROOT / hunt.module).read_text())
    ada, bob = grade([tmp_path / "ada", tmp_path / "bob"])
    assert [verdict.exercise.number for verdict in ada.verdicts] == ["10b1"]
    assert ada.verdicts[0].outcome is Outcome.PASSED
    assert bob.verdicts[0].outcome is Outcome.FAILED


def test_one_hunt_can_be_graded_alone(one_server: CheckServer, tmp_path: Path) -> None:
    """Whatever else was handed in; who has not planted it has not started."""
    hunt, other = find_hunts("10b1")[0], find_hunts("08b1")[0]
    for each in (hunt, other):
        HuntFolder(tmp_path / "ada", each).plant()
    HuntFolder(tmp_path / "bob", other).plant()
    submissions = [str(tmp_path / name) for name in ("ada", "bob")]
    done = CliRunner().invoke(app, ["workshop", "grade", "--only", "10b1", *submissions])
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["submission", "10b1", "passed"] in rows
    assert ["ada", "failed", "0/1"] in rows
    assert ["bob", "not", "started", "0/1"] in rows
    refused = CliRunner().invoke(app, ["workshop", "grade", "--phase", "08", "--only", "10b1", *submissions])
    assert refused.exit_code == 2
    assert "Bug 10b1 belongs to phase 10, not to phase 08" in refused.stderr


def test_without_triton_what_needs_it_is_not_run_and_the_rest_is_graded(
    one_server: CheckServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "needs Triton, says the test"
    for module in (check, grading, hunts_module):
        monkeypatch.setattr(module, "NO_TRITON", reason)
    of_kernels, other, exercise = find_hunts("03.1b2")[0], find_hunts("10b1")[0], find_exercise("03.1x1")
    for each in (of_kernels, other):
        HuntFolder(tmp_path / "ada", each).plant()
    (row,) = grade([tmp_path / "ada"], [exercise], [of_kernels, other])
    said = {verdict.exercise.number: (verdict.outcome, verdict.reason) for verdict in row.verdicts}
    assert said["03.1x1"] == said["03.1b2"] == (Outcome.NOT_RUN, reason)
    assert said["10b1"][0] is Outcome.FAILED
