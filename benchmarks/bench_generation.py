"""One request alone (W1): each phase beside transformers, measured against the limit of the memory.

Introduced in phase 3.1. Prompt 256, answer 256, greedy, past any end of sequence. All contenders live in one process
and take turns, trial by trial; medians count. Afterwards each answers once more with the profiler on some steps in the
middle. Beside every speed stands its share of the limit: the bytes that a token must read (weights, keys and values at
the answer's mean context) over the bandwidth that was measured in the same run.

Invariants: nothing is computed before every setting has been checked; no contender sees a prompt twice.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch

from benchmarks.contenders import Contender, answer_and_peak, generating_lessons, load_engine, load_transformers
from benchmarks.generation.results import figures, limit, ratios
from benchmarks.generation.step_trace import StepTrace, TraceWindow, prepare_profiler
from benchmarks.report import Report, describe_model, engine_settings
from benchmarks.roofline import DecodeWork
from benchmarks.timing import Run, Steps, SyntheticPrompts, rotated, torch_threads
from shared.checkpoints.progress import Progress
from shared.engine.config import EngineConfig
from shared.errors import CapacityError, ConfigError, RequestError
from shared.lessons import newest_lesson
from shared.loading.config_json import read_config
from shared.loading.placement import check_device, default_dtype
from shared.loading.resolve import resolve_model


@dataclass(frozen=True)
class GenerationSize:
    """How much is measured; ``window`` decode steps in the middle of an answer are traced."""

    prompt_tokens: int
    new_tokens: int
    trials: int
    window: int


W1 = GenerationSize(prompt_tokens=256, new_tokens=256, trials=3, window=16)
DEMO = GenerationSize(prompt_tokens=32, new_tokens=16, trials=3, window=4)
"""Without a GPU: the same measurement in a minute, with the demo model."""
ANSWER_SECONDS = 15.0
"""An answer breaks off after so much decoding; phase 2, which computes everything anew for each token, may need it."""
WARM_UPS = {"transformers_compiled": 3}
"""Answers before the first trial: one to compile, two to record the CUDA graph and replay it; anyone else needs one."""


def default_size(device: str) -> GenerationSize:
    return W1 if torch.device(device).type == "cuda" else DEMO


def default_phases() -> list[str]:
    """The uncached loop, the cached one, and the newest phase of the main line."""
    return list(dict.fromkeys(["02", "03", newest_lesson().number]))


def measure_generation(
    model: str,
    *,
    phases: Sequence[str] | None = None,
    size: GenerationSize | None = None,
    with_transformers: bool = True,
    with_compiled: bool | None = None,
    seed: int = 0,
    dtype: str | None = None,
    device: str = "cpu",
    threads: int | None = None,
    max_seconds: float = ANSWER_SECONDS,
    ceilings: Any = None,
    progress: Progress | None = None,
) -> Report:
    """Speed, share of the limit, work on the device and memory of each contender.

    Args:
        model: a folder, a known name or a hub name.
        phases: numbers of phases that generate; by default those of `default_phases`.
        size: by default W1 on a GPU and the demo size on a CPU.
        with_compiled: transformers' compiled way too; by default where there is a GPU, and nowhere else possible.
        ceilings: what `benchmarks.hardware.measure_ceilings` gives; by default it is called, in this process.

    Raises:
        ConfigError, RequestError, ModelFolderError, CapacityError: before anything is computed.
    """
    target = check_device(device)
    size = size or default_size(device)
    rungs = generating_lessons(default_phases() if phases is None else phases)
    folder = resolve_model(model)
    shape = read_config(folder)
    _check_size(size, seed, threads, max_seconds, shape.max_position_embeddings)
    ways = _ways(with_transformers, with_compiled, target)
    config = EngineConfig(
        model=str(folder), dtype=dtype, device=device, max_seq_len=size.prompt_tokens + size.new_tokens
    )
    work = DecodeWork(shape, config.torch_dtype or default_dtype(shape, target))
    _check_memory(work, len(rungs) + bool(ways), target)

    names = [lesson.number for lesson in rungs] + [f"transformers_{way}" for way in ways]
    steps = Steps(progress, 1 + len(rungs) + bool(ways) + len(names) * (2 + size.trials))
    prompts = SyntheticPrompts(shape.vocab_size, seed)
    with torch_threads(threads):
        with steps.step("the machine's ceilings"):
            ceilings = ceilings or _measure_ceilings(device)
        contenders: dict[str, Contender] = {}
        for lesson in rungs:
            with steps.step(f"phase {lesson.number}: load"):
                contenders[lesson.number] = load_engine(lesson, config, max_seconds)
        if ways:
            with steps.step("transformers: load"):
                peers = load_transformers(folder, work.dtype, device, ways, max_seconds)
                contenders |= {peer.name: peer for peer in peers}
        for name, contender in contenders.items():
            with steps.step(f"{name}: warm up"):
                for _ in range(WARM_UPS.get(name, 1)):
                    contender.answer(prompts.draw(size.prompt_tokens), size.new_tokens)
        runs: dict[str, list[Run]] = {name: [] for name in contenders}
        for trial in range(size.trials):
            prompt = prompts.draw(size.prompt_tokens)
            for name in rotated(names, trial):
                with steps.step(f"{name}: trial {trial + 1} of {size.trials}"):
                    runs[name].append(answer_and_peak(contenders[name], prompt, size.new_tokens, device))
        traces = {}
        for name, contender in contenders.items():
            with steps.step(f"{name}: profile"):
                traces[name] = _trace(contender, prompts.draw(size.prompt_tokens), size, target)

        about = describe_model(model)
        return Report(
            name="generation",
            model=about,
            engines={name: _settings(contender, about["name"]) for name, contender in contenders.items()},
            seed=seed,
            flags=asdict(size)
            | {
                "contenders": names,
                "dtype": str(work.dtype).removeprefix("torch."),
                "device": device,
                "threads": torch.get_num_threads(),
                "is_demo_size": target.type != "cuda",
            },
            results={
                name: figures(contender, runs[name], runs[names[0]], traces[name], work, size.prompt_tokens, ceilings)
                for name, contender in contenders.items()
            }
            | {
                "ratios": ratios(runs),
                "limit": limit(work, size.prompt_tokens, size.new_tokens, ceilings),
                "ceilings": ceilings.results(),
            },
            device=device,
        )


def _trace(contender: Contender, prompt: list[int], size: GenerationSize, device: torch.device) -> StepTrace:
    """The work of the window's steps, which lie in the middle of the answer."""
    prepare_profiler(device)
    first = max(1, (size.new_tokens - size.window) // 2)
    window = TraceWindow(first, min(size.window, size.new_tokens - first), device)
    contender.trace(prompt, size.new_tokens, window)
    return window.result


def _settings(contender: Contender, model_name: str) -> dict[str, Any]:
    config = contender.settings.get("config")
    return contender.settings if config is None else engine_settings(config, model_name)


def _measure_ceilings(device: str) -> Any:
    from benchmarks.hardware import measure_ceilings

    return measure_ceilings(device)


def _ways(with_transformers: bool, with_compiled: bool | None, device: torch.device) -> tuple[str, ...]:
    if with_compiled and device.type != "cuda":
        raise ConfigError(
            "transformers compiles its decode step on a GPU alone and the device is cpu; leave --compiled away, or "
            "choose --device cuda."
        )
    if not with_transformers:
        return ()
    return ("eager", "compiled") if with_compiled is not False and device.type == "cuda" else ("eager",)


def _check_size(size: GenerationSize, seed: int, threads: int | None, max_seconds: float, longest: int) -> None:
    least = {
        "prompt_tokens": (size.prompt_tokens, 1),
        "new_tokens": (size.new_tokens, 3),
        "trials": (size.trials, 1),
        "window": (size.window, 1),
        "seed": (seed, 0),
        "threads": (1 if threads is None else threads, 1),
    }
    for name, (value, bound) in least.items():
        if value < bound:
            raise ConfigError(f"{name} is {value}; it must be at least {bound}.")
    if not max_seconds > 0:
        raise ConfigError(f"max_seconds is {max_seconds}; it must be positive.")
    if size.prompt_tokens + size.new_tokens > longest:
        raise RequestError(
            f"prompt_tokens {size.prompt_tokens} and new_tokens {size.new_tokens} make "
            f"{size.prompt_tokens + size.new_tokens}; this model holds {longest} tokens of prompt and answer together, "
            "so ask for less."
        )


def _check_memory(work: DecodeWork, num_copies: int, device: torch.device) -> None:
    """Taking turns needs every contender, with its own weights, at once."""
    needed = num_copies * work.resident_bytes
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    if needed > free:
        raise CapacityError(
            f"{num_copies} contenders with their own weights need {needed / 2**30:.1f} GiB and {free / 2**30:.1f} GiB "
            "are free; name fewer phases with --phase, leave transformers away with --no-transformers, or take a "
            "smaller model or dtype."
        )
