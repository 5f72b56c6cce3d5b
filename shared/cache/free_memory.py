"""How much memory can still be allocated, on a GPU or in a container. Introduced in phase 6.

Invariant: what the operating system or the container would refuse is not counted as free.
"""

from pathlib import Path

import psutil
import torch

CONTROL_GROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated there, what PyTorch keeps for reuse included."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(psutil.virtual_memory().available, container_bytes())


def container_bytes(group: Path = CONTROL_GROUP) -> int:
    """Bytes that the process's container may still take, as its control group (version 2) says; 2^63 for no limit."""
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
        counts = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        # Pages of files that were only read are counted and given back as soon as memory is asked for.
        return 2**63 if limit == "max" else max(0, int(limit) - used + int(counts.get("inactive_file", 0)))
    except (OSError, ValueError):
        return 2**63
