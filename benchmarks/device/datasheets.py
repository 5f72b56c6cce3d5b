"""What makers print of their GPUs, for a reader who has none of them. Introduced in phase 3.1.

A data sheet names what the parts could do together at best; programs reach some 90 % of the bandwidth and 80 % of the
arithmetic. Invariant: every row names its source, rates are those of dense 16-bit matrices (a sheet's rate "with
sparsity" is halved), and what shows a row says that it is a data sheet's and was not measured.
"""

from dataclasses import dataclass

from shared.errors import ConfigError


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
    """The row of a GPU by its short name; raises ConfigError with those that there are."""
    sheet = DATA_SHEETS.get(name.lower())
    if sheet is None:
        raise ConfigError(
            f"There is no data sheet of {name!r} here; there are {', '.join(DATA_SHEETS)}. For another GPU give its "
            "rates with --bandwidth and --flops."
        )
    return sheet
