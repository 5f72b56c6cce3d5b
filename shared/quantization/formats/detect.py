"""Finds the format of a quantized checkpoint by its ``quantization_config``. Introduced in phase 10."""

from typing import Any

from shared.errors import ModelFolderError
from shared.loading.checkpoint import Checkpoint
from shared.quantization.formats.compressed_tensors import CompressedTensors
from shared.quantization.formats.fp8_blocks import Fp8Blocks
from shared.quantization.formats.packed_by_column import Awq, Gptq
from shared.quantization.formats.stored import Format

FORMATS: dict[str, type[Format]] = {"fp8": Fp8Blocks, "compressed-tensors": CompressedTensors, "gptq": Gptq, "awq": Awq}


def detect_format(config: Any, checkpoint: Checkpoint) -> Format:
    """The reader for a ``quantization_config``; raises ModelFolderError for an unsupported method or setting."""
    method = config.get("quant_method") if isinstance(config, dict) else None
    if not isinstance(method, str) or method not in FORMATS:
        raise ModelFolderError(
            f"{checkpoint.folder / 'config.json'}: quantization_config has quant_method {method!r}, which is not "
            f"supported; supported are {', '.join(FORMATS)}."
        )
    return FORMATS[method](config, checkpoint)
