"""The machine that a figure was measured on. Introduced in phase 3. Invariant: the description is of the kind of
machine, never of the individual one: no host name, no user, no path.
"""

import os
import platform
import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import psutil
import torch

from shared.loading.cpu_threads import most_threads

PACKAGES = ("torch", "transformers", "triton", "numpy", "safetensors", "flashinfer-python")

# Parts dropped from a processor's name: marks and, in a file name, also the maker and whatever follows the model.
_MARKS = re.compile(r"\((r|tm|c)\)|\b(cpu|processor)\b|@", re.IGNORECASE)
_MAKER = re.compile(r"\b(intel|amd|\d+(st|nd|rd|th) gen|\d+-core|with .*)(?=\s|$)", re.IGNORECASE)
_CLOCK = re.compile(r"\b(\d+)\.(\d*?)0+(?=\s?ghz\b)", re.IGNORECASE)


def describe_machine() -> dict[str, Any]:
    """Processor, memory, GPUs (``gpu`` is None without one), system, and ``versions`` of the software that computes."""
    gpus = _num_gpus(None)
    versions = {package: found.version for package in PACKAGES for found in distributions(name=package)}
    return {
        "cpu": cpu_model(),
        "cores": num_cores(),
        "torch_threads": most_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": torch.cuda.get_device_name(0) if gpus else None,
        "num_gpus": gpus,
        "gpu_memory_gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1) if gpus else None,
        "os": platform.platform(),
        "versions": versions | {"python": platform.python_version(), "cuda": torch.version.cuda},
    }


def machine_name(device: str | None = None) -> str:
    """A short slug for file names that names the device, by default the GPU if there is one: ``cpu-2x-xeon-2.5ghz`` (2
    threads), ``nvidia-h100-80gb-hbm3``.
    """
    if gpus := _num_gpus(device):
        return (f"{gpus}x-" if gpus > 1 else "") + slug(torch.cuda.get_device_name(0))
    return f"cpu-{_num_threads()}x-{slug(_MAKER.sub(' ', _plain_cpu_model()))}"


def machine_title(device: str | None = None) -> str:
    """The machine for a figure's title: the GPU, or the processor and the threads that compute."""
    if gpus := _num_gpus(device):
        return (f"{gpus} × " if gpus > 1 else "") + torch.cuda.get_device_name(0)
    threads = _num_threads()
    words = [_plain_cpu_model(), f"{threads} thread{'s' if threads != 1 else ''}"]
    return ", ".join(filter(None, words))


def num_cores() -> int:
    """Cores that this process may use; in a container these may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    """The processor's name from its maker; the architecture's name if the system does not report it."""
    found = ""
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    elif (file := Path("/proc/cpuinfo")).exists():
        found = "".join(re.findall(r"^model name\s*: (.*)", file.read_text(encoding="utf-8"), re.MULTILINE)[:1])
    return found or platform.processor() or platform.machine()


def slug(text: str) -> str:
    """Lower-case letters, digits and points, everything else becomes a hyphen: safe in a file name on any system."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "unknown"


def _num_gpus(device: str | None) -> int:
    """The machine's GPUs; none if the CPU computes."""
    if (device or "cuda").startswith("cpu") or not torch.cuda.is_available():
        return 0
    return torch.cuda.device_count()


def _num_threads() -> int:
    return min(num_cores(), torch.get_num_threads())


def _plain_cpu_model() -> str:
    """``Intel(R) Xeon(R) Processor @ 2.50GHz`` as ``Intel Xeon 2.5GHz``."""
    words = " ".join(_MARKS.sub(" ", cpu_model()).split())
    return _CLOCK.sub(lambda clock: clock[1] + (f".{clock[2]}" if clock[2] else ""), words)
