"""The gated activations of the MLP: SwiGLU and GeGLU. Introduced in phase 1a.

Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) · up``, elementwise (Llama, Qwen)."""
    return F.silu(gate) * up


def geglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``gelu(gate) · up`` with the tanh approximation of GELU, elementwise (Gemma)."""
    return F.gelu(gate, approximate="tanh") * up


GatedOp = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
GATED_ACTIVATIONS: dict[str, GatedOp] = {"silu": swiglu, "gelu_pytorch_tanh": geglu}
