"""Device, dtype and free memory for a model's weights. Introduced in phase 1a."""

import torch

from shared.errors import ConfigError
from shared.models.config import ModelConfig


def check_device(device: torch.device | str) -> torch.device:
    """The device, if this machine has it; raises ConfigError otherwise."""
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device {str(device)!r} is unknown to PyTorch; use cpu or cuda.") from None
    if found.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {str(device)!r} is not supported; use cpu or cuda.")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device is {str(device)!r} and this machine has no such GPU; use --device cpu.")
    return found


def default_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """fp32 on a CPU, where equal output is defined and arithmetic is fastest; on a GPU the checkpoint's dtype."""
    return torch.float32 if device.type == "cpu" else getattr(torch, config.dtype)


def check_room(num_bytes: int, device: torch.device, what: str) -> None:
    """Raise ConfigError if ``num_bytes`` for ``what`` are more than the GPU has free; a CPU may swap."""
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # cached by PyTorch for reuse
    if num_bytes > free:
        raise ConfigError(
            f"{what} takes {num_bytes / 1e9:.2f} GB and {torch.cuda.get_device_name(device)} has {free / 1e9:.2f} of "
            f"{total / 1e9:.2f} GB free; choose a smaller model or dtype, lower max_seq_len, or use --device cpu."
        )
