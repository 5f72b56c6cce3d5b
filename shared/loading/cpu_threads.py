"""How many threads compute a model's forwards on a CPU: as many as are fastest at the moment. Introduced in phase 1b.

PyTorch starts a thread for each core. The threads of a product wait for each other and keep their cores busy meanwhile.
So a thread that shares its core with another program delays all of them at each product: next to one busy loop, two
threads are many times slower than one. So successive forwards of about as many tokens are timed as they occur: steps of
a batch, or those of an engine without a cache, each of which has one token more. If two in a row take many times as
long as usual, the next one tries half the threads; from time to time, one tries twice as many again.

Invariants: no forward runs only to be timed; the number of threads is never above PyTorch's own, or the one that a
caller has set with ``torch.set_num_threads``; the variable ``OMP_NUM_THREADS`` fixes it. The number of threads may
change the last bits of a sum, as the number of sequences in a batch may; nothing else changes.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from threading import Lock, local
from typing import Any

import torch
from torch import nn

SLOW = 3.0  # times the usual seconds, above which fewer threads are tried
GAIN_OF_FEWER, GAIN_OF_MORE = 0.7, 0.95
"""Maximum share of the previous seconds that a trial may take to count as faster. Noise alone never removes threads."""
CONFIRMED = 2  # consecutive forwards that must be slow, faster in a trial, or of one size before any trial
USUAL = 8  # forwards whose median time counts as usual
ALIKE = 8  # forwards are compared if their tokens differ by at most an eighth
TRIAL_SHARE, MOST_PATIENCE = 20, 256
"""Failed trials of more threads take a twentieth of the time; there are at most this many forwards between two of them.
"""


class ThreadChoice:
    """Chooses the number of threads of the next forward from the times of those before it. It reads no clock.

    Args:
        most: the number of threads if nothing else runs, which is also the initial number.
    """

    def __init__(self, most: int) -> None:
        self.most = self.kept = self.next = most
        self.num_tokens = 0  # tokens of the last forward
        self.usual: deque[float] = deque(maxlen=USUAL)  # seconds with `kept` threads
        self.tried: list[float] = []  # seconds with `next` threads, in a trial
        self.tries_fewer = most > 1  # for trials without a cause: at the start, and after fewer threads were faster
        self.patience, self.num_waited = 0, 0  # forwards between two trials of more threads

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A forward of this many tokens took this long with ``next`` threads."""
        is_trial = self.next != self.kept
        if abs(num_tokens - self.num_tokens) > self.num_tokens // ALIKE:  # not comparable, so a trial is over
            self.next = self.kept
            self.usual.clear()
            self.tried.clear()
        self.num_tokens = num_tokens
        if not is_trial:
            self._watch(seconds)
        elif self.next != self.kept:
            self._try(seconds)

    def _watch(self, seconds: float) -> None:
        """A forward with the kept number of threads; the next one may begin a trial."""
        self.usual.append(seconds)
        seen = list(self.usual)
        is_slow = len(seen) > CONFIRMED and min(seen[-CONFIRMED:]) > SLOW * median(seen[:-CONFIRMED])
        self.num_waited += 1
        if len(seen) < CONFIRMED:
            return
        if self.kept > 1 and (is_slow or self.tries_fewer):
            self.next = self.kept // 2
        elif self.kept < self.most and self.num_waited >= self.patience:
            self.next = min(2 * self.kept, self.most)

    def _try(self, seconds: float) -> None:
        """A forward of a trial, which ends with the first one that is not faster, or when it is confirmed."""
        self.tried.append(seconds)
        before, tries_fewer = self.usual[-1], self.next < self.kept
        is_faster = seconds < before * (GAIN_OF_FEWER if tries_fewer else GAIN_OF_MORE)
        if is_faster and len(self.tried) < CONFIRMED:
            return
        if tries_fewer == is_faster:  # more threads were slower
            slower, faster = (before, seconds) if tries_fewer else (seconds, before)
            self.patience = min(round(TRIAL_SHARE * slower / faster), MOST_PATIENCE)
        if is_faster:
            self.kept, self.usual = self.next, deque(self.tried, USUAL)
        elif tries_fewer:
            self.usual = deque([before], USUAL)  # the forwards themselves now take longer
        self.tries_fewer = tries_fewer and is_faster
        self.next, self.tried, self.num_waited = self.kept, [], 0


class CpuThreads:
    """Sets PyTorch's number of threads before each forward of a model, and times the forward."""

    most = 0  # threads of this process: PyTorch's own number, or the last that a caller has set
    fixed = 0  # threads of all models in this process; 0: each model chooses
    _last = 0  # the number that a model has set last; a new thread of the process begins with it
    _of_thread = local()  # `number`: the one that was set in this thread, whose number is its own
    _lock = Lock()  # so that `_last` is what PyTorch gives to new threads

    def __init__(self) -> None:
        self.choice = ThreadChoice(1)
        self.began = 0.0

    def begin(self, model: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Before a forward."""
        with self._lock:
            found = torch.get_num_threads()
            if found != getattr(self._of_thread, "number", CpuThreads._last):
                CpuThreads.most = found
            if self.choice.most != CpuThreads.most:
                self.choice = ThreadChoice(CpuThreads.most)
            number = self._of_thread.number = self.fixed or self.choice.next
            if number != found:
                torch.set_num_threads(number)
                CpuThreads._last = number
        self.began = time.perf_counter()

    def end(self, model: nn.Module, arguments: tuple[Any, ...], hidden: torch.Tensor) -> None:
        """After a forward, whose first argument is its tokens; they may be more than the rows of ``hidden``."""
        if not self.fixed:
            self.choice.observe(len(arguments[0].ids), time.perf_counter() - self.began)


def most_threads() -> int:
    """The number of threads of this process if nothing else runs, whatever a model has chosen for its last forward."""
    return CpuThreads.most or torch.get_num_threads()


@contextmanager
def fixed_threads() -> Iterator[Callable[[int], None]]:
    """Fix the threads of all models' forwards, so that models that are compared have equally many; call what is yielded
    with their number. After the block each model chooses again.
    """

    def fix(number: int) -> None:
        CpuThreads.fixed = number

    try:
        yield fix
    finally:
        fix(0)


def share_cpu(model: nn.Module) -> None:
    """Let the model's forwards choose their number of threads, unless the environment fixes it."""
    if "OMP_NUM_THREADS" not in os.environ:
        threads = CpuThreads()
        model.register_forward_pre_hook(threads.begin)
        model.register_forward_hook(threads.end)
