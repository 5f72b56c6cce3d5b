"""Measures a model's table of step costs on this machine, which determines draft lengths. Introduced in phase 11.

Steps of synthetic requests run through the pool and the runner of an engine. Plain steps are launched one after the
other, as they run with ``overlap_scheduling``; steps with drafts are awaited. All are interleaved, and the median of
each counts. ``infer bench step-costs`` saves the table where engines find it.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from benchmarks.report import Report, rounded
from benchmarks.setup import Setup, free_memory, freeze_memory
from benchmarks.timing import in_turns
from benchmarks.view import Column, Table, View
from shared.engine.batch import Batch
from shared.engine.request import Request
from shared.lessons import find_lesson
from shared.sampling.params import SamplingParams
from shared.scheduling.schedule import Schedule, Scheduled
from shared.scheduling.step_costs import StepCosts, derived, identity

REQUESTS = (1, 2, 4, 8, 16)
"""Numbers of sequences of decode steps, with one token each."""
CHUNKS = {"cuda": (64, 256, 1024, 4096), "cpu": (64, 256)}
"""Numbers of tokens of steps with a chunk of one prompt."""
CONTEXT = {"cuda": 4096, "cpu": 512}
STEPS = {"cuda": 4, "cpu": 1}


def measure(
    model: str, device: str = "cpu", dtype: str | None = None, threads: int | None = None, trials: int = 5
) -> tuple[Report, StepCosts]:
    """The table, and a report that compares it with the derived one."""
    setup = Setup(model, device, dtype, threads)
    kind, limit = setup.target.type, setup.shape.max_position_embeddings
    chunks = tuple(size for size in CHUNKS[kind] if size < limit)
    context = min(CONTEXT[kind], limit - 2)
    longest = max([*chunks, context]) + 2
    most = REQUESTS[-1]
    blocks = -(-longest // 16) + 2 * most
    sizes = {"max_batch_size": most, "max_seq_len": min(longest, limit), "num_gpu_blocks": blocks}
    lookup = {"use_speculative_decoding": True, "drafter": "ngram", "spec_length": 1, "use_prefix_caching": False}
    config = setup.config(**sizes, **lookup)
    with setup.running(1):
        engine = find_lesson("11").engine(config)
        freeze_memory()
        step = partial(step_seconds, engine)
        calls: dict[tuple[str, int], Callable[[], float]] = {}
        calls |= {("tokens", num): partial(step, num_requests=num) for num in REQUESTS}
        calls |= {("tokens", size): partial(step, num_tokens=size) for size in chunks}
        calls |= {("drafts", num): partial(step, num_requests=num, num_tokens=2, num_drafts=1) for num in REQUESTS[:-1]}
        calls |= {("context", context): partial(step, start=context)}
        found = {name: statistics.median(times) for name, times in in_turns(calls, trials, warm_ups=2).items()}
        table = table_of(found, identity(engine.model))
        other = derived(engine.model)
        results = {
            "hash": table.hash,
            "table": asdict(table),
            "derived": {"hash": other.hash, "seconds": [rounded(other.cost(num)) for num in table.tokens]}
            | {"key": other.key, "wait": other.wait},
        }
        report = setup.report("step-costs", {"11": config}, {"trials": trials, "context": context}, results)
    del engine, step, calls
    free_memory()
    return report, table


def table_of(found: dict[tuple[str, int], float], of: dict[str, str]) -> StepCosts:
    """The table of measured medians; a larger step that was faster by chance counts as the smaller one."""
    tokens = sorted(num for name, num in found if name == "tokens")
    seconds = list(accumulate((found["tokens", num] for num in tokens), max))
    waits = [found["drafts", num] - found["tokens", 2 * num] for name, num in found if name == "drafts"]
    keys = [(found["context", num] - seconds[0]) / num for name, num in found if name == "context"]
    wait, key = max(statistics.median(waits), 0.0), max(*keys, 0.0)
    return StepCosts(tuple(tokens), tuple(map(rounded, seconds)), rounded(key), rounded(wait), "measured", of)


def step_seconds(
    engine: Any, *, num_requests: int = 1, num_tokens: int = 1, num_drafts: int = 0, start: int = 0
) -> float:
    """Seconds of a step of synthetic requests with ``start`` tokens in the KV cache, which is left empty.

    A step with drafts is awaited; any other is launched while the previous one runs.
    """
    pool, runner, params = engine.pool, engine.runner, SamplingParams(temperature=0.0, max_new_tokens=1)
    requests = [
        Request(f"timing {n}", [0] * (start + num_tokens - num_drafts), params, 0, draft_ids=[0] * num_drafts)
        for n in range(num_requests)
    ]
    is_decode = num_tokens == num_drafts + 1
    entries = tuple(Scheduled(request, start, num_tokens, num_drafts, num_drafts + 1) for request in requests)
    schedule = Schedule(0, entries, num_requests if is_decode else 0)
    num_steps = STEPS[runner.model.device.type]
    try:
        for request in requests:
            pool.admit(request)
            pool.reserve(request, start + num_tokens)
            pool.commit(request, start)
            request.num_computed_tokens = start
        with torch.inference_mode():
            started = time.perf_counter()
            for _ in range(num_steps):
                sampled = runner.sample(runner.forward(Batch.of(schedule, pool)), schedule.sampling_rows())
                if num_drafts:
                    sampled.wait()
            sampled.wait()
            return (time.perf_counter() - started) / num_steps
    finally:
        for request in requests:
            pool.release(request)


def view(report: Report) -> View:
    """The table, compared with the derived one."""
    table, other = report.results["table"], report.results["derived"]
    columns = [
        Column("new tokens", "tokens", str),
        Column("measured, ms", "measured"),
        Column("derived, ms", "derived"),
    ]
    rows = [
        {"tokens": num, "measured": 1e3 * seconds, "derived": 1e3 * by_shape}
        for num, seconds, by_shape in zip(table["tokens"], table["seconds"], other["seconds"], strict=True)
    ]
    note = (
        f"A step with drafts: {1e3 * table['wait']:.3f} ms more, derived {1e3 * other['wait']:.3f}. A thousand tokens "
        f"of context: {1e6 * table['key']:.3f} ms more, derived {1e6 * other['key']:.3f}. The table is "
        f"{report.results['hash']}; without it {other['hash']}, the derived one, is used."
    )
    return View(f"Step costs: {report.model['name']}", [report.machine_title], [Table("", columns, rows)], [note])
