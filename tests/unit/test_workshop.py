"""Exercises as text: markers, gaps, the way back; and a workspace's files, without running any of them."""

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError
from shared.lessons import find_lesson
from tutorial.screens.classroom import wanted_exercises
from tutorial.workshop.exercises import (
    ROOT,
    exercises,
    find_exercise,
    order,
    regions,
)
from tutorial.workshop.skeleton import filled, has_gap, skeleton, with_gap
from tutorial.workshop.versions import can_replace, code_of
from tutorial.workshop.workspace import State, Workspace

SOURCE = '''"""A module."""


class Counter:
    def step(self, by: int) -> int:
        """Count on."""
        # exercise 07x1: count
        # hint: add
        self.value += by
        return self.value
        # end exercise

    def back(self) -> int:
        """Count down."""
        # exercise 07x2: count down
        return self.step(-1)
        # end exercise


def other() -> None:
    return None
'''

PHASE_3 = tuple(exercise for exercise in exercises() if exercise.phase == "03")

code_lines = st.lists(st.sampled_from(["x = 1", "x += 2", "", "# a remark", "# hint: look closer", "return x"]))


@st.composite
def sources(draw: st.DrawFn) -> str:
    """Modules of functions with exercises of every length between other lines."""
    lines = ['"""A module."""', ""]
    for k in range(1, draw(st.integers(1, 4)) + 1):
        lines += [f"def f{k}(x):", f'    """Function {k}."""']
        body = [f"    {line}".rstrip() for line in draw(code_lines)]
        lines += [f"    # exercise 07x{k}: part {k}", *body, "    pass", "    # end exercise", ""]
        lines += draw(st.sampled_from([[], ["# between", ""], ["CONSTANT = 1", ""]]))
    return "\n".join(lines)


def test_markers_are_read() -> None:
    first, second = regions(SOURCE)
    assert (first.number, first.title, first.hints, first.target) == ("07x1", "count", ("add",), "Counter.step")
    assert (second.number, second.target, second.lines) == ("07x2", "Counter.back", ("        return self.step(-1)",))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("        # end exercise\n\n    def back", "\n    def back"), "07x2 begins inside exercise 07x1"),
        (("(-1)\n        # end exercise\n", "(-1)\n"), "07x2 has no `# end exercise`"),
        (("        return self.step(-1)\n", ""), "07x2 holds no line of code"),
        (
            ('"""A module."""\n', "# exercise 07x3: outside\nx = 1\n# end exercise\n"),
            "07x3 must stand inside one function",
        ),
        (("07x2: count down", "07.2: count down"), r"source:15: `# exercise 07\.2: count down` does not begin"),
        (("07x2: count down", "07x2 count down"), r"write `# exercise NUMBER: title`, where NUMBER is its phase, an x"),
    ],
)
def test_markers_that_do_not_fit_are_refused(change: tuple[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        regions(SOURCE.replace(*change))


def test_a_skeleton_keeps_signature_docstring_and_line_numbers_and_hides_lines_and_hints() -> None:
    text = skeleton(SOURCE, {"07x1"})
    assert 'raise NotImplementedError("exercise 07x1: count")' in text
    assert '"""Count on."""' in text
    assert "self.value += by" not in text
    assert "hint: add" not in text
    namespace: dict = {}
    exec(text, namespace)
    with pytest.raises(NotImplementedError, match=r"^exercise 07x1: count$"):
        namespace["Counter"]().step(1)


@given(sources(), st.data())
def test_a_gap_filled_again_is_the_reference(source: str, data: st.DataObject) -> None:
    found = regions(source)
    chosen = data.draw(st.sets(st.sampled_from([region.number for region in found])))
    text = skeleton(source, chosen)
    compile(text, "skeleton", "exec")
    assert text.count("\n") == source.count("\n")
    assert {region.number for region in found if has_gap(text, region)} == chosen
    again, numbers = filled(text, source)
    assert again == source
    assert set(numbers) == chosen


@given(sources(), st.data())
def test_gaps_made_one_by_one_are_the_skeleton(source: str, data: st.DataObject) -> None:
    found = regions(source)
    shuffled = data.draw(st.permutations(found))
    text = source
    for region in shuffled:
        cut = with_gap(text, region, only_if_untouched=True)
        assert cut is not None
        text = cut
    assert text == skeleton(source, {region.number for region in found})


def test_a_function_can_be_given_other_code_unless_that_closes_over_other_names() -> None:
    """Versions of an exercise are tested in forks that have imported its module already."""
    text = "class A:\n    def f(self):\n        return super().f()\n\n\ndef g():\n    return 1\n"
    found = code_of(text, "A.f")
    assert found is not None
    assert found.co_freevars == ("__class__",)
    assert code_of(text, "A.g") is None
    assert can_replace(text.replace("super().f()", "super().g()"), text, "A.f")
    assert not can_replace(text.replace("super().f()", "1"), text, "A.f")
    assert not can_replace(text, text, "f")


def test_what_a_learner_wrote_stays_when_the_other_gaps_are_filled() -> None:
    text = skeleton(SOURCE, {"07x1", "07x2"}).replace(
        '        raise NotImplementedError("exercise 07x2: count down")', "        x = -1\n        return self.step(x)"
    )
    again, numbers = filled(text, SOURCE)
    assert numbers == ["07x1"]
    assert "self.value += by" in again
    assert "return self.step(x)" in again
    assert "return self.step(-1)" not in again


@pytest.mark.parametrize(
    ("number", "message"),
    [
        ("3x9", r"There is no exercise '3x9'; there are 01ax1, .*03x1"),
        *((n, "its phase, an x and a count from 1") for n in ("06.1", "06x", "06x0", "x1")),
    ],
)
def test_numbers_of_exercises_are_found_as_they_are_written_and_others_refused(number: str, message: str) -> None:
    assert find_exercise("3x1") is find_exercise("03x1")
    assert find_exercise("1ax1") is find_exercise(" 01AX1 ")
    with pytest.raises(ConfigError, match=message):
        find_exercise(number)


def test_exercises_are_sorted_by_phase_and_count() -> None:
    numbers = [exercise.number for exercise in exercises()]
    assert sorted(numbers, key=order) == numbers
    assert sorted(["04x1", "03.1x1", "03x10", "03x9"], key=order) == ["03x9", "03x10", "03.1x1", "04x1"]


def test_an_exercise_and_a_phase_have_numbers_that_cannot_be_mistaken() -> None:
    assert find_exercise("3.1x1") is find_exercise("03.1x1")
    assert find_exercise("03.1x1").phase == find_lesson("3.1").number == "03.1"
    assert [exercise.number for exercise in wanted_exercises("03.1", None)][:2] == ["03.1x1", "03.1x2"]
    assert wanted_exercises(None, "03x1") == wanted_exercises("03", "3x1") == [find_exercise("03x1")]
    assert wanted_exercises("03x1", None) == wanted_exercises("3X1", None) == [find_exercise("03x1")]
    assert wanted_exercises("03_1", "03.1x1") == [find_exercise("03.1x1")]
    for phase, only in (("03.1", "03x1"), ("03", "03.1x1")):
        with pytest.raises(ConfigError, match=rf"belongs to phase .*, not to phase {phase}, whose exercises are"):
            wanted_exercises(phase, only)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "workspace")


def test_start_writes_the_gaps_asked_for_and_no_others(workspace: Workspace) -> None:
    second = find_exercise("03x2")
    (file,) = workspace.start([second])
    assert file.read_text() == skeleton((ROOT / second.path).read_text(), {"03x2"})
    states = {exercise.number: state for exercise, state in workspace.states().items() if state is not State.NEW}
    assert states == {"03x2": State.GAP}
    workspace.start([find_exercise("03x1")])
    assert file.read_text() == skeleton((ROOT / second.path).read_text(), {"03x1", "03x2"})
    assert Workspace(workspace.root).state(second) is State.GAP
    assert workspace.start([second]) == []


def test_start_does_not_touch_what_the_learner_wrote_and_refuses_a_gap_in_it(workspace: Workspace) -> None:
    exercise = find_exercise("03x1")
    (file,) = workspace.start([exercise])
    handed = file.read_text()
    file.write_text(handed.replace("k, v = k[:, first:], v[:, first:]", "pass"))
    before = file.read_text()
    with pytest.raises(ConfigError, match=r"03x4 in .* were edited"):
        workspace.start(PHASE_3)
    assert file.read_text() == before
    assert workspace.state(find_exercise("03x2")) is State.NEW
    file.write_text(handed.replace('raise NotImplementedError("exercise 03x1', 'return ("exercise 03x1'))
    assert workspace.state(exercise) is State.WRITTEN
    workspace.start(PHASE_3)
    assert 'return ("exercise 03x1' in file.read_text()
    assert workspace.state(find_exercise("03x4")) is State.GAP


def test_reset_keeps_a_backup(workspace: Workspace) -> None:
    wanted = PHASE_3
    (file,) = workspace.start(wanted)
    handed = file.read_text()
    file.write_text("mine")
    files, backup = workspace.reset(wanted)
    assert files == [file]
    assert file.read_text() == handed
    assert backup is not None
    assert (backup / wanted[0].path).read_text() == "mine"


def test_where_no_backup_can_be_written_nothing_is_reset(workspace: Workspace) -> None:
    workspace.start(PHASE_3)
    (workspace.root / ".backups").write_text("a file")  # root may write in any folder
    before = workspace.file(PHASE_3[0]).read_text()
    with pytest.raises(ConfigError, match=r"cannot be written .*, so nothing was changed"):
        workspace.reset(PHASE_3)
    assert workspace.file(PHASE_3[0]).read_text() == before


def test_reset_of_one_exercise_leaves_the_others(workspace: Workspace) -> None:
    (file,) = workspace.start(PHASE_3)
    handed = file.read_text()
    first = 'raise NotImplementedError("exercise 03x1: what one token costs, in bytes")'
    file.write_text(
        handed.replace(first, "return 1").replace('raise NotImplementedError("exercise 03x3', 'return ("03x3')
    )
    workspace.reset([find_exercise("03x1")])
    assert file.read_text() == handed.replace('raise NotImplementedError("exercise 03x3', 'return ("03x3')
    file.write_text(file.read_text().replace("# exercise 03x1: what one token costs, in bytes", ""))
    with pytest.raises(ConfigError, match=r"markers of exercise 03x1 .*`infer workshop reset 03`"):
        workspace.reset([find_exercise("03x1")])


def test_update_takes_in_what_changed_in_the_reference_and_marks_conflicts(workspace: Workspace, moved: Path) -> None:
    (file,) = workspace.start(PHASE_3)
    path, line = PHASE_3[0].path, "class ContiguousCache:"
    gap = 'raise NotImplementedError("exercise 03x1: what one token costs, in bytes")'
    file.write_text(file.read_text().replace(gap, "return 2  # mine"))
    text = (moved / path).read_text()
    (moved / path).write_text(text.replace(line, f"{line}  # moved"))
    (result,) = workspace.update()
    assert (result.is_changed, result.num_conflicts) == (True, 0)
    assert f"{line}  # moved" in file.read_text()
    assert "return 2  # mine" in file.read_text()
    assert result.backup is not None
    assert "moved" not in (result.backup / path).read_text()
    (again,) = workspace.update()
    assert not again.is_changed

    file.write_text(file.read_text().replace(f"{line}  # moved", "class MyCache:"))
    (moved / path).write_text(text.replace(line, "class Cache:"))
    (result,) = workspace.update()
    assert result.num_conflicts == 1
    conflict = "<<<<<<< yours\nclass MyCache:\n=======\nclass Cache:\n>>>>>>> the reference now\n"
    assert conflict in file.read_text()


@pytest.fixture
def moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the reference's module that a test may edit, in the reference's place."""
    from tutorial.workshop import exercises as of_course
    from tutorial.workshop import workspace as of_learner

    exercises()  # read before the root moves
    for exercise in exercises():
        target = tmp_path / "reference" / exercise.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text((ROOT / exercise.path).read_text())
    monkeypatch.setattr(of_learner, "ROOT", tmp_path / "reference")
    monkeypatch.setattr(of_course, "ROOT", tmp_path / "reference")
    return tmp_path / "reference"


NOTES = """
import sys
from pathlib import Path
from tutorial.workshop.exercises import exercises
from tutorial.workshop.workspace import Workspace
workspace = Workspace(Path(sys.argv[1]))
print("open", flush=True)
sys.stdin.readline()
for exercise in exercises()[int(sys.argv[2]) :: 2]:
    workspace.note_check(exercise, passed=True, digest=exercise.number)
"""


def test_two_processes_that_note_checks_at_once_lose_none(workspace: Workspace) -> None:
    """Both have read the progress before the other writes, and both write again and again."""
    workspace.start(PHASE_3)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    command = [sys.executable, "-c", NOTES, str(workspace.root)]
    with ExitStack() as stack:
        both = [stack.enter_context(subprocess.Popen([*command, n], **pipes)) for n in "01"]
        for process in both:
            assert process.stdout.readline() == "open\n"
        for process in both:
            process.stdin.write("go\n")
            process.stdin.flush()
    assert [process.returncode for process in both] == [0, 0]
    progress = json.loads((workspace.root / ".progress.json").read_text())
    assert {number: entry["passed"] for number, entry in progress.items()} == {e.number: e.number for e in exercises()}
    assert progress["03x1"]["is_started"]


def test_a_workspace_that_is_a_file_is_refused_and_nothing_is_to_be_deleted(tmp_path: Path) -> None:
    (tmp_path / "hostname").write_text("mine")
    with pytest.raises(ConfigError, match=r"hostname is a file; choose a folder with INFER_WORKSPACE=DIR\.$"):
        Workspace(tmp_path / "hostname")
    with pytest.raises(ConfigError, match="is the course itself, whose files would get gaps"):
        Workspace(ROOT)


def test_a_damaged_progress_file_is_one_paragraph(workspace: Workspace) -> None:
    workspace.start(PHASE_3)
    for text in ("{", "[]", '{"03x1": 3}', '{"03x1": {"unknown": 1}}'):
        (workspace.root / ".progress.json").write_text(text)
        with pytest.raises(ConfigError, match=r"\.progress\.json cannot be read"):
            Workspace(workspace.root)


def test_hints_come_one_by_one_and_do_not_start_an_exercise(workspace: Workspace) -> None:
    exercise = find_exercise("03x2")
    assert len(exercise.hints) == 2
    assert [workspace.next_hint(exercise) for _ in range(3)] == [1, 2, 2]
    assert workspace.state(exercise) is State.NEW
    assert json.loads((workspace.root / ".progress.json").read_text())["03x2"]["hints"] == 2
