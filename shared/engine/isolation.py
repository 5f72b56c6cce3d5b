"""Bisect a failing batch to isolate the request that raised. Introduced in phase 4.

A forward is one for many requests, and where it raises it does not say for which: a token that no table has, a prompt
too long for the memory that is left. So the requests are halved and each half is run by itself, down to the one that
raises alone. One failing request of n costs about 2 · log2(n) runs more, and none where nothing fails.
Invariant: no request's state changes before a run has succeeded, so a run can be repeated, in any company.
"""

import logging
import traceback
from collections.abc import Callable, Iterator
from typing import TypeVar

R = TypeVar("R")
logger = logging.getLogger("infer.engine")


def run_isolated(run: Callable[[range], R], sequences: range) -> Iterator[tuple[range, R | Exception]]:
    """Run the sequences of a batch, named by their numbers: together, or in parts where that raises.

    Yields the parts in order, each with its result, or, for a part of one sequence that raised, with the exception.
    NotImplementedError goes through: an operation that this machine or this code does not have is no request's fault,
    and would fail them all.
    """
    # exercise 04x5: find the one that fails, by halves
    # hint: run all of them, and yield (sequences, the result)
    # hint: if that raises, `yield from` this function for each half, in order; a slice of a range is a range
    # hint: a sequence that raises alone is the one: yield it with its exception
    # hint: NotImplementedError and what is no Exception pass through; for no sequences there is nothing to run
    # hint: an exception keeps the forward's memory alive by its frames: leave `except` before you run the halves,
    # hint: and empty its frames, since others may keep it (traceback.clear_frames); a log still finds its lines
    if not sequences:
        return
    failure: Exception | None = None
    try:
        result = run(sequences)
    except NotImplementedError:
        raise
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # a log or the step may keep it, and shall not keep its tensors
        failure = error
    if failure is None:
        yield sequences, result
        return
    if len(sequences) == 1:
        yield sequences, failure
        return
    logger.warning("A forward of %d requests raised %r; each half is run by itself.", len(sequences), failure)
    failure = None  # with it go its frames, which hold what the forward had allocated
    middle = len(sequences) // 2
    yield from run_isolated(run, sequences[:middle])
    yield from run_isolated(run, sequences[middle:])
    # end exercise
