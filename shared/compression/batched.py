"""Selection for all layers and KV heads at once, whose lengths differ. Introduced in phase 9.2.

:func:`shared.compression.selection.select` takes one head after the other. On a GPU that is thousands of launches a
compression, so here the heads stand side by side, aligned at their newest keys, with padding before the oldest.

Invariant: what is kept is what ``select`` keeps of each head alone, with ``mean`` as the reduction.
"""

import torch
from torch import Tensor

from shared.compression.calibration import top_n, top_p_count
from shared.compression.compressors import MassCompressor
from shared.compression.selection import Budget


def select_all(mass: Tensor, sizes: Tensor, compressor: MassCompressor, budget: Budget) -> Tensor:
    """The keys that each head keeps, bool [..., n].

    Args:
        mass: [..., Hq / Hkv, n], the attention that each key gets from the window's queries; 0 for padding.
        sizes: int [...], the keys of each head, which are the last ``sizes`` of n.
    """
    n, sizes = mass.shape[-1], sizes[..., None]
    place = torch.arange(n, device=mass.device) - (n - sizes)  # of a key in its head; negative for padding
    is_key = place >= 0
    always = is_key & ((place < budget.num_sinks) | (place >= sizes - budget.num_recent))
    scores = compressor.of_mass(mass).masked_fill(~is_key, -torch.inf)
    attention = mass.mean(-2)
    most_needed = top_p_count(attention / attention.sum(-1, keepdim=True), budget.p)
    count = (top_n(scores, most_needed) & is_key | always).sum(-1).clamp(budget.least, budget.most)
    count = count.maximum(always.sum(-1)).minimum(sizes[..., 0])
    return top_n(scores.masked_fill(always, torch.inf), count)
