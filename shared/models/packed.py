"""CPU blocks that store 16-bit weights, compute in fp32, and need few operations.

Introduced in phase 3.

With a KV cache, a decode step reads every weight for one token: decoding is bound by memory bandwidth, and the only way
to be faster is to read fewer bytes. Checkpoints store 16-bit weights, which a CPU engine widens to fp32. FBGEMM (Khudia
et al., arXiv 2101.05615), part of PyTorch on x86, has a product that reads fp16 weights and widens them in registers;
inputs, sums and outputs are fp32. The remaining overhead is a few microseconds per operation, so a packed block merges
matrices that read the same input and writes in place if possible.

Invariant: a weight is packed only if fp16 represents it exactly, so a packed model is the same model at half the bytes;
a block with any other weight is not packed.
"""

import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from shared.models.causal_lm import CausalLM
from shared.models.norm import RMSNorm
from shared.models.projection import Projection
from shared.models.tokens import KVView, Tokens

SUPPORTED_ENGINES = torch.backends.quantized.supported_engines


class PackedMatrix:
    """``x Wᵀ + b`` with W in fp16, of one projection or of several of the same x, with concatenated outputs."""

    def __init__(self, projections: Iterable[nn.Module]) -> None:
        members = [projection for projection in projections if isinstance(projection, Projection)]
        biases = [member.bias for member in members if member.bias is not None]
        weight = torch.cat([member.weight.data for member in members])
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight, torch.cat(biases) if biases else None)  # type: ignore[arg-type]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x fp32 ``[T, in]`` to a new tensor ``[T, out]``."""
        return torch.ops.quantized.linear_dynamic_fp16(x, self.packed)


class PackedNorm:
    """An :class:`RMSNorm` in four operations: √(mean(x²) + ε) is the hypotenuse of ‖x‖ and √(nε), over √n."""

    def __init__(self, norm: RMSNorm) -> None:
        size = len(norm.weight)
        self.floor = torch.tensor(math.sqrt(size * norm.eps))
        self.scale = (norm.weight.data + norm.offset) * math.sqrt(size)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x / torch.hypot(length, self.floor)).mul_(self.scale)


class PackedProjection(nn.Module):
    """A packed single :class:`Projection` (the output head), with the same interface."""

    def __init__(self, projection: Projection) -> None:
        super().__init__()
        self.matrix = PackedMatrix([projection])

    def forward(
        self,
        x: torch.Tensor,
        norm: RMSNorm | None = None,
        residual: torch.Tensor | None = None,
        activation: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """x fp32 ``[T, in]`` to ``[T, out]``."""
        y = self.matrix(x if norm is None else norm(x))
        if activation is not None:
            y = activation(y)
        return y if residual is None else residual + y


class PackedBlock(nn.Module):
    """The packed version of any family's block; post-norms exist if the family has them."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        attention, mlp = block.attention, block.mlp
        self.layer, self.head_dim = attention.layer, attention.head_dim
        self.scale, self.window, self.softcap = attention.scale, attention.window, attention.softcap
        self.heads = [len(member.weight) // self.head_dim for member in attention.qkv.children()]  # Hq, Hkv, Hkv
        self.qk, self.gated = attention.qk, mlp.gated
        self.qkv, self.o_proj = PackedMatrix(attention.qkv.children()), PackedMatrix([attention.o_proj])
        self.gate_up, self.down_proj = PackedMatrix(mlp.gate_up.children()), PackedMatrix([mlp.down_proj])
        self.attention_norm, self.mlp_norm = PackedNorm(block.attention_norm), PackedNorm(block.mlp_norm)
        self.post_attention_norm = self.post_mlp_norm = None
        if hasattr(block, "post_attention_norm"):
            self.post_attention_norm = PackedNorm(block.post_attention_norm)
            self.post_mlp_norm = PackedNorm(block.post_mlp_norm)

    def forward(self, x: torch.Tensor, tokens: Tokens, kv: KVView) -> torch.Tensor:
        """x fp32 ``[T, H]`` to a new tensor ``[T, H]``."""
        qkv = self.qkv(self.attention_norm(x)).view(len(x), -1, self.head_dim)
        q, k, v = qkv.split(self.heads, dim=1)  # [T, Hq, D], [T, Hkv, D] twice
        q = kv.write(self.layer, q, k, v, tokens.positions, self.qk)
        out = kv.attend(self.layer, q, scale=self.scale, window=self.window, softcap=self.softcap)
        y = self.o_proj(out.flatten(1))
        x = (y if self.post_attention_norm is None else self.post_attention_norm(y)).add_(x)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        y = self.down_proj(self.gated(gate, up))
        return (y if self.post_mlp_norm is None else self.post_mlp_norm(y)).add_(x)


def pack(model: CausalLM) -> CausalLM:
    """Replace, in place, the blocks that can be packed without loss; only fp32 models on x86 CPUs are packed.

    FBGEMM rearranges weights at about 40 ns per element on one core: seconds for every hundred million weights.
    """
    if model.device.type != "cpu" or model.dtype != torch.float32 or "fbgemm" not in SUPPORTED_ENGINES:
        return model

    def pack_block(layer: int) -> None:
        if _fits_fp16(model.blocks[layer]):
            model.blocks[layer] = PackedBlock(model.blocks[layer])

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(pack_block, range(len(model.blocks))))
    if _fits_fp16(model.head):
        model.head = PackedProjection(model.head)  # type: ignore[assignment]
    return model


def _fits_fp16(module: nn.Module) -> bool:
    """Whether fp16 represents every matrix of the module exactly; norms stay in fp32. False for quantized ones."""
    weights = [part.weight for part in module.modules() if hasattr(part, "weight")]
    return all(
        isinstance(weight, torch.Tensor) and (weight.ndim < 2 or torch.equal(weight.half().float(), weight))
        for weight in weights
    )
