"""Makes the recordings of the course: ``make recordings``, or those of some phases, by their numbers.

With ``--questions`` the questions are copied anew from the course's table, and nothing is run.
"""

import json
import sys
from typing import Any

from shared.lessons import Lesson
from shared.tracing.steps.recording import as_text
from tutorial.recordings.course import FOLDER, Workload, record_workload, recordings

QUESTIONS = "--questions"


def main(arguments: list[str]) -> None:
    """Write the recordings of these phases, or all."""
    numbers = [each for each in arguments if each != QUESTIONS]
    for name, (workload, lesson) in recordings().items():
        if not numbers or workload.phase in numbers:
            text = as_text(_stored(name) if QUESTIONS in arguments else record_workload(workload, lesson))
            text = as_text(with_questions(json.loads(text), workload, lesson))
            (FOLDER / name).write_text(text, encoding="utf-8")
            print(f"{name}: {len(text.encode()) / 1000:.0f} kB", flush=True)


def with_questions(recording: dict[str, Any], workload: Workload, lesson: Lesson) -> dict[str, Any]:
    """The recording with the workload's questions, which are asked of its own phase."""
    rest = {name: value for name, value in recording.items() if name != "questions"}
    is_asked = workload.questions and lesson.number == workload.phase
    return rest | ({"questions": [dict(each) for each in workload.questions]} if is_asked else {})


def _stored(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return values


if __name__ == "__main__":
    main(sys.argv[1:])
