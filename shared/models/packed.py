"""Parts of CPU models that store 16-bit weights, compute in fp32, and use few operations.

Introduced in phase 3.

With a KV cache, a decode step reads every weight for one token: decoding is bound by memory bandwidth, so the only way
to be faster is to read fewer bytes. Checkpoints store 16-bit weights, which a CPU engine widens to fp32. FBGEMM (Khudia
et al., arXiv 2101.05615), part of PyTorch on x86, has a product that reads fp16 weights and widens them in registers;
inputs, sums and outputs are fp32. The remaining overhead is a few microseconds per operation, so packed parts merge
matrices that read the same input, and write in place where possible.

Invariant: a weight is packed only if fp16 represents it exactly, so a packed model is the same model at half the bytes;
a block with any other weight is not packed.
"""

import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from shared.models.causal_lm import CausalLM
from shared.models.norm import RMSNorm
from shared.models.parts import MergedGroup, merged_biases, replace_parts
from shared.models.projection import Projection, ProjectionGroup
from shared.ops.gated import GatedOp

SUPPORTED_ENGINES = torch.backends.quantized.supported_engines


class PackedNorm(RMSNorm):
    """An :class:`RMSNorm` in four operations: √(mean(x²) + ε) is the hypotenuse of ‖x‖ and √(nε), over √n."""

    def __init__(self, norm: RMSNorm) -> None:
        nn.Module.__init__(self)
        self.weight, self.eps, self.offset = norm.weight, norm.eps, norm.offset
        size = len(norm.weight)
        self.floor = torch.tensor(math.sqrt(size * norm.eps))
        self.scale = (norm.weight.data + norm.offset) * math.sqrt(size)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        y = (x / torch.hypot(length, self.floor)).mul_(self.scale)
        return y if residual is None else y.add_(residual)

    def after(self, post_norm: RMSNorm, y: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        s = post_norm(y, residual)
        return self(s), s

    __call__ = forward  # skips nn.Module's hooks, which cost as much as an operation


class PackedProjection(nn.Module):
    """One fp16 matrix for one :class:`Projection`, or for several with the same x, whose outputs are concatenated."""

    def __init__(self, projections: Iterable[nn.Module]) -> None:
        super().__init__()
        members = [projection for projection in projections if isinstance(projection, Projection)]
        biases = merged_biases(members)
        weight = torch.cat([member.weight.data for member in members])
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight, torch.cat(biases) if biases else None)

    def forward(
        self,
        x: torch.Tensor,
        norm: RMSNorm | None = None,
        residual: torch.Tensor | None = None,
        gate: torch.Tensor | None = None,
        activation: GatedOp | None = None,
    ) -> torch.Tensor:
        """x fp32 ``[T, in]`` to a new tensor; otherwise like :class:`shared.models.fused.FusedProjection`."""
        y = torch.ops.quantized.linear_dynamic_fp16(x if norm is None else norm(x), self.packed)
        if activation is not None:
            y = activation(*y.chunk(2, dim=-1))
        return y if residual is None else y.add_(residual)

    __call__ = forward


def packed_part(part: nn.Module) -> nn.Module | None:
    """The packed version of a part; None for a module that is not a part."""
    if isinstance(part, ProjectionGroup):
        return MergedGroup(part, PackedProjection)
    if isinstance(part, Projection):
        return PackedProjection([part])
    return PackedNorm(part) if isinstance(part, RMSNorm) else None


def pack(model: CausalLM) -> CausalLM:
    """Replace, in place, the parts of blocks that can be packed without loss; only fp32 models on x86 CPUs are packed.

    FBGEMM rearranges weights at about 40 ns per element on one core: seconds for every hundred million weights.
    """
    if model.device.type != "cpu" or model.dtype != torch.float32 or "fbgemm" not in SUPPORTED_ENGINES:
        return model

    def pack_block(layer: int) -> None:
        if _fits_fp16(model.blocks[layer]):
            replace_parts(model.blocks[layer], packed_part)

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(pack_block, range(len(model.blocks))))
    if _fits_fp16(model.head):
        model.head = PackedProjection([model.head])  # type: ignore[assignment]
    return model


def _fits_fp16(module: nn.Module) -> bool:
    """Whether fp16 represents every matrix of the module exactly; norms stay in fp32. False for quantized modules."""
    weights = [part.weight for part in module.modules() if hasattr(part, "weight")]
    return all(
        isinstance(weight, torch.Tensor) and (weight.ndim < 2 or torch.equal(weight.half().float(), weight))
        for weight in weights
    )
