"""Experiments on memory: what regions and blocks make of the same bytes, and what a block table costs.

Introduced in phase 6.

    capacity    the same KV bytes as regions as wide as a long request, as regions as wide as the trace's longest, and
    as
                blocks; a queue that never empties
    whole-step  W2 in batches of the same size and memory for all: phases with blocks over regions

Invariants: in ``capacity`` the memory of all contenders has the same bytes, and only memory limits how many run in
blocks; in ``whole-step`` a ratio is of two runs of one trial, and every contender begins a trial as often as another.
"""

import statistics
from typing import Any

from benchmarks.report import rounded
from benchmarks.serving.experiment_bench import Bench, trial_ratios
from benchmarks.serving.results import ratio, saturated_figures
from benchmarks.workloads.serving import ServingSize
from shared.errors import ConfigError
from shared.lessons import Lesson

SLOTS = ("wide_slots", "tight_slots")
NEEDS_BLOCKS = ("capacity", "whole-step")
BLOCK_SIZE = 16


def capacity_batch(size: ServingSize) -> int:
    """A batch that blocks of that memory never fill: twice as many as would fit if each had its whole length."""
    workload = size.capacity
    mean = (sum(workload.prompt_tokens) + sum(workload.new_tokens)) / 2
    return min(workload.num_requests, int(2 * size.capacity_tokens / mean))


def run_capacity(bench: Bench) -> dict[str, Any]:
    """How many run at a time in the same memory, how full it is, and their speed; ratios of blocks over regions."""
    size, lineup = bench.size, bench.servers.lineup
    num_wide, wide = size.wide_slots
    tight = size.capacity.longest
    settings: dict[str, tuple[str, Lesson, dict[str, Any]]] = {
        "wide_slots": (
            f"regions of {wide:,} tokens (phase {lineup.slots.number})",
            lineup.slots,
            {"max_seq_len": wide, "max_batch_size": num_wide},
        ),
        "tight_slots": (
            f"regions of {tight:,} tokens (phase {lineup.slots.number})",
            lineup.slots,
            {"max_seq_len": tight, "max_batch_size": size.capacity_tokens // tight},
        ),
    }
    in_blocks = {
        "max_seq_len": wide,
        "max_batch_size": capacity_batch(size),
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks": size.capacity_tokens // BLOCK_SIZE,
    }
    for name, lesson in lineup.in_blocks.items():
        settings[name] = f"blocks of {BLOCK_SIZE} tokens (phase {lesson.number})", lesson, in_blocks
    trace = bench.trace(size.capacity)
    found: dict[str, Any] = {"kv_tokens": size.capacity_tokens}
    for name, (title, lesson, own) in settings.items():
        with bench.step(f"capacity: {title}"), bench.servers.lent(name, title, lesson, **own) as server:
            run, result = server.measure(trace, bench.max_seconds)
            found[name] = result | {"max_batch_size": server.max_batch_size} | saturated_figures(run)
    found["kv_bytes"] = found["wide_slots"]["memory_kv_bytes"]
    for name in lineup.in_blocks:
        for slots in SLOTS:
            for key, measured in (("peak", "peak_concurrent"), ("throughput", "saturated_tokens_per_second")):
                found[f"{name}_over_{slots}_{key}"] = ratio(found[name][measured], found[slots][measured])
    return found


def run_whole_step(bench: Bench) -> dict[str, Any]:
    """W2 with memory for all, in turns; medians, and the median of each trial's ratio over regions."""
    names = bench.servers.lineup.continuous
    found: dict[str, Any] = bench.in_turns(names, bench.size.max_batch_size, bench.size.w2, "whole step")
    for name in names[1:]:
        shares = trial_ratios(found[name], found["continuous"])
        found[f"{name}_over_continuous_trials"] = [rounded(share) for share in shares]
        found[f"{name}_over_continuous"] = rounded(statistics.median(shares))
    return found


def check_sizes(size: ServingSize) -> None:
    """Raise ConfigError if regions and blocks of ``capacity`` could not have the same bytes."""
    num, wide = size.wide_slots
    tight = size.capacity.longest
    if num < 1 or wide < tight or any(size.capacity_tokens % unit for unit in (tight, BLOCK_SIZE)):
        raise ConfigError(
            f"The memory of the experiment capacity is {num} regions of {wide} tokens; it must be as many bytes in "
            f"regions of {tight} and in blocks of {BLOCK_SIZE}, so both must divide {size.capacity_tokens}."
        )
