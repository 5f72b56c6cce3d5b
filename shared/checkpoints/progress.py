"""Progress of long operations. Introduced in phase 1b.

Generating and downloading checkpoints report progress through one callback, so that the library prints nothing; the
command line passes `progress_bar()`, a test passes a list's `append`, a benchmark passes nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress

Progress = Callable[[str, int, int], None]
"""Called with (stage, bytes done, bytes in total); a new stage name begins a new line."""


@contextmanager
def progress_bar(console: Console | None = None) -> Iterator[Progress]:
    """A `Progress` that draws one rich bar per stage on `console` (standard error by default) while the block runs."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=console or Console(stderr=True)) as bars:
        stages: dict[str, TaskID] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                stages[stage] = bars.add_task(stage, total=total)
            bars.update(stages[stage], completed=done, total=total)

        yield report
