"""Serving under load: batching and its policies compared with one request after another, over HTTP and without.

Introduced in phase 4. Invariant: nothing is computed before every setting has been checked.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from benchmarks.report import Report
from benchmarks.serving.contenders import Servers, lineup
from benchmarks.serving.experiments import EXPERIMENTS, Experiment, Runner
from benchmarks.serving.http_load import ServedProcess, served
from benchmarks.setup import Setup, check_least, check_positive
from benchmarks.workloads.serving import BLOCK_SIZE, ServingSize, Trace, TraceRequest, default_size
from shared.cache.view.contiguous import kv_bytes
from shared.engine.warm_up import rounds, warm_up_prompt
from shared.errors import ConfigError
from shared.lessons import Lesson, find_lesson, newest_lesson


def measure_serving(
    setup: Setup,
    *,
    experiments: Sequence[str] | None = None,
    contenders: Sequence[str] | None = None,
    phase: str | None = None,
    size: ServingSize | None = None,
    rate: float | None = None,
    max_seconds: float | None = None,
) -> Report:
    """Run experiments, by default all that the phases up to ``phase`` allow, and report them.

    Raises ConfigError, RequestError, ModelFolderError or CapacityError before anything is computed, and
    KeyboardInterrupt in the first experiment. A later interrupt ends the run, and the report has what was completed.
    """
    size = size or default_size(setup.device)
    check_least(trials=(size.trials, 1), tail_requests=(size.tail.num_requests, 1))
    check_positive(rate=rate, max_seconds=max_seconds)
    shown, lesson = lineup(phase), newest_lesson() if phase is None else find_lesson(phase)
    able = {each.name: each for each in EXPERIMENTS if shown.keys() >= {*each.needs}}
    asked = [able[name] for name in _chosen("experiment", experiments, tuple(able), lesson)]
    there = tuple(name for name in shown if any(name in each.contenders for each in asked))
    named = _chosen("contender", contenders, there, lesson)
    asked = [replace(each, contenders=tuple(n for n in each.contenders if n in named)) for each in asked]
    used = {name: workload for each in asked for name, workload in each.served(size).items()}
    widest = size.wide_slots[1] if any(each.name == "capacity" for each in asked) else 0
    longest = max(widest, *(each.longest(size) for each in asked))
    setup.check_length(longest, "The longest prompt and answer of the workloads")
    queue = max(1024, *(workload.num_requests for workload in used.values()))
    dtype = str(setup.work.dtype).removeprefix("torch.")
    base = replace(setup.config(max_waiting_requests=queue), dtype=dtype)
    runner = Runner(size, shown, Servers(base), setup.shape.vocab_size, setup.seed, rate, max_seconds)
    over_http = max((each.longest(size) for each in asked if "http" in runner.contenders(each)), default=0)
    if idle := [each.name for each in asked if not runner.contenders(each)]:
        raise ConfigError(f"The experiment {idle[0]} has none of the contenders {', '.join(named)}.")
    _check_memory(setup, runner, asked, over_http)

    results: dict[str, Any] = {}
    with setup.running(sum(map(runner.num_runs, asked)) + bool(over_http)) as steps, ExitStack() as stack:

        @cache
        def serve() -> ServedProcess:
            options = ["--device", setup.device, "--max-seq-len", str(over_http), "--dtype", dtype]
            options += ["--max-batch-size", str(size.server_batch)]
            with steps.step("start the server"):
                process = stack.enter_context(served(lesson, setup.folder, options))
                together = rounds(size.server_batch, over_http, is_gpu=setup.is_gpu)[-1]
                warm = [TraceRequest(tuple(warm_up_prompt(n, num)), new) for n, (num, new) in enumerate(together)]
                process.serve(Trace(tuple(warm), concurrency=len(warm)))
            return process

        runner = replace(runner, steps=steps, serve=serve)
        try:
            for each in asked:
                results[each.key] = runner.run(each)
        except KeyboardInterrupt:
            if not results:
                raise
        flags = {
            "experiments": [each.name for each in asked if each.key in results],
            "phase": lesson.number,
            "rate_requests_per_second": rate,
            "max_seconds": max_seconds,
            "max_batch_size": size.max_batch_size,
            "workloads": {name: asdict(workload) | {"about": workload.describe()} for name, workload in used.items()},
            "trials": size.trials,
        }
        only = asked[0].name if experiments and len(asked) == 1 else None
        return setup.report("-".join(filter(None, ("serving", only, phase))), runner.servers.configs, flags, results)


def _chosen(what: str, asked: Sequence[str] | None, able: tuple[str, ...], last: Lesson) -> tuple[str, ...]:
    """The requested experiments, in our order, without duplicates; raises ConfigError for an unknown one."""
    for name in asked or ():
        if name not in able:
            why = " It needs a GPU, and `pip install vllm==0.26.0`." if name == "vllm" else ""
            raise ConfigError(
                f"Up to phase {last.number} there is no {what} {name!r} here; there are {', '.join(able)}.{why}"
            )
    return tuple(name for name in able if asked is None or name in asked)


def _check_memory(setup: Setup, runner: Runner, asked: Sequence[Experiment], over_http: int) -> None:
    """Raise CapacityError if the engines of an experiment, loaded together, do not fit next to the server."""
    size = runner.size
    for each in asked:
        batch, longest = each.batch(size), each.longest(size)
        ours = [contender for name, contender in runner.contenders(each).items() if name != "http"]
        tokens = [(batch if contender.serves_many else 1) * longest for contender in ours]
        set_tokens = [BLOCK_SIZE * contender.settings.get("num_gpu_blocks", 0) for contender in ours]
        tokens = [fixed or whole for fixed, whole in zip(set_tokens, tokens, strict=True)]
        tokens = [max(tokens)] if each.one_by_one else tokens
        tokens += [size.server_batch * over_http] if over_http else []
        hint = f"leave out the experiment {each.name} (name others with --experiment)"
        setup.check_memory(len(tokens), hint, kv_bytes(setup.shape, sum(tokens), setup.work.dtype))
