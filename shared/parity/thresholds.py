"""How far two computations of the same numbers may lie apart. Introduced in phase 1a.

**The measure.** Of each row (a token's vector, or its logits) the root mean square of the difference over the root mean
square of the reference, and of all rows the worst. A row is measured by itself, because a trained model's first token
carries activations a hundred times larger than the others and would hide them.

**fp32.** Ours against transformers' in fp32. The unit roundoff is u = 2⁻²⁴; a dot product of n terms errs by about
√n u, and the longest of the models here has n = 8192: 5.4e-6. A layer may err by that, rounded to 5e-6. Through L
layers errors add like a random walk, √L of them; the logits of 30 layers may err by 2e-5.

**bf16, fp16.** Two correct programs differ as much from each other as from the truth, so the truth is the measure:
transformers in fp32 on the same weights and inputs, rounded beforehand. Sums run in fp32, so only the roundings between
operations count: about ten in a row in a layer, each u/√3 or so, u = 2⁻⁸ (bf16) or 2⁻¹¹ (fp16). A layer may err by 4u.
Trained layers can amplify a rounding: layer 9 of SmolLM2 takes away most of what the first token has gathered, and what
is left of that difference of large numbers errs by 8u in any program. So where transformers in the same dtype errs by
more, ours may err 1.25 times as much as that, and no more (``allowed_error``).

**Logits in bf16 and fp16** may err by 8u, or again 1.25 times as much as transformers, but as the root mean square over
all rows, ``typical``. The worst row says little here: through 30 trained layers one position in fifty comes out several
times worse than the rest, in any program, and which one it is changes with every rounding.

**Arg-max.** In fp32 the likeliest token is the same. In the others it may change where two are nearly tied: the fp32
logit of our choice lies at most 16u, times the root mean square of the row, below the highest. (Each of the two logits
errs by some 8u of that.)

**Direct comparison** (``infer compare``: both sides in one dtype, each layer starting from the same input). In fp32 as
above. In bf16 and fp16 the two errors add up, and inside a layer they are larger than at its output, where the
residual covers them: attention that mostly returns to the first token leaves rows that nearly cancel. A module may
differ by 24u, the logits, whose worst row counts here, by 64u: enough to find what is broken, while fp32 finds what is
slightly wrong.

Invariant: the table in docs/PHASE_01A.md equals ``THRESHOLDS``; a test reads it.
"""

from dataclasses import dataclass

import torch

ROWS_AT_ONCE = 64  # a long prompt's logits are compared in pieces
PEER_FACTOR = 1.25  # our error over that of transformers in the same dtype, where that one exceeds the bound


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
    """What ours may err by in a half-precision dtype when transformers, in the same dtype, errs by ``peer``."""
    return max(bound, PEER_FACTOR * peer)


@dataclass(frozen=True)
class Distance:
    """``relative``: the worst row's error. ``typical``: the root mean square of all rows' errors. ``maximum``: the
    largest absolute difference of any element."""

    relative: float
    typical: float
    maximum: float


def distance(ours: torch.Tensor, reference: torch.Tensor) -> Distance:
    """How far ``ours [..., n]`` lies from ``reference`` of the same shape; NaN if either holds one."""
    if ours.shape != reference.shape:
        raise ValueError(f"shapes differ: ours {list(ours.shape)}, the reference {list(reference.shape)}")
    errors, largest = [], []
    pieces = (x.flatten(0, -2).split(ROWS_AT_ONCE) for x in (ours, reference))
    for a, b in zip(*pieces, strict=True):
        difference = a.double() - b.double()
        rms, size = (x.square().mean(-1).sqrt() for x in (difference, b.double()))
        errors.append(torch.where(difference.eq(0).all(-1), 0.0, rms / size))  # equal rows of zeros are at distance 0
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
