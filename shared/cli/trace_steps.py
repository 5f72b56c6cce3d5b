"""``infer trace --steps``: the lines of an engine's steps, as a page. Introduced in phase 4.

Without a workload of its own, the command runs the one from the phase's chapter, so that learners see their own code
run there. Invariant: an option on the command line overrides the chapter's setting.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.cli import options
from shared.errors import ConfigError
from shared.lessons import Lesson
from shared.terminal import stdout_console, working

if TYPE_CHECKING:
    from shared.tracing.workload import Arrival

FILES = ("steps.html", "steps.json")


def write_course_run(lesson: Lesson, model: str, settings: dict[str, Any], given: dict[str, Any], out: Path) -> None:
    """Record the requests of the phase's chapter, with its settings unless the command line has others.

    Args:
        given: the values of the options that were given on the command line.
    """
    from tutorial.recordings.course import workloads

    workload = workloads().get(lesson.number)
    if workload is None:
        raise ConfigError(
            f"Phase {lesson.number} has no requests of its own for --steps; give --requests or --prompts, or choose "
            f"one of these with --phase: {', '.join(workloads())}."
        )
    own = {name: settings[name] for name in settings if name in given or name == "device"}
    engine = options.load_engine(lesson, model, **{**workload.settings, **own})
    write(lesson, engine, workload.arrivals(engine, given.get("max_tokens")), out)


def write(lesson: Lesson, engine: Any, arrivals: "Sequence[Arrival]", out: Path) -> None:
    """Record the requests, and write both files."""
    from shared.tracing.steps.page import write as page
    from shared.tracing.steps.recording import as_text, record
    from tutorial.recordings.course import workloads

    workload = workloads().get(lesson.number)
    with working(f"running {len(arrivals)} requests"):
        recording = record(engine, lesson, arrivals, workload.functions if workload else ())
    console = stdout_console()
    for name, text in zip(FILES, (page(recording), as_text(recording)), strict=True):
        (out / name).write_text(text, encoding="utf-8")
        console.print(f"wrote {out / name}", style="bright_black", highlight=False, soft_wrap=True, markup=False)
    if "error" in recording:
        raise ConfigError(f"The last step ended in {recording['error']}; the page shows the lines up to there.")
