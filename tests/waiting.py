"""Waiting in tests for what must come, with one limit that no busy machine reaches."""

import time
from collections.abc import Callable

PATIENCE = 120.0
"""Seconds after which an event that a test waits for will not come. Idle, each takes a few seconds at most."""


def wait_until(is_so: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Ask again and again until the answer is yes; fail if it never is."""
    started = time.monotonic()
    while not is_so():
        assert time.monotonic() - started < seconds, "it did not come in time"
        time.sleep(0.005)
