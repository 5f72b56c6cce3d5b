"""Makes the recordings of the course: ``make recordings``, or those of some phases, by their numbers."""

import sys

from shared.tracing.steps.recording import as_text
from tutorial.recordings.course import FOLDER, record_workload, recordings


def main(numbers: list[str]) -> None:
    """Write the recordings of these phases, or all."""
    for name, (workload, lesson) in recordings().items():
        if not numbers or workload.phase in numbers:
            text = as_text(record_workload(workload, lesson))
            (FOLDER / name).write_text(text, encoding="utf-8")
            print(f"{name}: {len(text.encode()) / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
