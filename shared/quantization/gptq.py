"""Rounds matrices to 4 bits so that their products with a text's activations change least. Introduced in phase 10.

GPTQ (Frantar et al., arXiv 2210.17323) rounds columns one after the other; later columns compensate each column's
rounding error, as far as their inputs correlate. This requires the inputs' second moments, ``H = XᵀX``, so the model
reads a text. Columns with large inputs are rounded first, while many columns remain to compensate. Invariant: a block's
inputs are the outputs of the blocks before it with rounded weights.
"""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from shared.cache.view.uncached import UncachedView
from shared.models.causal_lm import CausalLM
from shared.models.projection import Projection
from shared.models.tokens import Tokens
from shared.quantization.rounding import rounded
from shared.quantization.weight import QuantizedWeight, dequantize, pack_nibbles

SEQUENCE = 512  # tokens that attend to one another
LAZY = 128  # columns after which the rest are corrected, in one product
DAMPING = 0.01  # share of its mean that is added to H's diagonal: the correction must not rely on constant inputs


@torch.inference_mode()
def quantize_blocks(model: CausalLM, ids: list[int], group: int) -> Iterator[tuple[str, QuantizedWeight]]:
    """Round the matrices of the model's blocks, block by block, and yield each with its name.

    Args:
        model: the matrices of its blocks are replaced by the rounded ones, dequantized.
        ids: the text's tokens, divided into sequences of ``SEQUENCE``.
        group: columns that share a scale; it divides the rows of each matrix.
    """
    positions = torch.arange(len(ids)) % SEQUENCE
    lengths = [len(part) for part in torch.tensor(ids).split(SEQUENCE)]
    tokens = Tokens(torch.tensor(ids), positions)
    x = model.embedding(tokens.ids)
    for number, block in enumerate(model.blocks):
        moments: dict[str, torch.Tensor] = {}
        members = {name: module for name, module in block.named_modules() if isinstance(module, Projection)}
        handles = [module.register_forward_pre_hook(_adds_moments(moments, name)) for name, module in members.items()]
        block(x, tokens, UncachedView(lengths))
        for handle in handles:
            handle.remove()
        for name, module in members.items():
            weight = corrected(module.weight, moments[name], group)
            module.weight = nn.Parameter(dequantize(weight).to(module.weight.dtype), requires_grad=False)
            yield f"blocks.{number}.{name}", weight
        x = block(x, tokens, UncachedView(lengths))


def _adds_moments(moments: dict[str, torch.Tensor], name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
    def hook(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        x = args[0].float()
        moments[name] = moments.get(name, 0) + x.t() @ x

    return hook


def corrected(weight: torch.Tensor, moments: torch.Tensor, group: int) -> QuantizedWeight:
    """W ``[N, K]`` in 4 bits with one scale per ``group`` columns, for inputs with second moments ``[K, K]``.

    Scales are those of round-to-nearest.
    """
    rest = weight.float().clone()
    _, scales = rounded(rest.unflatten(1, (-1, group)), 7.5, torch.int8)  # [N, K / group, 1]
    order = moments.diagonal().argsort(descending=True)
    rest, of_column = rest[:, order], scales.squeeze(-1).repeat_interleave(group, 1)[:, order]
    damped = moments[order][:, order].double()
    damped.diagonal().add_(DAMPING * damped.diagonal().mean() + 1e-10)
    # Row i of this triangle is row i of the inverse without the columns before i, divided by the root of its first
    # element.
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True).float()
    numbers = torch.empty_like(rest)
    for start in range(0, rest.shape[1], LAZY):
        stop = min(start + LAZY, rest.shape[1])
        errors = torch.empty_like(rest[:, start:stop])
        for i in range(start, stop):
            numbers[:, i] = (rest[:, i] / of_column[:, i]).round().clamp(-8, 7)
            error = (rest[:, i] - numbers[:, i] * of_column[:, i]) / inverse[i, i]
            rest[:, i:stop] -= error[:, None] * inverse[i, i:stop]
            errors[:, i - start] = error
        rest[:, stop:] -= errors @ inverse[start:stop, stop:]
    numbers = numbers[:, order.argsort()]
    return QuantizedWeight(pack_nibbles((numbers + 8).to(torch.uint8), group), scales.squeeze(-1), None, group)
