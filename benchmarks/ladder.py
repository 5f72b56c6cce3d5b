"""The ladder: how fast each phase decodes on this machine, and what a token costs as its context grows. Introduced in
phase 3.

Every phase answers the same synthetic prompts, greedily and past any end of sequence, inside one process. After a
warm-up the phases take turns, trial by trial, so that a busy moment of the machine hits them all; medians count.
Invariants: nothing is computed before every setting has been checked; no engine sees a prompt twice, so none can profit
from what an earlier run left in its memory.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.report import Report, describe_model, engine_settings, rounded
from benchmarks.timing import Run, Steps, SyntheticPrompts, rotated, run, torch_threads
from shared.checkpoints.progress import Progress
from shared.engine.config import DEFAULT_MAX_SEQ_LEN, EngineConfig
from shared.errors import CapacityError, ConfigError, RequestError
from shared.lessons import Lesson, find_lesson, lessons
from shared.loading.checkpoint import Checkpoint
from shared.loading.config_json import read_config
from shared.loading.placement import check_device, default_dtype
from shared.loading.resolve import resolve_model
from shared.models.config import ModelConfig


@dataclass(frozen=True)
class LadderSize:
    """How much is measured; ``context_lengths`` None means those of ``CONTEXT_LENGTHS`` that the model can hold."""

    prompt_tokens: int
    new_tokens: int
    trials: int
    context_lengths: tuple[int, ...] | None


CONTEXT_LENGTHS = (16, 32, 64, 128, 256, 512)
DEFAULT = LadderSize(prompt_tokens=64, new_tokens=16, trials=3, context_lengths=None)
QUICK = LadderSize(prompt_tokens=32, new_tokens=12, trials=1, context_lengths=())
POINT_TOKENS = 16
"""Most tokens that are timed for one point of the curve."""
MIN_POINT_TOKENS = 2
POINT_SECONDS = 0.5
"""A point is finished after this time, once it has ``MIN_POINT_TOKENS``."""
WARM_UP_TOKENS = 3


def measure_ladder(
    model: str,
    *,
    prompt_tokens: int = DEFAULT.prompt_tokens,
    new_tokens: int = DEFAULT.new_tokens,
    trials: int = DEFAULT.trials,
    phases: Sequence[str] | None = None,
    context_lengths: Sequence[int] | None = None,
    seed: int = 0,
    dtype: str | None = None,
    device: str = "cpu",
    threads: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Decode speed, time to first token, tokens computed, and milliseconds a token by context, of each phase.

    Args:
        model: a folder, a known name or a hub name.
        prompt_tokens, new_tokens: of each answer; at least 1 and 2 (speed needs an interval).
        phases: numbers of phases that generate; by default all there are.
        context_lengths: tokens before the first timed one, for the curve; by default those of ``CONTEXT_LENGTHS`` that
            the model can hold, and none for an empty sequence.
        seed: of the synthetic prompts, which are drawn uniformly from the vocabulary.
        threads: for PyTorch on a CPU while this runs; by default what is set.
        progress: called with (what is being done, steps done, steps in all).

    Raises:
        ConfigError, RequestError, ModelFolderError, CapacityError: before anything is computed.
    """
    rungs = _rungs(phases)
    folder = resolve_model(model)
    shape = read_config(folder)
    limit = shape.max_position_embeddings
    contexts = _contexts(context_lengths, limit)
    _check_counts(prompt_tokens, new_tokens, trials, seed, threads, limit)
    longest = max([prompt_tokens + new_tokens, *(length + POINT_TOKENS + 1 for length in contexts)])
    config = EngineConfig(
        model=str(folder), dtype=dtype, device=device, max_seq_len=longest if longest > DEFAULT_MAX_SEQ_LEN else None
    )
    _check_memory(folder, shape, config, rungs)

    steps = Steps(progress, len(rungs) * (2 + trials + len(contexts)))
    prompts = SyntheticPrompts(shape.vocab_size, seed)
    with torch_threads(threads):
        engines = {}
        for lesson in rungs:
            with steps.step(f"phase {lesson.number}: load"):
                engines[lesson.number] = lesson.engine_alone(config)
        warm_up = prompts.draw(prompt_tokens)
        for number, engine in engines.items():
            with steps.step(f"phase {number}: warm up"):
                run(engine, warm_up, min(new_tokens, WARM_UP_TOKENS))
        runs: dict[str, list[Run]] = {number: [] for number in engines}
        for trial in range(trials):
            prompt = prompts.draw(prompt_tokens)
            for number in rotated(tuple(engines), trial):
                with steps.step(f"phase {number}: trial {trial + 1} of {trials}"):
                    runs[number].append(run(engines[number], prompt, new_tokens))
        curve: dict[str, dict[int, Run]] = {number: {} for number in engines}
        for turn, length in enumerate(contexts):
            prompt = prompts.draw(length)
            for number in rotated(tuple(engines), turn):
                with steps.step(f"phase {number}: {length} tokens of context"):
                    point = run(engines[number], prompt, POINT_TOKENS + 1, MIN_POINT_TOKENS, POINT_SECONDS)
                    curve[number][length] = point

        about_model = describe_model(model)
        return Report(
            name="ladder",
            model=about_model,
            engines={number: engine_settings(engine.config, about_model["name"]) for number, engine in engines.items()},
            seed=seed,
            flags={
                "prompt_tokens": prompt_tokens,
                "new_tokens": new_tokens,
                "trials": trials,
                "contexts": list(contexts),
                "threads": torch.get_num_threads(),
                "dtype": config.dtype or str(_dtype(shape, config)).removeprefix("torch."),
                "device": device,
            },
            results=_results(rungs, runs, curve),
            device=device,
        )


def _results(
    rungs: Sequence[Lesson], runs: dict[str, list[Run]], curve: dict[str, dict[int, Run]]
) -> dict[str, dict[str, Any]]:
    results = {}
    first_rung = runs[rungs[0].number]
    base = statistics.median(run.decode_tokens_per_second for run in first_rung)
    for lesson in rungs:
        own = runs[lesson.number]
        speeds = [run.decode_tokens_per_second for run in own]
        points = curve[lesson.number]
        results[lesson.number] = {
            "title": lesson.title,
            "decode_tokens_per_second": rounded(statistics.median(speeds)),
            "decode_tokens_per_second_trials": [rounded(speed) for speed in speeds],
            "time_to_first_token_ms": rounded(1e3 * statistics.median(run.times[0] for run in own)),
            "tokens_computed": statistics.median_high(run.tokens_computed for run in own),
            "speedup": rounded(statistics.median(speeds) / base),
            "equal_output": [run.token_ids for run in own] == [run.token_ids for run in first_rung],
            "ms_per_token": {
                str(length): rounded(1e3 * statistics.median(point.intervals)) for length, point in points.items()
            },
            "tokens_timed": {str(length): len(point.intervals) for length, point in points.items()},
        }
    return results


def _rungs(phases: Sequence[str] | None) -> list[Lesson]:
    """The phases to measure, in their own order, each once; the default leaves out those that do not generate."""
    if phases is None:
        return [lesson for lesson in lessons() if lesson.generates]
    asked = {find_lesson(number).number for number in phases}
    rungs = [lesson for lesson in lessons() if lesson.number in asked]
    if not rungs:
        raise ConfigError("No phase was named; name at least one, or none at all to measure every phase.")
    for lesson in rungs:
        if not lesson.generates:
            able = ", ".join(other.number for other in lessons() if other.generates)
            raise ConfigError(f"Phase {lesson.number} generates no text and has no speed; phases that do: {able}.")
    return rungs


def _contexts(lengths: Sequence[int] | None, limit: int) -> tuple[int, ...]:
    longest = limit - POINT_TOKENS - 1
    if lengths is None:
        return tuple(length for length in CONTEXT_LENGTHS if length <= longest)
    for length in lengths:
        if length < 1:
            raise ConfigError(f"A context length is {length}; it must be at least 1.")
        if length > longest:
            raise RequestError(
                f"A context length is {length}; this model holds {limit} tokens and a point times up to "
                f"{POINT_TOKENS + 1} more, so ask for at most {longest}."
            )
    return tuple(sorted(set(lengths)))


def _check_counts(prompt_tokens: int, new_tokens: int, trials: int, seed: int, threads: int | None, limit: int) -> None:
    least = {
        "prompt_tokens": (prompt_tokens, 1),
        "new_tokens": (new_tokens, 2),
        "trials": (trials, 1),
        "seed": (seed, 0),
    }
    if threads is not None:
        least["threads"] = (threads, 1)
    for name, (value, bound) in least.items():
        if value < bound:
            raise ConfigError(f"{name} is {value}; it must be at least {bound}.")
    if prompt_tokens + new_tokens > limit:
        raise RequestError(
            f"prompt_tokens {prompt_tokens} and new_tokens {new_tokens} make {prompt_tokens + new_tokens}; this model "
            f"holds {limit} tokens of prompt and answer together, so ask for less."
        )


def _check_memory(folder: Path, shape: ModelConfig, config: EngineConfig, rungs: Sequence[Lesson]) -> None:
    """Taking turns needs every phase's engine, with its own weights, at once."""
    checkpoint = Checkpoint(folder)
    numbers = sum(torch.Size(checkpoint.shape(name)).numel() for name in checkpoint.names)
    needed = len(rungs) * numbers * _dtype(shape, config).itemsize
    device = check_device(config.device)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    if needed > free:
        raise CapacityError(
            f"{len(rungs)} engines with their own weights need {needed / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are "
            "free; name fewer phases with --phase, or a smaller model or dtype."
        )


def _dtype(shape: ModelConfig, config: EngineConfig) -> torch.dtype:
    return config.torch_dtype or default_dtype(shape, check_device(config.device))
