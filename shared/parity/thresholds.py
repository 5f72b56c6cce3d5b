"""Error bounds for two computations of the same numbers. Introduced in phase 1a.

**The measure.** For each row (a token's vector, or its logits) the root mean square of the difference over the root
mean square of the reference; the worst row counts. Rows are measured separately, because a trained model's first token
has activations a hundred times larger than the others and would hide their errors.

**fp32.** Ours against transformers' in fp32. The unit roundoff is u = 2⁻²⁴. The error of a dot product of n terms is
about √n u, and the longest one of the models here has n = 8192: 5.4e-6. A layer may have an error of that, rounded to
5e-6. Through L layers, errors add up like a random walk, to √L of them; the logits of 30 layers may have an error of
2e-5.

**bf16, fp16.** Two correct programs differ as much from each other as from the truth, so the truth is the measure:
transformers in fp32 on the same weights and inputs, rounded beforehand. Sums are in fp32, so only the roundings between
operations count: about ten in a row in a layer, each about u/√3, with u = 2⁻⁸ (bf16) or 2⁻¹¹ (fp16). A layer may have
an error of 4u.
Trained layers can amplify a rounding error: layer 9 of SmolLM2 subtracts most of the first token's large activations,
and this cancellation leaves an error of 8u in any program. So if transformers in the same dtype exceeds the bound, ours
may have up to 1.25 times its error (``allowed_error``).

**Logits in bf16 and fp16** may have an error of 8u, or again 1.25 times that of transformers, but as the root mean
square over all rows, ``typical``. The worst row says little here: after 30 trained layers, one position in fifty is
several times worse than the rest in any program, and rounding determines which one.

**Arg-max.** In fp32 the most likely token is the same. In other dtypes it may differ if two tokens are nearly tied: the
fp32 logit of our choice is at most 16u, times the root mean square of the row, below the highest. (Each of the two
logits has an error of about 8u of that.)

**Direct comparison** (``infer compare``: both sides in one dtype, each layer starting from the same input). In fp32 as
above. In bf16 and fp16 the two errors add up. Inside a layer they are larger than at its output, where the residual
covers them: attention that mostly returns to the first token leaves rows that nearly cancel. A module may differ by
24u; the logits, whose worst row counts here, by 64u. That is enough to find what is broken; fp32 finds what is slightly
wrong.

Invariant: the table in docs/PHASE_01A.md equals ``THRESHOLDS``; a test reads it.
"""

from dataclasses import dataclass

import torch

ROWS_AT_ONCE = 64  # a long prompt's logits are compared in pieces
PEER_FACTOR = 1.25  # our error divided by that of transformers in the same dtype, if theirs exceeds the bound


@dataclass(frozen=True)
class Threshold:
    """Bounds on the relative error in one dtype: against the truth, and (``direct_``) between two programs."""

    layer: float
    logits: float
    argmax: float
    direct_module: float
    direct_logits: float


def _half(u: float) -> Threshold:
    """The bounds of a dtype with unit roundoff u whose sums run in fp32."""
    return Threshold(layer=4 * u, logits=8 * u, argmax=16 * u, direct_module=24 * u, direct_logits=64 * u)


THRESHOLDS = {
    torch.float32: Threshold(layer=5e-6, logits=2e-5, argmax=0.0, direct_module=5e-6, direct_logits=2e-5),
    torch.bfloat16: _half(2**-8),
    torch.float16: _half(2**-11),
}


def allowed_error(bound: float, peer: float) -> float:
    """The bound on our error in a half-precision dtype if transformers has the error ``peer`` in the same dtype."""
    return max(bound, PEER_FACTOR * peer)


@dataclass(frozen=True)
class Distance:
    """``relative``: the worst row's error. ``typical``: the root mean square of all rows' errors. ``maximum``: the
    largest absolute difference of any element."""

    relative: float
    typical: float
    maximum: float


def distance(ours: torch.Tensor, reference: torch.Tensor) -> Distance:
    """The distance of ``ours [..., n]`` from ``reference`` of the same shape; NaN if either contains NaN."""
    if ours.shape != reference.shape:
        raise ValueError(f"shapes differ: ours {list(ours.shape)}, the reference {list(reference.shape)}")
    errors, largest = [], []
    pieces = (x.flatten(0, -2).split(ROWS_AT_ONCE) for x in (ours, reference))
    for a, b in zip(*pieces, strict=True):
        difference = a.double() - b.double()
        rms, size = (x.square().mean(-1).sqrt() for x in (difference, b.double()))
        errors.append(torch.where(difference.eq(0).all(-1), 0.0, rms / size))  # equal rows of zeros have distance 0
        largest.append(difference.abs().max())
    rows = torch.cat(errors)
    return Distance(rows.max().item(), rows.square().mean().sqrt().item(), torch.stack(largest).max().item())


def argmax_shortfall(ours: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """For logits ``[T, V]``: how far the reference's logit of our arg-max lies below its highest, over the row's rms.

    fp32 ``[T]``, 0 where both choose the same token.
    """
    reference = reference.float()
    chosen = reference.gather(-1, ours.argmax(-1, keepdim=True))[:, 0]
    return (reference.amax(-1) - chosen) / reference.square().mean(-1).sqrt()
