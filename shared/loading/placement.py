"""Device, dtype and free memory for a model's weights. Introduced in phase 1a."""

import torch

from shared.errors import ConfigError
from shared.models.config import ModelConfig


def check_device(device: torch.device | str) -> torch.device:
    """The device, if this machine has it, and for ``auto`` the best one; raises ConfigError otherwise."""
    if device == "auto":
        return best_device()
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device {str(device)!r} is unknown to PyTorch; use auto, cpu or cuda.") from None
    if found.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {str(device)!r} is not supported; use auto, cpu or cuda.")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device is {str(device)!r} and this machine has no such GPU; use --device cpu.")
    return found


def best_device() -> torch.device:
    """The GPU if one can run the kernels, otherwise the CPU: the meaning of ``auto``.

    A GPU that is too old for the kernels, or that Triton cannot use here, is skipped. If it is requested by name, it is
    used, and an engine that needs kernels raises the reason.
    """
    if torch.version.cuda is None or not torch.cuda.is_available():
        return torch.device("cpu")
    from shared.kernels.launch import check_kernels

    try:
        check_kernels(torch.device("cuda"))
    except ConfigError:
        return torch.device("cpu")
    return torch.device("cuda")


def device_name(device: torch.device | str) -> str:
    """The device's name in a sentence: a GPU's own name, or "the CPU"."""
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "the CPU"


def default_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """fp32 on a CPU, where outputs must be exactly equal and fp32 is fastest; on a GPU the checkpoint's dtype."""
    return torch.float32 if device.type == "cpu" else getattr(torch, config.dtype)


def check_memory(num_bytes: int, device: torch.device, what: str) -> None:
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
