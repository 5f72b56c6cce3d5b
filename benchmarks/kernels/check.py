"""Whether a kernel is right, asked before it is timed. Introduced in phase 3.1.

The tests of the kernels ask in fp64, with poisoned memory and at awkward sizes; this asks once more at the sizes and on
the GPU that are measured. Invariant: the reference is the op in fp32 on the same inputs, so that it shares neither the
kernel's code nor its rounding.
"""

import math
from typing import Any

import torch

from benchmarks.device.graph_timing import Inputs
from benchmarks.kernels.cases import KernelCase
from benchmarks.report import rounded
from shared.kernels.launch import LAUNCHES

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest error of a number, in units of its own magnitude plus the root mean square of all: a few roundings."""


def check_case(case: KernelCase, inputs: Inputs) -> tuple[str | None, float | None, int]:
    """What is wrong with our result (None: nothing), its largest error, and how many launches it took."""
    return compare(case, inputs, reference(case, inputs))


def reference(case: KernelCase, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """The results of the op in fp32."""
    with torch.no_grad():
        return _results(case.eager(*(_widened(value) for value in inputs)))


def compare(
    case: KernelCase, inputs: Inputs, expected: tuple[torch.Tensor, ...]
) -> tuple[str | None, float | None, int]:
    """As :func:`check_case`, with the reference at hand."""
    with torch.no_grad():
        before = LAUNCHES.total()
        actual = _results(case.ours(*inputs))
        launches = LAUNCHES.total() - before
    tolerance, largest = TOLERANCES[case.dtype], 0.0
    for ours, right in zip(actual, expected, strict=True):
        if not right.is_floating_point():
            if not torch.equal(ours, right):
                return f"chose {ours.tolist()} where the op in fp32 chooses {right.tolist()}", None, launches
            continue
        scale = right.abs() + right.square().mean().sqrt()
        error = float(((ours.float() - right).abs() / scale).max())
        if not error <= tolerance:  # a NaN fails too
            return (
                f"differs from the op in fp32 by {error:.2g} of a number's size where {tolerance:.2g} is allowed",
                rounded(error, 2) if math.isfinite(error) else None,
                launches,
            )
        largest = max(largest, rounded(error, 2))
    return None, largest, launches


def _widened(value: Any) -> Any:
    """A floating tensor in fp32, always a copy; anything else as it is."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(torch.float32, copy=True)
    return value


def _results(returned: Any) -> tuple[torch.Tensor, ...]:
    return returned if isinstance(returned, tuple) else (returned,)
