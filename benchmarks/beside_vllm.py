"""This engine and vLLM on the same work, through the ``LLM.generate`` of each. Introduced in phase 9.

Each engine has a process of its own and a part of the GPU's memory, so both stay loaded. Only one computes at a time:
they take turns, trial by trial, so that neither gains from a change of the GPU's clock or of the host's load. Weights
are random and made in memory, prompts are random ids, and decoding is greedy. Both KV caches have room for as many
tokens, prefixes are cached only where the work says so, and garbage collections skip objects that exist when an engine
is ready. Everything else is as each engine chooses it. (`infer bench serving` has vLLM as a contender too, under a load
of requests that arrive one by one, and without its ``LLM.generate``.)

    python -m benchmarks.beside_vllm --work llama-3.2-1b qwen3-8b --out benchmarks/reports

Invariant: both engines get the same prompts in the same order, and no prompt twice.
"""

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.command import run
from benchmarks.decoding import decoding
from benchmarks.host_parts import loop_ns
from benchmarks.random_weights import make_weights_when_read, random_model
from benchmarks.report import Report, rounded
from benchmarks.serving.vllm_peer import ENVIRONMENT, settings_of
from benchmarks.setup import freeze_memory
from benchmarks.timing import SyntheticPrompts, in_turns
from benchmarks.view import View, table_of, times
from shared.cache.view.contiguous import kv_bytes
from shared.checkpoints.shapes import SHAPES
from shared.errors import ConfigError
from shared.loading.config_json import read_config

BLOCK_SIZE = 16
Generate = Callable[[Sequence[list[int]], int], float]
"""Seconds in which an engine answers these prompts, each with so many tokens."""
Draw = Callable[[int], list[int]]


class Figure(Protocol):
    """Something to measure, in its unit; of milliseconds fewer are better, of tokens/s more."""

    @property
    def unit(self) -> str: ...

    def trial(self, generate: Generate, draw: Draw) -> float: ...


@dataclass(frozen=True)
class First:
    """The first token of a prompt, of which the first ``cached`` tokens are in the cache."""

    length: int
    cached: int = 0
    unit: str = "ms"

    def trial(self, generate: Generate, draw: Draw) -> float:
        prefix = draw(self.cached)
        if prefix:
            generate([prefix + draw(1)], 1)
        return 1e3 * generate([prefix + draw(self.length - self.cached)], 1)


@dataclass(frozen=True)
class Prompts:
    """Prompt tokens a second, until each of ``count`` prompts has its first token."""

    count: int
    length: int
    unit: str = "tokens/s"

    def trial(self, generate: Generate, draw: Draw) -> float:
        return self.count * self.length / generate([draw(self.length) for _ in range(self.count)], 1)


@dataclass(frozen=True)
class Decoded:
    """Tokens a second of ``count`` sequences that decode together: the first token of each does not count."""

    count: int
    length: int = 256
    new_tokens: int = 128
    unit: str = "tokens/s"

    def trial(self, generate: Generate, draw: Draw) -> float:
        first, whole = (
            generate([draw(self.length) for _ in range(self.count)], num_new) for num_new in (1, self.new_tokens)
        )
        return self.count * (self.new_tokens - 1) / (whole - first)


@dataclass(frozen=True)
class Answered:
    """Output tokens a second of ``count`` requests that come together, their prompts included."""

    count: int
    length: int = 128
    new_tokens: int = 128
    unit: str = "tokens/s"

    def trial(self, generate: Generate, draw: Draw) -> float:
        return self.count * self.new_tokens / generate([draw(self.length) for _ in range(self.count)], self.new_tokens)


@dataclass(frozen=True)
class Work:
    """What both engines do with one model. ``kv_tokens``: tokens for which each engine has memory."""

    shape: str
    max_batch_size: int
    max_seq_len: int
    kv_tokens: int
    figures: Mapping[str, Figure]
    quantization: str | None = None
    caches_prefixes: bool = False


OF_8B: dict[str, Figure] = {
    "first_token_8192": First(8192),
    "prompts_4x2048": Prompts(4, 2048),
    "decoding_1": Decoded(1),
    "decoding_16": Decoded(16),
    "answers_512": Answered(512),
}
WORK = {
    "llama-3.2-1b": Work(
        "llama-3.2-1b",
        max_batch_size=128,
        max_seq_len=16_384,
        kv_tokens=131_072,
        figures={
            "first_token_8224": First(8224),
            "first_token_8192_cached": First(8224, cached=8192),
            "prompts_16x512": Prompts(16, 512),
            "decoding_1": Decoded(1),
            "decoding_128": Decoded(128),
        },
        caches_prefixes=True,
    ),
    "qwen3-8b": Work("qwen3-8b", 512, 16_384, 147_456, OF_8B),
    "qwen3-8b-fp8": Work("qwen3-8b", 512, 16_384, 147_456, OF_8B, quantization="fp8"),
    "tiny-llama": Work(
        "tiny-llama",
        max_batch_size=4,
        max_seq_len=128,
        kv_tokens=512,
        figures={
            "first_token_cached": First(49, cached=48),
            "prompts_2x8": Prompts(2, 8),
            "answers_4": Answered(4, 8, 2),
        },
        caches_prefixes=True,
    ),
}


def ours(work: Work, folder: Path, device: str) -> Generate:
    """The newest engine, warmed up."""
    from shared.engine.llm import LLM
    from shared.engine.warm_up import warm_up

    make_weights_when_read()
    llm = LLM(
        str(folder),
        device=device,
        max_batch_size=work.max_batch_size,
        max_seq_len=work.max_seq_len,
        num_gpu_blocks=work.kv_tokens // BLOCK_SIZE,
        use_prefix_caching=work.caches_prefixes,
        quantization=work.quantization,
    )
    warm_up(llm.engine)
    return lambda prompts, num_new: seconds(llm.generate, prompts, decoding(num_new), progress=False)


def vllm(work: Work, folder: Path, device: str) -> Generate:
    """vLLM, whose engine runs in the process that calls it. Raises ConfigError if it cannot be imported."""
    os.environ |= ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    try:
        from vllm import LLM, SamplingParams
    except ImportError as error:
        raise ConfigError(f"vLLM cannot be imported ({error}); install vllm==0.26.0, or name its folder.") from error
    num_bytes = kv_bytes(read_config(folder), work.kv_tokens, torch.bfloat16)
    settings = settings_of(torch.bfloat16, work.max_seq_len, work.max_batch_size, num_bytes)
    settings |= {"load_format": "dummy", "enable_prefix_caching": work.caches_prefixes}
    llm = LLM(model=str(folder), quantization=work.quantization, **settings)

    def generate(prompts: Sequence[list[int]], num_new: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return seconds(llm.generate, asked, params, use_tqdm=False)

    return generate


Make = Callable[[Work, Path, str], Generate]
"""Loads an engine with a model folder on a device."""
ENGINES: dict[str, Make] = {"ours": ours, "vllm": vllm}
MOST_SECONDS = 60  # for an engine's process to end


def seconds(call: Callable[..., Any], *arguments: Any, **options: Any) -> float:
    started = time.perf_counter()
    call(*arguments, **options)
    return time.perf_counter() - started


def serve(connection: Connection, make: Make, work: Work, folder: Path, device: str) -> None:
    """An engine's process: when ready it sends the host's speed and vLLM's version, and then answers until it gets
    None. If the engine does not start, it sends the error."""
    try:
        generate = make(work, folder, device)
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
        raise
    freeze_memory()
    connection.send((loop_ns(), getattr(sys.modules.get("vllm"), "__version__", None)))
    while (asked := connection.recv()) is not None:
        connection.send(generate(*asked))


@contextmanager
def in_a_process(name: str, path: str | None, *arguments: Any) -> Iterator[tuple[Generate, tuple[float, str | None]]]:
    """An engine in a process of its own, and what it sent when ready.

    Args:
        path: a folder that comes first where the process looks for packages.
        arguments: further ones of :func:`serve`.

    Raises ConfigError if the engine does not start, and RuntimeError if its process ends early.
    """
    spawn = multiprocessing.get_context("spawn")
    connection, its_end = spawn.Pipe()
    process = spawn.Process(target=serve, args=(its_end, *arguments))
    with first_on_path(path):
        process.start()
    its_end.close()

    def received() -> Any:
        try:
            return connection.recv()
        except EOFError:
            process.join()
            raise RuntimeError(f"The process of the engine {name!r} ended with {process.exitcode}.") from None

    def generate(prompts: Sequence[list[int]], num_new: int) -> float:
        connection.send((prompts, num_new))
        answer: float = received()
        return answer

    try:
        ready = received()
        if isinstance(ready, str):
            raise ConfigError(f"The engine {name!r} does not start: {ready}")
        yield generate, ready
        connection.send(None)
        process.join(MOST_SECONDS)
    finally:
        process.kill()
        process.join()


@contextmanager
def first_on_path(path: str | None) -> Iterator[None]:
    """Processes that are started in this block look for packages in ``path`` first, and so do their own processes."""
    packages, variable = list(sys.path), os.environ.get("PYTHONPATH")
    if path is not None:
        sys.path.insert(0, path)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (path, variable)))
    try:
        yield
    finally:
        sys.path[:] = packages
        os.environ.pop("PYTHONPATH", None)
        os.environ |= {} if variable is None else {"PYTHONPATH": variable}


def measure(
    work: tuple[str, ...] = ("llama-3.2-1b", "qwen3-8b", "qwen3-8b-fp8"),
    trials: int = 5,
    vllm_path: str | None = None,
    device: str = "cuda",
) -> Report:
    """Measure both engines, in turns, after a trial that does not count.

    A figure is the median of the trials, and the best one stands beside it. ``vllm_path``: a folder with vLLM and what
    it needs, unless it is installed. Works are printed as they end, since each takes a minute or two.
    """
    if unknown := [name for name in work if name not in WORK]:
        raise ConfigError(f"There is no work {unknown[0]!r}; there are {', '.join(WORK)}.")
    flags: dict[str, Any] = {"vllm": None, "work": {}}
    results: dict[str, Any] = {"loop_ns": {}}
    for name in work:
        found, ready = measure_work(WORK[name], trials, device, vllm_path)
        results[name] = found
        results["loop_ns"][name] = {engine: host for engine, (host, _) in ready.items()}
        flags["vllm"] = ready["vllm"][1]
        flags["work"][name] = asdict(WORK[name]) | {"trials": trials}
        print(name, results["loop_ns"][name], found, flush=True)
    return Report("beside-vllm", {}, {}, 0, flags, results, device)


def measure_work(
    work: Work, trials: int, device: str, path: str | None, engines: Mapping[str, Make] = ENGINES
) -> tuple[dict[str, dict[str, Any]], dict[str, tuple[float, str | None]]]:
    """The figures, and what each engine sent when ready."""
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = random_model(work.shape, Path(temporary), device)
        running = {
            name: stack.enter_context(in_a_process(name, path if name == "vllm" else None, make, work, folder, device))
            for name, make in engines.items()
        }
        prompts = {name: SyntheticPrompts(SHAPES[work.shape]["vocab_size"], 0) for name in engines}
        found = {}
        for name, figure in work.figures.items():
            calls = {
                engine: partial(figure.trial, generate, prompts[engine].draw)
                for engine, (generate, _) in running.items()
            }
            found[name] = row(figure.unit, **in_turns(calls, trials, warm_ups=1))
        return found, {name: ready for name, (_, ready) in running.items()}


def row(unit: str, ours: Sequence[float], vllm: Sequence[float]) -> dict[str, Any]:
    """The median and the best trial of each; ``ahead``: how many times as fast ours is."""
    is_time = unit == "ms"
    figures: dict[str, Any] = {"unit": unit}
    for prefix, of in (("", statistics.median), ("best_", min if is_time else max)):
        mine, theirs = of(ours), of(vllm)
        ahead = theirs / mine if is_time else mine / theirs
        figures |= {f"{prefix}ours": rounded(mine), f"{prefix}vllm": rounded(theirs), f"{prefix}ahead": rounded(ahead)}
    return figures | {"ours_trials": [rounded(one) for one in ours], "vllm_trials": [rounded(one) for one in vllm]}


def view(report: Report) -> View:
    """A table for each work."""
    flags, tables = report.flags, []
    for name, work in flags["work"].items():
        loop = report.results["loop_ns"].get(name)
        host = f", an addition in Python took {loop['ours']} and {loop['vllm']} ns" if loop else ""
        heading = f"{name}: {work['trials']} trials in turns{host}"
        tables.append(table_of(heading, "work", report.results[name], unit=str, ahead=times, best_ahead=times))
    subtitles = [f"{report.machine_title}; {report.date[:10]}", "medians, and the best trial of each"]
    return View(f"Beside vLLM {flags['vllm']}: LLM.generate", subtitles, tables)


if __name__ == "__main__":
    run(measure, view, __doc__)
