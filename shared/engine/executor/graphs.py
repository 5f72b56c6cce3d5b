"""CUDA graphs: a step's launches, recorded once and replayed with one call. Introduced in phase 9.

Launching a kernel costs the host several microseconds, and a small decode step has hundreds of kernels that run for a
few microseconds each, so the GPU waits for the host. A CUDA graph is a recording of launches. It holds addresses and
sizes, not values: everything that differs between steps must be read from device memory at a fixed address (the view's
staging), and nothing may be read back to the host while it is recorded.

All graphs share one memory pool: only one runs at a time, and its results are used before the next one runs. For the
same reason a result is stored as an address: a later recording may reuse its memory.

Invariant: everything recorded has run once before, so that kernels are compiled and libraries have their workspaces.
"""

import contextlib
import gc
import logging
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from shared.sampling.sampler import SamplingBatch

NUM_BEFORE, MOST_RECORDED = 16, 256
"""How many times a draw is launched before it is recorded, since those of a batch that shrinks from step to step rarely
recur; and how many are known: if there are more, all are dropped."""
logger = logging.getLogger("infer.engine")
Results = TypeVar("Results")


class Computed(NamedTuple):
    """What a forward computes: hidden states and, if the step only decodes in a bucket, the logits of all rows."""

    hidden: torch.Tensor  # [T, H], or of the tokens that may be sampled from
    logits: torch.Tensor | None = None  # [T, V]


class CapturedStep(NamedTuple):
    """A recorded forward: ``replay`` repeats its launches, which write ``results`` until the next replay."""

    replay: Callable[[], None]
    results: Computed


class Capture(Protocol):
    """Records the launches of a forward."""

    def __call__(self, run: Callable[[], Computed]) -> CapturedStep: ...


class CudaGraphCapture:
    """Records CUDA graphs on ``device``, all with one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1)  # above work that runs alongside, such as compressions
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Computed]) -> CapturedStep:
        """See :class:`Capture`."""
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            run()
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                hidden, logits = run()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # ending an invalid capture raises a second error
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self.stream)
        return CapturedStep(graph.replay, Computed(unowned(hidden), None if logits is None else unowned(logits)))


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Suspends garbage collection: memory of an earlier engine may not be freed during a capture."""
    gc.collect()
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_collecting:
            gc.enable()


class _Address:
    """A tensor's address in the form of CUDA's array interface, in bytes, since the interface has no type for
    bfloat16."""

    def __init__(self, tensor: torch.Tensor) -> None:
        interface = {"shape": (tensor.nbytes,), "typestr": "|u1", "data": (tensor.data_ptr(), False), "version": 2}
        self.__cuda_array_interface__ = interface


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, as a tensor that does not keep that memory alive."""
    return torch.as_tensor(_Address(tensor), device=tensor.device).view(tensor.dtype).view(tensor.shape)


def recorded(
    launch: Callable[[], Results], pool: Any, stream: torch.cuda.Stream | None = None
) -> tuple[torch.cuda.CUDAGraph, Results]:
    """Record launches, all of which have run before, without running them; replays write to the returned results.

    Args:
        pool, stream: the memory pool and the stream; graphs that share both share memory. None: a new stream.
    """
    graph, stream = torch.cuda.CUDAGraph(), stream or torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            results = launch()
        finally:
            graph.capture_end()
    return graph, results


class RecordedDraw(NamedTuple):
    """A draw's recorded launches, and where they write the ids."""

    graph: torch.cuda.CUDAGraph
    ids: torch.Tensor

    @classmethod
    def of(cls, launch: Callable[[], torch.Tensor], pool: Any) -> "RecordedDraw":
        """See :func:`recorded`."""
        return cls(*recorded(launch, pool))

    def replay(self) -> torch.Tensor:
        """Run the launches."""
        self.graph.replay()
        return self.ids


class DrawRecorder:
    """Replays draws that recur; a :data:`shared.engine.sampling.drawing.Recorder`.

    A draw's parameters are at fixed addresses, and so are the logits of captured steps. A draw of one kind and size is
    recorded once it has been launched ``NUM_BEFORE`` times for such logits. Draws with biases or penalties are never
    recorded, since their edit has no size.

    Args:
        addresses: the addresses of the logits of captured steps.
    """

    def __init__(self, addresses: Collection[int]) -> None:
        self.addresses = addresses
        self.pool = torch.cuda.graph_pool_handle()
        self.known: dict[tuple[Any, ...], RecordedDraw | int] = {}  # int: how many times it was launched
        self.has_failed = False

    def __call__(
        self,
        logits: torch.Tensor,
        batch: SamplingBatch,
        draw: Callable[[], torch.Tensor],
        sizes: tuple[int | None, ...],
    ) -> torch.Tensor:
        """The ids; no later draw overwrites them."""
        address = logits.data_ptr()
        is_fixed = address in self.addresses and not self.has_failed
        if not is_fixed or torch.cuda.is_current_stream_capturing():
            return draw()
        kind = (batch.temperature is None, batch.log_min_p is None, batch.top_k is None, batch.top_p is None)
        key = (address, *logits.shape, sizes, *kind)
        known = self.known.get(key, 0)
        if known == NUM_BEFORE:
            try:
                known = RecordedDraw.of(draw, self.pool)
            except Exception as error:
                self.has_failed = True
                logger.warning("draws are launched, since they could not be recorded: %s", error, exc_info=error)
                return draw()
            self.known[key] = known
        if isinstance(known, RecordedDraw):
            return known.replay().clone()
        if known == 0 and len(self.known) == MOST_RECORDED:
            self.known.clear()
            self.pool = torch.cuda.graph_pool_handle()  # once all graphs of a pool are gone, it accepts no further ones
        self.known[key] = known + 1
        return draw()
