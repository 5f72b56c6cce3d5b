"""The gain from a compressed KV cache: memory per request, requests at a time, time per step. Introduced in phase 9.2.

Steps: phase 9 and phase 9.2 get the same prompts, which nearly fill ``length`` tokens, and decode to the end. Steps are
timed while all requests decode, with the engines interleaved. Requests at a time: the same number of requests with
short prompts generate up to ``length`` tokens together, compressed, in a pool that holds two of them without
compression. Invariant: runs that are timed together have the same number of blocks.

    python -m benchmarks.long_answers --out benchmarks/reports
"""

import statistics
import time
from typing import Any

from benchmarks.command import run
from benchmarks.decoding import decoding
from benchmarks.report import Report, describe_model, engine_settings, rounded
from benchmarks.setup import free_memory
from benchmarks.timing import SyntheticPrompts
from benchmarks.view import Column, Table, View, count, percent, text
from shared.engine.config import EngineConfig
from shared.lessons import find_lesson

BLOCK, FULL, COMPRESSED = 16, "09", "09.2"
HELD, SHORT = 2, 64  # requests that the small pool holds without compression, and the tokens of their prompts


class Measured:
    """A phase's engine, and the maximum number of blocks that its requests hold after their prompts."""

    def __init__(self, phase: str, options: dict[str, Any]) -> None:
        self.engine = find_lesson(phase).engine(EngineConfig(**options))
        self.steps: list[tuple[float, int, int]] = []  # seconds, tokens decoded, requests compressed
        self.num_requests = self.most_blocks = self.most_decoded = 0

    def add(self, prompts: list[list[int]], num_new: int) -> None:
        self.num_requests = len(prompts)
        for prompt in prompts:
            self.engine.add_request(prompt, decoding(num_new))

    def step(self) -> None:
        """One step; blocks count while all requests decode, after the prompts' compressions."""
        before, started = getattr(self.engine, "num_compressions", 0), time.perf_counter()
        self.engine.step()
        seconds = time.perf_counter() - started
        record = self.engine.last_step
        decoded = 0 if record.prefilled else len(record.decoded)
        self.steps.append((seconds, decoded, getattr(self.engine, "num_compressions", 0) - before))
        self.most_decoded = max(self.most_decoded, len(record.decoded))
        if decoded == self.num_requests:
            # immediately, so that the GPU does not wait
            self.most_blocks = max(self.most_blocks, *self.engine.pool.num_held)

    @property
    def median_ms(self) -> float:
        """Figures for the steps in which all requests decode."""
        whole = [seconds for seconds, decoded, _ in self.steps if decoded == self.num_requests]
        return rounded(1e3 * statistics.median(whole))

    def share(self, every: int) -> float:
        """The share of the time that compressions take if each request is compressed every ``every`` steps: the time
        between the first and the last step of all requests, beyond that of steps far from a compression.
        """
        whole = [i for i, (_, decoded, _) in enumerate(self.steps) if decoded == self.num_requests]
        steps = self.steps[whole[0] : whole[-1] + 1]
        num_compressed = sum(compressed for *_, compressed in steps)
        if not num_compressed:
            return 0.0
        near = 2 if self.engine.overlaps else 0  # steps before and after it, which a compression may lengthen
        plain = [
            seconds
            for i, (seconds, decoded, _) in enumerate(steps)
            if decoded == self.num_requests and not any(c for *_, c in steps[max(i - near, 0) : i + near + 1])
        ]
        step, num_tokens = statistics.mean(plain), sum(decoded for _, decoded, _ in steps)
        extra = sum(seconds for seconds, *_ in steps) - num_tokens / self.num_requests * step
        return extra * self.num_requests / (extra * self.num_requests + num_compressed * every * step)

    def run(self) -> None:
        while self.engine.has_work():
            self.step()


def measure(
    model: str = "smollm2-135m",
    length: int = 2048,
    budget: int = 128,
    every: int = 32,
    requests: int = 16,
    new_tokens: int = 48,
    from_length: int = SHORT,
    device: str = "cpu",
    dtype: str | None = None,
) -> Report:
    """Both engines with ``requests`` requests of ``length`` tokens, ``new_tokens`` of which are decoded; then the same
    number with prompts of ``from_length`` tokens in the small pool, unless that is 0."""
    plain: dict[str, Any] = {
        "model": model,
        "device": device,
        "dtype": dtype,
        "max_seq_len": length,
        "max_batch_size": requests,
        "num_gpu_blocks": requests * length // BLOCK,
        "use_prefix_caching": False,
        "seed": 0,
    }
    if device == "cuda":
        plain |= {"prefill_chunk_size": 2048, "max_num_batched_tokens": 2048 + requests}
    compressed = {"compress_method": "snapkv", "layer_budget": budget // 2, "layer_upper_budget": budget}
    compressed |= {"query_window_size": min(128, budget // 4), "steps_between_compressions": every}
    engines = {FULL: Measured(FULL, plain), COMPRESSED: Measured(COMPRESSED, plain | compressed)}
    draw = SyntheticPrompts(engines[FULL].engine.model.config.vocab_size, 0)
    prompts = [draw.draw(length - new_tokens) for _ in range(requests)]
    for one in engines.values():
        one.add(prompts, new_tokens)
    if device == "cuda":  # steps that run while the host plans would hide each other's time if they were interleaved
        for one in engines.values():
            one.run()
    while any(one.engine.has_work() for one in engines.values()):
        for one in engines.values():
            if one.engine.has_work():
                one.step()
    settings = {
        phase: engine_settings(one.engine.config, describe_model(model)["name"]) for phase, one in engines.items()
    }
    results: dict[str, Any] = {
        phase: {"blocks": one.most_blocks, "ms_per_step": one.median_ms} for phase, one in engines.items()
    }
    results[COMPRESSED]["share"] = rounded(engines[COMPRESSED].share(every))
    weights = sum(parameter.nbytes for parameter in engines[FULL].engine.model.parameters())
    results["bytes"] = {"weights": weights, "keys_and_values": engines[FULL].engine.view.num_bytes}
    del engines, one
    free_memory()
    full, ours = results[FULL], results[COMPRESSED]
    results["ratios"] = {
        "memory": rounded(ours["blocks"] / full["blocks"]),
        "step": rounded(full["ms_per_step"] / ours["ms_per_step"]),
    }
    if from_length:
        measured = Measured(COMPRESSED, plain | compressed | {"num_gpu_blocks": HELD * length // BLOCK})
        measured.add([prompt[:from_length] for prompt in prompts], length - from_length)
        measured.run()
        results["together"] = {
            "held": HELD,
            "requests": measured.most_decoded,
            "preemptions": measured.engine.load().num_preemptions,
            "compressions": measured.engine.num_compressions,
        }
        results["ratios"]["together"] = rounded(measured.most_decoded / HELD)
    flags = {
        "from": from_length,
        "length": length,
        "budget": budget,
        "every": every,
        "requests": requests,
        "new_tokens": new_tokens,
    }
    return Report("long-answers", describe_model(model), settings, 0, flags, results, device)


def view(report: Report) -> View:
    """One table, and a line about what ran together."""
    columns = [
        text("phase", "phase"),
        Column("blocks a request", "blocks", count),
        Column("ms a step", "ms_per_step"),
        Column("compressing", "share", percent),
    ]
    flags, rows = report.flags, [{"phase": phase} | report.results[phase] for phase in (FULL, COMPRESSED)]
    said = f"{flags['requests']} requests of {flags['length']} tokens, the last {flags['new_tokens']} decoded"
    kept = f"SnapKV, at most {flags['budget']} keys a head, every {flags['every']} tokens"
    options = [f"{said}; {kept}", f"{report.machine_title}; {report.date[:10]}"]
    notes = []
    if ran := report.results.get("together"):
        lengths = f"from {flags['from']} tokens to {flags['length']}"
        note = (
            f"In the memory of {ran['held']} requests without compression {ran['requests']} ran together, {lengths}, "
            f"with {ran['preemptions']} preemptions and {ran['compressions']} compressions."
        )
        notes.append(note)
    return View(f"Long answers: {report.model['name']}", options, [Table("", columns, rows)], notes)


if __name__ == "__main__":
    run(measure, view, __doc__)
