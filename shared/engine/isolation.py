"""A request that fails takes nobody with it. Introduced in phase 4.

A forward is one for many requests, and where it raises it does not say whose fault that was: a token that no table has,
a prompt too long for the memory that is left. So the requests are halved and each half is run by itself, down to the
one that raises alone. One failing request of n costs about 2 · log2(n) forwards more, and none where nothing fails.
Invariant: nobody's state changes before a run has succeeded, so a run can be repeated, in any company.
"""

import logging
import traceback
from collections.abc import Callable, Iterator, Sequence

import torch

from shared.engine.batch import Batch
from shared.engine.draw import Drawn
from shared.engine.request import Request
from shared.sampling.sampler import SamplingRow

logger = logging.getLogger(__name__)


def run_isolated(
    run: Callable[[Batch], torch.Tensor],
    draw: Callable[[torch.Tensor, Sequence[SamplingRow]], Drawn],
    requests: Sequence[Request],
) -> Iterator[tuple[Sequence[Request], Drawn | Exception]]:
    """Run the requests and draw a token for each: together, or in parts where that raises.

    Yields the parts in order, each with what was drawn, or, for a part of one request that raised, with the exception.
    NotImplementedError goes through: an operation that this machine or this code does not have is no request's fault,
    and would fail them all.
    """
    # exercise 04.5: find the one that fails, by halves
    # hint: run all of them as one batch, and yield (requests, what was drawn)
    # hint: if that raises, `yield from` this function for each half, in order
    # hint: a request that raises alone is the one: yield it with its exception
    # hint: NotImplementedError and what is no Exception pass through; for no requests there is nothing to run
    # hint: an exception keeps the forward's memory alive by its frames: leave `except` before you run the halves,
    # hint: and empty its frames, since others may keep it (traceback.clear_frames); a log still finds its lines
    if not requests:
        return
    result: Drawn | Exception | None = None
    try:
        batch = Batch.of(requests)
        result = draw(run(batch), batch.sampling_rows)
    except NotImplementedError:
        raise
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # whoever keeps the exception, a log or the step, keeps no tensors
        if len(requests) == 1:
            result = error
        else:
            logger.warning("A forward of %d requests raised %r; each half is run by itself.", len(requests), error)
    if result is not None:
        yield requests, result
        return
    # The exception is gone by now, and with it its frames, which hold what the forward had allocated.
    middle = len(requests) // 2
    yield from run_isolated(run, draw, requests[:middle])
    yield from run_isolated(run, draw, requests[middle:])
    # end exercise
