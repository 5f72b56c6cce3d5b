"""Every kernel at the real decode shapes of the development models, beside the memory's ceiling.

Introduced in phase 3.1. Decoding moves bytes, so each row says how many bytes must move, how long that would take at
the ceiling measured in the same run, and how long it took: our kernel, eager PyTorch, and ``torch.compile`` of the
eager code, all three by :mod:`benchmarks.device.graph_timing`. Without a GPU the tiny shapes stand in, and our
launchers call the ops.

    infer bench kernels

Invariant: nothing wrong is timed. Each case is first compared with the op in fp32 on the same inputs; one that differs
has an error and no time.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.device.graph_timing import TRIALS, Inputs, cache_bytes, num_input_sets, time_calls
from benchmarks.device.precompile import precompile
from benchmarks.hardware import Ceilings, device_of, measure_ceilings
from benchmarks.kernels.cases import KernelCase, ModelShapes, gated_case, norm_cases, projection_case
from benchmarks.kernels.check import check_case
from benchmarks.kernels.decode_cases import attention_case, kv_write_case, sampler_cases
from benchmarks.report import Report, rounded
from benchmarks.timing import Steps
from shared.checkpoints.progress import Progress
from shared.checkpoints.shapes import SHAPES
from shared.errors import CapacityError, ConfigError
from shared.kernels.launch import INTERPRETED
from shared.kernels.tiling import MAX_ROWS
from shared.loading.config_json import parse_config

MODELS = ("llama-3.2-1b", "qwen3-1.7b", "gemma-3-1b")
DEMO_SHAPES = {"llama-3.2-1b": "tiny-llama", "qwen3-1.7b": "tiny-qwen3", "gemma-3-1b": "tiny-gemma3"}
PROJECTIONS = ("qkv", "o", "gate_up", "down", "head")
KERNELS = (
    *PROJECTIONS,
    *("rms_norm", "add_rms_norm", "gated", "kv_write"),
    *("decode_attention", "decode_attention_windowed", "sampler_greedy", "sampler_drawn"),
)
ROWS = (1, 4, 8, 16)
CONTEXTS = (512, 4096, 16384)
DEMO_ROWS = (1, 4)
DEMO_CONTEXTS = (32, 256)
DEMO_TRIALS = 3
NOT_AT_DEMO_SIZE = "not asked for at demo size; --compile does it"


def measure_kernels(
    models: Sequence[str] = MODELS,
    *,
    device: str,
    kernels: Sequence[str] | None = None,
    rows: Sequence[int] | None = None,
    trials: int | None = None,
    compiles: bool | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Iterator[Report]:
    """Measure kernel by kernel; one report for each model, as soon as it is finished.

    Args:
        models: names of ``MODELS``; on a CPU the tiny shape of the same family is measured.
        device: ``cpu`` or ``cuda``.
        kernels: names of ``KERNELS``; None: all.
        rows: tokens or sequences a call, 1 to 16; None: ``ROWS``. Attention has one sequence, at ``CONTEXTS``.
        trials: replays of each graph, whose median counts (fewer of long ones); None: 9, at demo size 3.
        compiles: whether ``torch.compile`` is measured too; None: on a GPU.
        progress: called with (what is being done, cases done, cases in all).

    Raises:
        ConfigError, CapacityError: before anything is measured.
    """
    is_demo = torch.device(device).type != "cuda"
    trials = (DEMO_TRIALS if is_demo else TRIALS) if trials is None else trials
    check_options(models, kernels, rows, trials, seed)
    where = device_of(device)
    compiles = not is_demo if compiles is None else compiles
    chosen = tuple(kernels or KERNELS)
    sizes = tuple(rows or (DEMO_ROWS if is_demo else ROWS))
    names = [DEMO_SHAPES[model] if is_demo else model for model in dict.fromkeys(models)]
    torch.manual_seed(seed)
    ceilings = measure_ceilings(device)
    cases = {name: cases_of(name, where, chosen, sizes) for name in names}
    check_memory([case for of_model in cases.values() for case in of_model], where)
    steps = Steps(progress, sum(len(of_model) for of_model in cases.values()))
    for name, of_model in cases.items():
        if not is_demo:
            precompile([(case.ours, case.draw(1, where)[0]) for case in of_model])
        results: dict[str, dict[str, Any]] = {}
        for case in of_model:
            with steps.step(f"{name}: {case.kernel} {case.size}"):
                results.setdefault(case.kernel, {})[case.size] = measure_case(case, where, ceilings, trials, compiles)
        yield Report(
            name="kernels",
            model=describe_shape(name),
            engines={},
            seed=seed,
            flags={
                "kernels": [kernel for kernel in chosen if kernel in results],
                "rows": list(sizes),
                "trials": trials,
                "compile": compiles,
                "device": device,
                "dtype": str(dtype_of(where)).removeprefix("torch."),
                "is_demo_size": is_demo,
            },
            results={"ceilings": ceilings.results(), "kernels": results},
            device=device,
        )


def cases_of(model: str, device: torch.device, kernels: Sequence[str], rows: Sequence[int]) -> list[KernelCase]:
    """The cases of one model, a key of ``SHAPES``, in the order of ``KERNELS``."""
    shapes = ModelShapes(parse_config(SHAPES[model], model))
    dtype = dtype_of(device)
    cases: list[KernelCase] = []
    for count in rows:
        cases += [projection_case(shape, count, dtype) for shape in shapes.projections()]
        cases += norm_cases(shapes, count, dtype)
        cases += [gated_case(shapes, count, dtype), kv_write_case(shapes, count, dtype, device)]
        cases += sampler_cases(shapes, count, dtype, device)
    for window in dict.fromkeys((None, *shapes.config.windows)):
        for context in CONTEXTS if device.type == "cuda" else DEMO_CONTEXTS:
            if window is None or window < context:
                cases.append(attention_case(shapes, context, window, dtype, device))
    return sorted((case for case in cases if case.kernel in kernels), key=lambda case: KERNELS.index(case.kernel))


def dtype_of(device: torch.device) -> torch.dtype:
    """What decode computes in there: bf16 on a GPU, fp32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def measure_case(
    case: KernelCase, device: torch.device, ceilings: Ceilings, trials: int, compiles: bool
) -> dict[str, Any]:
    """One row of a report: ours checked, then all timed over the same inputs."""
    sets = case.draw(num_input_sets(case.set_bytes, cache_bytes(device)), device)
    error, largest_error, launches = check_case(case, sets[0])
    ceiling = ceilings.bytes_per_second(case.ceiling)
    floor = case.num_bytes / ceiling
    row: dict[str, Any] = {
        "shape": case.shape,
        "bytes": case.num_bytes,
        "ceiling": case.ceiling,
        "launches": launches,
        "floor_us": rounded(1e6 * floor),
        "predicted_us": rounded(1e6 * (floor + launches * (ceilings.launch_seconds_graph or 0.0))),
        "input_sets": len(sets),
        "largest_error": largest_error,
        "error": error,
        "time_us": None,
        "spread": None,
        "gb_per_second": None,
        "share_of_ceiling": None,
    }
    if error is None:
        timing = time_calls(case.ours, sets, trials=trials)
        row |= {
            "time_us": rounded(1e6 * timing.seconds),
            "spread": rounded(timing.spread, 2),
            "gb_per_second": rounded(case.num_bytes / timing.seconds / 1e9),
            "share_of_ceiling": rounded(floor / timing.seconds),
        }
    row["eager_us"], row["eager_missing"] = peer_time(lambda: case.eager, sets, trials)
    if compiles:
        row["compiled_us"], row["compiled_missing"] = peer_time(lambda: compiled(case.eager), sets, trials)
    else:
        missing = NOT_AT_DEMO_SIZE if device.type != "cuda" else "not asked for (--no-compile)"
        row["compiled_us"], row["compiled_missing"] = None, missing
    return row


def compiled(eager: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile`` of the eager code, whole and for these shapes; what was compiled before is forgotten, since
    PyTorch falls back to eager when one function has been compiled for too many shapes."""
    torch.compiler.reset()
    return torch.compile(eager, dynamic=False, fullgraph=True)


def peer_time(
    make: Callable[[], Callable[..., Any]], sets: Sequence[Inputs], trials: int
) -> tuple[float | None, str | None]:
    """Microseconds of a peer, or why there are none: what others cannot do is a finding, not a failure."""
    try:
        return rounded(1e6 * time_calls(make(), sets, trials=trials).seconds), None
    except Exception as error:
        said = next((line for line in str(error).splitlines() if line.strip()), "no message")
        return None, f"{type(error).__name__}: {said.strip()[:200]}"


def describe_shape(name: str) -> dict[str, Any]:
    """A report's description of a model that is a shape without weights."""
    config = SHAPES[name]
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    return {"name": name, "revision": None, "config_sha256": digest, "config": config}


def check_options(
    models: Sequence[str], kernels: Sequence[str] | None, rows: Sequence[int] | None, trials: int, seed: int
) -> None:
    """Raise ConfigError for what cannot be measured."""
    for kind, known, given in (("model", MODELS, models), ("kernel", KERNELS, kernels or ())):
        for name in given:
            if name not in known:
                raise ConfigError(f"--{kind} is {name!r}; it must be one of {', '.join(known)}.")
    for count in rows or ():
        if not 1 <= count <= MAX_ROWS:
            raise ConfigError(f"--rows has {count}; the small products take from 1 to {MAX_ROWS} rows.")
    if trials < 1:
        raise ConfigError(f"--trials is {trials}; it must be at least 1.")
    if seed < 0:
        raise ConfigError(f"--seed is {seed}; it must be at least 0.")
    if INTERPRETED:
        raise ConfigError("TRITON_INTERPRET is set, and the interpreter's times say nothing of a kernel's; unset it.")


def check_memory(cases: Sequence[KernelCase], device: torch.device) -> None:
    """Raise CapacityError if a case's inputs, and the same once more in fp32 for the check, do not fit the GPU."""
    if device.type != "cuda":
        return
    free, cache = torch.cuda.mem_get_info(device)[0], cache_bytes(device)
    for case in cases:
        needed = case.set_bytes * (num_input_sets(case.set_bytes, cache) + 4)
        if needed > free:
            raise CapacityError(
                f"{case.kernel} at {case.size} ({case.shape}) takes {needed / 2**30:.1f} GiB to measure and "
                f"{free / 2**30:.1f} GiB of the GPU's memory are free; leave it out with --kernel or --model."
            )
