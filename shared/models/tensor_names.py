"""How a family's ``LAYER_NAMES`` locates a module's parameters in a checkpoint. Introduced in phase 1a.

    "self_attn.q_proj"                  in a tensor of the same shape
    Rows("self_attn.qkv_proj", 0)       in the first rows of a tensor that several modules share
    ("mlp.gate_proj", "mlp.up_proj")    in several tensors, concatenated along rows

The tensor has the parameter's kind after the name (``.weight``, ``.bias``); a name for the parameter itself,
``mlp.up_proj.weight``, gives the tensor's whole name.

If a layer has several numbered modules, such as experts, ``*`` is the number in both names. If only the module's name
has a ``*``, the tensor is a stack, and each module has one entry of it; if only the checkpoint's name has one, the
parameter is the stack.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rows:
    """The rows of the ``index``-th module among those whose matrices are concatenated in ``name``."""

    name: str
    index: int


TensorNames = str | Rows | tuple[str, ...]
