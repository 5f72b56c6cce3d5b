"""The formats of the library compressed-tensors, FP8, INT8 and packed INT4. Introduced in phase 10.

A config has groups of modules, each with its scheme, and a list of excluded modules. FP8 and INT8 are stored unpacked,
with a ``weight_scale`` per row or tensor; packed numbers are in int32, lowest bits first, offset by 2^(bits - 1).
Schemes for activations are not applied: activations keep the model's dtype.
"""

import re
from typing import Any

import torch

from shared.loading.checkpoint import Checkpoint
from shared.quantization.formats.stored import Format, unpack_int32
from shared.quantization.weight import QuantizedWeight, pack_nibbles

FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "mixed-precision")
GROUP_SIZES = (32, 64, 128)
OF_GROUP = frozenset({"targets", "weights", "format", "input_activations", "output_activations"})
OF_WEIGHTS = frozenset(
    {"num_bits", "type", "strategy", "group_size", "symmetric", "actorder", "observer", "observer_kwargs"}
    | {"scale_dtype", "zp_dtype"}  # visible in the tensors
)


class CompressedTensors(Format):
    settings = frozenset(
        {"format", "config_groups", "ignore", "sparsity_config", "kv_cache_scheme"}
        | {"quantization_status", "global_compression_ratio", "version"}  # how the checkpoint was made
        | {"run_compressed", "dequantize", "use_optimized_inference"}  # of another loader
    )

    def __init__(self, config: dict[str, Any], checkpoint: Checkpoint) -> None:
        super().__init__(config, checkpoint)
        self.ignored = self.listed("ignore")
        self.groups: list[tuple[list[str], dict[str, Any], str]] = []  # targets, scheme of the weights, format
        sparsity = config.get("sparsity_config") or {}
        if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
            raise self.wrong("sparsity_config", sparsity, "the format 'dense'")
        config_groups = config.get("config_groups")
        if not isinstance(config_groups, dict) or not all(isinstance(group, dict) for group in config_groups.values()):
            raise self.wrong("config_groups", config_groups, "an object of groups")
        for name, group in config_groups.items():
            self.check_known(group, OF_GROUP, f"{name}.")
            stored = group.get("format") or config.get("format")
            weights, targets = group.get("weights"), group.get("targets")
            if stored not in FORMATS:
                raise self.wrong("format", stored, ", ".join(FORMATS))
            if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
                raise self.wrong(f"{name}.targets", targets, "a list of module names")
            self._check(name, weights, stored)
            self.groups.append((targets, weights, stored))

    def quantizes(self, module: str) -> bool:
        return not any(_matches(module, name) for name in self.ignored) and self._scheme(module) is not None

    def read(self, module: str, shape: tuple[int, int]) -> QuantizedWeight:
        scheme = self._scheme(module)
        assert scheme is not None, module
        weights, stored = scheme
        if stored == "pack-quantized":
            return self._read_packed(module, shape, weights)
        dtype = torch.float8_e4m3fn if weights["type"] == "float" else torch.int8
        values = self.tensor(f"{module}.weight", (dtype,), shape)
        return QuantizedWeight(values, self._row_scales(module, shape[0], weights["strategy"]), None, shape[1])

    def _read_packed(self, module: str, shape: tuple[int, int], weights: dict[str, Any]) -> QuantizedWeight:
        rows, columns = shape
        bits = weights["num_bits"]
        packed = self.tensor(f"{module}.weight_packed", (torch.int32,), (rows, -(-columns * bits // 32)))
        numbers = unpack_int32(packed, bits, dim=1)[:, :columns]
        if bits == 8:
            values = (numbers.short() - 128).to(torch.int8)
            return QuantizedWeight(values, self._row_scales(module, rows, weights["strategy"]), None, columns)
        group = weights["group_size"]
        if columns % group:
            raise self.wrong("group_size", group, f"a divisor of {columns}, the columns of {module}")
        scales = self.scales(f"{module}.weight_scale", (rows, columns // group))
        zeros = None
        if not weights.get("symmetric", True):
            zeros = self.tensor(f"{module}.weight_zero_point", (torch.int32,), (-(-rows // 8), columns // group))
            zeros = unpack_int32(zeros, 4, dim=0)[:rows].contiguous()
        return QuantizedWeight(pack_nibbles(numbers, group), scales, zeros, group)

    def _row_scales(self, module: str, rows: int, strategy: str) -> torch.Tensor:
        """One scale per row, fp32 ``[N, 1]``; the scale of a whole tensor is repeated."""
        name = f"{module}.weight_scale"
        if strategy == "channel":
            return self.scales(name, (rows, 1)).float()
        is_scalar = name in self.checkpoint.names and self.checkpoint.shape(name) == ()
        return self.scales(name, () if is_scalar else (1,)).float().reshape(1, 1).repeat(rows, 1)

    def _scheme(self, module: str) -> tuple[dict[str, Any], str] | None:
        """The scheme of a module's weights: a group that names it takes precedence over one for all linear layers."""
        named = [group for group in self.groups if any(_matches(module, target) for target in group[0])]
        found = named or [group for group in self.groups if "Linear" in group[0]]
        return found[0][1:] if found else None

    def _check(self, name: str, weights: Any, stored: str) -> None:
        """Raise ModelFolderError for an unsupported scheme."""
        if not isinstance(weights, dict):
            raise self.wrong(f"{name}.weights", weights, "an object")
        self.check_known(weights, OF_WEIGHTS, f"{name}.weights.")
        kind = (weights.get("type"), weights.get("num_bits"))
        strategy, group = weights.get("strategy"), weights.get("group_size")
        is_symmetric = weights.get("symmetric", True)
        if weights.get("actorder") not in (None, "weight", "static"):
            raise self.wrong(f"{name}.weights.actorder", weights["actorder"], "null, 'weight' or 'static'")
        if stored == "pack-quantized" and kind == ("int", 4):
            if strategy != "group" or group not in GROUP_SIZES:
                raise self.wrong(f"{name}.weights", (strategy, group), f"strategy 'group' of {GROUP_SIZES} columns")
        elif kind not in (("int", 8), ("float", 8)) or (stored == "pack-quantized" and kind[0] == "float"):
            raise self.wrong(f"{name}.weights", kind, "float or int of 8 bits, or packed int of 4 bits")
        elif strategy not in ("channel", "tensor") or not is_symmetric:
            wanted = "strategy 'channel' or 'tensor', symmetric"
            raise self.wrong(f"{name}.weights", (strategy, f"symmetric: {is_symmetric}"), wanted)


def _matches(module: str, target: str) -> bool:
    """Whether a name, or a regular expression after ``re:``, matches the module."""
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return module == target
