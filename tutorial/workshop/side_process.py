"""A process that measures one side of a learner's ladder (`tutorial.workshop.rung_worker`).

Invariant: it computes only while it is asked, and ends with the block that opened it.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from tutorial.workshop.exercises import ROOT
from tutorial.workshop.overlay import ENABLED, FOLDER, GAPS, SAID


class SideProcess:
    """A process that measures one side; it stands still except while it is asked.

    Args:
        workspace: whose modules it loads; None for the reference's.
    """

    def __init__(self, settings: Mapping[str, Any], workspace: Path | None) -> None:
        self.workspace = workspace
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            SAID: "1",
            ENABLED: "0" if workspace is None else "1",
            GAPS: "reference",
            "OMP_WAIT_POLICY": "passive",  # threads that spin while they wait stand in the way of busy neighbours
            "MALLOC_MMAP_THRESHOLD_": str(1 << 20),  # glibc then returns the memory of a freed engine
        }
        if workspace is not None:
            variables[FOLDER] = str(workspace)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tutorial.workshop.rung_worker", json.dumps(dict(settings))],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # an interruption reaches this process alone, which then ends that one
        )

    def __enter__(self) -> "SideProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()

    def ask(self, method: str, *arguments: Any) -> Any:
        """Let it do one thing and answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps([method, *arguments]) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise ConfigError(self._why_it_ended(" ".join(map(str, (method, *arguments)))))
        message = json.loads(line)
        if "error" in message:
            raise ConfigError(message["error"])
        return message["answer"]

    def _why_it_ended(self, what: str) -> str:
        code = self.process.wait()
        if self.workspace is None:
            return f"The measurement of the reference ended at `{what}`, with exit code {code}; see above."
        return (
            f"Your code ended the measurement at `{what}`, with exit code {code}; see above, and run `infer workshop "
            "check` first."
        )
