"""The learner's folder: skeletons, what was handed out, backups, and how far each exercise is.

    workspace/shared/...     the learner's modules, at the reference's paths
    workspace/.handed/...    each of them as it was handed out, the base of a later merge
    workspace/.backups/...   what ``reset`` and ``update`` replaced, by time
    workspace/.progress.json which exercises were started, which hints shown, what the last check said

Several commands may use a workspace at once (`watch` in one terminal, `check` in another): each changes the progress
under a lock, in what the file says then. Invariants: no file of the learner's is replaced before its copy lies in the
backups; no command loses what another noted.
"""

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from merge3 import Merge3

from shared.errors import ConfigError
from tutorial.workshop.exercises import ROOT, Exercise, exercises, reference
from tutorial.workshop.skeleton import has_gap, skeleton, with_gap, written_lines

_HANDED = ".handed"
_BACKUPS = ".backups"
_PROGRESS = ".progress.json"


class State(StrEnum):
    """How far an exercise is."""

    NEW = "not started"
    GAP = "to do"
    WRITTEN = "written"


@dataclass
class Progress:
    """What a workspace remembers of one exercise."""

    is_started: bool = False
    hints: int = 0  # how many were shown
    passed: str | None = None  # digest of the lines with which its tests passed
    checked: float = 0.0  # when its tests ran last, in seconds since the epoch
    num_failed: int = 0  # checks that failed since it was started, or passed
    case: str = ""  # the one to look at first, if the last check failed


@dataclass(frozen=True)
class Update:
    """What a merge did to one file: nothing, took the reference's changes in, or left conflicts to solve."""

    path: str
    is_changed: bool
    num_conflicts: int
    backup: Path | None = None


@dataclass
class Workspace:
    """The folder at ``root``, which need not exist yet."""

    root: Path
    progress: dict[str, Progress] = field(init=False)

    def __post_init__(self) -> None:
        if self.root.exists() and not self.root.is_dir():
            raise ConfigError(f"The workspace {self.root} is a file; choose a folder with INFER_WORKSPACE=DIR.")
        if self.root.resolve() == ROOT:
            raise ConfigError(
                f"The workspace {self.root} is the course itself, whose files would get gaps; choose another folder "
                "with INFER_WORKSPACE=DIR."
            )
        self.progress = self._read_progress()

    def _read_progress(self) -> dict[str, Progress]:
        try:
            values = json.loads((self.root / _PROGRESS).read_text(encoding="utf-8"))
            return {number: Progress(**entry) for number, entry in values.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{self.root / _PROGRESS} cannot be read ({error}); delete it and start the exercises again; the "
                "files stay as they are."
            ) from None

    def file(self, exercise: Exercise) -> Path:
        """Where the learner writes the exercise."""
        return self.root / exercise.path

    def state(self, exercise: Exercise) -> State:
        if exercise.number not in self._started(exercise.path) or not self.file(exercise).is_file():
            return State.NEW
        _, region = reference(exercise)
        text = self._text(exercise.path, errors="replace")  # one file that is no UTF-8 must not hide the others
        return State.GAP if has_gap(text, region) else State.WRITTEN

    def states(self) -> dict[Exercise, State]:
        """Every exercise of the course with its state, in order."""
        return {exercise: self.state(exercise) for exercise in exercises()}

    def has_passed(self, exercise: Exercise) -> bool:
        """Whether the tests passed with the exercise's lines as they are now."""
        digest = self._progress(exercise).passed
        return digest is not None and self.file(exercise).is_file() and digest == self.digest(exercise)

    def note_check(
        self, exercise: Exercise, *, passed: bool, digest: str | None = None, case: str = "", is_new: bool = True
    ) -> None:
        """Remember what a check said of the lines with this `digest`, by default as they are now.

        Args:
            case: the one to look at first, if the check failed.
            is_new: whether tests ran; otherwise it was answered from an earlier check.
        """
        digest = digest or self.digest(exercise)
        with self._changing():
            entry = self.progress.setdefault(exercise.number, Progress(True))
            entry.passed = digest if passed else None
            entry.case = "" if passed else case
            if is_new:
                entry.checked = time.time()
                entry.num_failed = 0 if passed else entry.num_failed + 1

    def next_hint(self, exercise: Exercise) -> int:
        """Count one more hint as shown; how many have been shown now, at most all."""
        with self._changing():
            entry = self.progress[exercise.number] = self._progress(exercise)
            entry.hints = min(entry.hints + 1, len(exercise.hints))
        return entry.hints

    def start(self, wanted: Sequence[Exercise]) -> list[Path]:
        """Hand out these exercises: write their modules with gaps; the files that changed, in order.

        An exercise that was started stays as it is. Raises ConfigError, with nothing written, if the lines of a new
        one can no longer be found in a file that the learner already has.
        """
        texts: dict[str, str] = {}
        with self._changing():  # the files too: two commands may start exercises of one module
            new = [exercise for exercise in wanted if self.state(exercise) is State.NEW]
            for exercise in new:
                source, region = reference(exercise)
                if exercise.path not in texts:
                    texts[exercise.path] = self._text(exercise.path) if self.file(exercise).is_file() else source
                text = with_gap(texts[exercise.path], region, only_if_untouched=True)
                if text is None:
                    raise ConfigError(
                        f"The lines of exercise {exercise.number} in {self.file(exercise)} were edited, "
                        "so no gap was made there; `infer workshop reset` hands the file out anew and keeps a backup."
                    )
                texts[exercise.path] = text
            for exercise in new:
                self.progress[exercise.number] = Progress(True, self._progress(exercise).hints)
            for path, text in texts.items():
                self._write(self.root / path, text)
                self._hand_out(path)
        return [self.root / path for path in texts]

    def reset(self, wanted: Sequence[Exercise]) -> tuple[list[Path], Path | None]:
        """Put the gaps back; the files, and the folder of their backup (None if nothing was there).

        A file all of whose started exercises are reset becomes its skeleton; otherwise the lines between an
        exercise's markers are replaced, and ConfigError is raised, with nothing written, if they are not there.
        """
        chosen = [exercise for exercise in wanted if self.state(exercise) is not State.NEW]
        texts: dict[str, str] = {}
        for path in dict.fromkeys(exercise.path for exercise in chosen):
            numbers = {exercise.number for exercise in chosen if exercise.path == path}
            if numbers == self._started(path):
                texts[path] = skeleton((ROOT / path).read_text(encoding="utf-8"), numbers)
            else:
                texts[path] = self._text(path)
                for exercise in chosen:
                    if exercise.path == path:
                        texts[path] = self._reopened(texts[path], exercise)
        backup = self._back_up(texts)
        for path, text in texts.items():
            self._write(self.root / path, text)
        with self._changing():
            for exercise in chosen:
                self._progress(exercise).passed = None
        return [self.root / path for path in texts], backup

    def update(self) -> list[Update]:
        """Merge what changed in the reference since the files were handed out into the learner's files.

        A three-way merge by lines (base: as handed out; theirs: the learner's; ours: handed out today). Where both
        changed the same lines, both versions stand in the file between conflict markers.
        """
        results = []
        for path in sorted({exercise.path for exercise, state in self.states().items() if state is not State.NEW}):
            base = self._lines(self.root / _HANDED / path)
            theirs = self._lines(self.root / path)
            today = skeleton((ROOT / path).read_text(encoding="utf-8"), self._started(path))
            ours = today.splitlines(keepends=True)
            if base == ours:
                results.append(Update(path, False, 0))
                continue
            merge = Merge3(base, theirs, ours)
            merged = "".join(merge.merge_lines(name_a="yours", name_b="the reference now"))
            conflicts = sum(group[0] == "conflict" for group in merge.merge_groups())
            backup = self._back_up([path])
            self._write(self.root / path, merged)
            self._hand_out(path)
            results.append(Update(path, merged != "".join(theirs), conflicts, backup))
        return results

    def digest(self, exercise: Exercise) -> str:
        """A digest of the lines between the exercise's markers, or of the file if the markers are gone."""
        text = self.file(exercise).read_text(encoding="utf-8", errors="replace")
        lines = written_lines(text, reference(exercise)[1])
        return hashlib.sha256((text if lines is None else lines).encode()).hexdigest()

    def _progress(self, exercise: Exercise) -> Progress:
        return self.progress.get(exercise.number, Progress())

    def _started(self, path: str) -> set[str]:
        """Numbers of the exercises of a module that were handed out."""
        return {e.number for e in exercises() if e.path == path and self._progress(e).is_started}

    def _reopened(self, text: str, exercise: Exercise) -> str:
        """The learner's text with one exercise's lines as a gap again."""
        reopened = with_gap(text, reference(exercise)[1])
        if reopened is None:
            raise ConfigError(
                f"The markers of exercise {exercise.number} are no longer in {self.file(exercise)}, so it cannot be "
                f"reset alone; `infer workshop reset {exercise.phase}` resets the whole file and keeps a backup."
            )
        return reopened

    def _hand_out(self, path: str) -> None:
        """Keep the skeleton of today, which is the base when the reference moves on."""
        today = skeleton((ROOT / path).read_text(encoding="utf-8"), self._started(path))
        self._write(self.root / _HANDED / path, today)

    def _back_up(self, paths: Iterable[str]) -> Path | None:
        existing = [path for path in paths if (self.root / path).is_file()]
        if not existing:
            return None
        folder = self.root / _BACKUPS / datetime.now().strftime("%Y-%m-%d-%H%M%S-%f")
        try:
            for path in existing:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(self.root / path, folder / path)
        except OSError as error:
            raise ConfigError(
                f"{folder} cannot be written ({error.strerror}), so nothing was changed; make {self.root} writable."
            ) from None
        return folder

    def _text(self, path: str, errors: str = "strict") -> str:
        try:
            return (self.root / path).read_text(encoding="utf-8", errors=errors)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.root / path} cannot be read ({error}); write it as UTF-8 text.") from None

    def _lines(self, file: Path) -> list[str]:
        try:
            return file.read_text(encoding="utf-8").splitlines(keepends=True)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file} cannot be read ({error}); `infer workshop reset` hands it out anew.") from None

    def _write(self, file: Path, text: str) -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{file} cannot be written ({error.strerror}); choose another folder with INFER_WORKSPACE=DIR."
            ) from None

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Read the progress again, let the block change it, and write it, while no other process does so."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.root, os.O_RDONLY)
        except OSError as error:
            raise ConfigError(
                f"{self.root} cannot be written ({error.strerror}); choose another folder with INFER_WORKSPACE=DIR."
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.progress = self._read_progress()
            yield
            entries = {number: vars(entry) for number, entry in sorted(self.progress.items())}
            unfinished = self.root / f"{_PROGRESS}.new"
            self._write(unfinished, json.dumps(entries, indent=2) + "\n")
            unfinished.replace(self.root / _PROGRESS)
        finally:
            os.close(lock)
