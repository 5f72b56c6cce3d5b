"""What the host does in a decode step, part by part, and whether it sets the pace. Introduced in phase 9.

A step's host work should overlap with the GPU's, so that a step takes as long as its captured graph and the sampling.
For each number of sequences this measures plain steps, then the parts of further steps with a clock between them (the
parts of a trace, :mod:`shared.tracing.activity`), then the step's graph alone. A host's speed varies between machines
and with other load, so a loop of a million additions in Python is timed too. Finally, the same number of requests is
answered by ``LLM.generate``, once with all tokens and once with one; the difference is the time of decoding.

    python -m benchmarks.host_parts --device cuda --out benchmarks/reports

Invariant: all requests decode, and none ends, while steps are timed.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.command import run
from benchmarks.decoding import Decoding, decoding
from benchmarks.report import Report, describe_model, engine_settings, rounded
from benchmarks.setup import free_memory, freeze_memory
from benchmarks.timing import SyntheticPrompts
from benchmarks.view import Column, Table, View, text
from shared.engine.llm import LLM
from shared.sampling.params import SamplingParams
from shared.tracing.activity import ActivityRecorder

MOST_US, MOST_US_PER_SEQUENCE = 250, 8  # of the host, per step
WARM, STEPS, WATCHED, REPLAYS = 20, 100, 60, 20
PARTS = ("schedule", "batch", "launch", "sample", "commit", "return")


def microseconds(seconds: Sequence[float]) -> float:
    return rounded(1e6 * statistics.median(seconds))


def loop_ns() -> float:
    """Nanoseconds of an addition in a Python loop, as a measure of the host's current speed."""
    started, total = time.perf_counter(), 0
    for number in range(1_000_000):
        total += number & 3
    return rounded(1e3 * (time.perf_counter() - started))


def measure_steps(engine: Any, prompts: Sequence[list[int]], params: SamplingParams) -> dict[str, Any]:
    """Steps in which all prompts decode; the requests are aborted afterwards."""
    together, found = Decoding(engine, [(prompt, params) for prompt in prompts]), dict[str, list[float]]()
    together.steps(WARM)
    times, _ = together.steps(STEPS)
    recorder = ActivityRecorder(engine, time.perf_counter_ns)
    recorder.zero = None  # only the host's lane
    for _ in range(WATCHED):
        with recorder.watch() as activity:
            engine.step()
            activity.end("return")
        for span in activity.host:
            found.setdefault(span.name, []).append((span.ended_ns - span.started_ns) / 1e9)
    parts = {name: microseconds(found[name]) for name in (*PARTS, "wait")}
    result: dict[str, Any] = {
        "step_us": microseconds(times),
        "tokens_per_second": rounded(len(prompts) / statistics.median(times)),
        "host_us": rounded(sum(parts[name] for name in PARTS)),
        "most_host_us": MOST_US + MOST_US_PER_SEQUENCE * len(prompts),
        "parts_us": parts,
    }
    if graphs := getattr(engine.runner.executor, "graphs", None):
        graph = graphs[engine.view.bucket]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        result["graph_us"] = rounded(1e3 * begin.elapsed_time(end) / REPLAYS)
        result["step_over_graph"] = rounded(result["step_us"] / result["graph_us"])
    together.end()
    return result


def measure_answers(llm: LLM, prompts: Sequence[list[int]], num_new: int) -> dict[str, Any]:
    """Answers of ``num_new`` tokens to all prompts, and of one token."""
    seconds = {}
    for most in (1, num_new):
        llm.engine.pool.drop_cached()
        started = time.perf_counter()
        llm.generate(prompts, decoding(most), progress=False)
        seconds[most] = time.perf_counter() - started
    return {
        "generate_tokens_per_second": rounded(len(prompts) * num_new / seconds[num_new]),
        "generate_decode_tokens_per_second": rounded(len(prompts) * (num_new - 1) / (seconds[num_new] - seconds[1])),
    }


def measure(
    model: str = "smollm2-135m",
    sizes: Sequence[int] = (1, 8, 32, 64, 128, 256),
    phase: str = "09",
    prompt_tokens: int = 256,
    new_tokens: int = 256,
    device: str = "cpu",
) -> Report:
    """The parts of greedy decode steps of this many sequences, and answers through ``LLM.generate``."""
    longest = prompt_tokens + max(new_tokens, WARM + STEPS + WATCHED + 16)
    blocks = max(sizes) * -(-longest // 16)
    options = {"device": device, "max_batch_size": max(sizes), "max_seq_len": longest, "num_gpu_blocks": blocks}
    llm = LLM(model, phase, overlap_scheduling=True, seed=0, **options)
    engine, results = llm.engine, dict[str, Any]()
    draw = SyntheticPrompts(engine.model.config.vocab_size, 0)
    params = decoding(longest - prompt_tokens)
    freeze_memory()
    for size in sizes:
        prompts = [draw.draw(prompt_tokens) for _ in range(size)]
        before = loop_ns()
        results[str(size)] = measure_steps(engine, prompts, params) | {"loop_ns": before}
        results[str(size)] |= measure_answers(llm, prompts, new_tokens)
        print(size, results[str(size)], flush=True)
    settings = {"engine": engine_settings(engine.config, describe_model(model)["name"])}
    flags = {"phase": phase, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "steps": STEPS}
    del engine, llm
    free_memory()
    return Report("host-parts", describe_model(model), settings, 0, flags, results, device)


def view(report: Report) -> View:
    """A row for each number of sequences."""
    steps = [
        text("sequences", "sequences"),
        Column("step, µs", "step_us"),
        Column("graph, µs", "graph_us"),
        Column("step over graph", "step_over_graph"),
        Column("tokens/s", "tokens_per_second"),
        Column("LLM.generate, decoding", "generate_decode_tokens_per_second"),
        Column("host, µs", "host_us"),
        Column("at most", "most_host_us"),
    ]
    parts = [text("sequences", "sequences"), *(Column(f"{name}, µs", name) for name in PARTS)]
    rows = [{"sequences": size} | found | found["parts_us"] for size, found in report.results.items()]
    options = [
        f"phase {report.flags['phase']}, greedy, prompts of {report.flags['prompt_tokens']} tokens",
        f"{report.machine_title}; {report.date[:10]}",
    ]
    title = f"The host in a decode step: {report.model['name']}"
    return View(title, options, [Table("steps", steps, rows), Table("parts of the host's work", parts, rows)], [])


if __name__ == "__main__":
    run(measure, view, __doc__)
