"""Mistakes that make captured decode attention slow, each compared with the kernel without it. Introduced in phase 9.

Each mistake replaces a line of the planned kernel or its loop, or its tiling. Invariant as in
:mod:`benchmarks.kernels.case`.
"""

import inspect
import linecache
from dataclasses import replace
from itertools import product
from typing import Any, cast

import torch

from benchmarks.kernels import paged_cases
from benchmarks.kernels.case import Call, Case
from benchmarks.kernels.paged_cases import AttentionShape, PagedSequences, planned_call
from benchmarks.timing import cache_bytes, num_input_sets, time_calls
from shared.kernels.attention import online_softmax, planned_attention
from shared.kernels.attention.planned_tiling import DecodeTiling, decode_tiling, fitted

LLAMA, DEMO = (32, 8, 64), (4, 2, 16)
LENGTHS = {  # a name begins with the mistake; sequences of length 0 are padding
    "widest-32x256": [256] * 32,
    "tuned-1x1024": [1024],
    "tuned-8x1024": [1024] * 8,
    "padded-9-of-16": [1024] * 9 + [0] * 7,
    "padded-33-of-64": [1024] * 33 + [0] * 31,
}
DEMO_LENGTHS = {"widest-4x64": [64, 16, 16, 32], "tuned-2x64": [64, 64], "padded-3-of-4": [64, 16, 64, 0]}
SHAPES = [AttentionShape(name, LLAMA, tuple(lengths)) for name, lengths in LENGTHS.items()]
DEMO_SHAPES = [AttentionShape(name, DEMO, tuple(lengths)) for name, lengths in DEMO_LENGTHS.items()]
WIDEST_TABLE = "tl.range(start, end, TILE)", "tl.range(start, start + 8192, TILE)"  # capacity for 8,192 tokens
ALL_COMPUTE = "is_item = item < tl.load(num_items)", "is_item = item < tl.num_programs(1)"
CANDIDATES = (32, 64, 128), (2, 4, 8), (2, 3, 4)  # for tuning: keys per tile, warps, loads in flight


def mistaken(right: str, wrong: str) -> Call:
    """``planned_decode``, with one line of its kernel replaced, or of the loop that the kernel calls."""
    sources = [inspect.getsource(module) for module in (online_softmax, planned_attention)]
    if (count := sum(source.count(right) for source in sources)) != 1:
        raise ValueError(f"the source of the planned kernel has {count} times {right!r}, and not once")
    modules: list[dict[str, Any]] = []
    for source in (each.replace(right, wrong) for each in sources):
        name = f"<planned attention {len(modules)}, {wrong}>"
        # Triton reads the source there
        linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
        modules.append({"__name__": name})
        exec(compile(source, name, "exec"), modules[-1])
    modules[1]["attend"] = modules[0]["attend"]
    return cast(Call, modules[1]["planned_decode"])


def paged_case(sequences: PagedSequences, dtype: torch.dtype) -> Case:
    """The call of an engine, and the same call with this shape's mistake."""
    shape, device = sequences.shape, sequences.lengths.device
    tiling = decode_tiling(shape.num_sequences, *shape.heads[1:], dtype.itemsize)
    if shape.name.startswith("padded"):  # merged by a launch: the additional programs would count as arrivals
        tiling = replace(tiling, is_arrival=False)
    calls = {"planned": planned_call(sequences, tiling)}
    if shape.name.startswith("widest"):
        calls["unsplit"] = planned_call(sequences, tiling, is_split=False)
        calls["widest_table"] = planned_call(sequences, tiling, is_split=False, decode=mistaken(*WIDEST_TABLE))
    elif shape.name.startswith("padded"):
        calls["all_compute"] = planned_call(sequences, tiling, decode=mistaken(*ALL_COMPUTE))
    else:
        case = paged_cases.paged_case(sequences, dtype, {})
        sets = case.draw(num_input_sets(case.set_bytes, cache_bytes(device)), device)
        fitting = (fitted(DecodeTiling(*sizes), shape.heads[2], dtype.itemsize) for sizes in product(*CANDIDATES))
        candidates = [planned_call(sequences, candidate) for candidate in dict.fromkeys(fitting)]
        calls["tuned_outside"] = min(candidates, key=lambda variant: time_calls(variant[0], sets, is_eager=True))
        calls["tuned_inside"] = min(candidates, key=lambda variant: time_calls(variant[0], sets))
    return paged_cases.paged_case(sequences, dtype, calls)
