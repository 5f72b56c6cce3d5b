"""Kept verdicts: what finds them again, and where they point then, without running a test."""

import ast
import shutil
from pathlib import Path

import pytest

from tutorial.screens.check import screen
from tutorial.workshop.course_state import _sources
from tutorial.workshop.exercises import ROOT, exercises, find_exercise, reference
from tutorial.workshop.kept_verdicts import KeptVerdicts
from tutorial.workshop.verdicts import Case, Outcome, Verdict
from tutorial.workshop.workspace import Workspace

ABOVE, EXERCISE = find_exercise("03x2"), find_exercise("03x3")


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """A workspace whose third exercise is written, right."""
    made = Workspace(tmp_path / "workspace")
    made.start([ABOVE, EXERCISE])
    file = made.file(EXERCISE)
    lines = "\n".join(reference(EXERCISE)[1].lines)
    file.write_text(file.read_text().replace(f'        raise NotImplementedError("{EXERCISE.message}")', lines))
    return made


def failed(workspace: Workspace, text: str = "return q") -> Verdict:
    """A failure at the first line of the exercise that holds a text."""
    file = workspace.file(EXERCISE)
    lines = file.read_text().split("\n")
    begin = lines.index(f"        # {EXERCISE.message}")
    where = f"{file}:{next(n for n, line in enumerate(lines, 1) if n > begin and text in line)}"
    cases = (Case(EXERCISE.tests[0], "failed", "ValueError: x", where=where),)
    return Verdict(EXERCISE, Outcome.FAILED, 0, 1, "ValueError: x", EXERCISE.tests[0], where, str(file), cases)


def keep(workspace: Workspace, verdict: Verdict) -> None:
    kept = KeptVerdicts(workspace.root)
    kept.keep(verdict, kept.keys([EXERCISE])[EXERCISE], is_alone=True)


def found(workspace: Workspace) -> Verdict:
    kept = KeptVerdicts(workspace.root)
    verdict = kept.find(EXERCISE, kept.keys([EXERCISE])[EXERCISE])
    assert verdict is not None
    return verdict


def test_a_failure_names_its_line_after_lines_were_added_above(workspace: Workspace) -> None:
    file = workspace.file(EXERCISE)
    keep(workspace, failed(workspace))
    gap = f'raise NotImplementedError("{ABOVE.message}")'
    file.write_text(file.read_text().replace(gap, "\n".join(["self.num_past = 7", *["        # a note"] * 50])))
    shown = screen(workspace, found(workspace))
    assert any(line.endswith(" return q") for line in shown), shown


def test_a_failure_outside_the_exercise_s_lines_is_not_kept(workspace: Workspace) -> None:
    keep(workspace, failed(workspace, "def attend("))
    assert not (workspace.root / ".verdicts").exists()


def test_a_copy_of_the_workspace_finds_its_own_files(workspace: Workspace, tmp_path: Path) -> None:
    verdict = failed(workspace)
    keep(workspace, verdict)
    shutil.move(workspace.root, tmp_path / "renamed")
    moved = Workspace(tmp_path / "renamed")
    assert found(moved).where == verdict.where.replace(str(workspace.root), str(moved.root))  # type: ignore[union-attr]
    assert found(moved).file == str(moved.file(EXERCISE))
    assert str(workspace.root) not in "\n".join(screen(moved, found(moved)))


def test_an_editor_s_lock_is_passed_over(workspace: Workspace) -> None:
    keep(workspace, failed(workspace))
    workspace.file(EXERCISE).with_name(".#contiguous.py").symlink_to("user@host.1234:5678")
    (workspace.file(ABOVE).parent / "folder.py").mkdir()
    assert found(workspace).is_kept


def test_a_verdict_that_cannot_be_kept_is_dropped(workspace: Workspace) -> None:
    (workspace.root / ".verdicts").write_text("a file")
    keep(workspace, failed(workspace))
    kept = KeptVerdicts(workspace.root)
    assert kept.find(EXERCISE, kept.keys([EXERCISE])[EXERCISE]) is None


def test_the_model_folders_count(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    before = KeptVerdicts(workspace.root).keys([EXERCISE])
    monkeypatch.setenv("INFER_TEST_MODELS", "/nowhere")
    assert KeptVerdicts(workspace.root).keys([EXERCISE]) != before


def test_all_that_the_tests_of_exercises_import_counts() -> None:
    """Followed through the imports of their files; not what the engine reads at run time, which lies in ``shared``."""
    hashed = set(_sources())
    left = [ROOT / "conftest.py", *{ROOT / test.partition("::")[0] for each in exercises() for test in each.tests}]
    seen: set[Path] = set()
    while left:
        file = left.pop()
        if file in seen:
            continue
        seen.add(file)
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            paths = (ROOT / name.replace(".", "/") for name in names)
            left += [one for path in paths for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file()]
    assert ROOT / "benchmarks/compression.py" in seen
    templates = set((ROOT / "shared").rglob("*.jinja"))
    assert templates
    missing = sorted(str(file.relative_to(ROOT)) for file in (seen | templates) - hashed)
    assert not missing, missing
