"""The phases of the course, from their ``lesson.toml`` files. Introduced in phase 1b.

A phase's number is its folder's name without ``phase_``, with dots for underscores: ``phase_03_1`` is 03.1. Invariant:
all facts about a phase (in tables, diffs, the ladder, documentation) are read from here.
"""

import dataclasses
import importlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import phases
from shared.engine.config import SIDE_TRACKS, EngineConfig
from shared.errors import ConfigError


@dataclass(frozen=True)
class ExerciseEntry:
    """An exercise's entry in ``lesson.toml``; its title, hints and lines are marked in the source.

    ``evening`` is set for the exercises that carry the main line: their number in the plan of ten evenings.
    """

    number: str
    minutes: int
    tests: tuple[str, ...]
    processor_seconds: float = 5.0  # limit for a part of one test, at least ten times what correct code takes
    evening: int | None = None


@dataclass(frozen=True)
class Lesson:
    """One phase: ``adds`` are its new shared modules, ``beside`` further ones with an exercise that its engine does
    not load; ``changes`` the methods of Engine that differ, ``removes`` the methods it drops; ``replaces`` are pairs of
    shared modules, the second replaces the first in its engine; ``whole`` is a test of the whole engine, by its
    node id. A side track branches off from its ``previous`` phase, and no phase follows it.
    """

    number: str
    folder: Path
    title: str
    question: str
    previous: str | None
    adds: tuple[str, ...]
    changes: tuple[str, ...]
    workload: str
    removes: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    replaces: tuple[tuple[str, str], ...] = ()
    is_side_track: bool = False
    exercises: tuple[ExerciseEntry, ...] = ()
    whole: str | None = None

    @property
    def module_name(self) -> str:
        return f"phases.{self.folder.name}"

    def load(self, part: str) -> ModuleType:
        """Import a module of the phase, such as ``engine``."""
        return importlib.import_module(f"{self.module_name}.{part}")

    @property
    def engine(self) -> Any:
        """The phase's Engine class."""
        return self.load("engine").Engine

    def engine_alone(self, config: Any) -> Any:
        """The phase's engine for one request at a time; no KV cache is reserved for more."""
        if "max_batch_size" in self.load("engine").SUPPORTED:
            config = dataclasses.replace(config, max_batch_size=1)
        return self.engine(config)

    def engine_within(self, config: Any, num_regions: int, max_batch_size: int) -> Any:
        """The phase's engine with the KV cache of ``num_regions`` requests of ``config.max_seq_len`` tokens.

        The memory is that many regions or, from phase 6 on, as many bytes in blocks, for up to ``max_batch_size``
        requests. A phase that runs one request at a time has one region.
        """
        supported = self.load("engine").SUPPORTED
        if "num_gpu_blocks" in supported:
            blocks = num_regions * config.max_seq_len // config.block_size
            config = dataclasses.replace(config, max_batch_size=max_batch_size, num_gpu_blocks=blocks)
        elif "max_batch_size" in supported:
            config = dataclasses.replace(config, max_batch_size=num_regions)
        return self.engine(config)

    @property
    def generates(self) -> bool:
        """Whether the phase generates text; 1a and 1b only run a layer and a forward pass."""
        return hasattr(self.engine, "generate")

    @property
    def batches(self) -> bool:
        """Whether the engine runs many requests together, and so can be served; the first phases run one at a time."""
        return hasattr(self.engine, "add_request")


@cache
def lessons() -> tuple[Lesson, ...]:
    """Every phase that exists, in order of number."""
    folders = sorted(Path(entry) for root in phases.__path__ for entry in Path(root).glob("phase_*"))
    return tuple(_read(folder) for folder in folders if (folder / "lesson.toml").exists())


def find_lesson(number: str) -> Lesson:
    """A phase by its number, written 01b, 1b, 03.1, 3.1 or 03_1; raises ConfigError, with all numbers, if unknown."""
    wanted = number.lower().removeprefix("phase_").replace("_", ".")
    for lesson in lessons():
        if wanted in (lesson.number, lesson.number.lstrip("0")):
            return lesson
    raise ConfigError(f"There is no phase {number!r}; there are {', '.join(lesson.number for lesson in lessons())}.")


def newest_lesson() -> Lesson:
    """The last phase of the main line that generates text."""
    return [lesson for lesson in lessons() if lesson.generates and not lesson.is_side_track][-1]


def lesson_of(settings: Mapping[str, Any]) -> Lesson:
    """The phase that runs given settings: the side track that one of them belongs to, otherwise the newest phase."""
    for field in dataclasses.fields(EngineConfig):
        phase = field.metadata["phase"]
        if phase in SIDE_TRACKS and settings.get(field.name, field.default) != field.default:
            return find_lesson(phase)
    return newest_lesson()


def _read(folder: Path) -> Lesson:
    values = tomllib.loads((folder / "lesson.toml").read_text(encoding="utf-8"))
    return Lesson(
        number=folder.name.removeprefix("phase_").replace("_", "."),
        folder=folder,
        title=values["title"],
        question=values["question"],
        previous=values.get("previous"),
        adds=tuple(values["adds"]),
        changes=tuple(values["changes"]),
        removes=tuple(values.get("removes", ())),
        beside=tuple(values.get("beside", ())),
        replaces=tuple((old, new) for old, new in values.get("replaces", ())),
        workload=values["workload"],
        is_side_track=values.get("side_track", False),
        whole=values.get("whole"),
        exercises=tuple(
            ExerciseEntry(**entry | {"tests": tuple(entry["tests"])}) for entry in values.get("exercises", ())
        ),
    )
