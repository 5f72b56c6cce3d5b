"""The sizes to which a view pads steps: the interface. Introduced in phase 6.

Invariant: without buckets, as before phase 9, the arrays of a step are as long as the step.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from shared.cache.view.attention import Arrays
from shared.engine.batch import Batch


class Padding(Protocol):
    """Pads the arrays of a step to the step's bucket; without methods of its own it leaves them as they are."""

    buckets: Any = None  # see :class:`shared.engine.executor.captured.BucketedView`
    paddings: Sequence[Batch] = ()

    def bucket_of(self, batch: Batch) -> Any:
        """The bucket to which a step is padded; None: it is not padded."""
        return None

    def pad(self, arrays: Arrays, bucket: Any) -> None:
        """Pad the arrays that depend on the number of tokens, or of sequences."""
        return None

    def advance(self, sent: Mapping[str, Tensor]) -> None:
        """Move the loaded decode step on by a token for each sequence; only a captured step is repeated."""
        return None


class NoPadding(Padding):
    """Steps as they are."""
