"""The matrix: every phase that generates, in every configuration that is its own, on W1, W2 and W3. Introduced in
phase 4.

A row is a phase with its defaults, or with one value of a setting that arrived in that phase, or with what its own
default took the place of; a column is a workload; a cell the throughput. Beside it stand the gain over the first row,
the plain loop, and over the row of the phase before. A phase that answers one request at a time serves one after
another, as a queue in front of it would. Invariants: every cell of a column served the same trace; a configuration
differs from its phase's defaults in one optimization and in what that needs.
"""

import gc
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from benchmarks.bench_serving import default_size
from benchmarks.contenders import generating_lessons, is_cuda
from benchmarks.report import Report, describe_model, engine_settings
from benchmarks.serving.contenders import load_server
from benchmarks.serving.lineup import serves_many
from benchmarks.serving.results import ratio
from benchmarks.timing import Steps, torch_threads
from benchmarks.workloads.serving import ServingSize, make_trace
from shared.checkpoints.progress import Progress
from shared.engine.config import NEEDS, EngineConfig
from shared.errors import ConfigError, RequestError
from shared.lessons import Lesson, lessons
from shared.loading.config_json import read_config
from shared.loading.placement import check_device, default_dtype
from shared.loading.resolve import resolve_model

OPTIMIZATIONS: dict[str, tuple[Any, ...]] = {
    "scheduler_policy": ("prefill_first", "decode_round_robin"),
    "use_chunked_prefill": (True,),
    "use_prefix_caching": (True,),
    "use_cuda_graphs": (True,),
    "quantization": ("fp8", "int8"),
}
"""Settings whose other values make a row, in the phase that brings them."""
REPLACED: dict[str, dict[Any, Any]] = {
    "kv_cache_backend": {"paged": "contiguous"},
    "attention_backend": {"planned": "flash"},
}
"""Values that are the default of the phase that brings them, and what they took the place of: the phase without them.

The first phase with kernels of its own has no such row: without them it is the phase before.
"""
GPU_ONLY = ("attention_backend",)
"""Settings that make no difference on a CPU."""
CELL_SECONDS = 20.0
"""A cell breaks off after so long; its throughput is that of what it did."""


@dataclass(frozen=True)
class Configuration:
    """A row: a phase, and the settings that differ from its defaults."""

    lesson: Lesson
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        """Such as ``05`` and ``05 scheduler_policy=prefill_first``."""
        return " ".join([self.lesson.number, *(f"{field}={value}" for field, value in self.settings.items())])


def configurations(found: Sequence[Lesson], device: str = "cuda") -> list[Configuration]:
    """The rows of these phases, each phase's defaults first; on a CPU without those that make no difference there."""
    rows = []
    phases: list[tuple[str, Any, str]] = []  # setting, value, the phase in which that is a row
    for field in fields(EngineConfig):
        if field.name in GPU_ONLY and not is_cuda(device):
            continue
        came = field.metadata["values"]
        phases += [
            (field.name, value, came.get(value, field.metadata["phase"])) for value in OPTIMIZATIONS.get(field.name, ())
        ]
        phases += [(field.name, before, came[value]) for value, before in REPLACED.get(field.name, {}).items()]
    for lesson in found:
        rows.append(Configuration(lesson, {}))
        for name, value, number in phases:
            if number == lesson.number:
                needed = dict([NEEDS[name]]) if name in NEEDS else {}
                rows.append(Configuration(lesson, needed | {name: value}))
    return rows


def run_matrix(
    model: str,
    *,
    phases: Sequence[str] | None = None,
    size: ServingSize | None = None,
    max_seconds: float = CELL_SECONDS,
    seed: int = 0,
    dtype: str | None = None,
    device: str = "cpu",
    threads: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Measure every configuration on every workload, one engine after another.

    Args:
        phases: numbers; by default all of the main line that generate.
        max_seconds: of a cell.

    Raises:
        ConfigError, RequestError, ModelFolderError: before anything is computed.
    """
    target = check_device(device)
    size = size or default_size(device)
    able = [lesson.number for lesson in lessons() if lesson.generates and not lesson.is_side_track]
    rows = configurations(generating_lessons(able if phases is None else phases), device)
    folder = resolve_model(model)
    shape = read_config(folder)
    longest = max(workload.longest for workload in size.workloads.values())
    _check(seed, threads, max_seconds, longest, shape.max_position_embeddings)
    base = EngineConfig(model=str(folder), dtype=dtype, device=device, max_seq_len=longest)
    traces = {name: make_trace(workload, shape.vocab_size, seed) for name, workload in size.workloads.items()}
    steps = Steps(progress, len(rows) * (1 + len(traces)))
    results: dict[str, Any] = {}
    engines: dict[str, Any] = {}
    about = describe_model(model)
    with torch_threads(threads):
        for row in rows:
            with steps.step(f"{row.name}: load"):
                settings = row.settings | ({"max_batch_size": size.max_batch_size} if serves_many(row.lesson) else {})
                title = f"{row.lesson.number} {row.lesson.title}"
                server = load_server(row.name, title, row.lesson.engine, base, **settings)
            engines[row.name] = engine_settings(server.config, about["name"])
            results[row.name] = {"title": title, "phase": row.lesson.number, "settings": row.settings}
            for name, trace in traces.items():
                with steps.step(f"{row.name}: {size.workloads[name].title}"):
                    results[row.name][name] = server.measure(trace, max_seconds)[1]
            del server
            gc.collect()
            if is_cuda(device):
                torch.cuda.empty_cache()
        add_gains(results, {lesson.number: lesson.previous for lesson in lessons()}, list(traces))
        return Report(
            name="matrix",
            model=about,
            engines=engines,
            seed=seed,
            flags={
                "configurations": [row.name for row in rows],
                "max_batch_size": size.max_batch_size,
                "max_seconds": max_seconds,
                "workloads": {
                    workload.name: asdict(workload) | {"about": workload.describe()}
                    for workload in size.workloads.values()
                },
                "dtype": base.dtype or str(default_dtype(shape, target)).removeprefix("torch."),
                "device": device,
                "threads": torch.get_num_threads(),
                "is_demo_size": target.type != "cuda",
            },
            results=results,
            device=device,
        )


def add_gains(results: dict[str, Any], previous: dict[str, str | None], workloads: Sequence[str]) -> None:
    """Put into each cell its gain over the first row's, and over the one of the phase before, in its defaults.

    Where the phase before was not measured, the one before that counts; a phase's other configurations are compared
    with the same row as its defaults.
    """
    first = next(iter(results.values()))
    for result in results.values():
        before = previous[result["phase"]]
        while before is not None and before not in results:
            before = previous[before]
        for name in workloads:
            speed = result[name]["output_tokens_per_second"]
            result[name]["gain_over_first"] = ratio(speed, first[name]["output_tokens_per_second"])
            result[name]["gain_over_previous"] = (
                None if before is None else ratio(speed, results[before][name]["output_tokens_per_second"])
            )


def _check(seed: int, threads: int | None, max_seconds: float, longest: int, limit: int) -> None:
    if seed < 0:
        raise ConfigError(f"seed is {seed}; it must be at least 0.")
    if threads is not None and threads < 1:
        raise ConfigError(f"threads is {threads}; it must be at least 1.")
    if not max_seconds > 0:
        raise ConfigError(f"max_seconds is {max_seconds}; it must be positive.")
    if longest > limit:
        raise RequestError(
            f"The workloads have requests of up to {longest} tokens, prompt and answer together, and this model holds "
            f"{limit}; choose another model."
        )
