"""Blocks whose operations PyTorch compiles, in place of our kernels. Introduced in phase 11.1.

``torch.compile`` (TorchDynamo and TorchInductor; Ansel et al., ASPLOS 2024) writes kernels for the elementwise parts of
a function and leaves products to a library. A block that uses it beside one that uses :mod:`shared.kernels` tells what
hand-written kernels buy. Attention and the writing of keys stay behind the KV view in both.

A compiled function has weights for arguments, not a layer for ``self``: so one compilation serves all layers, where
layers that are compiled one by one take minutes. The number of tokens is a variable of the compiled code; one token is
a case of its own.

Invariant: the operations and their order are those of :class:`shared.models.fused.FusedBlock` on a CPU.
"""

import itertools
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
from shared.models.config import ModelConfig
from shared.models.fused import FusedBlock, FusedProjection
from shared.models.norm import RMSNorm
from shared.models.tokens import KVView, Tokens
from shared.ops.gated import GatedOp
from shared.ops.rmsnorm import rms_norm

Norm = tuple[torch.Tensor, float, float]
"""Weight, epsilon and offset of a norm."""
Matrix = tuple[torch.Tensor, torch.Tensor | None]
"""Weight and bias of a product."""
SIZES = (1, 2)
"""Numbers of tokens for which code is made when a model is compiled: one, and any other."""


def project(x: torch.Tensor, norm: Norm, matrix: Matrix) -> torch.Tensor:
    """``norm(x) Wᵀ + b``: x ``[T, H]`` to queries, keys and values ``[T, N]``, or to logits."""
    return F.linear(rms_norm(x, *norm), *matrix)


def finish(
    x: torch.Tensor,
    out: torch.Tensor,
    o_proj: Matrix,
    mlp_norm: Norm,
    gate_up: Matrix,
    down_proj: Matrix,
    post_norms: tuple[Norm, Norm] | None,
    gated: GatedOp,
) -> torch.Tensor:
    """The rest of a block: its input x ``[T, H]`` and the output of attention ``[T, Hq · D]`` to ``[T, H]``."""
    y = F.linear(out, *o_proj)
    x = x + (y if post_norms is None else rms_norm(y, *post_norms[0]))
    gate, up = F.linear(rms_norm(x, *mlp_norm), *gate_up).chunk(2, dim=-1)
    y = F.linear(gated(gate, up), *down_proj)
    return x + (y if post_norms is None else rms_norm(y, *post_norms[1]))


Compiled = Callable[..., torch.Tensor]


@cache
def compiled(config: ModelConfig, backend: str) -> tuple[Compiled, Compiled]:
    """``project`` and ``finish`` for models of one shape, as ``backend`` of ``torch.compile`` makes them.

    TorchDynamo keeps a few compilations for each code object, so each shape gets code objects of its own.
    """
    number = next(_shapes)
    copies = [
        FunctionType(function.__code__.replace(co_name=f"{function.__name__}_{number}"), function.__globals__)
        for function in (project, finish)
    ]
    first, second = (torch.compile(copy, backend=backend, dynamic=True, fullgraph=True) for copy in copies)
    return first, second


_shapes = itertools.count()


class CompiledBlock(nn.Module):
    """The compiled version of a :class:`FusedBlock`, with its matrices."""

    def __init__(self, base: Any, functions: tuple[Compiled, Compiled]) -> None:
        super().__init__()
        self.base = base
        self.project, self.finish = functions
        self.enter = _norm(base.attention_norm), _matrix(base.qkv)
        post = base.post_attention_norm
        norms = None if post is None else (_norm(post), _norm(base.post_mlp_norm))
        matrices = _matrix(base.gate_up), _matrix(base.down_proj)
        self.leave = _matrix(base.o_proj), _norm(base.mlp_norm), *matrices, norms, base.gated

    def forward(self, x: torch.Tensor, tokens: Tokens, kv: KVView) -> torch.Tensor:
        """x ``[T, H]`` to a new tensor ``[T, H]``."""
        base = self.base
        qkv = self.project(x, *self.enter).view(len(x), -1, base.head_dim)
        q, k, v = qkv.split_with_sizes(base.heads, dim=1)  # [T, Hq, D], [T, Hkv, D] twice
        q = kv.write(base.layer, q, k, v, tokens.positions, base.qk)
        out = kv.attend(base.layer, q, scale=base.scale, window=base.window, softcap=base.softcap)
        return self.finish(x, out.flatten(1), *self.leave)


class CompiledHead(nn.Module):
    """The compiled version of the output head: a product behind the final norm."""

    def __init__(self, base: FusedProjection, project: Compiled) -> None:
        super().__init__()
        self.weight, self.bias = base.weight, base.bias
        self.project = project

    def forward(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """Hidden states ``[T, H]`` to ``[T, V]``."""
        return self.project(x, _norm(norm), (self.weight, self.bias))


def compile_model(model: CausalLM, backend: str = "inductor") -> float:
    """Replace, in place, the blocks and the head of a fused model; returns the seconds that compilation took.

    Raises ConfigError if a block is not fused, or if this machine has no compiler for the code.
    """
    functions = compiled(model.config, backend)
    for layer, block in enumerate(model.blocks):
        if not isinstance(block, FusedBlock):
            raise ConfigError(f"Layer {layer} is a {type(block).__name__}, and only fused blocks can be compiled.")
        model.blocks[layer] = CompiledBlock(block, functions)
    model.head = CompiledHead(model.head, functions[0])  # type: ignore[assignment, arg-type]
    started = time.perf_counter()
    try:
        with torch.inference_mode():
            for size in SIZES:
                _try_out(model, size)
    except Exception as error:  # of the compiler, whose classes are many
        said = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"execution is 'compile', and PyTorch cannot compile the model here ({said}); install a C++ compiler, or "
            "leave execution at 'kernels'."
        ) from error
    return time.perf_counter() - started


def _try_out(model: CausalLM, size: int) -> None:
    """Run the first block's functions and the head on ``size`` tokens, which makes their code."""
    block: Any = model.blocks[0]
    hidden = model.norm.weight.new_zeros(size, model.config.hidden_size)
    block.project(hidden, *block.enter)
    block.finish(hidden, hidden.new_zeros(size, block.base.heads[0] * block.base.head_dim), *block.leave)
    model.logits(hidden)


def _norm(norm: RMSNorm) -> Norm:
    return norm.weight, norm.eps, norm.offset


def _matrix(projection: FusedProjection) -> Matrix:
    return projection.weight, projection.bias
