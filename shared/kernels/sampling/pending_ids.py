"""Fills in the token ids that only the device knows. Introduced in phase 9.

A step that is planned while the previous one still runs does not know the tokens that the previous one samples. The
host sends ``-1 - row`` in place of such an id, and the step's first launch replaces it with the last id sampled for the
sequence in that row of the pool. A draft that a model has just sampled (phase 11) has a row after the pool's rows.
Invariant: ids that the host knows are unchanged.
"""

import torch

from shared.kernels.launch import launch, launches, tl, triton

BLOCK = 128


@triton.jit
def fill_pending_kernel(ids, last_ids, num_ids, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token_id = tl.load(ids + n, mask=n < num_ids, other=0)
    tl.store(ids + n, tl.load(last_ids - 1 - token_id, mask=token_id < 0), mask=token_id < 0)


def fill_pending(ids: torch.Tensor, last_ids: torch.Tensor) -> None:
    """Replace each id ``-1 - row`` by ``last_ids[row]``, in place.

    Args:
        ids: int64 ``[T]``, contiguous.
        last_ids: int64 ``[rows]``, contiguous.
    """
    if launches(ids):
        launch(fill_pending_kernel, (triton.cdiv(len(ids), BLOCK),), ids, last_ids, len(ids), BLOCK=BLOCK)
        return
    # exercise 09x2: the ids that the host does not know
    # hint: an id below 0 is pending: -1 for row 0, -2 for row 1, and so on
    # hint: the view's buffer is changed in place, since a captured step reads its address
    is_pending = ids < 0
    ids[is_pending] = last_ids[-1 - ids[is_pending]]
    # end exercise
