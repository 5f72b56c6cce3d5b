"""Free memory of a GPU, or of the host within its container's limit. Introduced in phase 6.

Invariant: memory that the operating system or the container would refuse does not count as free.
"""

from pathlib import Path

import psutil
import torch

CONTROL_GROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on the device, including memory that PyTorch caches for reuse."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(psutil.virtual_memory().available, container_bytes())


def container_bytes(group: Path = CONTROL_GROUP) -> int:
    """Bytes that the process's container may still allocate, from its control group (version 2); 2^63 if unlimited."""
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
        counts = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        # The page cache counts as used, but the kernel reclaims it on demand.
        return 2**63 if limit == "max" else max(0, int(limit) - used + int(counts.get("inactive_file", 0)))
    except (OSError, ValueError):
        return 2**63
