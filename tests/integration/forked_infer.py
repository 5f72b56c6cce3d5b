"""``infer`` in a fork of a server that has imported packages of other projects alone.

This module imports nothing of the course, so that a workspace can take the place of its modules.
"""

import os
import sys


def run_infer(errors: str, *arguments: str) -> None:
    """Be ``infer`` with these arguments and end as it does; standard error goes to the file ``errors``."""
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    code: int | str | None = 1
    try:
        from shared.cli import app

        app(arguments, prog_name="infer")
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code or 0))
