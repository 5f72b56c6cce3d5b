"""Moving keys and queries along the sequence after RoPE. Introduced in phase 9.1.

RoPE rotates each pair of a head's numbers by an angle that grows with the position, and rotations add up: R(a + b) =
R(a) R(b) (Su et al., arXiv 2104.09864). So one more rotation, R(d), turns a key that was rotated for position p into
the key for position p + d; d may be negative. A score depends only on the difference of two positions: moving all keys
of a segment by d gives the same scores as moving the query by -d. Moving the query is cheaper, since a step has few
queries, and more exact: a moved key would have to be rounded to the KV cache's dtype a second time.

The norm of queries and keys (Qwen 3, Gemma 3) precedes RoPE and has per-channel weights, so it does not commute with a
rotation; a moved key is not normalized again. Invariant: angles are computed in fp64, so sines and cosines are exact
for any distance. No table is indexed, so a negative distance is not a special case.
"""

import torch
from torch import Tensor

from shared.ops.rope import rotate


def turns(distances: Tensor, frequencies: Tensor) -> Tensor:
    """Rows like those of :func:`shared.ops.rope.rope_table`, for any distances.

    Args:
        distances: int64 ``[T]``, in positions; possibly negative.
        frequencies: fp32 ``[D/2]``, angle per position of each pair (``inverse_frequencies``).

    Returns:
        fp32 ``[T, 2, 1, D]``: for each distance D cosines, then D sines, those of the first half negated.
    """
    # exercise 09.1x1: the turn by any distance
    # hint: the angle of pair i is distance · frequency i; a head's halves turn by the same D/2 angles
    # hint: cos(-a) = cos a and sin(-a) = -sin a: torch.cos and torch.sin take negative angles as they are
    # hint: compute in float64 (.double()), since a large distance leaves fp32 few digits; return float32
    # hint: torch.cat joins the halves, torch.stack the cosines and the sines; the third dimension is 1
    angles = distances.double()[:, None] * frequencies.double()  # [T, D/2]
    cos, sin = angles.cos(), angles.sin()
    rows = torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)), 1)  # [T, 2, D]
    return rows[:, :, None].float()
    # end exercise


def relocate(x: Tensor, distances: Tensor, frequencies: Tensor) -> Tensor:
    """Rotated keys or queries ``[T, heads, D]``, moved by ``distances`` positions, in the dtype of ``x``."""
    return rotate(x, turns(distances, frequencies))
