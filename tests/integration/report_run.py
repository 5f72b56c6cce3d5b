"""The report of a bug hunt, run in a fork of the server of the tests."""

import os
import runpy
import sys
import tempfile
import traceback


def run_report(script: str) -> None:
    """Run a report as ``infer workshop bug --run`` does, and end this process with its exit code."""
    code = 0
    with tempfile.TemporaryDirectory() as empty:
        os.chdir(empty)
        try:
            from tutorial.workshop.overlay import install

            install()
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            code = int(end.code) if isinstance(end.code, int) else int(end.code is not None)
            print(end.code if isinstance(end.code, str) else "")
        except Exception:
            traceback.print_exc()
            code = 3
    sys.stdout.flush()
    os._exit(code)
