"""The attention of a paged view, and the padding of its steps: the interfaces. Introduced in phase 6.

An attention backend declares which arrays of a step it needs on the device, and attends over the keys and values of a
storage (:mod:`shared.cache.view.block_storage`). Invariants: it never writes to a block; without buckets, as before
phase 9, the arrays of a step are exactly as long as the step needs.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from shared.cache.layout.paged import PagedLayout
from shared.engine.batch import Batch

Arrays = dict[str, NDArray[Any]]
ArraySpecs = dict[str, tuple[int, DTypeLike]]
Scores = dict[str, Any]  # the arguments scale, window and softcap of ``KVView.attend``


class PagedAttentionProtocol(Protocol):
    """Attends over blocks; there are several implementations."""

    def lay_out(self, layout: PagedLayout) -> PagedLayout:
        """What the pool adds to a step's layout on the host, such as plans (phase 6.1)."""
        return layout

    def staged(self, is_decode: bool, max_tokens: int) -> ArraySpecs:
        """Lengths and dtypes of the arrays of steps of up to ``max_tokens`` tokens."""
        return {}

    def arrays(self, batch: Batch, layout: PagedLayout) -> Arrays:
        """The arrays of a step."""
        return {}

    def receive(self, batch: Batch, layout: PagedLayout, sent: Mapping[str, Tensor]) -> None:
        """Use the step's arrays on the device; from now on every layer attends with them."""
        ...

    def attend(self, layer: int, q: Tensor, options: Scores, out: Tensor | None) -> Tensor:
        """As ``KVView.attend``; ``out`` is the buffer of a decode step's results."""
        ...


class Padding(Protocol):
    """Pads the arrays of a step to the step's bucket; the base class leaves them unpadded."""

    buckets: Any = None  # see :class:`shared.engine.executor.captured.BucketedView`
    paddings: Sequence[Batch] = ()

    def bucket_of(self, batch: Batch) -> Any:
        """The bucket to which a step is padded; None: it is not padded."""
        return None

    def pad(self, arrays: Arrays, bucket: Any) -> None:
        """Pad the arrays that depend on the number of tokens, or of sequences."""
        return None

    def advance(self, sent: Mapping[str, Tensor]) -> None:
        """Advance the loaded decode step by one token per sequence; only a captured step is repeated."""
        return None


class NoPadding(Padding):
    """Leaves steps unpadded."""
