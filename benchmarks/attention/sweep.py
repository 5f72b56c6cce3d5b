"""Other tilings than the planned kernel's table has, timed as a decode step would run them. Introduced in phase 6.1.

As :mod:`benchmarks.kernels.sweep`: every variant is compiled first, on all cores; then each is checked and timed, and
the best few once more with more trials and merged either way, since the fastest of hundreds is in part the luckiest.

Invariant: a tiling that gives a wrong result, or none, is never among the best.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from benchmarks.attention.cases import (
    BLOCK_SIZE,
    AttentionShape,
    PagedSequences,
    attention_case,
    planned_call,
    report_settings,
)
from benchmarks.bench_attention import check_memory, check_options, chosen_shapes
from benchmarks.bench_kernels import dtype_of
from benchmarks.device.graph_timing import cache_bytes, num_input_sets, time_calls
from benchmarks.device.precompile import compile_all, recorded_launches
from benchmarks.hardware import device_of, measure_ceilings
from benchmarks.kernels.check import compare, reference
from benchmarks.report import Report, rounded
from shared.errors import ConfigError
from shared.kernels.planned_tiling import DecodeTiling, decode_tiling

KEPT = 5
TRIALS, FINAL_TRIALS = 3, 9
MIN_CALLS, FINAL_MIN_CALLS = 32, 128
SHARED_MEMORY = 224 << 10  # bytes of an H100's multiprocessor, less what else is there
LEAST_IN_FLIGHT = 24 << 10  # bytes a multiprocessor; below it cannot keep the memory busy
MOST_TILE_BYTES = 64 << 10
KEYS_PER_WARP = 8  # columns of a tensor core's tile: with fewer, warps have nothing to do
SHORT_TOKENS = 4096  # a batch of fewer tokens is worth shorter splits


def tilings_of(shape: AttentionShape, itemsize: int) -> list[DecodeTiling]:
    """The table's tiling first, then all that fit a multiprocessor as often as they ask to be resident."""
    table = decode_tiling(shape.num_sequences, shape.num_kv_heads, shape.head_dim, itemsize)
    found = [table]
    least_splits = (64, 128) if sum(shape.lengths) <= SHORT_TOKENS else (128,)
    for tile, num_warps, num_stages, programs, least_split in product(
        (32, 64, 128), (4, 8), (3, 4), (1, 2, 3, 4), least_splits
    ):
        tile_bytes = 2 * tile * shape.head_dim * itemsize
        in_flight = programs * (num_stages - 1) * tile_bytes
        fits = LEAST_IN_FLIGHT <= in_flight <= SHARED_MEMORY and tile_bytes <= MOST_TILE_BYTES
        if fits and tile >= KEYS_PER_WARP * num_warps:
            sizes: dict[str, Any] = {"tile": tile, "num_warps": num_warps, "num_stages": num_stages}
            found.append(replace(table, **sizes, programs_per_multiprocessor=programs, least_split=least_split))
    return list(dict.fromkeys(found))


def sweep(
    shape: AttentionShape, sequences: PagedSequences, tilings: Sequence[DecodeTiling], dtype: torch.dtype
) -> dict[str, Any]:
    """Time all, the best once more; the first of ``tilings`` is what the table has."""
    device = sequences.lengths.device
    case = attention_case("planned", shape, sequences, lambda *inputs: inputs[0], dtype)
    sets = case.draw(num_input_sets(case.set_bytes, cache_bytes(device)), device)
    expected = reference(case, sets[0])

    def seconds(tiling: DecodeTiling, trials: int, min_calls: int) -> float:
        ours = replace(case, ours=planned_call(shape, sequences, tiling)[0])
        error, _, _ = compare(ours, sets[0], expected)
        if error is not None:
            raise RuntimeError(error)
        return time_calls(ours.ours, sets, trials=trials, min_calls=min_calls).seconds

    timed: list[tuple[float, DecodeTiling]] = []
    failures: list[str] = []
    for tiling in tilings:
        try:
            timed.append((seconds(tiling, TRIALS, MIN_CALLS), tiling))
        except Exception as error:  # too much shared memory, too many registers: no tiling for this chip
            failures.append(f"{report_settings(tiling)}: {type(error).__name__}: {str(error)[:160]}")
    timed.sort(key=lambda pair: pair[0])

    def result(tiling: DecodeTiling) -> dict[str, Any]:
        taken = seconds(tiling, FINAL_TRIALS, FINAL_MIN_CALLS)
        return {
            "settings": report_settings(tiling),
            "time_us": rounded(1e6 * taken),
            "gb_per_second": rounded(case.num_bytes / taken / 1e9),
        }

    best = [tiling for _, tiling in timed[:KEPT]]
    best += [replace(tiling, is_arrival=not tiling.is_arrival) for tiling in best[:2]]
    return {
        "shape": shape.describe(),
        "bytes": case.num_bytes,
        "tried": len(tilings),
        "table": result(tilings[0]) if any(tiling == tilings[0] for _, tiling in timed) else None,
        "best": sorted((result(tiling) for tiling in best), key=lambda one: one["time_us"]),
        "timed": [report_settings(tiling) | {"time_us": rounded(1e6 * taken)} for taken, tiling in timed],
        "failures": failures,
    }


def sweep_attention(
    shapes: Sequence[str] | None = None,
    *,
    device: str,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Report]:
    """Search the tilings of each shape; one report.

    Args:
        shapes: names of ``attention_cases.SHAPES``; None: all.
        say: called with a line about each step.

    Raises ConfigError without a GPU, and for what cannot be swept.
    """
    if torch.device(device).type != "cuda":
        raise ConfigError("--sweep looks for the best cuts of a GPU's kernels and this is a CPU; leave it out here.")
    check_options((), 1, seed)
    where, chosen = device_of(device), chosen_shapes(shapes, is_demo=False)
    dtype = dtype_of(where)
    check_memory(chosen, where, dtype)
    torch.manual_seed(seed)
    ceilings = measure_ceilings(device)
    say(f"read ceiling {ceilings.read_bytes_per_second / 1e9:,.0f} GB/s")
    tilings = {shape: tilings_of(shape, dtype.itemsize) for shape in chosen}
    compilations = compilations_of(tilings, where, dtype)
    say(f"compiling {len(compilations)} variants")
    failed = compile_all(compilations)
    say(f"compiled {len(compilations) - failed}; {failed} cannot be")
    results: dict[str, Any] = {}
    for shape, of_shape in tilings.items():
        results[shape.name] = swept = sweep(shape, PagedSequences(shape, where, seed), of_shape, dtype)
        table, best = swept["table"], swept["best"]
        now = "fails" if table is None else f"{table['time_us']} µs, {table['gb_per_second']:,.0f} GB/s"
        say(f"{shape.name}: table {now}; best of {swept['tried']}, {len(swept['failures'])} of which fail:")
        for one in best:
            settings = " ".join(f"{name}={value}" for name, value in one["settings"].items())
            say(f"  {one['time_us']} µs {one['gb_per_second']:,.0f} GB/s {settings}")
    yield Report(
        name="attention-sweep",
        model={},
        engines={},
        seed=seed,
        flags={"shapes": [shape.name for shape in chosen], "block_size": BLOCK_SIZE, "device": device},
        results={"ceilings": ceilings.results(), "shapes": results},
        device=device,
    )


def compilations_of(
    tilings: dict[AttentionShape, list[DecodeTiling]], device: torch.device, dtype: torch.dtype
) -> list[Callable[[], Any]]:
    """What compiles every tiling, merged either way, each kernel once; a short sequence compiles to the same."""
    with recorded_launches() as compilations:
        for shape, of_shape in tilings.items():
            short = replace(shape, lengths=(256, *[BLOCK_SIZE] * (shape.num_sequences - 1)))
            sequences = PagedSequences(short, device, 0)
            inputs = attention_case("planned", short, sequences, lambda *inputs: inputs[0], dtype).draw(1, device)[0]
            for tiling, is_arrival in product(of_shape, (True, False)):
                planned_call(short, sequences, replace(tiling, is_arrival=is_arrival))[0](*inputs)
    return list(compilations.values())
