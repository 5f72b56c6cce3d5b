"""A rank's part of gated additions to a model's matrices (LoRA). Introduced in phase 12.1.

An addition is B A x. Beside a column-parallel matrix, A is whole and B is cut as the matrix: a rank adds to its
outputs. Beside a row-parallel one, A is cut and B is whole: the addition is a term too, and is added before the sum
over the ranks. No engine uses it yet: phase 11.1, which trains additions, has one rank.

Invariant: with ``RowParallelProjection`` behind it, no addition needs a sum of its own.
"""

from torch import nn

from shared.models.lora import GatedLoRA
from shared.parallel.cut import ROWS, Cut, ModelCut

MEMBERS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o_proj": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}
"""The matrices of each target of additions, one below the other."""


def cut_addition(name: str, addition: GatedLoRA, cut: ModelCut) -> GatedLoRA:
    """This rank's part of the addition to the matrices ``name``, a key of ``MEMBERS``."""
    cuts = [found for found in map(cut.of, MEMBERS[name]) if found is not None]
    a, b = addition.a.data, addition.b.data
    if cuts[0].dim == ROWS:
        b = b[_rows(cuts)]
    else:
        a = a[:, cuts[0].part.start : cuts[0].part.stop].contiguous()
    part = GatedLoRA(a.shape[1], b.shape[0], a.shape[0], alpha=addition.scale * a.shape[0])
    part.a, part.b = (nn.Parameter(weight, requires_grad=False) for weight in (a, b))
    return part


def _rows(cuts: list[Cut]) -> list[int]:
    """The rows of the rank, in matrices that stand one below the other."""
    rows: list[int] = []
    first = 0
    for cut in cuts:
        rows += range(first + cut.part.start, first + cut.part.stop)
        first += cut.total
    return rows
