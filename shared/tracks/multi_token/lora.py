"""Low-rank additions to a model's matrices that act on chosen tokens only. Introduced in phase 11.1.

LoRA (Hu et al., arXiv 2106.09685) adds a product of two thin matrices to a weight: y = Wx + (α / r) · B(Ax). Here a
gate g, one number per token, switches the addition on (Samragh et al., arXiv 2507.11851):

    y = Wx + (α / r) · g · B(Ax)

Mask tokens have g = 1 and learn to predict further ahead; ordinary tokens have g = 0 and are unchanged. One forward
computes both kinds, and reads W once. The base may be fused, packed or quantized: the addition needs only its output.

Invariants: a token with g = 0 has the output of the base, bit for bit if the base does not fuse norm and activation
into its products (on a CPU; a GPU's fused kernels round less often); a step without a gate runs the base alone.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.errors import ConfigError
from shared.kernels.launch import launches
from shared.kernels.products import gemv
from shared.models.causal_lm import CausalLM
from shared.models.config import ModelConfig
from shared.models.families import FAMILIES
from shared.models.norm import RMSNorm
from shared.models.parts import find_at_once
from shared.ops.gated import GatedOp
from shared.tracks.multi_token.kernels.low_rank import add_low_rank

TARGETS = {
    "qkv": "attention.qkv.matrix",
    "o_proj": "attention.o_proj",
    "gate_up": "mlp.gate_up.matrix",
    "down_proj": "mlp.down_proj",
}
"""The matrices of a block that may have an addition, and their locations; those with the same input are one."""
FIRST_MASK = 1 << 32
"""The id of the first mask token, above every vocabulary."""


def target_sizes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(in, out) of each of ``TARGETS``."""
    H, D, inner = config.hidden_size, config.head_dim, config.intermediate_size
    return {
        "qkv": (H, (config.num_heads + 2 * config.num_kv_heads) * D),
        "o_proj": (config.num_heads * D, H),
        "gate_up": (H, 2 * inner),
        "down_proj": (inner, H),
    }


class GatedLoRA(nn.Module):
    """The addition to one matrix; zero at first, because B is.

    Args:
        in_features, out_features: those of the matrix.
        rank: r, the number of rows of A.
        alpha: α; the addition is scaled by α / r.
    """

    def __init__(self, in_features: int, out_features: int, rank: int, alpha: float) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(rank, in_features) / math.sqrt(in_features))
        self.b = nn.Parameter(torch.zeros(out_features, rank))
        self.scale = alpha / rank

    def forward(self, y: Tensor, x: Tensor, gate: Tensor) -> Tensor:
        """``y + (α / r) · gate · B(Ax)``: y ``[T, out]``, the base's output for x ``[T, in]``; gate ``[T]``."""
        low = F.linear(x, self.a.to(x.dtype)) * gate[:, None]  # [T, r]
        return torch.addmm(y, low, self.b.to(x.dtype).T, alpha=self.scale)


class AdaptedProjection(nn.Module):
    """A fused or packed matrix with an addition.

    Args:
        base: the matrix of one projection, or of several.
        addition: None: the matrix has none and ignores the gate.
    """

    def __init__(self, base: Any, addition: GatedLoRA | None) -> None:
        super().__init__()
        self.base, self.addition = base, addition
        self.whole = None if addition is None else _with_rows_of_a(base, addition)
        find_at_once(self)

    def forward(
        self,
        x: Tensor,
        norm: RMSNorm | None = None,
        residual: Tensor | None = None,
        gate: Tensor | None = None,
        activation: GatedOp | None = None,
    ) -> Tensor:
        """Like the base; tokens with an open gate get the addition too."""
        if gate is None:
            y: Tensor = self.base(x, norm, residual, activation=activation)
            return y
        if norm is not None:
            x = norm(x)
        addition = self.addition
        if self.whole is not None and addition is not None:
            return add_low_rank(gemv.linear(x, self.whole), addition.b, gate, addition.scale, residual, activation)
        y = self.base(x)
        y = y if addition is None else addition(y, x, gate.to(x.dtype))
        if activation is not None:
            gated = activation if torch.is_grad_enabled() else gemv.ACTIVATIONS[activation][1]
            y = gated(*y.chunk(2, dim=-1))
        return y if residual is None else residual + y

    __call__ = forward  # skips nn.Module's hooks, as the base does


def _with_rows_of_a(base: Any, addition: GatedLoRA) -> Tensor | None:
    """W with the rows of A appended, for an addition that is no longer trained, if kernels are used; otherwise None.

    One product then yields both W x and A x. The base's weight becomes part of the new matrix.
    """
    weight = getattr(base, "weight", None)
    if not isinstance(weight, Tensor) or not launches(weight) or base.bias is not None:
        return None
    if addition.b.dtype != weight.dtype or addition.a.requires_grad:
        return None
    whole = torch.cat((weight.data, addition.a.data))
    base.weight = nn.Parameter(whole[: len(weight)], requires_grad=False)
    find_at_once(base)
    del weight
    if whole.is_cuda:
        torch.cuda.empty_cache()  # the freed matrix is too small for the next layer's
    return whole


class MaskEmbedding(nn.Module):
    """An embedding that also has vectors for mask tokens, whose ids start at ``FIRST_MASK``.

    The vectors are stored as blocks receive them: a family's embedding scale is not applied.
    """

    def __init__(self, base: nn.Module, masks: Tensor, vocab_size: int) -> None:
        super().__init__()
        self.base, self.masks, self.vocab_size = base, masks, vocab_size  # masks [k, H]

    def forward(self, ids: Tensor) -> Tensor:
        """Ids ``[T]`` to vectors ``[T, H]``."""
        x = self.base(ids.clamp(max=self.vocab_size - 1))
        number = ids - FIRST_MASK
        masks = self.masks.to(x.dtype)[number.clamp(min=0)]
        return torch.where((number >= 0)[:, None], masks, x)


def adapt(model: CausalLM, additions: Sequence[Mapping[str, GatedLoRA]], masks: Tensor) -> CausalLM:
    """Add each layer's additions and the vectors of the mask tokens ``[k, H]`` to a fused or packed model, in place.

    Raises ConfigError for a family whose blocks have different matrices.
    """
    if FAMILIES[model.config.family].own_fields:
        raise ConfigError(
            f"adapter is for blocks of attention and one MLP, and those of family {model.config.family!r} have parts "
            "of their own; leave it out."
        )
    for block, of_layer in zip(model.blocks, additions, strict=True):
        for name, path in TARGETS.items():
            block.set_submodule(path, AdaptedProjection(block.get_submodule(path), of_layer.get(name)))
            find_at_once(block.get_submodule(path.rpartition(".")[0]))
    model.embedding = MaskEmbedding(model.embedding, masks, model.config.vocab_size)  # type: ignore[assignment]
    return model
