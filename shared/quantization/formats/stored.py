"""What the readers of all formats share: a module's tensors, checked, and numbers packed in int32.

Introduced in phase 10.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch

from shared.errors import ModelFolderError
from shared.loading.checkpoint import Checkpoint
from shared.quantization.weight import QuantizedWeight


class Format(ABC):
    """How one checkpoint stores its quantized matrices; the constructor checks its ``quantization_config``.

    An unknown setting may change the meaning of the stored numbers, so it is refused.
    """

    settings: frozenset[str]
    """Names in ``quantization_config`` that the reader applies, or that do not change the stored weights."""

    def __init__(self, config: dict[str, Any], checkpoint: Checkpoint) -> None:
        self.config = config
        self.checkpoint = checkpoint
        self.check_known(config, self.settings | {"quant_method"})

    def check_known(self, values: dict[str, Any], known: frozenset[str], prefix: str = "") -> None:
        """Raise ModelFolderError for an unknown setting, unless its value is null, false or empty."""
        for name in values.keys() - known:
            if values[name]:
                raise self.wrong(prefix + name, values[name], "a checkpoint without it")

    @abstractmethod
    def quantizes(self, module: str) -> bool:
        """Whether the config says that this matrix, named as in the checkpoint, is quantized."""

    @abstractmethod
    def read(self, module: str, shape: tuple[int, int]) -> QuantizedWeight:
        """The matrix W ``[N, K]`` of a module; raises ModelFolderError for tensors that contradict the config."""

    def wrong(self, field: str, value: Any, supported: str) -> ModelFolderError:
        """The error for an unsupported setting of the config."""
        return ModelFolderError(
            f"{self.checkpoint.folder / 'config.json'}: quantization_config has {field} {value!r}, which is not "
            f"supported; supported is {supported}."
        )

    def tensor(self, name: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor of the checkpoint, which must have one of the dtypes and the shape."""
        if name not in self.checkpoint.names:
            raise ModelFolderError(
                f"The weights in {self.checkpoint.folder} lack {name}, which quantization_config says is there; fetch "
                "config.json and the weights of the same checkpoint."
            )
        tensor = self.checkpoint.tensor(name)
        if tensor.dtype not in dtypes or tuple(tensor.shape) != shape:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ModelFolderError(
                f"{name} in {self.checkpoint.folder} is {str(tensor.dtype).removeprefix('torch.')} "
                f"{list(tensor.shape)}; by config.json it must be {wanted} {list(shape)}."
            )
        return tensor

    def scales(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Scales, which must be finite and nonzero."""
        scales = self.tensor(name, (torch.float32, torch.bfloat16, torch.float16), shape)
        bad = ~torch.isfinite(scales) | (scales == 0)
        if bad.any():
            where = bad.nonzero()[0].tolist()
            raise ModelFolderError(
                f"{name} in {self.checkpoint.folder} has the scale {scales[tuple(where)].item()} at {where}; scales "
                "must be finite and not zero. Fetch the weights again."
            )
        return scales

    def listed(self, field: str) -> list[str]:
        """A list of names in the config; empty if absent."""
        names = self.config.get(field) or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self.wrong(field, names, "a list of module names")
        return names


def unpack_int32(packed: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """The ``bits``-bit numbers of int32, lowest bits first, along ``dim`` (0 or 1), as uint8."""
    # exercise 10x3: unpack eight nibbles
    # hint: shifts of 0, 4, .. 28 bits bring each of the numbers to the end; & keeps the last `bits` bits
    # hint: >> of a negative int32 fills in ones: the mask comes after the shift
    # hint: the numbers of an int32 are neighbours along `dim`: a new dimension after it, then flatten both
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    if dim == 0:
        return ((packed[:, None, :] >> shifts[:, None]) & (2**bits - 1)).to(torch.uint8).flatten(0, 1)
    return ((packed[:, :, None] >> shifts) & (2**bits - 1)).to(torch.uint8).flatten(1)
    # end exercise
