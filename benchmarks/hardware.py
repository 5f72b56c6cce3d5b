"""What a machine can do at best: the ceilings that every other figure is compared with. Introduced in phase 3.1.

For a GPU that is not available, the rates of its data sheet are used, for dense 16-bit matrices; real programs reach
about 90 % of its bandwidth and 80 % of its arithmetic. Invariant: ceilings are valid for one run; each benchmark
measures them again.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from benchmarks.report import Report, rounded
from benchmarks.timing import time_calls
from benchmarks.view import Column, Table, View, text
from shared.errors import ConfigError
from shared.kernels.launch import check_launchable, tl, triton

GPU_BUFFER_BYTES, CPU_BUFFER_BYTES, LEAST_BUFFER_BYTES = 1 << 30, 1 << 28, 1 << 26
READ_CUTS = ((1024, 4, 4), (1024, 8, 4), (2048, 4, 8), (2048, 8, 8))  # numbers per tile, tiles per program, warps
LAUNCHES = 2000


@dataclass(frozen=True)
class Ceilings:
    """The rates that one device reached in this run; launches are None on a CPU, which has none."""

    copy_bytes_per_second: float  # bytes read plus bytes written
    read_bytes_per_second: float
    matmul_flops_per_second: float
    launch_seconds_eager: float | None  # a Triton kernel launched from Python, host and stream together
    launch_seconds_graph: float | None  # the same kernel inside a CUDA graph
    matmul_dtype: str

    def bytes_per_second(self, kind: Literal["read", "copy"]) -> float:
        return self.read_bytes_per_second if kind == "read" else self.copy_bytes_per_second

    def results(self) -> dict[str, Any]:
        """For a report, each key with its unit."""
        figures = {
            "copy_gb_per_second": self.copy_bytes_per_second / 1e9,
            "read_gb_per_second": self.read_bytes_per_second / 1e9,
            "matmul_tflop_per_second": self.matmul_flops_per_second / 1e12,
            "launch_eager_us": self.launch_seconds_eager and 1e6 * self.launch_seconds_eager,
            "launch_graph_us": self.launch_seconds_graph and 1e6 * self.launch_seconds_graph,
        }
        rates = {name: None if figure is None else rounded(figure) for name, figure in figures.items()}
        return rates | {"matmul_dtype": self.matmul_dtype}


@triton.jit
def read_kernel(x, sums, BLOCK: tl.constexpr, TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program i sums its TILES · BLOCK numbers into one."""
    at = x + tl.program_id(0).to(tl.int64) * (BLOCK * TILES) + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for tile in tl.static_range(TILES):
        total += tl.load(at + tile * BLOCK, eviction_policy="evict_first")
    tl.store(sums + tl.program_id(0), tl.sum(total))


@triton.jit
def touch_kernel(x):  # type: ignore[no-untyped-def]
    """Store one number: almost nothing but its launch."""
    tl.store(x, 1.0)


def device_of(device: str) -> torch.device:
    """The device by its name, ``cuda`` with the number of the current one."""
    found = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if found.type == "cuda" and found.index is None else found


def measure_ceilings(device: str) -> Ceilings:
    """Measure the ceilings of ``cpu`` or ``cuda``, in seconds; ConfigError if the kernels cannot run on this GPU."""
    where = device_of(device)
    is_gpu = where.type == "cuda"
    check_launchable(where)
    size, dtype = (8192, torch.bfloat16) if is_gpu else (1024, torch.float32)  # of the matrices
    num_bytes = _buffer_bytes(where)
    a, b = (torch.rand(num_bytes // 4, device=where) for _ in range(2))
    copy = time_calls(lambda source, target: target.copy_(source), [(a, b), (b, a)])
    read = _read_seconds(a)
    del a, b
    factors = tuple(torch.randn(size, size, device=where).to(dtype) for _ in range(2))
    matmul = time_calls(torch.matmul, [factors])
    del factors
    eager, graph = _launch_seconds(where) if is_gpu else (None, None)
    torch.cuda.empty_cache()  # does nothing if no GPU was used
    rates = 2 * num_bytes / copy, num_bytes / read, 2 * size**3 / matmul
    return Ceilings(*rates, eager, graph, str(dtype).removeprefix("torch."))


def _buffer_bytes(device: torch.device) -> int:
    """A power of two; smaller than usual on a GPU with little free memory, but larger than its cache."""
    if device.type != "cuda":
        return CPU_BUFFER_BYTES
    free = torch.cuda.mem_get_info(device)[0]
    return max(LEAST_BUFFER_BYTES, min(GPU_BUFFER_BYTES, 1 << (free // 4).bit_length() - 1))


def _read_seconds(x: torch.Tensor) -> float:
    """Time to read all of x: on a GPU with our kernel's best tiling, on a CPU with PyTorch's sum."""
    if not x.is_cuda:
        return time_calls(torch.sum, [(x,)])
    total = x.sum(dtype=torch.float64)
    times = []
    for block, tiles, num_warps in READ_CUTS:
        sums = torch.zeros(x.numel() // (block * tiles), device=x.device)

        def read(x: torch.Tensor, sums: torch.Tensor, cut: tuple[int, int, int] = (block, tiles, num_warps)) -> None:
            read_kernel[(len(sums),)](x, sums, BLOCK=cut[0], TILES=cut[1], num_warps=cut[2])

        read(x, sums)
        if abs(sums.sum(dtype=torch.float64) / total - 1) > 1e-4:
            raise RuntimeError(f"the read kernel summed {sums.sum()} where {total} is right")
        times.append(time_calls(read, [(x, sums)]))
    return min(times)


def _launch_seconds(device: torch.device) -> tuple[float, float]:
    """Time of one launch among many: requested from Python, and replayed from a graph."""
    x = torch.zeros(32, device=device)

    def touch(x: torch.Tensor) -> None:
        touch_kernel[(1,)](x, num_warps=1)

    calls = [(x,)] * LAUNCHES
    return time_calls(touch, calls, is_eager=True), time_calls(touch, calls)


def hardware_report(device: str) -> Report:
    """Measure only the machine."""
    results = measure_ceilings(device).results()
    return Report("hardware", model={}, engines={}, seed=0, flags={"device": device}, results=results, device=device)


def view(report: Report) -> View:
    """What the machine reached."""
    names = {
        "copy_gb_per_second": "copy, read and written, GB/s",
        "read_gb_per_second": "read only, GB/s",
        "matmul_tflop_per_second": f"matrix product, {report.results['matmul_dtype']}, TFLOP/s",
        "launch_eager_us": "launch, eager, µs",
        "launch_graph_us": "launch, inside a CUDA graph, µs",
    }
    rows = [{"ceiling": name, "reached": report.results[key]} for key, name in names.items()]
    table = Table("", [text("", "ceiling"), Column("reached", "reached")], rows)
    return View(f"Ceilings: {report.machine_title}", [], [table])


@dataclass(frozen=True)
class DataSheet:
    """``read_bytes_per_second`` of the GPU's memory, ``matmul_flops_per_second`` of dense bf16 or fp16 products."""

    title: str
    read_bytes_per_second: float
    matmul_flops_per_second: float
    source: str


DATA_SHEETS = {
    name: DataSheet(f"NVIDIA {title}", read, flops, f"NVIDIA {source}")
    for name, title, read, flops, source in (
        ("h100", "H100 SXM 80 GB", 3.35e12, 989e12, "H100 data sheet: 3.35 TB/s; 1,979 TFLOP/s with sparsity, halved"),
        ("h100-pcie", "H100 PCIe", 2.0e12, 756e12, "H100 data sheet: 2 TB/s; 1,513 TFLOP/s with sparsity, halved"),
        ("h200", "H200 SXM", 4.8e12, 989e12, "H200 data sheet: 4.8 TB/s; 1,979 TFLOP/s with sparsity, halved"),
        ("a100", "A100 SXM 80 GB", 2.039e12, 312e12, "A100 data sheet: 2,039 GB/s; 312 TFLOP/s"),
        ("l40s", "L40S", 0.864e12, 362e12, "L40S data sheet: 864 GB/s; 362 TFLOP/s"),
        ("l4", "L4", 0.3e12, 121e12, "L4 data sheet: 300 GB/s; 242 TFLOP/s with sparsity, halved"),
        ("rtx-4090", "GeForce RTX 4090", 1.008e12, 165e12, "Ada whitepaper: 1,008 GB/s; 165.2 TFLOP/s"),
        ("rtx-3090", "GeForce RTX 3090", 0.936e12, 71e12, "GA102 whitepaper: 936 GB/s; 71 TFLOP/s"),
    )
}


def find_data_sheet(name: str) -> DataSheet:
    """The row of a GPU by its short name; raises ConfigError that lists the known ones."""
    sheet = DATA_SHEETS.get(name.lower())
    if sheet is None:
        raise ConfigError(
            f"There is no data sheet of {name!r} here; there are {', '.join(DATA_SHEETS)}. For another GPU give its "
            "rates with --bandwidth and --flops."
        )
    return sheet
