"""Detects that a rank has died, hung or failed, and ends its group. Introduced in phase 12.1.

A missing rank leaves the others in a collective that never completes. So a thread of rank 0 reads the ranks' reports,
detects closed pipes, and checks that counters advance while rank 0 waits. If one of them stops, the thread kills all of
them. On a CPU, rank 0's collective then raises; on a GPU, it is aborted.

Invariant: the group reports its first failure and names the rank that caused it.
"""

import logging
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from shared.errors import RankError
from shared.tracks.ranks.channel import BEATS, CALLS, Board
from shared.tracks.ranks.collectives import Collectives

PATIENCE = 7.0
"""Seconds without a heartbeat after which a rank is considered hung. A rank has no heartbeats while its own work blocks
it."""
LONG_PATIENCE = 60.0
"""Seconds after which ranks are considered hung if they begin and end no collective, although they compute or wait for
each other."""
_log = logging.getLogger("infer.engine")


@dataclass(frozen=True)
class Failed:
    """A rank's last message: why it is ending. ``is_peers``: another rank abandoned it in a collective."""

    reason: str
    is_peers: bool = False


class Watch:
    """The ranks 1 to N - 1 of a group, as seen from rank 0."""

    def __init__(
        self, board: Board, processes: Sequence[subprocess.Popen[bytes]], pipes: "Sequence[Connection[Any, Any]]"
    ) -> None:
        self.board, self.processes, self.pipes = board, processes, pipes
        self.size = len(processes) + 1
        self.collectives: list[Collectives] = []
        self.failure: RankError | None = None
        self.waits: list[tuple[float, float]] = []  # when rank 0 began to wait, and how long it will; innermost last
        self.is_closing = False
        self.when_lost: Callable[[RankError], None] = lambda failure: None
        self.reported: dict[int, Failed] = {}
        threading.Thread(target=self._run, name="ranks", daemon=True).start()

    @contextmanager
    def waiting(self, patience: float = LONG_PATIENCE) -> Iterator[None]:
        """A context in which rank 0 waits for the other ranks; raises RankError if the group has failed.

        ``patience``: seconds without the start or end of a collective after which ranks are considered hung; the
        innermost wait decides.
        """
        self.check()
        self.waits.append((time.monotonic(), patience))
        try:
            yield
        finally:
            self.waits.pop()
        self.check()

    def check(self) -> None:
        """Raise RankError if the group has failed."""
        if self.failure is not None:
            raise self.failure

    def failed(self, error: BaseException) -> RankError:
        """The group's failure, given that rank 0 raised ``error``; ends the group."""
        if not isinstance(error, MemoryError) and "out of memory" not in str(error):
            deadline = time.monotonic() + 2  # the cause may be that another rank ended, which the thread will find
            while self.failure is None and time.monotonic() < deadline and not self.is_closing:
                time.sleep(0.01)
        if self.failure is None:
            self._fail(f"Rank 0 of {self.size} {reason_of(error)}")
        assert self.failure is not None
        return self.failure

    def close(self) -> None:
        """End the other ranks and wait for them."""
        self.is_closing = True
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        for pipe in self.pipes:
            pipe.close()

    def _run(self) -> None:
        counts, changed = self.board.counters.copy(), np.full(self.board.counters.shape, time.monotonic())
        while not self.is_closing and self.failure is None:
            try:
                ready = wait(self.pipes, 0.25)
            except OSError:  # closed
                return
            if self.is_closing:
                return
            if ready:
                self._read()
                return
            now = time.monotonic()
            is_new = self.board.counters != counts
            counts, changed = self.board.counters.copy(), np.where(is_new, now, changed)
            waits = self.waits[:]
            if not waits:
                continue
            (first, _), (began, patience) = waits[0], waits[-1]
            since = np.maximum(first, changed[:, BEATS])
            quiet = [r for r in range(1, self.size) if counts[r, BEATS] and now - since[r] > PATIENCE]  # has started
            if quiet:
                self._fail(f"Rank {quiet[0]} of {self.size} made no progress for {PATIENCE:.0f} s")
            elif now - max(began, changed[:, CALLS].max()) > patience:
                last = int(counts[:, CALLS].argmin())
                self._fail(f"Rank {last} of {self.size} made no progress for {patience:.0f} s")

    def _read(self) -> None:
        """Read why ranks ended, and report the first cause."""
        time.sleep(0.2)  # the others notice it too
        died: list[str] = []
        for rank, (process, pipe) in enumerate(zip(self.processes, self.pipes, strict=True), 1):
            try:
                while pipe.poll():
                    self.reported[rank] = pipe.recv()
            except (EOFError, OSError):
                if rank not in self.reported and not self.is_closing:
                    died.append(f"Rank {rank} of {self.size} {_end(process)}")
        reported = sorted(self.reported.items(), key=lambda item: item[1].is_peers)
        if self.is_closing:
            return
        if died or not reported:
            self._fail(died[0] if died else f"A rank of {self.size} ended")
        else:
            rank, failed = reported[0]
            self._fail(f"Rank {rank} of {self.size} {failed.reason}")

    def _fail(self, what: str) -> None:
        if self.failure is None:
            self.failure = RankError(f"{what}; the other ranks cannot go on without it and have ended. Start again.")
            _log.critical("%s", self.failure)
        for process in self.processes:
            process.kill()
        self.when_lost(self.failure)
        for collectives in self.collectives:
            collectives.abort()


def reason_of(error: BaseException) -> str:
    """What a rank that raised did, phrased to follow its name."""
    if isinstance(error, MemoryError) or "out of memory" in str(error) or "can't allocate memory" in str(error):
        return f"ran out of memory ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
    return f"failed ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'})"


def _end(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(2)
    except subprocess.TimeoutExpired:
        return "closed its pipe"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
