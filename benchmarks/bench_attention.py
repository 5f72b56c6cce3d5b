"""Decode attention over a paged KV cache, beside the memory's ceiling and beside others. Introduced in phase 6.1.

Decoding reads every cached key and value once, so a row says how many bytes that is, how long it would take at the read
ceiling measured in the same run, and how long it took: our planned kernel, the same without what makes it fast, phase
6's kernel, FlashInfer and PyTorch, all measured as the kernels of :mod:`benchmarks.bench_kernels` are. Beside it stands
what a plan costs on the host. Without a GPU tiny shapes stand in, and our launchers call the op.
"""

import statistics
import timeit
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.hardware import device_of
from benchmarks.kernels.case import check_options, dtype_of, is_gpu, measure_cases, report_of
from benchmarks.kernels.paged_cases import (
    BLOCK_SIZE,
    DEMO_SHAPES,
    PEERS,
    SHAPES,
    PagedSequences,
    paged_case,
)
from benchmarks.report import Report, ratio, rounded
from shared.attention.descriptor import Grid
from shared.attention.plan import plan_decode
from shared.checkpoints.progress import Progress

PLANNED_SEQUENCES = (1, 32, 256)
PLANNED_CONTEXT = 8192
PLANNED_GRID = Grid(resident=528, unit=64, least_split=128)  # so many items that 256 sequences are still cut
PLANS_TIMED = 200


def measure_attention(
    shapes: Sequence[str] | None = None,
    *,
    device: str,
    peers: Sequence[str] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Measure shape by shape. Raises ConfigError before anything is measured.

    Args:
        shapes: names of ``SHAPES``, on a CPU of ``DEMO_SHAPES``; None: all.
        peers: names of ``PEERS``, possibly none; None: all.
        seed: of the inputs and of the order of blocks.
    """
    known = {shape.name: shape for shape in (SHAPES if is_gpu(device) else DEMO_SHAPES)}
    check_options(seed, shape=(shapes or (), known), peer=(peers or (), PEERS))
    peers = PEERS if peers is None else tuple(peers)
    chosen = [known[name] for name in dict.fromkeys(shapes or known)]
    where = device_of(device)
    cases = [paged_case(PagedSequences(shape, where, seed), dtype_of(where)) for shape in chosen]
    ceilings, rows = measure_cases(cases, peers, device, seed, progress)
    results: dict[str, Any] = {"ceilings": ceilings}
    results["planning_us"] = {str(count): planning_us(count) for count in PLANNED_SEQUENCES}
    results["shapes"] = {shape.name: finished(row) for shape, row in zip(chosen, rows, strict=True)}
    flags = {"shapes": list(results["shapes"]), "peers": list(peers), "block_size": BLOCK_SIZE}
    return report_of("attention", results, flags, device, seed, model={})


def finished(row: dict[str, Any]) -> dict[str, Any]:
    """A shape's row of the report: what was measured, and what splitting gains."""
    ours, unsplit = row["variants"]["planned"], row["variants"]["unsplit"]
    # Without launches both are the same op.
    return row | {"times_unsplit": ratio(unsplit["time_us"], ours["time_us"]) if ours["launches"] else None}


def planning_us(num_sequences: int) -> float:
    """Microseconds on the host to plan a batch of sequences of any length, the median of many."""
    lengths = np.random.default_rng(num_sequences).integers(1, PLANNED_CONTEXT, num_sequences)
    plan_decode(lengths, PLANNED_GRID)
    times = timeit.repeat(lambda: plan_decode(lengths, PLANNED_GRID), number=1, repeat=PLANS_TIMED)
    return rounded(1e6 * statistics.median(times), 3)
