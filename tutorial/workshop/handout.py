"""A phase packed for handing out: the chapter with its pictures, the skeleton, the tests to read, and a README.

Everything lies in one folder of a zip file, at the path that it has in the repository, so that the page finds its
pictures. Invariant: the same tree gives the same bytes on every machine: members are sorted, dated 1980, and stored,
since compressed bytes depend on the library that made them.
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
# Phase {number}: {title}

{question}

What is here:

- `{chapter}`: the chapter, with its pictures. Begin with it.
- `workspace/`: the modules that you work on. Where one raises `NotImplementedError`, your lines are missing:

{exercises}

- {tests}: the tests that judge them, for reading.

The exercises run inside the complete engine, so they need a checkout of the course, in which `make env` was run once.
All commands are typed in its folder; `. .venv/bin/activate` lets the shell find `infer`.

## Start

If the checkout has no folder `workspace` yet, copy the one from here into it. If there is one with work of yours in it,
leave it as it is and let the course put the same skeleton beside what you have:

    infer workshop start {number}

Then write your lines. When you are stuck:

    infer workshop hint {first}

## Check

    infer workshop check {number}
    infer workshop check --only {first}

Your code works in every other command too: `INFER_WORKSHOP=1 infer generate --prompt Hello`. Gaps that are left run the
reference's lines there.

## Hand in

Pack the folder `workspace`, under your own name, and hand in that one file:

    python -m zipfile -c YOUR-NAME.zip workspace
"""


def chapter_of(lesson: Lesson) -> Path:
    """Where the chapter of a phase lies, whether it has been written or not."""
    return ROOT / "tutorial" / f"{lesson.folder.name}.md"


def phases_to_hand_out() -> list[str]:
    """Numbers of the phases that have a chapter and exercises."""
    having = {exercise.phase for exercise in exercises()}
    return [lesson.number for lesson in lessons() if lesson.number in having and chapter_of(lesson).is_file()]


def handout_name(lesson: Lesson) -> str:
    """The name of the folder in the zip file, and of the file without its end."""
    return f"infer-workshop-{lesson.number}"


def contents(lesson: Lesson) -> dict[str, bytes]:
    """What is handed out, by its path inside the folder; ConfigError where there is nothing to hand out."""
    chapter = chapter_of(lesson)
    if lesson.number not in phases_to_hand_out():
        missing = "exercises" if chapter.is_file() else "chapter"
        raise ConfigError(
            f"Phase {lesson.number} has no {missing}, so there is nothing to hand out; phases that have both are "
            f"{', '.join(phases_to_hand_out()) or 'none'}."
        )
    wanted = exercises_of(lesson)
    tests = list(dict.fromkeys(test.partition("::")[0] for exercise in wanted for test in exercise.tests))
    paths = [chapter, *_images(chapter), *(ROOT / test for test in tests)]
    files = {path.relative_to(ROOT).as_posix(): _read(path) for path in paths}
    files["README.md"] = _readme(lesson, wanted, tests).encode()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "workspace"
        Workspace(root).start(wanted)
        for path in root.rglob("*"):
            if path.is_file():
                files[path.relative_to(folder).as_posix()] = path.read_bytes()
    return files


def export(lesson: Lesson, out: Path, *, force: bool = False) -> list[str]:
    """Write the zip file, complete or not at all; the paths of its members.

    Raises ConfigError if there is nothing to hand out, if ``out`` exists and is not to be replaced, or if it cannot be
    written.
    """
    files = contents(lesson)
    if out.exists() and not force:
        raise ConfigError(f"{out} exists; replace it with --force, or name another file with --out.")
    unfinished = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_STORED) as archive:
            for path in sorted(files):
                info = zipfile.ZipInfo(f"{handout_name(lesson)}/{path}", _DATE)
                info.create_system = 3  # Unix, wherever this runs
                info.external_attr = 0o100644 << 16
                archive.writestr(info, files[path])
        unfinished.replace(out)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise ConfigError(f"{out} cannot be written ({error.strerror}); name another file with --out.") from None
    return [f"{handout_name(lesson)}/{path}" for path in sorted(files)]


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


def _readme(lesson: Lesson, wanted: Sequence[Exercise], tests: Sequence[str]) -> str:
    return _README.format(
        number=lesson.number,
        title=lesson.title,
        question=lesson.question,
        chapter=chapter_of(lesson).relative_to(ROOT).as_posix(),
        exercises="\n".join(f"  - {e.number}, about {e.minutes} minutes: {e.title} (`{e.path}`)" for e in wanted),
        tests=", ".join(f"`{test}`" for test in tests),
        first=wanted[0].number,
    )
