"""A process of the course that imports only what it needs and inherits one end of a pipe. Introduced in phase 12.1.

It is not a ``multiprocessing`` process: a daemon, such as the server's engine, may not start one, and ``spawn`` imports
the parent's main module and therefore PyTorch.
"""

import os
import subprocess
import sys
from pathlib import Path


def start_child(
    statement: str, passed: tuple[int, ...], environment: dict[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Start an interpreter that runs ``statement``.

    Args:
        passed: file descriptors that it inherits; their numbers are its ``sys.argv[1:]``.
        environment: variables in addition to those of this process.
    """
    if os.environ.get("INFER_WORKSHOP", "0") not in ("", "0"):
        statement = f"import shared.cli; {statement}"  # lets the learner's modules replace the reference's
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    variables = os.environ | (environment or {}) | {"PYTHONPATH": path}
    command = [sys.executable, "-c", statement, *map(str, passed)]
    return subprocess.Popen(command, pass_fds=passed, stdin=subprocess.DEVNULL, env=variables)
