"""``infer`` as a process of its own, as a user at a terminal starts it."""

import signal
import sys

INFER = [sys.executable, "-c", "from shared.cli import app; app(prog_name='infer')"]


def heed_interrupts() -> None:
    """For ``preexec_fn``: a shell's background jobs inherit an ignored SIGINT; a terminal's do not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
