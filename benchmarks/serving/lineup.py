"""Which phase stands for which contender of the serving benchmark. Introduced in phase 4.

Three ideas have a contender each, and each is shown by the phase that brought it or was the last without the next: one
request at a time, regions that are filled again as they become free, blocks. Beside them stands the newest phase, once
it is newer than they are. Invariant: who takes part follows from what the phases' engines can do, and from the last
phase that is to take part.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.errors import ConfigError
from shared.lessons import Lesson, find_lesson, lessons


@dataclass(frozen=True)
class Lineup:
    """``slots``: continuous batching in regions; ``blocks``: the first phase with blocks; ``newest``: the last."""

    sequential: Lesson
    slots: Lesson
    blocks: Lesson | None
    newest: Lesson

    @property
    def in_blocks(self) -> dict[str, Lesson]:
        """Contenders whose memory is cut into blocks, by name; empty before there are any."""
        if self.blocks is None:
            return {}
        return {"paged": self.blocks} | ({"newest": self.newest} if self.newest != self.blocks else {})

    @property
    def continuous(self) -> tuple[str, ...]:
        """Contenders that batch continuously."""
        return ("continuous", *self.in_blocks)

    @property
    def contenders(self) -> tuple[str, ...]:
        """All of them, the simplest first."""
        return ("sequential", "padded", "static", *self.continuous)


def lineup(number: str | None = None) -> Lineup:
    """Of the phases up to one, by default up to the newest; raises ConfigError for one without continuous batching."""
    main = [lesson for lesson in lessons() if lesson.generates and not lesson.is_side_track]
    able = [lesson for lesson in lessons() if lesson.generates and has_continuous(lesson)]
    last = [lesson for lesson in able if lesson in main][-1] if number is None else find_lesson(number)
    if last not in able:
        raise ConfigError(
            f"Phase {last.number} ({last.title}) has no continuous batching; choose one of "
            f"{', '.join(other.number for other in able)}, or leave --phase out."
        )
    return draw_up(main, last)


def draw_up(main: Sequence[Lesson], last: Lesson) -> Lineup:
    """The lineup of the main line's phases, in their order, up to ``last``."""
    many = [lesson for lesson in main if serves_many(lesson) and lesson.number <= last.number]
    with_blocks = [lesson for lesson in many if has_blocks(lesson)]
    return Lineup(
        sequential=[lesson for lesson in main if not serves_many(lesson)][-1],
        slots=[lesson for lesson in many if has_continuous(lesson) and lesson not in with_blocks][-1],
        blocks=with_blocks[0] if with_blocks else None,
        newest=last,
    )


def serves_many(lesson: Lesson) -> bool:
    """Whether a phase answers more than one request at a time."""
    return hasattr(lesson.engine, "add_request")


def has_continuous(lesson: Lesson) -> bool:
    """Whether a phase knows continuous batching."""
    return serves_many(lesson) and "continuous" in lesson.load("engine").SCHEDULERS


def has_blocks(lesson: Lesson) -> bool:
    """Whether a phase knows memory in blocks."""
    return serves_many(lesson) and "paged" in lesson.load("engine").MEMORY
