"""Serving under load: batching and its policies beside one request after another, over HTTP and without.

Introduced in phase 4. The experiments are those of :mod:`benchmarks.serving.experiments`; on a GPU at full size, and
without one at demo size, which the report's head says. Invariants: nothing is computed before every setting has been
checked; whoever is compared serves the same traces in the same run.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.report import Report, describe_model, engine_settings
from benchmarks.roofline import DecodeWork
from benchmarks.serving.choice import check_memory, chosen, chosen_experiments, kv_tokens, used_workloads
from benchmarks.serving.contenders import Servers, warm_up_trace
from benchmarks.serving.experiment_bench import Bench, http_batch
from benchmarks.serving.experiments import OVER_HTTP, RUN, num_steps
from benchmarks.serving.lineup import lineup
from benchmarks.serving.memory import check_sizes
from benchmarks.serving.served_process import ServedProcess, check_can_serve, served
from benchmarks.timing import Steps, torch_threads
from benchmarks.workloads.serving import DEMO, FULL, LARGE, ServingSize
from shared.checkpoints.progress import Progress
from shared.engine.config import EngineConfig
from shared.errors import ConfigError, RequestError
from shared.loading.config_json import read_config
from shared.loading.placement import check_device, default_dtype
from shared.loading.resolve import resolve_model

WAYS = ("engine", "http")


def default_size(device: str, is_large: bool = False) -> ServingSize:
    """Full size on a GPU, otherwise the demo size; ``is_large`` raises W2 to 64 at a time, on a GPU alone."""
    if torch.device(device).type == "cuda":
        return LARGE if is_large else FULL
    if is_large:
        raise ConfigError("--large opens 64 long requests at a time and the device is cpu; leave it out, or use a GPU.")
    return DEMO


def measure_serving(
    model: str,
    *,
    experiments: Sequence[str] | None = None,
    ways: Sequence[str] | None = None,
    contenders: Sequence[str] | None = None,
    phase: str | None = None,
    size: ServingSize | None = None,
    rate: float | None = None,
    max_seconds: float | None = None,
    seed: int = 0,
    dtype: str | None = None,
    device: str = "cpu",
    threads: int | None = None,
    clients: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Run experiments and report them.

    Args:
        experiments: of ``EXPERIMENTS``; by default all.
        ways: of the workloads: ``engine``, ``http``; by default both.
        contenders: of the workloads; by default those of the lineup.
        phase: the last that takes part, and the one that serves over HTTP; by default the newest.
        rate: requests a second, with which those of the workloads and policies come; by default a closed loop.
        max_seconds: break a trace off after so long, without HTTP.
        clients: processes of the load generator; by default one, and up to four where there are many cores.

    Raises:
        ConfigError, RequestError, ModelFolderError, CapacityError: before anything is computed.
        KeyboardInterrupt: in the first experiment; later it ends the run, and the report has those that were completed.
    """
    target = check_device(device)
    size = size or default_size(device)
    phases = lineup(phase)
    asked = chosen_experiments(experiments, phases)
    ways = chosen("way", ways, WAYS)
    contenders = chosen("contender", contenders, phases.contenders)
    if "capacity" in asked:
        check_sizes(size)
    folder = resolve_model(model)
    shape = read_config(folder)
    used = used_workloads(size, asked)
    # In `capacity` every contender has a limit of its own.
    longest = max((w.longest for w in used if w is not size.capacity), default=size.capacity.longest)
    widest = max(longest, size.wide_slots[1] if "capacity" in asked else 0)
    _check(seed, threads, clients, rate, max_seconds, widest, shape.max_position_embeddings, size.trials)
    needs_http = any(name in OVER_HTTP for name in asked) or ("workloads" in asked and "http" in ways)
    if needs_http:
        check_can_serve()
    config = EngineConfig(
        model=str(folder),
        dtype=dtype,
        device=device,
        max_seq_len=longest,
        max_waiting_requests=max(1024, *(workload.num_requests for workload in used)),
    )
    work = DecodeWork(shape, config.torch_dtype or default_dtype(shape, target))
    check_memory(kv_tokens(size, asked, ways, contenders, needs_http, phases, longest), work, shape, target)

    steps = Steps(progress, num_steps(size, asked, ways, contenders, phases) + needs_http)
    with torch_threads(threads), ExitStack() as stack:
        process: list[ServedProcess] = []

        def serve() -> ServedProcess:
            if not process:
                options = ["--device", device, "--max-seq-len", str(longest)]
                options += ["--max-batch-size", str(http_batch(size)), *(["--dtype", dtype] if dtype else [])]
                with steps.step("start the server"):
                    process.append(stack.enter_context(served(phases.newest, folder, options, clients)))
                    process[0].serve(warm_up_trace(http_batch(size), longest, target.type == "cuda"))
            return process[0]

        servers = Servers(config, phases)
        bench = Bench(
            size, servers, ways, contenders, shape.vocab_size, seed, rate, max_seconds, serve=serve, steps=steps
        )
        results: dict[str, Any] = {}
        done: list[str] = []
        try:
            for name in asked:
                results[name.replace("-", "_")] = RUN[name](bench)
                done.append(name)
        except KeyboardInterrupt:
            if not done:
                raise
        about = describe_model(model)
        engines = {name: engine_settings(config, about["name"]) for name, config in servers.configs.items()}
        if process:
            engines["http"] = {
                "serve": phases.newest.number,
                "max_batch_size": http_batch(size),
                "max_seq_len": longest,
            }
        return Report(
            name="serving",
            model=about,
            engines=engines,
            seed=seed,
            flags={
                "experiments": done,
                "ways": list(ways),
                "contenders": list(contenders),
                "phase": phases.newest.number,
                "rate_requests_per_second": rate,
                "max_seconds": max_seconds,
                "max_batch_size": size.max_batch_size,
                "workloads": {workload.name: asdict(workload) | {"about": workload.describe()} for workload in used},
                "trials": size.trials,
                "dtype": str(work.dtype).removeprefix("torch."),
                "device": device,
                "threads": torch.get_num_threads(),
                "is_demo_size": target.type != "cuda",
            },
            results=results,
            device=device,
        )


def _check(
    seed: int,
    threads: int | None,
    clients: int | None,
    rate: float | None,
    max_seconds: float | None,
    longest: int,
    limit: int,
    trials: int,
) -> None:
    least = {
        "seed": (seed, 0),
        "threads": (1 if threads is None else threads, 1),
        "clients": (1 if clients is None else clients, 1),
        "trials": (trials, 1),
    }
    for name, (value, bound) in least.items():
        if value < bound:
            raise ConfigError(f"{name} is {value}; it must be at least {bound}.")
    for name, number in (("rate", rate), ("max_seconds", max_seconds)):
        if number is not None and not number > 0:
            raise ConfigError(f"{name} is {number}; it must be positive.")
    if longest > limit:
        raise RequestError(
            f"The workloads have requests of up to {longest} tokens, prompt and answer together, and this model holds "
            f"{limit}; choose another model, or experiments with shorter requests."
        )
