"""The learner's own ladder: what each phase gains on this machine with their lines in it. Introduced in phase 1b.

It is ``infer ladder``, in a process of its own that loads the learner's modules. Invariant: lines that have not passed
do not run; the reference's run in their place.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shared.errors import ConfigError
from shared.lessons import lessons
from tutorial.workshop.exercises import ROOT
from tutorial.workshop.later import copy_passed, is_finished
from tutorial.workshop.overlay import ENABLED, FOLDER, GAPS, SAID
from tutorial.workshop.workspace import Workspace

FIRST_ROW = "03"
"""The first phase that is measured beside another one; the earlier ones show an answer."""
PROMPT = "The capital of France is"
SECONDS_OF_PAIRS = 10.0
"""After so many, what a finished phase gains is not measured again, so that it is shown within 20 s on an idle
machine."""
MOST_SECONDS = 40.0
"""The most that it may take, on a machine that is slow or busy with other programs."""


def finished_phases(workspace: Workspace) -> list[str]:
    """The phases whose exercises have all passed and that the ladder measures."""
    found = [lesson.number for lesson in lessons() if lesson.exercises and is_finished(workspace, lesson.number)]
    return [number for number in found if number >= FIRST_ROW]


def run_ladder(workspace: Workspace, phases: Sequence[str], model: str, out: Path | None = None) -> str:
    """What ``infer ladder`` prints of these phases; progress goes to standard error. Raises ConfigError if it fails."""
    chosen = [option for phase in phases for option in ("--phase", phase)]
    written = [] if out is None else ["--out", str(out)]
    return _run(workspace, "ladder", "--model", model, *chosen, *written)


def show_phase(workspace: Workspace, phase: str, model: str) -> str:
    """What a finished phase does: its rows of the ladder, with fewer pairs where they take long, or an answer for
    phases before the first row. Raises ConfigError if it fails, or takes `MOST_SECONDS`."""
    if phase >= FIRST_ROW:
        options = ["--model", model, "--phase", phase, "--seconds", f"{SECONDS_OF_PAIRS:g}"]
        return "\n".join(_run(workspace, "ladder", *options, seconds=MOST_SECONDS).splitlines()[:-1]).strip()
    number = max(phase, "02")
    options = ["--phase", number, "--model", model, "--prompt", PROMPT, "--max-tokens", "8", "--quiet"]
    return f"{PROMPT} …{_run(workspace, 'generate', *options, seconds=MOST_SECONDS).rstrip()}"


def is_here(model: str) -> bool:
    """Whether a model need not be fetched first."""
    from shared.checkpoints.demo import local_model_folder

    return Path(model).expanduser().is_dir() or local_model_folder(model) is not None


def _run(workspace: Workspace, *arguments: str, seconds: float | None = None) -> str:
    """Standard output of an ``infer`` command on the lines that have passed, which ends within so many seconds."""
    with tempfile.TemporaryDirectory(prefix="infer-chart-") as folder:
        copy_passed(workspace, Path(folder))
        variables = {
            "OMP_WAIT_POLICY": "passive",  # threads that spin while they wait slow busy neighbours
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            ENABLED: "1",
            FOLDER: folder,
            GAPS: "reference",
            SAID: "1",
        }
        command = [sys.executable, "-c", "from shared.cli import app; app(prog_name='infer')", *arguments]
        try:
            done = subprocess.run(
                command, env=variables, stdout=subprocess.PIPE, text=True, check=False, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"It was ended after {seconds:g} s: this machine is slow, or busy with other programs. `infer workshop "
                "chart` takes the time that it needs."
            ) from None
    if done.returncode:
        raise ConfigError(
            f"The measurement ended with exit code {done.returncode}; see above. If your code did that, run `infer "
            "workshop check`."
        )
    return done.stdout
