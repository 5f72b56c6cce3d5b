"""Bisect a failing batch to isolate the request that raised. Introduced in phase 4.

A batched forward that raises does not say which request is at fault: a token id outside the embedding table, a prompt
too long for the free memory. So the batch is split in half and each half runs separately, until a single request
raises. One failing request among n costs about 2 · log2(n) extra runs; a batch without failures costs none.
Invariant: a run changes no request's state until it has succeeded, so any part of the batch can run again.
"""

import logging
import traceback
from collections.abc import Callable, Iterator
from typing import TypeVar

R = TypeVar("R")
logger = logging.getLogger("infer.engine")


def run_isolated(run: Callable[[range], R], sequences: range) -> Iterator[tuple[range, R | Exception]]:
    """Run the sequences of a batch, given as a range of indices: together, or in parts if that raises.

    Yields the parts in order, each with its result; a single sequence that raised is yielded with its exception.
    NotImplementedError propagates: an operation that the machine or the code lacks is not one request's fault, and
    would fail every request.
    """
    # exercise 04x5: bisect the failing batch
    # hint: run the whole range, and yield (sequences, the result)
    # hint: if that raises, `yield from` this function for each half, in order; a slice of a range is a range
    # hint: a sequence that raises alone is the culprit: yield it with its exception
    # hint: let NotImplementedError and BaseExceptions propagate; an empty range runs nothing
    # hint: an exception's frames keep the forward's tensors alive: leave `except` before running the halves,
    # hint: and clear the frames (traceback.clear_frames), since a log may keep the exception; its lines remain
    if not sequences:
        return
    failure: Exception | None = None
    try:
        result = run(sequences)
    except NotImplementedError:
        raise
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # a log may keep the exception; free its tensors
        failure = error
    if failure is None:
        yield sequences, result
        return
    if len(sequences) == 1:
        yield sequences, failure
        return
    logger.warning("A forward of %d requests raised %r; retrying each half by itself.", len(sequences), failure)
    failure = None  # drops the frames, and with them the tensors that the forward allocated
    middle = len(sequences) // 2
    yield from run_isolated(run, sequences[:middle])
    yield from run_isolated(run, sequences[middle:])
    # end exercise
