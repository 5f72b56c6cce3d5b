"""Writing safetensors one tensor at a time. Introduced in phase 1b.

The library's `save_file` needs every tensor of a file in memory at once. A file's layout depends only on names, dtypes
and shapes, so this writer writes the header first and then streams the data. Memory holds one tensor, and the bytes
depend only on the tensors (not on a library version or hash order), so that a checksum can be pinned.

Invariant: a written file opens with `safetensors.safe_open`; each tensor starts at a multiple of its item size.
"""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

FORMAT_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
HEADER_ALIGNMENT = 8


def write_safetensors(
    path: Path, layout: Sequence[tuple[str, tuple[int, ...]]], dtype: torch.dtype, tensors: Iterable[Tensor]
) -> None:
    """Write one file: `layout` gives the (name, shape) of each tensor in order, `tensors` their values in that order.

    Tensors may have any device and floating dtype; each is cast to `dtype` (a key of `FORMAT_NAMES`) and dropped before
    the next is read. Raises ValueError if the tensors do not match the layout.
    """
    item_bytes = dtype.itemsize
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in layout:
        end = offset + math.prod(shape) * item_bytes
        header[name] = {"dtype": FORMAT_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % HEADER_ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for (name, shape), tensor in zip(layout, tensors, strict=True):
            if tuple(tensor.shape) != shape:
                raise ValueError(f"tensor {name} has shape {tuple(tensor.shape)}, the layout says {shape}")
            flat = tensor.detach().to(dtype).cpu().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().data)
