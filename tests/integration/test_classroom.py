"""The classroom as teacher and learner use it: real submissions, real processes, a real measurement."""

import contextlib
import csv
import json
import re
import zipfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from matplotlib.image import imread
from typer.testing import CliRunner, Result

from shared.cli import app
from shared.errors import ConfigError
from tests.waiting import PATIENCE, wait_until
from tutorial.screens import later
from tutorial.workshop import chart, grading, preparation
from tutorial.workshop.exercises import Exercise, exercises, find_exercise, reference
from tutorial.workshop.grading import grade, write_csv
from tutorial.workshop.limits import Limits
from tutorial.workshop.skeleton import skeleton
from tutorial.workshop.verdicts import Outcome
from tutorial.workshop.workspace import Workspace

pytestmark = pytest.mark.slow

STOPPING = find_exercise("02x5")
"""Its tests compute least of all, so that a submission costs little more than starting pytest."""
HAZARDS = {
    "syntax": "return (",
    "huge": "return bytearray(200 << 30)",
    "ends": "import os; os._exit(0)",
    "exits": "import sys; sys.exit(0)",
    "forks": "import os, time\nfor _ in range(6): os.fork()\ntime.sleep(600)",
    "floods": "while True: print('x' * 10000)",
    "escapes": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.fork()\n    time.sleep(600)\nos._exit(0)",
}


def solved(exercise: Exercise, lines: str | None = None) -> str:
    """The reference's module, with these lines in the exercise's place if given."""
    source, region = reference(exercise)
    if lines is None:
        return source
    text = source.split("\n")
    text[region.begin + 1 : region.end] = [region.indent + line for line in lines.split("\n")]
    return "\n".join(text)


def hand_in(folder: Path, *modules: tuple[Exercise, str | bytes]) -> Path:
    """A submission that is a workspace."""
    (folder / "shared").mkdir(parents=True)
    for exercise, text in modules:
        file = folder / exercise.path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def start_solved(workspace: Workspace, wanted: list[Exercise]) -> None:
    workspace.start(wanted)
    for exercise in wanted:
        workspace.file(exercise).write_text(solved(exercise))


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, str]], str]:
    """The CSV and the table of a class in which nearly everything goes wrong."""
    root = tmp_path_factory.mktemp("class")
    hand_in(root / "diligent" / "workspace", (STOPPING, solved(STOPPING)))
    with zipfile.ZipFile(root / "packed.zip", "w") as archive:
        archive.writestr(f"infer-workshop-02/workspace/{STOPPING.path}", solved(STOPPING))
    for name, lines in HAZARDS.items():
        hand_in(root / name, (STOPPING, solved(STOPPING, lines)))
    hand_in(root / "late", (STOPPING, skeleton(solved(STOPPING), {STOPPING.number})))
    hand_in(root / "binary", (STOPPING, b"\xff\xfe\x00\x01"))
    hand_in(root / "deleted")
    with zipfile.ZipFile(root / "hostile.zip", "w") as archive:
        archive.writestr(f"workspace/{STOPPING.path}", solved(STOPPING))
        archive.writestr("../../outside.py", "mine")
    names = ["diligent", "packed.zip", *HAZARDS, "late", "binary", "deleted", "hostile.zip"]
    table = root / "grades.csv"
    limits = ["--only", STOPPING.number, "--memory", "2", "--jobs", "2", "--csv", str(table)]
    before = {process.pid for process in psutil.process_iter()}
    command = ["workshop", "grade", *(str(root / name) for name in names), *limits]
    result = CliRunner().invoke(app, command, env={"CLASS": str(root)})  # forks show the variables of their server
    assert result.exit_code == 0, result.output

    def are_gone() -> bool:
        """No process of a submission runs, and no supervisor of one."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):  # others may end at any moment
                if process.pid not in before and f"{root.parent}" in str(process.environ()):
                    return False
        return True

    wait_until(are_gone)  # on their own they would go on for longer
    with table.open(newline="", encoding="utf-8") as source:
        return list(csv.DictReader(source)), result.stdout


@pytest.mark.parametrize(
    ("name", "outcome", "reason"),
    [
        ("diligent", "passed", ""),
        ("packed", "passed", ""),
        ("syntax", "failed", "shared/text/stopping.py, line"),
        ("huge", "failed", "MemoryError"),
        ("ends", "not run", "the run ended before this"),
        ("exits", "failed", "SystemExit"),
        ("forks", "not run", "more than"),
        ("floods", "failed", "File too large"),
        ("escapes", "not run", "the run ended before this"),
        ("late", "to do", ""),
        ("binary", "not run", "no UTF-8 text"),
        ("deleted", "not started", "is not in it"),
        ("hostile", "not run", "leads out of the zip file"),
    ],
)
def test_each_submission_gets_its_row(graded: tuple, name: str, outcome: str, reason: str) -> None:
    rows, shown = graded
    (row,) = [row for row in rows if row["submission"] == name]
    assert row["02x5"] == outcome, row
    assert reason in row["02x5 reason"]
    assert (row["passed"], row["of"]) == ("1" if outcome == "passed" else "0", "1")
    (line,) = [line for line in shown.splitlines() if line.split()[:1] == [name] and "/1" in line]
    assert outcome in line
    assert "passed by" in shown
    assert "2/13" in shown


@pytest.mark.usefixtures("one_server")
def test_what_is_wrong_in_one_exercise_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are in one file, and the first does not end the run of their tests."""
    monkeypatch.setattr(grading, "_check_reference", lambda judge, wanted, hunted: None)  # proved above
    first, second = find_exercise("02x1"), find_exercise("02x2")
    assert first.path == second.path
    folder = hand_in(tmp_path / "ada", (first, solved(first, "import os; os._exit(0)")))
    (row,) = grade([folder], [first, second])
    assert [verdict.outcome for verdict in row.verdicts] == [Outcome.NOT_RUN, Outcome.PASSED]
    assert row.num_passed == 1


@pytest.mark.usefixtures("one_server")
def test_an_endless_loop_that_no_signal_interrupts_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit on one test, here two seconds; the code gets to its loop in milliseconds."""
    monkeypatch.setattr(grading, "_check_reference", lambda judge, wanted, hunted: None)
    monkeypatch.setattr(grading, "GRACE", 0.0)
    endless = "import collections, itertools; collections.deque(itertools.repeat(1), maxlen=0)"
    (row,) = grade([hand_in(tmp_path / "ada", (STOPPING, solved(STOPPING, endless)))], [STOPPING], limits=Limits(2.0))
    assert row.verdicts[0].outcome is Outcome.NOT_RUN
    assert row.verdicts[0].reason == "a test had not ended after 2 s"


@pytest.mark.usefixtures("one_server")
@pytest.mark.parametrize(
    "entry",
    ['{"a": ' * 10_000 + "}", '{"test": 5, "outcome": "failed"}', '{"files": "ab"}', '{"files": 5}', "x}"],
    ids=["too deep", "a number for a name", "a text for files", "a number for files", "no JSON"],
)
def test_a_record_that_a_submission_wrote_into_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    """It finds the recorder on purpose, among the plugins of its process."""
    monkeypatch.setattr(grading, "_check_reference", lambda judge, wanted, hunted: None)
    lines = (
        "import sys",
        "frame = sys._getframe()",
        "while 'item' not in frame.f_locals:",
        "    frame = frame.f_back",
        "plugins = frame.f_locals['item'].config.pluginmanager.get_plugins()",
        "path = next(each.path for each in plugins if type(each).__name__ == 'Recorder')",
        f"with path.open('a') as out: out.write({entry!r} + chr(10))",
    )
    (row,) = grade([hand_in(tmp_path / "ada", (STOPPING, solved(STOPPING, "\n".join(lines))))], [STOPPING])
    assert row.verdicts[0].outcome is Outcome.NOT_RUN
    assert "its record cannot be read" in row.verdicts[0].reason


@pytest.mark.usefixtures("one_server")
def test_limits_within_which_the_reference_fails_are_refused(tmp_path: Path) -> None:
    folder = hand_in(tmp_path / "ada", (STOPPING, solved(STOPPING)))
    with pytest.raises(ConfigError, match=r"The reference itself does not pass 02x5 here \(.*--memory"):
        grade([folder], [STOPPING], limits=Limits(memory=0.05))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--phase", "02", "--only", "03x1", "."], "belongs to phase 03, not to phase 02"),
        (["no-such-folder"], "There is no submission no-such-folder"),
        (["--jobs", "0", "."], "jobs is 0"),
        (["--seconds", "0", "."], "both must be above 0"),
        (["--csv", "no-such-folder/grades.csv", "."], "cannot be written"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["workshop", "grade", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_spreadsheet_computes_nothing_of_a_submission(tmp_path: Path) -> None:
    verdict = grading.Verdict(STOPPING, Outcome.NOT_RUN, reason="@SUM(A1)")
    write_csv([grading.Row("=cmd()", (verdict,))], tmp_path / "grades.csv")
    with (tmp_path / "grades.csv").open(newline="") as source:
        (row,) = csv.DictReader(source)
    assert row["submission"] == "'=cmd()"
    assert row["02x5 reason"] == "'@SUM(A1)"


def test_submissions_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = [tmp_path / "ada" / "workspace", tmp_path / "bob" / "workspace", tmp_path / "eve.zip"]
    assert grading.names_of(paths[:2]) == [str(path) for path in paths[:2]]
    paths[2].write_bytes(b"")
    assert grading.names_of(paths[1:]) == ["workspace", "eve"]


def test_without_a_phase_the_exercises_that_were_handed_in_are_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grading, "_check_reference", lambda judge, wanted, hunted: None)
    gaps = skeleton(solved(STOPPING), {STOPPING.number})
    (row,) = grade([hand_in(tmp_path / "ada", (STOPPING, gaps))])
    assert [verdict.exercise for verdict in row.verdicts] == [STOPPING]
    (row,) = grade([hand_in(tmp_path / "bob")])
    assert [verdict.exercise for verdict in row.verdicts] == list(exercises())
    assert {verdict.outcome for verdict in row.verdicts} == {Outcome.NEW}


@pytest.mark.usefixtures("one_server")
def test_the_exported_skeleton_is_a_workspace_for_the_learner_s_commands(tmp_path: Path) -> None:
    def workshop(*arguments: str) -> Result:
        variables = {"INFER_WORKSPACE": str(tmp_path / "infer-workshop-03" / "workspace"), "NO_COLOR": "1"}
        return CliRunner().invoke(app, ["workshop", *arguments], env=variables)

    exported = workshop("export", "3", "--out", str(tmp_path / "hand.zip"))
    assert exported.exit_code == 0, exported.stderr
    assert "infer-workshop-03/workspace/shared/cache/view/contiguous.py" in exported.stdout
    with zipfile.ZipFile(tmp_path / "hand.zip") as archive:
        archive.extractall(tmp_path)
    checked = workshop("check")
    assert checked.exit_code == 1
    assert checked.stdout.count("to do") == 4
    assert "0 of 4 passed" in checked.stdout
    again = workshop("export", "3", "--out", str(tmp_path / "hand.zip"))
    assert again.exit_code == 2
    assert "replace it with --force" in again.stderr


def test_a_learner_s_ladder_runs_what_passed_and_nothing_else(
    tmp_path: Path, tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """Phase 6.1 is theirs; an exercise that has not passed runs as the reference's."""
    monkeypatch.setenv("INFER_WORKSPACE", str(tmp_path / "workspace"))
    workspace = Workspace(tmp_path / "workspace")
    planned, failing = find_exercise("06.1x1"), find_exercise("04x1")
    theirs = [failing, *(exercise for exercise in exercises() if exercise.phase == "06.1")]
    start_solved(workspace, theirs)
    mine = "import sys; print('mine', file=sys.stderr)\n" + "\n".join(_body(planned))
    workspace.file(planned).write_text(solved(planned, mine))
    workspace.file(failing).write_text(solved(failing, "raise RuntimeError('this must not run')"))
    for exercise in theirs:
        workspace.note_check(exercise, passed=exercise != failing)
    assert chart.finished_phases(workspace) == ["06.1"]

    model, out = str(tiny_checkpoints["llama"]), tmp_path / "pictures"
    shown = CliRunner().invoke(app, ["workshop", "chart", "--model", model, "--out", str(out)])
    assert shown.exit_code == 0, shown.output
    line = json.loads(shown.stdout.splitlines()[-1])
    assert list(line["results"]) == ["06.1"]
    assert line["results"]["06.1"]["after"] == 128
    assert "on your lines: phase 06.1" in shown.stdout
    told = capfd.readouterr().err
    assert "mine" in told
    assert "of 3: phase 06.1" in told, "progress is told to a pipe too"
    pixels = imread(next(out.glob("*.png")))
    assert (pixels != pixels[0, 0]).any(-1).mean() > 0.01, "the picture is empty"


def test_a_finished_phase_is_shown_on_the_learner_s_lines(
    tmp_path: Path, tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    workspace = Workspace(tmp_path / "workspace")
    theirs = [exercise for exercise in exercises() if exercise.phase == "06.1"]
    start_solved(workspace, theirs)
    for exercise in theirs:
        workspace.note_check(exercise, passed=True)
    monkeypatch.setenv("INFER_CACHE", str(tmp_path))
    later.say_reward(workspace, "06.1")
    assert "infer model pull smollm2-135m, then infer workshop chart" in capsys.readouterr().out
    monkeypatch.setattr(later, "EngineConfig", SimpleNamespace(model=str(tiny_checkpoints["llama"])))
    monkeypatch.setattr(chart, "MOST_SECONDS", PATIENCE)
    later.say_reward(workspace, "06.1")
    told = capsys.readouterr().out
    assert "06.1 Plan–run attention" in told
    assert '"benchmark"' not in told
    monkeypatch.setattr(chart, "MOST_SECONDS", 0.01)
    later.say_reward(workspace, "06.1")
    assert "It was ended after 0.01 s" in capsys.readouterr().out


def test_a_chart_without_a_finished_phase_says_where_to_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFER_WORKSPACE", str(tmp_path))
    refused = CliRunner().invoke(app, ["workshop", "chart"])
    assert refused.exit_code == 2
    assert "infer workshop start 03" in refused.stderr


def test_code_that_raises_ends_the_measurement_with_a_word_about_it(
    tmp_path: Path,
    tiny_checkpoints: dict[str, Path],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A phase before the first row shows an answer."""
    monkeypatch.setattr(chart, "MOST_SECONDS", PATIENCE)
    workspace = Workspace(tmp_path / "workspace")
    theirs = [exercise for exercise in exercises() if exercise.phase == "02"]
    start_solved(workspace, theirs)
    for exercise in theirs:
        workspace.note_check(exercise, passed=True)
    assert chart.show_phase(workspace, "02", str(tiny_checkpoints["llama"])).startswith("The capital of France is …")
    workspace.file(STOPPING).write_text(solved(STOPPING, "raise RuntimeError('this is mine')"))
    workspace.note_check(STOPPING, passed=True)
    with pytest.raises(ConfigError, match=r"The measurement ended with exit code"):
        chart.show_phase(workspace, "02", str(tiny_checkpoints["llama"]))
    assert "RuntimeError: this is mine" in capfd.readouterr().err


def test_prepare_says_what_is_ready_and_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFER_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(preparation, "first_of_each_phase", lambda: [STOPPING])
    result = CliRunner().invoke(app, ["workshop", "prepare"])
    assert result.exit_code == 1
    lines = {re.split(r" {2,}", line)[1]: line for line in result.stdout.splitlines()}
    assert lines["environment"].startswith("ready")
    assert lines["demo model"].startswith("missing")
    assert "infer model pull smollm2-135m" in lines["demo model"]
    assert lines["skeletons"].startswith(f"ready    skeletons    {len(exercises())} exercises")
    assert lines["check"].startswith("ready    check        02x5, solved, pass their tests without a network")


@pytest.mark.usefixtures("one_server")
def test_prepare_reports_a_check_that_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(preparation.OFFLINE, "PYTEST_PLUGINS", "tutorial.workshop.no_such_plugin")
    item = list(preparation.look([STOPPING]))[-1]
    assert not item.is_ready
    assert "02x5, solved, not run without a network" in item.detail


def _body(exercise: Exercise) -> list[str]:
    """The reference's lines of an exercise, without their indentation."""
    region = reference(exercise)[1]
    return [line.removeprefix(region.indent) for line in region.lines]
