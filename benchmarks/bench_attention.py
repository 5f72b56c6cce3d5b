"""Decode attention over paged memory, beside the memory's ceiling and beside others. Introduced in phase 6.1.

Decoding reads every cached key and value once, so a row says how many bytes that is, how long it would take at the read
ceiling measured in the same run, and how long it took: our planned kernel, the same without what makes it fast, phase
6's kernel, and peers. All by :mod:`benchmarks.device.graph_timing`: inside a CUDA graph, inputs rotated. Beside it
stands what a plan costs on the host. Without a GPU tiny shapes stand in, and our launchers call the op.

    infer bench attention

Invariant: nothing wrong is timed, ours or a peer's.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.attention.cases import (
    BLOCK_SIZE,
    DEMO_SHAPES,
    SHAPES,
    AttentionShape,
    PagedSequences,
    attention_case,
    variant_calls,
)
from benchmarks.attention.peers import PEERS, peer_call
from benchmarks.bench_kernels import dtype_of
from benchmarks.device.graph_timing import TRIALS, Inputs, cache_bytes, num_input_sets, time_calls
from benchmarks.device.precompile import precompile
from benchmarks.hardware import Ceilings, device_of, measure_ceilings
from benchmarks.kernels.cases import KernelCase
from benchmarks.kernels.check import compare, reference
from benchmarks.report import Report, rounded
from benchmarks.timing import Steps
from shared.attention.descriptor import Grid
from shared.attention.plan import plan_decode
from shared.checkpoints.progress import Progress
from shared.errors import CapacityError, ConfigError
from shared.kernels.launch import INTERPRETED

DEMO_TRIALS = 3
PLANNED_SEQUENCES = (1, 32, 256)
PLANNED_CONTEXT = 8192
PLANNED_GRID = Grid(resident=528, unit=64, least_split=128)  # so many items that 256 sequences are still cut
PLANS_TIMED = 200


def measure_attention(
    shapes: Sequence[str] | None = None,
    *,
    device: str,
    peers: Sequence[str] | None = None,
    trials: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Measure shape by shape.

    Args:
        shapes: names of ``SHAPES``, on a CPU of ``DEMO_SHAPES``; None: all.
        device: ``cpu`` or ``cuda``.
        peers: names of ``PEERS``, possibly none; None: all.
        trials: replays of each graph, whose median counts (fewer of long ones); None: 9, at demo size 3.
        progress: called with (what is being done, steps done, steps in all).

    Raises:
        ConfigError, CapacityError: before anything is measured.
    """
    is_demo = torch.device(device).type != "cuda"
    trials = (DEMO_TRIALS if is_demo else TRIALS) if trials is None else trials
    peers = PEERS if peers is None else tuple(peers)
    chosen = chosen_shapes(shapes, is_demo)
    check_options(peers, trials, seed)
    where = device_of(device)
    dtype = dtype_of(where)
    check_memory(chosen, where, dtype)
    torch.manual_seed(seed)
    ceilings = measure_ceilings(device)
    steps = Steps(progress, len(chosen) + 1)
    results: dict[str, Any] = {"ceilings": ceilings.results()}
    with steps.step("plans"):
        results["planning_us"] = {str(count): planning_us(count) for count in PLANNED_SEQUENCES}
    results["shapes"] = {}
    for shape in chosen:
        with steps.step(shape.name):
            results["shapes"][shape.name] = measure_shape(shape, where, dtype, ceilings, peers, trials, seed)
    return Report(
        name="attention",
        model={},
        engines={},
        seed=seed,
        flags={
            "shapes": [shape.name for shape in chosen],
            "peers": list(peers),
            "block_size": BLOCK_SIZE,
            "trials": trials,
            "device": device,
            "dtype": str(dtype).removeprefix("torch."),
            "is_demo_size": is_demo,
        },
        results=results,
        device=device,
    )


def measure_shape(
    shape: AttentionShape,
    device: torch.device,
    dtype: torch.dtype,
    ceilings: Ceilings,
    peers: Sequence[str],
    trials: int,
    seed: int,
) -> dict[str, Any]:
    """One shape: our variants and the peers, over the same inputs."""
    sequences = PagedSequences(shape, device, seed)
    calls = variant_calls(shape, sequences, dtype)
    cases = {name: attention_case(name, shape, sequences, call, dtype) for name, (call, _) in calls.items()}
    case = cases["planned"]
    sets = case.draw(num_input_sets(case.set_bytes, cache_bytes(device)), device)
    if device.type == "cuda":
        precompile([(one.ours, sets[0]) for one in cases.values()])
    expected = reference(case, sets[0])
    floor = case.num_bytes / ceilings.read_bytes_per_second
    variants = {
        name: measured(one, sets, expected, floor, trials) | {"settings": calls[name][1]} for name, one in cases.items()
    }
    in_order = PagedSequences(shape, device, None)
    expected_in_order = reference(attention_case("", shape, in_order, case.ours, dtype), sets[0])
    timed_peers = {}
    for name in peers:
        right = expected_in_order if name.endswith("contiguous") else expected
        try:
            one = attention_case(name, shape, sequences, peer_call(name, shape, sequences, dtype), dtype)
            timed_peers[name] = measured(one, sets, right, floor, trials) | {"missing": None}
        except Exception as error:  # what others cannot do is a finding, not a failure
            said = next((line for line in str(error).splitlines() if line.strip()), "no message")
            timed_peers[name] = {"time_us": None, "missing": f"{type(error).__name__}: {said.strip()[:200]}"}
    row = {
        "shape": shape.describe(),
        "num_sequences": shape.num_sequences,
        "num_tokens": sum(shape.lengths),
        "bytes": case.num_bytes,
        "floor_us": rounded(1e6 * floor),
        "input_sets": len(sets),
        "target_gb_per_second": shape.target_gb_per_second,
        "target_us": shape.target_us,
        "target_times_unsplit": shape.target_times_unsplit,
        "times_unsplit": None,
        "variants": variants,
        "peers": timed_peers,
    }
    ours, unsplit = (variants[name]["time_us"] for name in ("planned", "unsplit"))
    if ours and unsplit and variants["planned"]["launches"]:  # without launches both are the same op
        row["times_unsplit"] = rounded(unsplit / ours, 3)
    return row | {"is_reached": is_reached(row)}


def measured(
    case: KernelCase, sets: Sequence[Inputs], expected: tuple[torch.Tensor, ...], floor: float, trials: int
) -> dict[str, Any]:
    """Checked, then timed; with an error it has no time."""
    error, largest_error, launches = compare(case, sets[0], expected)
    row: dict[str, Any] = {"error": error, "largest_error": largest_error, "launches": launches, "time_us": None}
    if error is not None:
        return row
    timing = time_calls(case.ours, sets, trials=trials)
    return row | {
        "time_us": rounded(1e6 * timing.seconds),
        "spread": rounded(timing.spread, 2),
        "gb_per_second": rounded(case.num_bytes / timing.seconds / 1e9),
        "share_of_ceiling": rounded(floor / timing.seconds),
    }


def is_reached(row: dict[str, Any]) -> bool | None:
    """Whether the planned kernel is as fast as the shape asks; None where it asks nothing."""
    ours = row["variants"]["planned"]
    if ours["time_us"] is None:
        return False
    if row["target_gb_per_second"] is not None:
        return bool(ours["gb_per_second"] >= row["target_gb_per_second"])
    if row["target_us"] is not None:
        return bool(ours["time_us"] <= row["target_us"])
    if row["target_times_unsplit"] is not None:
        return bool((row["times_unsplit"] or 0) >= row["target_times_unsplit"])
    return None


def planning_us(num_sequences: int) -> float:
    """Microseconds on the host to plan a batch of sequences of any length, the median of many."""
    lengths = np.random.default_rng(num_sequences).integers(1, PLANNED_CONTEXT, num_sequences)
    plan_decode(lengths, PLANNED_GRID)
    times = []
    for _ in range(PLANS_TIMED):
        started = time.perf_counter()
        plan_decode(lengths, PLANNED_GRID)
        times.append(time.perf_counter() - started)
    return rounded(1e6 * statistics.median(times), 3)


def chosen_shapes(names: Sequence[str] | None, is_demo: bool) -> list[AttentionShape]:
    """The shapes by name; raises ConfigError for one that there is not."""
    known = {shape.name: shape for shape in (DEMO_SHAPES if is_demo else SHAPES)}
    for name in names or ():
        if name not in known:
            raise ConfigError(f"--shape is {name!r}; it must be one of {', '.join(known)}.")
    return [known[name] for name in dict.fromkeys(names or known)]


def check_options(peers: Sequence[str], trials: int, seed: int) -> None:
    """Raise ConfigError for what cannot be measured."""
    for name in peers:
        if name not in PEERS:
            raise ConfigError(f"--peer is {name!r}; it must be one of {', '.join(PEERS)}.")
    if trials < 1:
        raise ConfigError(f"--trials is {trials}; it must be at least 1.")
    if seed < 0:
        raise ConfigError(f"--seed is {seed}; it must be at least 0.")
    if INTERPRETED:
        raise ConfigError("TRITON_INTERPRET is set, and the interpreter's times say nothing of a kernel's; unset it.")


def check_memory(shapes: Sequence[AttentionShape], device: torch.device, dtype: torch.dtype) -> None:
    """Raise CapacityError if a shape's inputs, in fp32 for the check and gathered for the peers too, do not fit."""
    if device.type != "cuda":
        return
    free, cache = torch.cuda.mem_get_info(device)[0], cache_bytes(device)
    for shape in shapes:
        set_bytes = shape.num_bytes(dtype.itemsize)
        padded = shape.num_sequences * max(shape.lengths) / sum(shape.lengths)
        needed = int(set_bytes * (num_input_sets(set_bytes, cache) + 4 + 4 * padded))
        if needed > free:
            raise CapacityError(
                f"{shape.name} ({shape.describe()}) takes {needed / 2**30:.1f} GiB to measure and {free / 2**30:.1f} "
                "GiB of the GPU's memory are free; choose others with --shape."
            )
