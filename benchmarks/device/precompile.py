"""Compile many kernels at once, on all cores, before any is timed. Introduced in phase 3.1.

Triton compiles a variant at its first launch, some tenths of a second on one core: a sweep has hundreds. So the
launchers are run with a recorder in the place of their launch, and what they would have launched is compiled by threads
(most of a compilation is outside of Python). The later launch finds it. Invariant: nothing is launched here.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks.device.graph_timing import Inputs
from shared.kernels import (
    decode_attention,
    gated,
    gemv,
    kv_write,
    merge_states,
    paged_attention,
    planned_attention,
    rmsnorm,
    sampler,
)

LAUNCHING_MODULES: tuple[Any, ...] = (
    *(decode_attention, gated, gemv, kv_write, merge_states),
    *(paged_attention, planned_attention, rmsnorm, sampler),
)
Compilation = Callable[[], Any]


@contextmanager
def recorded_launches() -> Iterator[dict[Any, Compilation]]:
    """Inside the block launchers launch nothing; what would compile their launches is in the dict, each once."""
    compilations: dict[Any, Compilation] = {}

    def record(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        key = (kernel.__name__, tuple(map(_specialized, args)), tuple(sorted(options.items())))
        compilations.setdefault(key, partial(kernel.warmup, *args, grid=grid, **options))

    originals = [module.launch for module in LAUNCHING_MODULES]
    for module in LAUNCHING_MODULES:
        module.launch = record
    try:
        yield compilations
    finally:
        for module, original in zip(LAUNCHING_MODULES, originals, strict=True):
            module.launch = original


def _specialized(value: Any) -> Any:
    """What of an argument Triton compiles for: a tensor's dtype; whether a whole number is 1 or a multiple of 16."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, int):
        return value == 1, value % 16 == 0
    return type(value)


def compile_all(compilations: Sequence[Compilation], finished: Callable[[int, int], None] | None = None) -> int:
    """Compile in threads; ``finished(done, total)`` after each. Returns how many failed: they fail again, and say why,
    when they are launched."""
    failed = 0
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for done, future in enumerate(as_completed([pool.submit(one) for one in compilations]), 1):
            failed += future.exception() is not None
            if finished is not None:
                finished(done, len(compilations))
    return failed


def precompile(calls: Sequence[tuple[Callable[..., Any], Inputs]]) -> int:
    """Compile what these calls of launchers would launch; returns how many compilations failed."""
    with recorded_launches() as compilations:
        for call, inputs in calls:
            call(*inputs)
    return compile_all(list(compilations.values()))
