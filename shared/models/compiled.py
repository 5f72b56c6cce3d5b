"""Parts whose operations are compiled by PyTorch instead of using our kernels. Introduced in phase 11.1.

``torch.compile`` (TorchDynamo and TorchInductor; Ansel et al., ASPLOS 2024) writes kernels for the elementwise parts of
a function and leaves products to a library. Comparing a model that uses it with one that uses :mod:`shared.kernels`
shows what hand-written kernels gain. In both, attention and the writing of keys remain in the KV view.

A compiled function takes weights as arguments rather than a part as ``self``, so one compilation serves all layers;
compiling layers one by one would take minutes. The number of tokens is a variable of the compiled code; a single token
is compiled separately.

Invariant: the operations and their order are those of fused parts on a CPU.
"""

import time
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shared.errors import ConfigError
from shared.models.causal_lm import CausalLM
from shared.models.fused import FusedNorm, FusedProjection
from shared.models.norm import RMSNorm
from shared.models.parts import find_at_once, replace_parts
from shared.models.projection import Projection, ProjectionGroup
from shared.models.tokens import Tokens
from shared.ops.gated import GatedOp
from shared.ops.rmsnorm import rms_norm

Weights = tuple[torch.Tensor, float, float]
"""Weight, epsilon and offset of a norm."""
SIZES = (1, 2)
"""Numbers of tokens for which code is generated when a model is compiled: one, and any other."""


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: Weights | None,
    residual: torch.Tensor | None,
    activation: GatedOp | None,
) -> torch.Tensor:
    """``activation(norm(x) Wᵀ + b) + residual``, as in :func:`shared.kernels.products.gemv.linear`."""
    y = F.linear(x if norm is None else rms_norm(x, *norm), weight, bias)
    if activation is not None:
        y = activation(*y.chunk(2, dim=-1))
    return y if residual is None else residual + y


def normed(x: torch.Tensor, norm: Weights, residual: torch.Tensor | None) -> torch.Tensor:
    """``norm(x) + residual``."""
    y = rms_norm(x, *norm)
    return y if residual is None else residual + y


def normed_sum(
    y: torch.Tensor, post: Weights, residual: torch.Tensor, norm: Weights
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum ``s = residual + post(y)`` and its norm: ``(norm(s), s)``."""
    s = residual + rms_norm(y, *post)
    return rms_norm(s, *norm), s


Compiled = Callable[..., Any]


@cache
def compiled(function: Compiled, shape: tuple[int, ...], backend: str) -> Compiled:
    """``function`` for weights of one shape, compiled with ``backend`` of ``torch.compile``.

    TorchDynamo keeps only a few compilations per code object, so each shape gets a code object of its own.
    """
    name = "_".join(map(str, (function.__name__, *shape)))
    copy = FunctionType(function.__code__.replace(co_name=name), function.__globals__)
    return torch.compile(copy, backend=backend, dynamic=True, fullgraph=True)


class CompiledProjection(nn.Module):
    """The compiled version of a :class:`FusedProjection`, with its matrix."""

    def __init__(self, base: FusedProjection, backend: str) -> None:
        super().__init__()
        self.weight, self.bias = base.weight, base.bias
        self.multiply = compiled(multiply, tuple(base.weight.shape), backend)
        find_at_once(self)

    def forward(
        self,
        x: torch.Tensor,
        norm: RMSNorm | None = None,
        residual: torch.Tensor | None = None,
        gate: torch.Tensor | None = None,
        activation: GatedOp | None = None,
    ) -> torch.Tensor:
        weights = None if norm is None else _weights(norm)
        y: torch.Tensor = self.multiply(x, self.weight, self.bias, weights, residual, activation)
        return y

    __call__ = forward  # skips nn.Module's hooks, as FusedProjection does


class CompiledNorm(RMSNorm):
    """The compiled version of a :class:`FusedNorm`."""

    def __init__(self, base: FusedNorm, backend: str) -> None:
        nn.Module.__init__(self)
        self.weight, self.eps, self.offset = base.weight, base.eps, base.offset
        shape = tuple(base.weight.shape)
        self.normed, self.normed_sum = compiled(normed, shape, backend), compiled(normed_sum, shape, backend)
        find_at_once(self)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = self.normed(x, _weights(self), residual)
        return y

    def after(self, post_norm: RMSNorm, y: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h, s = self.normed_sum(y, _weights(post_norm), residual, _weights(self))
        return h, s

    __call__ = forward


class Echo:
    """A KV view without a cache, whose attention returns the queries, so that a block can run by itself."""

    def write(self, layer: int, q: torch.Tensor, *_: object) -> torch.Tensor:
        return q

    def attend(self, layer: int, q: torch.Tensor, **_: object) -> torch.Tensor:
        return q.contiguous()


def compile_model(model: CausalLM, backend: str = "inductor") -> float:
    """Replace, in place, the parts of the blocks and the head of a fused model; returns the compilation time in
    seconds.

    Raises ConfigError if a part is not fused, or if this machine has no compiler for the code.
    """

    def compiled_part(part: nn.Module) -> nn.Module | None:
        if isinstance(part, FusedNorm):
            return CompiledNorm(part, backend)
        if isinstance(part, FusedProjection):
            return CompiledProjection(part, backend)
        if isinstance(part, Projection | ProjectionGroup | RMSNorm):
            raise ConfigError(f"A part of the model is a {type(part).__name__}, and only fused parts can be compiled.")
        return None

    for block in model.blocks:
        replace_parts(block, compiled_part)
    model.head = CompiledProjection(model.head, backend)  # type: ignore[assignment, arg-type]
    started = time.perf_counter()
    try:
        with torch.inference_mode():
            for size in SIZES:
                _try_out(model, size)
    except Exception as error:  # the compiler's errors, which have many classes
        said = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"execution is 'compile', and PyTorch cannot compile the model here ({said}); install a C++ compiler, or "
            "leave execution at 'kernels'."
        ) from error
    return time.perf_counter() - started


def _try_out(model: CausalLM, size: int) -> None:
    """Run the first block and the head on ``size`` tokens, which generates their code."""
    hidden = model.norm.weight.new_zeros(size, model.config.hidden_size)
    positions = torch.zeros(size, dtype=torch.int64, device=hidden.device)
    model.logits(model.blocks[0](hidden, Tokens(positions, positions), Echo()))


def _weights(norm: RMSNorm) -> Weights:
    return norm.weight, norm.eps, norm.offset
