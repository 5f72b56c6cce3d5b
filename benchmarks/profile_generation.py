"""Where a decoded token's time goes: PyTorch's profiler over some steps of one phase. Introduced in phase 3.1.

Two answers to the same kind of prompt: one without the profiler, for the true time of a token, and one with it, for
what ran. On a GPU the table is of kernels, and the time in which no kernel ran is what the host cost; on a CPU it is of
PyTorch's operations. The Chrome trace shows every call on a time line.

Invariant: shares are of the time of a token measured without the profiler on a GPU, where kernels take the same time
either way; on a CPU, where the profiler slows every operation, of the operations' own sum.
"""

import statistics
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import generating_lessons
from benchmarks.generation.step_trace import Activity, StepTrace, TraceWindow, prepare_profiler
from benchmarks.kernels.names import short_name
from benchmarks.report import Report, describe_model, engine_settings, rounded
from benchmarks.timing import Run, Steps, SyntheticPrompts, run, torch_threads
from shared.checkpoints.progress import Progress
from shared.engine.config import EngineConfig
from shared.errors import ConfigError, RequestError
from shared.lessons import Lesson, newest_lesson
from shared.loading.config_json import read_config
from shared.loading.placement import check_device, default_dtype
from shared.loading.resolve import resolve_model
from shared.sampling.params import SamplingParams

LEAD = 3
"""Decoded tokens before the profiled steps."""


def measure_profile(
    model: str,
    *,
    phase: str | None = None,
    prompt_tokens: int | None = None,
    steps: int | None = None,
    trace: Path | None = None,
    seed: int = 0,
    dtype: str | None = None,
    device: str = "cpu",
    threads: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Profile ``steps`` decode steps behind ``prompt_tokens``; ``trace`` names a file for the Chrome trace.

    The defaults are 256 tokens and 16 steps on a GPU, 32 and 4 on a CPU; the phase is the newest of the main line.
    Raises ConfigError, RequestError or ModelFolderError before anything is computed.
    """
    target = check_device(device)
    is_gpu = target.type == "cuda"
    prompt_tokens = (256 if is_gpu else 32) if prompt_tokens is None else prompt_tokens
    steps = (16 if is_gpu else 4) if steps is None else steps
    (lesson,) = generating_lessons([newest_lesson().number if phase is None else phase])
    folder = resolve_model(model)
    shape = read_config(folder)
    new_tokens = LEAD + steps + 1
    _check(prompt_tokens, steps, seed, threads, prompt_tokens + new_tokens, shape.max_position_embeddings)
    if trace is not None:
        _check_writable(trace)
    config = EngineConfig(model=str(folder), dtype=dtype, device=device, max_seq_len=prompt_tokens + new_tokens)

    progress_steps = Steps(progress, 4)
    prompts = SyntheticPrompts(shape.vocab_size, seed)
    with torch_threads(threads):
        with progress_steps.step(f"phase {lesson.number}: load"):
            engine = lesson.engine_alone(config)
        with progress_steps.step("warm up"):
            run(engine, prompts.draw(prompt_tokens), new_tokens)
        with progress_steps.step("without the profiler"):
            plain = run(engine, prompts.draw(prompt_tokens), new_tokens)
        with progress_steps.step("with the profiler"):
            prepare_profiler(target)
            window = TraceWindow(LEAD, steps, target, with_host=True)
            params = SamplingParams(temperature=0.0, max_new_tokens=new_tokens, ignore_eos=True)
            with closing(engine.generate(prompts.draw(prompt_tokens), params)) as outputs:
                for _ in outputs:
                    if not window.token():
                        break
            if trace is not None:
                window.profiler.export_chrome_trace(str(trace))
        about = describe_model(model)
        return Report(
            name=f"profile-{lesson.number}",
            model=about,
            engines={lesson.number: engine_settings(config, about["name"])},
            seed=seed,
            flags={
                "phase": lesson.number,
                "prompt_tokens": prompt_tokens,
                "steps": steps,
                "dtype": str(config.torch_dtype or default_dtype(shape, target)).removeprefix("torch."),
                "device": device,
                "threads": torch.get_num_threads(),
                "is_demo_size": not is_gpu,
            },
            results={lesson.number: results(lesson, plain, window.result, is_gpu)},
            device=device,
        )


def results(lesson: Lesson, plain: Run, trace: StepTrace, is_gpu: bool) -> dict[str, Any]:
    """One token of the window: its time, who spent it, and the table."""
    intervals = plain.intervals[LEAD - 1 : LEAD - 1 + trace.steps]
    us_per_token = 1e6 * statistics.median(intervals)
    rows = merged((*trace.kernels, *trace.copies) if is_gpu else trace.operations)
    row_us = sum(row.microseconds for row in rows) / trace.steps
    whole = us_per_token if is_gpu else row_us
    return {
        "title": lesson.title,
        "us_per_token": rounded(us_per_token),
        "profiled_us_per_token": rounded(1e6 * trace.seconds / trace.steps),
        "kernel_us_per_token": rounded(trace.kernel_us_per_token) if is_gpu else None,
        "idle_us_per_token": rounded(max(0.0, us_per_token - trace.kernel_us_per_token)) if is_gpu else None,
        "host_us_per_token": rounded(trace.host_us_per_token),
        "kernels_per_token": rounded(_count(trace.kernels) / trace.steps) if is_gpu else None,
        "copies_per_token": rounded(_count(trace.copies) / trace.steps) if is_gpu else None,
        "host_launches_per_token": rounded(trace.host_launches / trace.steps) if is_gpu else None,
        "own_launches_per_token": rounded(trace.own_launches / trace.steps),
        "rows": [
            {
                "name": row.name,
                "count_per_token": rounded(row.count / trace.steps),
                "us_per_token": rounded(row.microseconds / trace.steps),
                "us_each": rounded(row.microseconds / row.count),
                "share": rounded(row.microseconds / trace.steps / whole) if whole else 0.0,
            }
            for row in rows
        ],
    }


def merged(activities: Iterable[Activity]) -> list[Activity]:
    """Activities of the same short name as one, the longest first."""
    found: dict[str, Activity] = {}
    for activity in activities:
        name = short_name(activity.name)
        before = found.get(name, Activity(name, 0, 0.0))
        found[name] = Activity(name, before.count + activity.count, before.microseconds + activity.microseconds)
    return sorted(found.values(), key=lambda activity: -activity.microseconds)


def _count(activities: Iterable[Activity]) -> int:
    return sum(activity.count for activity in activities)


def _check(prompt_tokens: int, steps: int, seed: int, threads: int | None, needed: int, longest: int) -> None:
    least = {
        "prompt_tokens": (prompt_tokens, 1),
        "steps": (steps, 1),
        "seed": (seed, 0),
        "threads": (1 if threads is None else threads, 1),
    }
    for name, (value, bound) in least.items():
        if value < bound:
            raise ConfigError(f"{name} is {value}; it must be at least {bound}.")
    if needed > longest:
        raise RequestError(
            f"prompt_tokens {prompt_tokens} and {needed - prompt_tokens} new ones make {needed}; this model holds "
            f"{longest} tokens of prompt and answer together, so ask for less."
        )


def _check_writable(path: Path) -> None:
    if path.is_dir() or not path.parent.is_dir() or not path.name.endswith((".json", ".json.gz")):
        raise ConfigError(
            f"The trace cannot go to {path}; name a file ending in .json.gz or .json in a folder that is there."
        )
