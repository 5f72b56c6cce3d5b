"""Every kernel at the real decode shapes of a model, and decode attention over a paged KV cache, compared with the
memory's ceiling (:mod:`benchmarks.kernels.case`). Introduced in phase 3.1; paged attention in phase 6.1.
"""

import statistics
import timeit
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.hardware import device_of
from benchmarks.kernels import graph_cases, paged_cases
from benchmarks.kernels.case import Case, check_options, dtype_of, is_gpu, measure_cases, report_of
from benchmarks.kernels.cases import (
    PEERS,
    ModelShapes,
    attention_case,
    kv_write_case,
    norm_cases,
    projection_cases,
    sampler_cases,
)
from benchmarks.kernels.paged_cases import PagedSequences
from benchmarks.report import Report, ratio, rounded
from shared.attention.descriptor import Grid
from shared.attention.plan import plan_decode
from shared.checkpoints.progress import Progress
from shared.checkpoints.shapes import SHAPES
from shared.errors import ConfigError
from shared.kernels.products.tiling import MAX_ROWS
from shared.loading.config_json import parse_config

DEMO_SHAPES = {"llama-3.2-1b": "tiny-llama", "qwen3-1.7b": "tiny-qwen3", "gemma-3-1b": "tiny-gemma3"}
MODELS = tuple(DEMO_SHAPES)
KERNELS = (
    *("qkv", "o", "gate_up", "down", "head", "rms_norm", "add_rms_norm", "kv_write"),
    *("decode_attention", "decode_attention_windowed", "sampler_greedy", "sampler_drawn"),
)
ROWS, DEMO_ROWS = (1, 4, 8, 16), (1, 4)
CONTEXTS, DEMO_CONTEXTS = (512, 4096, 16384), (32, 256)
NOT_ASKED = {"time_us": None, "missing": "not asked for"}
PLANNED_SEQUENCES = (1, 32, 256)
PLANNED_CONTEXT = 8192
PLANNED_GRID = Grid(resident=528, unit=64, least_split=128)  # so many items that 256 sequences are still split
PLANS_TIMED = 200


def measure_kernels(
    model: str = MODELS[0],
    *,
    device: str,
    kernels: Sequence[str] | None = None,
    rows: Sequence[int] | None = None,
    compiles: bool | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Measure kernel by kernel, by default all. Raises ConfigError before anything is measured.

    ``rows`` are tokens or sequences a call, 1 to 64; ``compiles``: whether ``torch.compile`` is measured too. On a CPU
    the tiny shape of the model's family is used instead.
    """
    check_options(seed, model=([model], MODELS), kernel=(kernels or (), KERNELS))
    for count in rows or ():
        if not 1 <= count <= MAX_ROWS:
            raise ConfigError(f"--rows has {count}; the small products take from 1 to {MAX_ROWS} rows.")
    name = model if is_gpu(device) else DEMO_SHAPES[model]
    peers = PEERS if (is_gpu(device) if compiles is None else compiles) else PEERS[:1]
    sizes = list(rows or (ROWS if is_gpu(device) else DEMO_ROWS))
    cases = cases_of(name, device_of(device), kernels or KERNELS, sizes)
    if not cases:
        raise ConfigError(f"A decode step of {name} launches none of {', '.join(kernels or ())}; leave out --kernel.")
    ceilings, measured = measure_cases(cases, peers, device, seed, progress)
    results: dict[str, dict[str, Any]] = {}
    for case, row in zip(cases, measured, strict=True):
        results.setdefault(case.kernel, {})[case.size] = flat_row(row)
    flags = {"kernels": list(results), "rows": sizes, "compile": "compiled" in peers}
    described = {"name": name, "revision": None, "config": SHAPES[name]}
    return report_of("kernels", {"ceilings": ceilings, "kernels": results}, flags, device, seed, described)


def cases_of(model: str, device: torch.device, kernels: Sequence[str], rows: Sequence[int]) -> list[Case]:
    """The cases of one model, a key of ``SHAPES``, in the order of ``KERNELS``."""
    shapes = ModelShapes(parse_config(SHAPES[model], model), dtype_of(device))
    cases: list[Case] = []
    for count in rows:
        cases += [*projection_cases(shapes, count), *norm_cases(shapes, count), kv_write_case(shapes, count, device)]
        cases += sampler_cases(shapes, count, device)
    for window in dict.fromkeys((None, *shapes.config.windows)):
        for context in CONTEXTS if device.type == "cuda" else DEMO_CONTEXTS:
            if window is None or window < context:
                cases.append(attention_case(shapes, context, window, device))
    return sorted((case for case in cases if case.kernel in kernels), key=lambda case: KERNELS.index(case.kernel))


def flat_row(row: dict[str, Any]) -> dict[str, Any]:
    """One row of a report: our call's figures next to the case's, and each peer's time."""
    (ours,), peers = row.pop("variants").values(), row.pop("peers")
    for name in PEERS:
        peer = peers.get(name, NOT_ASKED)
        ours |= {f"{name}_us": peer["time_us"], f"{name}_missing": peer["missing"]}
    return row | ours


def measure_attention(
    shapes: Sequence[str] | None = None,
    *,
    device: str,
    peers: Sequence[str] | None = None,
    mistakes: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Measure shape by shape, with peers, by default all. Raises ConfigError before anything is measured.

    ``mistakes``: measure mistakes that slow captured attention, at their own shapes, instead of our variants and peers.
    """
    kind: Any = graph_cases if mistakes else paged_cases
    known = {shape.name: shape for shape in (kind.SHAPES if is_gpu(device) else kind.DEMO_SHAPES)}
    check_options(seed, shape=(shapes or (), known), peer=(peers or (), paged_cases.PEERS))
    peers = () if mistakes else paged_cases.PEERS if peers is None else tuple(peers)
    chosen = [known[name] for name in dict.fromkeys(shapes or known)]
    where = device_of(device)
    cases = [kind.paged_case(PagedSequences(shape, where, seed), dtype_of(where)) for shape in chosen]
    ceilings, rows = measure_cases(cases, peers, device, seed, progress)
    results: dict[str, Any] = {"ceilings": ceilings}
    results["planning_us"] = {str(count): planning_us(count) for count in PLANNED_SEQUENCES}
    results["shapes"] = {shape.name: compared_row(row) for shape, row in zip(chosen, rows, strict=True)}
    flags = {"shapes": list(results["shapes"]), "peers": list(peers), "block_size": paged_cases.BLOCK_SIZE}
    return report_of("graph-mistakes" if mistakes else "attention", results, flags, device, seed, model={})


def compared_row(row: dict[str, Any]) -> dict[str, Any]:
    """A shape's row of the report: the measurements, and each other call's time relative to our first call's."""
    (_, ours), *others = row["variants"].items()
    us = ours["time_us"] if ours["launches"] else None  # without launches, all of them are the same op
    return row | {f"times_{name}": ratio(other["time_us"], us) for name, other in others}


def planning_us(num_sequences: int) -> float:
    """Microseconds that the host takes to plan a batch of sequences of any length, the median of many."""
    lengths = np.random.default_rng(num_sequences).integers(1, PLANNED_CONTEXT, num_sequences)
    plan_decode(lengths, PLANNED_GRID)
    times = timeit.repeat(lambda: plan_decode(lengths, PLANNED_GRID), number=1, repeat=PLANS_TIMED)
    return rounded(1e6 * statistics.median(times), 3)
