"""FP8 with a scale for each block of 128 × 128 weights (``quant_method`` fp8). Introduced in phase 10.

The format of DeepSeek-V3 (arXiv 2412.19437), also of Qwen3's FP8 checkpoints: ``weight`` in float8_e4m3fn and
``weight_scale_inv``, the factor for a stored number.
"""

from typing import Any

import torch

from shared.loading.checkpoint import Checkpoint
from shared.quantization.formats.stored import Format
from shared.quantization.weight import QuantizedWeight

BLOCK = 128


class Fp8Blocks(Format):
    settings = frozenset(
        {"weight_block_size", "fmt", "modules_to_not_convert"}
        | {"activation_scheme", "scale_fmt", "expert_dtype", "dequantize"}  # for activations, experts, another loader
    )

    def __init__(self, config: dict[str, Any], checkpoint: Checkpoint) -> None:
        super().__init__(config, checkpoint)
        if config.get("weight_block_size") != [BLOCK, BLOCK]:
            raise self.wrong("weight_block_size", config.get("weight_block_size"), f"[{BLOCK}, {BLOCK}]")
        if config.get("fmt", "e4m3") != "e4m3":
            raise self.wrong("fmt", config["fmt"], "'e4m3'")
        self.excluded = self.listed("modules_to_not_convert")

    def quantizes(self, module: str) -> bool:
        is_head = module == "lm_head"  # excluded even if the list does not name it
        is_listed = any(module == name or module.startswith(f"{name}.") for name in self.excluded)
        return not is_listed and (not is_head or f"{module}.weight_scale_inv" in self.checkpoint.names)

    def read(self, module: str, shape: tuple[int, int]) -> QuantizedWeight:
        rows, columns = shape
        if columns % BLOCK:
            raise self.wrong(
                "weight_block_size", [BLOCK, BLOCK], f"for rows of a multiple of {BLOCK}; {module} has {columns}"
            )
        values = self.tensor(f"{module}.weight", (torch.float8_e4m3fn,), shape)
        scales = self.scales(f"{module}.weight_scale_inv", (-(-rows // BLOCK), columns // BLOCK))
        return QuantizedWeight(values, scales.float(), None, BLOCK, BLOCK)
