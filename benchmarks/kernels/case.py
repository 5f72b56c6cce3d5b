"""One measured case: inputs, our calls, and others that do the same. Introduced in phase 3.1.

Invariants: a call's result is checked, at the measured sizes and on the measured GPU, before it is timed; the reference
is the op in fp32 on the same inputs; ``num_bytes`` counts what any implementation must move, each input read once and
each result written once.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from benchmarks.hardware import Ceilings, device_of, measure_ceilings
from benchmarks.report import Report, ratio, rounded
from benchmarks.setup import check_least
from benchmarks.timing import Inputs, Steps, cache_bytes, num_input_sets, rotated_tensors, time_calls
from shared.checkpoints.progress import Progress
from shared.errors import ConfigError
from shared.kernels.launch import INTERPRETED, LAUNCHES

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Maximum error of a number, relative to its own magnitude plus the root mean square of all: a few roundings."""

Call = Callable[..., Any]


@dataclass(frozen=True)
class Drawn:
    """An input that differs between sets, by default normal numbers; with dtype None it has the case's dtype."""

    shape: tuple[int, ...]
    fill: Callable[[torch.Tensor], Any] = torch.Tensor.normal_
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Peer:
    """Another implementation: ``make`` gives its call, or raises; ``op`` gives the expected results, None for the
    case's op in the case's dtype.
    """

    make: Callable[[], Call]
    op: Call | None = None


@dataclass(frozen=True)
class Case:
    """The calls at one size, each with the same inputs and results as ``op``; ``size`` is the report's key; ``ours``
    has our calls by name; the first is the one that an engine uses.
    """

    kernel: str
    size: str
    shape: str  # for a reader
    num_bytes: int
    ceiling: Literal["read", "copy"]  # what it is measured against: does it read nearly everything it moves?
    ours: Mapping[str, Call]
    op: Call
    drawn: tuple[Drawn | None, ...]
    dtype: torch.dtype
    peers: Mapping[str, Peer] = field(default_factory=dict)
    details: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # further entries of the report for ``ours``

    @property
    def set_bytes(self) -> int:
        """Bytes of one set of inputs."""
        return sum(torch.Size(one.shape).numel() * (one.dtype or self.dtype).itemsize for one in self.drawn if one)

    def draw(self, num_sets: int, device: torch.device) -> list[Inputs]:
        """Fresh sets of inputs, from the device's default generator."""

        def column(one: Drawn | None) -> Sequence[Any]:
            described = one and (one.shape, one.dtype or self.dtype, device, one.fill)
            return rotated_tensors(num_sets, *described) if described else [None] * num_sets

        return list(zip(*map(column, self.drawn), strict=True))


def measure_cases(
    cases: Sequence[Case], peers: Sequence[str], device: str, seed: int, progress: Progress | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The ceilings, and a row for each case, measured one after another on inputs generated with ``seed``."""
    where = device_of(device)
    ceilings = measure_ceilings(device)
    steps, rows = Steps(progress, len(cases)), []
    torch.manual_seed(seed)
    for case in cases:
        with steps.step(f"{case.kernel} {case.size}"):
            rows.append(measure_case(case, where, ceilings, peers))
    return ceilings.results(), rows


def report_of(
    name: str, results: dict[str, Any], flags: dict[str, Any], device: str, seed: int, model: dict[str, Any]
) -> Report:
    """A report without an engine; ``flags`` besides those that every kernel benchmark has."""
    dtype = str(dtype_of(torch.device(device))).removeprefix("torch.")
    flags |= {"device": device, "dtype": dtype, "is_demo_size": not is_gpu(device)}
    return Report(name, model, {}, seed, flags, results, device)


def measure_case(case: Case, device: torch.device, ceilings: Ceilings, peers: Sequence[str]) -> dict[str, Any]:
    """The case's part of a report: our calls and the requested peers, checked and timed over the same inputs."""
    sets = case.draw(num_input_sets(case.set_bytes, cache_bytes(device)), device)
    floor = case.num_bytes / ceilings.bytes_per_second(case.ceiling)
    reference = functools.cache(lambda op: results_of(op, tuple(map(widened, sets[0]))))

    def measured(call: Call, op: Call | None) -> dict[str, Any]:
        row: dict[str, Any] = compare(call, sets[0], reference(op), case.dtype) if op else {"error": None}
        if row["error"] is not None:
            return row | {"time_us": None}
        seconds = time_calls(call, sets)
        return row | {
            "time_us": rounded(1e6 * seconds),
            "gb_per_second": rounded(case.num_bytes / seconds / 1e9),
            "share_of_ceiling": rounded(floor / seconds),
        }

    ours = {name: measured(call, case.op) | case.details.get(name, {}) for name, call in case.ours.items()}
    own_us = next(iter(ours.values()))["time_us"]
    others: dict[str, dict[str, Any]] = {}
    for name in peers:
        try:
            row = measured(case.peers[name].make(), case.peers[name].op) | {"missing": None}
        except Exception as error:  # what others cannot do is a result, not a failure
            said = next((line for line in str(error).splitlines() if line.strip()), "no message")
            row = {"error": None, "time_us": None, "missing": f"{type(error).__name__}: {said.strip()[:200]}"}
        others[name] = row | {"ours_over_peer": ratio(own_us, row["time_us"])}
    common = {"shape": case.shape, "bytes": case.num_bytes, "ceiling": case.ceiling, "floor_us": rounded(1e6 * floor)}
    return common | {"variants": ours, "peers": others}


def compare(call: Call, inputs: Inputs, expected: Sequence[torch.Tensor], dtype: torch.dtype) -> dict[str, Any]:
    """``error``: what is wrong with a call's results (None: nothing); and the number of its ``launches``."""
    before = LAUNCHES.total()
    actual, said = results_of(call, inputs), None
    launches = LAUNCHES.total() - before
    for found, right in zip(actual, expected, strict=True):
        if not right.is_floating_point():
            if not torch.equal(found, right):
                said = f"chose {found.tolist()} where the op in fp32 chooses {right.tolist()}"
            continue
        scale = right.abs() + right.square().mean().sqrt()
        error, allowed = float(((found.float() - right).abs() / scale).max()), TOLERANCES[dtype]
        if not error <= allowed:  # a NaN fails too
            said = f"differs from the op in fp32 by {error:.2g} of a number's size where {allowed:.2g} is allowed"
    return {"error": said, "launches": launches}


@torch.no_grad()
def results_of(call: Call, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    returned = call(*inputs)
    return returned if isinstance(returned, tuple) else (returned,)


def widened(value: Any) -> Any:
    """A floating tensor in fp32, always a copy, so that an op may write into it; anything else as it is."""
    is_floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(torch.float32, copy=True) if is_floating else value


def is_gpu(device: str) -> bool:
    """Whether real shapes are measured; without a GPU tiny ones are used."""
    return torch.device(device).type == "cuda"


def dtype_of(device: torch.device) -> torch.dtype:
    """The dtype of decoding there: bf16 on a GPU, fp32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def check_options(seed: int, **options: tuple[Sequence[str], Collection[str]]) -> None:
    """Raise ConfigError for an unknown value of an option, and under Triton's interpreter."""
    check_least(seed=(seed, 0))
    for option, (given, known) in options.items():
        for name in given:
            if name not in known:
                raise ConfigError(f"--{option} is {name!r}; it must be one of {', '.join(known)}.")
    if INTERPRETED:
        raise ConfigError("TRITON_INTERPRET is set, and the interpreter's times say nothing of a kernel's; unset it.")
