"""Sums over ranks: whether ours are right, and their time in a CUDA graph beside NCCL's. Introduced in phase 12.1.

Invariant: all ranks make the same calls in the same order; a rank ends with the process that started it.
"""

import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.report import rounded
from shared.engine.graphs import Computed, CudaGraphCapture
from shared.kernels import all_reduce as kernel
from shared.kernels.all_reduce import all_reduce, fits
from shared.kernels.launch import check_launchable
from shared.kernels.rmsnorm import rms_norm
from shared.parallel.collectives import Collectives
from shared.parallel.group import local_store
from shared.parallel.peers import PeerMemory

ROW = 4096  # numbers of 16 bits: 8 KB
ROWS = {"8KB": 1, "64KB": 8, "128KB": 16, "256KB": 32, "512KB": 64, "1MB": 128, "8MB": 1024}
CHAIN = 40  # sums in a graph


def measure_sums(size: int, rank: int, port: int, out: Path, save: Callable[[dict[str, Any]], None]) -> None:
    """Whether our sums are right, and the time of ours and NCCL's in a graph; rank 0 starts the others."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    others = []
    if rank == 0:
        store = local_store()
        for peer in range(1, size):
            command = [sys.executable, "-m", "benchmarks.tensor_parallel", "sums", "--ranks", str(size)]
            command += ["--rank", str(peer), "--port", str(store.port), "--out", str(out)]
            others.append(subprocess.Popen(command))
    else:
        threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    check_launchable(device)
    ranks = Collectives(store, rank, size, device)
    figures: dict[str, Any] = {"ranks": size, "way": None if ranks.peers is None else ranks.peers.way}
    print(f"rank {rank} meets, {figures['way']} memory", flush=True)
    ranks.least(0)
    rows: dict[str, dict[str, float]] = {label: {} for label in ROWS}
    with torch.inference_mode():
        for label, count in ROWS.items():
            x = torch.zeros(count, ROW, dtype=torch.bfloat16, device=device)
            rows[label]["nccl_us"] = time_in_graph(partial(ranks._run, ranks.group.allreduce, [x], ranks.options[0]))
            save(figures | {"rows": rows})
        if ranks.peers is not None:
            figures["num_right"] = check_sums(ranks)
            save(figures | {"rows": rows})
            weight = torch.ones(ROW, dtype=torch.bfloat16, device=device)
            norm: Any = SimpleNamespace(weight=weight, eps=1e-6, offset=0.0)
            for label, count in ROWS.items():
                x = torch.zeros(count, ROW, dtype=torch.bfloat16, device=device)
                if not fits(x):
                    continue
                calls: dict[str, Callable[[], Any]] = {
                    "peer_us": partial(all_reduce, x, ranks.peers),
                    "one_shot_us": partial(with_shots, 1, x, ranks.peers),
                    "two_shots_us": partial(with_shots, 2, x, ranks.peers),
                    "residual_us": partial(all_reduce, x, ranks.peers, x),
                    "norm_us": partial(all_reduce, x, ranks.peers, x, norm),
                    "then_norm_us": partial(then_norm, x, ranks.peers, norm),
                }
                for name, call in calls.items():
                    rows[label][name] = time_in_graph(call)
                    save(figures | {"rows": rows})
    ranks.least(0)
    for process in others:
        process.wait(20)


def then_norm(x: torch.Tensor, peers: PeerMemory, norm: Any) -> torch.Tensor:
    """The sum, and the norm in a launch behind it."""
    return rms_norm(all_reduce(x, peers, x)[0], norm.weight, norm.eps)


def with_shots(shots: int, x: torch.Tensor, peers: PeerMemory) -> None:
    """The sum with as many shots, 1 or 2, whatever its size."""
    least, kernel.TWO_SHOT_BYTES = kernel.TWO_SHOT_BYTES, (sys.maxsize, 0)[shots - 1]
    all_reduce(x, peers)
    kernel.TWO_SHOT_BYTES = least


def end_with(parent: int) -> None:
    """End this process when its parent has gone, whatever its GPU waits for."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def time_in_graph(call: Callable[[], Any]) -> float:
    """Microseconds of a call, in a graph of ``CHAIN`` of them; all ranks make the same calls."""

    def run() -> Computed:
        for _ in range(CHAIN):
            call()
        return Computed(torch.zeros(1, device="cuda"))

    captured = CudaGraphCapture(torch.device("cuda", torch.cuda.current_device()))(run)
    times = []
    for _ in range(12):
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        captured.replay()  # the ranks meet
        ends[0].record()
        for _ in range(4):
            captured.replay()
        ends[1].record()
        torch.cuda.synchronize()
        times.append(1e3 * ends[0].elapsed_time(ends[1]) / (4 * CHAIN))
    return rounded(statistics.median(times[2:]))


def check_sums(ranks: Collectives) -> int:
    """How many of our sums, in many shapes one after the other, have the bits of a sum in the order of the ranks."""
    num_right = 0
    for n in range(300):
        count, width = (1, 3, 64, 128, 2)[n % 5], (4096, 2048, 2560, 8192, 1152)[n // 5 % 5]
        dtype = (torch.bfloat16, torch.float16, torch.float32)[n % 3]
        width = min(width, 4096) if dtype == torch.float32 else width
        generator = torch.Generator(ranks.device).manual_seed(7 * n + ranks.rank)
        x = torch.randn(count, width, device=ranks.device, generator=generator).to(dtype)
        total, _ = all_reduce(x, ranks.peers, None)  # type: ignore[arg-type]
        parts = ranks.gathered(x).float().unbind()
        expected = parts[0]
        for part in parts[1:]:
            expected = expected + part
        num_right += torch.equal(total, expected.to(dtype))
    print(f"rank {ranks.rank}: {num_right} of 300 sums are right", flush=True)
    return num_right
