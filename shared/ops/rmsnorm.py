"""RMSNorm: scale a vector to unit root mean square, then by a learned weight. Introduced in phase 1a.

Zhang & Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467. Invariant: all arithmetic is fp32 whatever
the dtype of the input, and the result is rounded once.
"""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """``x / sqrt(mean(x²) + eps) · (weight + offset)`` over the last dimension.

    Args:
        x: ``[..., n]`` in any floating dtype; the result has its shape and dtype.
        weight: ``[n]``.
        eps: added to the mean square, inside the root.
        offset: 1.0 if a family stores the weight as its distance from one (Gemma), otherwise 0.0.
    """
    # exercise 01ax1: scale x to unit root mean square, in fp32, then by the weight
    # hint: F.rms_norm takes the normalised shape, the weight and eps; only its result is rounded to x.dtype
    scale = weight.float() + offset if offset else weight.float()
    return F.rms_norm(x.float(), x.shape[-1:], scale, eps).to(x.dtype)
    # end exercise
