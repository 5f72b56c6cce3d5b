"""What runs during some decode steps: kernels, copies and launches, from PyTorch's profiler. Introduced in phase 3.1.

Invariant: a kernel is anything that ran on the GPU except copies, fills and profiler marks; those of a CUDA graph count
individually, and its launch as one host launch.
"""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.report import rounded
from benchmarks.timing import Answer
from shared.kernels.launch import LAUNCHES

COPIES = ("Memcpy", "Memset")
HOST_LAUNCH = re.compile(r"(cuda|cu)(Launch|GraphLaunch)")  # of both programming interfaces, runtime and driver
MARKS = ("ProfilerStep", "Activity Buffer", "Command Buffer", "cudaDeviceSynchronize")


class StepTrace:
    """The work of decode steps, from the profiler's ``key_averages()`` and ``own_launches`` of our kernels."""

    def __init__(self, averages: Iterable[Any], steps: int, own_launches: int) -> None:
        self.steps, self.own_launches = steps, own_launches
        seen = [entry for entry in averages if not (entry.is_user_annotation or entry.key.startswith(MARKS))]
        on_gpu = [entry for entry in seen if entry.device_type == DeviceType.CUDA]
        self.kernels = [entry for entry in on_gpu if not entry.key.startswith(COPIES)]
        self.copies = [entry for entry in on_gpu if entry.key.startswith(COPIES)]
        self.operations = [entry for entry in seen if entry.device_type == DeviceType.CPU]

    @property
    def kernel_us_per_token(self) -> float | None:
        """None without a GPU."""
        return sum(kernel.self_device_time_total for kernel in self.kernels) / self.steps if self.kernels else None

    def figures(self) -> dict[str, float | None]:
        """For one token: the kernels' time, and counts; None without a GPU."""
        launches = [call for call in self.operations if HOST_LAUNCH.match(call.key)]
        found = {"kernels": self.kernels, "copies": self.copies, "host_launches": launches}
        figures: dict[str, float | None] = {"kernel_us": self.kernel_us_per_token}
        for name, entries in found.items():
            figures[name] = sum(entry.count for entry in entries) / self.steps if self.kernels else None
        figures["own_launches"] = self.own_launches / self.steps
        return {f"{name}_per_token": None if value is None else rounded(value) for name, value in figures.items()}

    def rows(self) -> list[tuple[str, int, float]]:
        """Name, calls and microseconds, longest first: for kernels and copies or, without a GPU, for PyTorch's
        operations."""
        if self.kernels:
            rows = [(entry.key, entry.count, entry.self_device_time_total) for entry in (*self.kernels, *self.copies)]
        else:
            rows = [(entry.key, entry.count, entry.self_cpu_time_total) for entry in self.operations]
        return sorted(rows, key=lambda row: -row[2])


class TraceWindow:
    """Traces the steps of tokens ``first + 1`` to ``first + steps`` of one answer; ``with_host``: also trace the host's
    operations besides a GPU's kernels, at a higher cost to the host.
    """

    def __init__(self, first: int, steps: int, device: torch.device, with_host: bool = False) -> None:
        self.first, self.steps, self.device = first, steps, device
        gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
        host = [ProfilerActivity.CPU]
        self.all_activities = gpu + host
        self.profiler = profile(activities=gpu + host if with_host or not gpu else gpu)
        self.num_tokens = 0
        self.result: StepTrace | None = None

    def trace(self, answer: Answer, prompt_ids: list[int], new_tokens: int) -> StepTrace:
        """Trace an answer; raises ValueError if it ends inside the window."""
        with profile(activities=self.all_activities):  # so that loading it falls into no window
            torch.ones(1, device=self.device).add_(1)
            self.finish()
        answer(prompt_ids, new_tokens, self.token)
        if self.result is None:
            raise ValueError(f"the answer ended after {self.num_tokens} tokens, before {self.first + self.steps}")
        return self.result

    def token(self, token_id: int) -> bool:
        """Count one token; returns whether the window is still open or to come."""
        self.num_tokens += 1
        if self.num_tokens == self.first:
            self.finish()
            self.profiler.start()
            self.launched = LAUNCHES.total()
        elif self.num_tokens == self.first + self.steps:
            self.finish()
            self.profiler.stop()
            launched = LAUNCHES.total() - self.launched
            self.result = StepTrace(self.profiler.key_averages(), self.steps, launched)
        return self.result is None

    def finish(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
