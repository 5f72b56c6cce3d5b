"""Phases packed for handing out: chapters with their pictures, one skeleton, the tests to read, and a README.

Everything lies in one folder of a zip file, at the path that it has in the repository, so that the page finds its
pictures. An installed wheel holds neither `tests` nor `docs`; a file made from one leaves out what is there, which
learners have in their checkout. Invariant: the same tree gives the same bytes on every machine: members are sorted,
dated 1980, and stored, since compressed bytes depend on the library that made them.
"""

import contextlib
import os
import re
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from shared.errors import ConfigError
from shared.lessons import Lesson, lessons
from tutorial.workshop.exercises import ROOT, Exercise, exercises, exercises_of
from tutorial.workshop.workspace import Workspace

_IMAGE = re.compile(r"""!\[[^\]]*\]\(([^)\s]+)[^)]*\)|\b(?:src|srcset)=["']([^"'\s]+)""")
_REMOTE = re.compile(r"[a-z]+:|//")
_DATE = (1980, 1, 1, 0, 0, 0)
_README = """\
# Exercises of {titles}

What is here:

{chapters}
- `workspace/`: the modules that you work on. Where one raises `NotImplementedError`, your lines are missing:

{exercises}

- {tests}: the tests that judge them, for reading here or in the checkout.

The exercises run inside the complete engine, so they need a checkout of the course, in which `make env` was run once.
All commands are typed in its folder; `. .venv/bin/activate` lets the shell find `infer`.

## Start

If the checkout has no folder `workspace` yet, copy the one from here into it. If there is one with work of yours in it,
leave it as it is and let the course put the same skeleton beside what you have:

{starts}

Then write your lines. When you are stuck:

    infer workshop hint {first}

## Check

{checks}
    infer workshop check --only {first}

Your code works in every other command too: `INFER_WORKSHOP=1 infer generate --prompt Hello`. Gaps that are left run the
reference's lines there.

## Hand in

Pack what you wrote and how far you are, under your own name, and hand in that one file:

    python -m zipfile -c YOUR-NAME.zip workspace/shared workspace/bugs workspace/.progress.json

A part that you do not have, such as `bugs` before the first bug hunt, is left out. What else lies in `workspace` stays
with you: your backups, your key to the teacher's board, and your times if you had the course record them.
"""


def chapter_of(lesson: Lesson) -> Path:
    """Where the chapter of a phase lies, whether it has been written or not."""
    return ROOT / "tutorial" / f"{lesson.folder.name}.md"


def phases_to_hand_out() -> list[str]:
    """Numbers of the phases that have a chapter and exercises."""
    having = {exercise.phase for exercise in exercises()}
    return [lesson.number for lesson in lessons() if lesson.number in having and chapter_of(lesson).is_file()]


def handout_name(wanted: Sequence[Lesson]) -> str:
    """The name of the folder in the zip file, and of the file without its end."""
    return "-".join(["infer-workshop", *(lesson.number for lesson in wanted)])


def contents(wanted: Sequence[Lesson]) -> dict[str, bytes]:
    """What is handed out of these phases, by its path inside the folder; ConfigError if one has nothing to hand out."""
    for lesson in wanted:
        if lesson.number not in phases_to_hand_out():
            missing = "exercises" if chapter_of(lesson).is_file() else "chapter"
            raise ConfigError(
                f"Phase {lesson.number} has no {missing}, so there is nothing to hand out; phases that have both are "
                f"{', '.join(phases_to_hand_out()) or 'none'}."
            )
    chapters = [chapter_of(lesson) for lesson in wanted]
    pictures = [picture for chapter in chapters for picture in _images(chapter)]
    own = [exercise for lesson in wanted for exercise in exercises_of(lesson)]
    tests = list(dict.fromkeys(test.partition("::")[0] for exercise in own for test in exercise.tests))
    paths = [*chapters, *pictures, *(ROOT / test for test in tests)]
    if not (ROOT / "tests").is_dir():  # no checkout, but an installed wheel
        paths = [path for path in paths if path.is_file()]
    files = {path.relative_to(ROOT).as_posix(): _read(path) for path in paths}
    files["README.md"] = _readme(wanted, own, tests).encode()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "workspace"
        Workspace(root).start(own)
        for path in root.rglob("*"):
            if path.is_file():
                files[path.relative_to(folder).as_posix()] = path.read_bytes()
    return files


def export(wanted: Sequence[Lesson], out: Path, *, force: bool = False) -> list[str]:
    """Write the zip file, complete or not at all; the paths of its members.

    Raises ConfigError if there is nothing to hand out, if ``out`` exists and is not to be replaced, or if it cannot be
    written.
    """
    files = contents(wanted)
    if out.exists() and not force:
        raise ConfigError(f"{out} exists; replace it with --force, or name another file with --out.")
    unfinished = out.with_name(f".{out.name}.{os.getpid()}")
    name = handout_name(wanted)
    try:
        with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_STORED) as archive:
            for path in sorted(files):
                info = zipfile.ZipInfo(f"{name}/{path}", _DATE)
                info.create_system = 3  # Unix, wherever this runs
                info.external_attr = 0o100644 << 16
                archive.writestr(info, files[path])
        unfinished.replace(out)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise ConfigError(f"{out} cannot be written ({error.strerror}); name another file with --out.") from None
    return [f"{name}/{path}" for path in sorted(files)]


def _images(chapter: Path) -> list[Path]:
    """The files that the page shows as pictures."""
    targets = [match[1] or match[2] for match in _IMAGE.finditer(chapter.read_text(encoding="utf-8"))]
    paths = [(chapter.parent / target.partition("#")[0]).resolve() for target in targets if not _REMOTE.match(target)]
    for path in paths:
        if not path.is_relative_to(ROOT):
            raise ConfigError(f"{chapter.name} shows {path}, which lies outside the repository; move it inside.")
    return list(dict.fromkeys(paths))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path.relative_to(ROOT)} cannot be packed ({error.strerror}); export from a checkout of the repository."
        ) from None


def _readme(wanted: Sequence[Lesson], own: Sequence[Exercise], tests: Sequence[str]) -> str:
    chapters = [(lesson, chapter_of(lesson).relative_to(ROOT).as_posix()) for lesson in wanted]
    return _README.format(
        titles=", ".join(f"phase {lesson.number}, {lesson.title}" for lesson in wanted),
        chapters="\n".join(f"- `{path}`, with its pictures: {lesson.question}" for lesson, path in chapters),
        exercises="\n".join(f"  - {e.number}, about {e.minutes} minutes: {e.title} (`{e.path}`)" for e in own),
        tests=", ".join(f"`{test}`" for test in tests),
        starts="\n".join(f"    infer workshop start {lesson.number}" for lesson in wanted),
        checks="\n".join(f"    infer workshop check {lesson.number}" for lesson in wanted),
        first=own[0].number,
    )
