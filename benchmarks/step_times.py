"""The time of an engine's step by what it computes, and the formula that fits it. Follows phase 11.

Batches of several sizes, with prompts and answers of several lengths, run to their ends. Each step's time is measured,
and its counts are read from its record. ``infer simulate`` uses the coefficients.
Invariant: the engine is warm, and every second batch is left out of the fit and gives its error.

    python -m benchmarks.step_times --out benchmarks/reports
"""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import run
from benchmarks.decoding import decoding
from benchmarks.report import Report, read_value, rounded
from benchmarks.setup import Setup, freeze_memory
from benchmarks.timing import SyntheticPrompts
from benchmarks.view import Column, Table, View, percent, text
from shared.engine.record import StepRecord
from shared.lessons import newest_lesson

BATCHES = ((1, 16), (1, 128), (1, 384), (2, 64), (3, 256), (4, 32), (6, 128), (8, 16), (8, 192))
"""Numbers of requests, and of tokens per prompt; on a GPU both are larger."""
GPU_FACTOR = 8
NEW_TOKENS = 12
COUNTS = ("step", "prefill_step", "prefill_token", "prefill_key", "decode_row", "decode_key")

_DECODE, _LONG = "serving-decode", "serving-long-prompts"
_BETWEEN, _FIRST, _QUEUE = (f"{name}_ms.p50" for name in ("inter_token_latency", "time_to_first_token", "queue_wait"))
POINTS: tuple[tuple[str, str, str | None, list[float]], ...] = (
    *(
        (_DECODE, f"results.decode.{name}.newest.{_BETWEEN}", None, [1.0, 0.0, 0.0, 0.0, rows, rows * 384])
        for name, rows in (("decode_one", 1), ("decode_few", 8), ("decode_tens", 32), ("decode_most", 128))
    ),
    (
        _DECODE,
        f"results.decode.decode_one.newest.{_FIRST}",
        f"results.decode.decode_one.newest.{_QUEUE}",
        [1.0, 1.0, 256, 256 * 128.5, 0.0, 0.0],
    ),
    (
        _LONG,
        f"results.long_prompts.whole.{_FIRST}",
        f"results.long_prompts.whole.{_QUEUE}",
        [1.0, 1.0, 8192, 8192 * 4096.5, 32.0, 32 * 192],
    ),
    (
        _LONG,
        "results.long_prompts.one_chunk.inter_token_latency_ms.p95",
        None,
        [1.0, 1.0, 512, 512 * (3840 + 256.5), 32.0, 32 * 192],
    ),
)
"""Steps on an H100: a report, the key of the milliseconds, the key of those to subtract, and the counts in the order of
``COUNTS``. They are decoding alone, a prompt of 256 tokens, one of 8,192, and a chunk of 512 alongside 32 decoding
requests."""


def measure(
    model: str = "smollm2-135m", device: str = "cpu", dtype: str | None = None, threads: int = 1, trials: int = 3
) -> Report:
    """Coefficients in seconds, and how far the formula is from steps that were left out of the fit."""
    setup = Setup(model, device, dtype, threads)
    factor = GPU_FACTOR if setup.is_gpu else 1
    batches = [(num * factor, length * factor) for num, length in BATCHES]
    most, longest = max(num for num, _ in batches), max(length for _, length in batches) + NEW_TOKENS
    lesson, prompts = newest_lesson(), SyntheticPrompts(setup.shape.vocab_size, setup.seed)
    with setup.running(1):
        config = setup.config(max_batch_size=most, max_seq_len=longest, num_gpu_blocks=most * -(-longest // 16))
        engine = lesson.engine(config)
        run_batch(engine, prompts, *batches[0])
        freeze_memory()
        fitted, told = list[Any](), list[Any]()
        for trial in range(2 * trials):
            for num, length in batches:
                (told if trial % 2 else fitted).extend(run_batch(engine, prompts, num, length))
        times = fit(fitted)
        results = {"step_times": dict(zip(COUNTS, times, strict=True)), "fit": errors(times, told)}
        flags = {"trials": trials, "batches": batches, "new_tokens": NEW_TOKENS, "phase": lesson.number}
        return setup.report("step-times", {"newest": config}, flags, results)


def run_batch(
    engine: Any, prompts: SyntheticPrompts, num_requests: int, length: int
) -> list[tuple[list[float], float]]:
    """The counts of each step, in the order of ``COUNTS``, and its seconds; answers end one after the other."""
    for n in range(num_requests):
        engine.add_request(prompts.draw(length), decoding(NEW_TOKENS - n % 4))
    counts, found = StepCounts(), []
    while engine.has_work():
        start = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - start
        if counted := counts.of(engine.last_step):
            found.append((counted, seconds))
    return found


class StepCounts:
    """What steps compute, in the order of ``COUNTS``, from their records, which must be consecutive."""

    def __init__(self) -> None:
        self._lengths: dict[str, int] = {}  # tokens of each decoding request

    def of(self, record: StepRecord) -> list[float]:
        """The counts of the next step; none if it computed nothing."""
        chunks = [
            (name, num, start) for (name, num), start in zip(record.prefilled, record.prefill_starts, strict=True)
        ]
        for name in record.decoded:
            self._lengths[name] += 1
        keys = sum(self._lengths[name] for name in record.decoded)
        tokens, pairs = sum(num for _, num, _ in chunks), sum(num * (start + (num + 1) / 2) for _, num, start in chunks)
        self._lengths |= {name: start + num for name, num, start in chunks}
        for name in record.finished:
            self._lengths.pop(name, None)
        if not (tokens or record.decoded):
            return []
        return [1.0, float(tokens > 0), float(tokens), pairs, float(len(record.decoded)), float(keys)]


def fit(steps: Sequence[tuple[list[float], float]]) -> list[float]:
    """The nonnegative coefficients that minimize the sum of squared relative errors. Steps with equal counts count
    once, with their median.
    """
    alike: dict[tuple[float, ...], list[float]] = {}
    for counts, seconds in steps:
        alike.setdefault(tuple(counts), []).append(seconds)
    measured = np.array([statistics.median(group) for group in alike.values()])
    counts = np.array(list(alike)) / measured[:, None]
    kept = list(range(counts.shape[1]))
    while True:  # the most negative one is dropped, until none is left
        found = np.linalg.lstsq(counts[:, kept], np.ones(len(measured)), rcond=None)[0]
        if (found >= 0).all():
            break
        del kept[int(found.argmin())]
    times = [0.0] * counts.shape[1]
    for place, value in zip(kept, found, strict=True):
        times[place] = rounded(float(value))
    return times


def times_of_reports() -> tuple[list[float], dict[str, Any]]:
    """The coefficients of Llama 3.2 1B on an H100, from this repository's reports on its steps, and how far the formula
    is from these.
    """
    steps = [
        (counts, 1e-3 * (_read(file, key) - (_read(file, less) if less else 0.0))) for file, key, less, counts in POINTS
    ]
    times = fit(steps)
    return times, errors(times, steps)


def _read(file: str, key: str) -> float:
    return float(read_value(Path(__file__).parent / "reports" / f"{file}-llama-3.2-1b-nvidia-h100-80gb-hbm3.json", key))


def errors(times: Sequence[float], steps: Sequence[tuple[list[float], float]]) -> dict[str, Any]:
    """How far the formula is from measured steps, as a share of their times."""
    off = [abs(np.dot(times, counts) - seconds) / seconds for counts, seconds in steps]
    total = sum(seconds for _, seconds in steps)
    return {
        "steps": len(steps),
        "median_error": rounded(float(np.median(off))),
        "p95_error": rounded(float(np.percentile(off, 95))),
        "error_of_the_sum": rounded(abs(sum(float(np.dot(times, counts)) for counts, _ in steps) - total) / total),
    }


def view(report: Report) -> View:
    names = {
        "step": "the step itself",
        "prefill_step": "prompts in it",
        "prefill_token": "a token of a prompt",
        "prefill_key": "a key that such a token attends to",
        "decode_row": "a decoding request",
        "decode_key": "a key that it attends to",
    }
    rows = [{"what": names[name], "us": 1e6 * value} for name, value in report.results["step_times"].items()]
    columns = [text("part of a step", "what"), Column("µs", "us")]
    off = report.results["fit"]
    note = (
        f"Of {off['steps']} steps that took no part in the fit, half are within {percent(off['median_error'])} of the "
        f"formula and 95 % within {percent(off['p95_error'])}; their sum is within {percent(off['error_of_the_sum'])}."
    )
    options = [f"{report.machine_title}; phase {report.flags['phase']}; {report.date[:10]}"]
    return View(f"Step times: {report.model['name']}", options, [Table("", columns, rows)], [note])


if __name__ == "__main__":
    run(measure, view, __doc__)
