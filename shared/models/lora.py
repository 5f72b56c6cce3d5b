"""Low-rank additions to a model's matrices that act on chosen tokens only. Introduced in phase 11.1.

LoRA (Hu et al., arXiv 2106.09685) adds a product of two thin matrices to a weight: y = Wx + (α / r) · B(Ax). Here a
gate g, one number for each token, switches the addition on (Samragh et al., arXiv 2507.11851):

    y = Wx + (α / r) · g · B(Ax)

Mask tokens have g = 1 and learn to predict further ahead; ordinary tokens have g = 0 and stay what they were. One
forward computes both, and reads W once. The base may be fused, packed or quantized: the addition needs its output only.

Invariants: a token with g = 0 has the output of the base, bit for bit if the base does not fuse norm and activation
into its products (on a CPU; a GPU's fused kernels round less often); a step without a gate runs the base alone.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shared.kernels import gemv
from shared.kernels.launch import launches
from shared.kernels.low_rank import add_low_rank
from shared.kernels.rmsnorm import rms_norm
from shared.models.causal_lm import CausalLM
from shared.models.config import ModelConfig
from shared.models.norm import RMSNorm
from shared.models.tokens import KVView, Tokens
from shared.ops.gated import GatedOp

TARGETS = ("qkv", "o_proj", "gate_up", "down_proj")
"""The matrices of a block that may have an addition; those of the same input are one."""
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
    """The addition to one matrix; at first zero, since B is.

    Args:
        in_features, out_features: of the matrix.
        rank: r, rows of A.
        alpha: α; the addition is scaled by α / r.
    """

    def __init__(self, in_features: int, out_features: int, rank: int, alpha: float) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(rank, in_features) / math.sqrt(in_features))
        self.b = nn.Parameter(torch.zeros(out_features, rank))
        self.scale = alpha / rank

    def forward(self, y: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """``y + (α / r) · gate · B(Ax)``: y ``[T, out]``, the base's output for x ``[T, in]``; gate ``[T]``."""
        low = F.linear(x, self.a.to(x.dtype)) * gate[:, None]  # [T, r]
        return torch.addmm(y, low, self.b.to(x.dtype).T, alpha=self.scale)


class AdaptedBlock(nn.Module):
    """A fused or packed block with additions to its matrices.

    Args:
        base: a ``FusedBlock`` or ``PackedBlock``.
        additions: by the names of ``TARGETS``; matrices without one stay as they are.
    """

    def __init__(self, base: Any, additions: Mapping[str, GatedLoRA]) -> None:
        super().__init__()
        self.base = base
        self.additions = nn.ModuleDict(additions)
        self.wholes = _with_rows_of_a(base, additions)

    def forward(self, x: torch.Tensor, tokens: Tokens, kv: KVView) -> torch.Tensor:
        """x ``[T, H]`` to a new tensor ``[T, H]``."""
        base, gate = self.base, tokens.gate
        if gate is None:
            return base(x, tokens, kv)
        qkv = self._product("qkv", _normed(x, base.attention_norm), gate).view(len(x), -1, base.head_dim)
        q, k, v = qkv.split_with_sizes(base.heads, dim=1)  # [T, Hq, D], [T, Hkv, D] twice
        q = kv.write(base.layer, q, k, v, tokens.positions, base.qk)
        out = kv.attend(base.layer, q, scale=base.scale, window=base.window, softcap=base.softcap)
        x = self._added("o_proj", out.flatten(1), gate, x, base.post_attention_norm)
        y = self._product("gate_up", _normed(x, base.mlp_norm), gate, activation=base.gated)
        return self._added("down_proj", y, gate, x, base.post_mlp_norm)

    def _added(self, name: str, y: torch.Tensor, gate: torch.Tensor, x: torch.Tensor, norm: Any) -> torch.Tensor:
        """The product of y, behind it the norm if there is one, and x."""
        if norm is None:
            return self._product(name, y, gate, residual=x)
        return x + _normed(self._product(name, y, gate), norm)

    def _product(
        self,
        name: str,
        x: torch.Tensor,
        gate: torch.Tensor,
        residual: torch.Tensor | None = None,
        activation: GatedOp | None = None,
    ) -> torch.Tensor:
        addition: Any = self.additions[name] if name in self.additions else None  # noqa: SIM401  # it has no get
        if name in self.wholes:
            y = gemv.linear(x, self.wholes[name])
            return add_low_rank(y, addition.b, gate, addition.scale, residual, activation)
        y = getattr(self.base, name)(x)
        y = y if addition is None else addition(y, x, gate.to(x.dtype))
        if activation is not None:
            gated = activation if torch.is_grad_enabled() else gemv.ACTIVATIONS[activation][1]
            y = gated(*y.chunk(2, dim=-1))
        return y if residual is None else residual + y


def _with_rows_of_a(base: Any, additions: Mapping[str, GatedLoRA]) -> dict[str, torch.Tensor]:
    """By name, W with the rows of A below it, for additions that are not trained any more, where kernels run.

    One product then gives both W x and A x. The weight of the base becomes a part of the new matrix.
    """
    wholes: dict[str, torch.Tensor] = {}
    for name, addition in additions.items():
        projection = getattr(base, name)
        weight = getattr(projection, "weight", None)
        if not isinstance(weight, torch.Tensor) or not launches(weight) or projection.bias is not None:
            continue
        if addition.b.dtype == weight.dtype and not addition.a.requires_grad:
            wholes[name] = torch.cat((weight.data, addition.a.data))
            projection.weight = nn.Parameter(wholes[name][: len(weight)], requires_grad=False)
            weight = None
            if wholes[name].is_cuda:
                torch.cuda.empty_cache()  # the freed matrix is too small for the next layer's
    return wholes


def _normed(x: torch.Tensor, norm: Any) -> torch.Tensor:
    """The norm of x: a single launch, or with gradients the op."""
    if isinstance(norm, RMSNorm) and not torch.is_grad_enabled():
        return rms_norm(x, norm.weight, norm.eps, norm.offset)
    return norm(x)


class MaskEmbedding(nn.Module):
    """An embedding that also has vectors for mask tokens, whose ids count from ``FIRST_MASK``.

    The vectors stand for embeddings as blocks receive them: a family's factor is not applied.
    """

    def __init__(self, base: nn.Module, masks: torch.Tensor, vocab_size: int) -> None:
        super().__init__()
        self.base, self.masks, self.vocab_size = base, masks, vocab_size  # masks [k, H]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids ``[T]`` to vectors ``[T, H]``."""
        x = self.base(ids.clamp(max=self.vocab_size - 1))
        number = ids - FIRST_MASK
        masks = self.masks.to(x.dtype)[number.clamp(min=0)]
        return torch.where((number >= 0)[:, None], masks, x)


def adapt(model: CausalLM, additions: Sequence[Mapping[str, GatedLoRA]], masks: torch.Tensor) -> CausalLM:
    """Give a fused or packed model, in place, the additions of each layer and the vectors of mask tokens ``[k, H]``."""
    for layer, of_layer in enumerate(additions):
        model.blocks[layer] = AdaptedBlock(model.blocks[layer], of_layer)
    model.embedding = MaskEmbedding(model.embedding, masks, model.config.vocab_size)  # type: ignore[assignment]
    return model
