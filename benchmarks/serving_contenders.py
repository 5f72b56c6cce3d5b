"""Who serves in the serving benchmarks: an engine with its configuration, loaded once. Introduced in phase 4.

Four ways to serve: one request after another, by the last phase that answers one at a time; static batches, by phase 4
and once more padded; continuous batching under each policy. Invariants: all have the same model, longest sequence and
dtype; each is warmed up when it is loaded, at every size of batch that it can have on a GPU, so that no trace pays for
compilation.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.contenders import allocated, held_tensors, is_cuda, storage_bytes
from benchmarks.engine_load import OneAtATime, Servable, drive
from benchmarks.padded_baseline import PaddedEngine
from benchmarks.serving_results import figures
from benchmarks.serving_run import ServedRun
from benchmarks.workloads.serving import Trace, TraceRequest
from shared.engine.config import EngineConfig
from shared.errors import ConfigError
from shared.lessons import Lesson, find_lesson, lessons

WARM_UP_PROMPT = 24


@dataclass
class Server:
    """An engine that is ready to serve a trace."""

    name: str
    title: str
    engine: Servable
    config: EngineConfig
    max_batch_size: int
    memory: dict[str, int | None] = field(default_factory=dict)

    def serve(self, trace: Trace, max_seconds: float | None = None) -> ServedRun:
        """Serve a trace; on a GPU its peak of memory is kept."""
        device = self.config.device
        gc.collect()
        if is_cuda(device):
            torch.cuda.reset_peak_memory_stats(device)
            before = allocated(device)
        run = drive(self.engine, trace, max_seconds)
        if is_cuda(device):
            peak = torch.cuda.max_memory_allocated(device) - before
            self.memory["peak_activation_bytes"] = max(self.memory["peak_activation_bytes"] or 0, peak)
        return run

    def measure(self, trace: Trace, max_seconds: float | None = None) -> tuple[ServedRun, dict[str, Any]]:
        """Serve a trace; the run, and what it says, with the memory and the tokens that were computed."""
        before = self.engine.num_tokens_computed
        run = self.serve(trace, max_seconds)
        found = figures(run, self.max_batch_size, self.config.max_decode_interval)
        computed = self.engine.num_tokens_computed - before
        return run, {"title": self.title} | found | {"tokens_computed": computed} | self.memory


def sequential_lesson() -> Lesson:
    """The last phase of the main line whose engine answers one request at a time."""
    able = [lesson for lesson in lessons() if lesson.generates and not lesson.is_side_track]
    return [lesson for lesson in able if not serves_many(lesson)][-1]


def serves_many(lesson: Lesson) -> bool:
    return hasattr(lesson.engine, "add_request")


def has_continuous(lesson: Lesson) -> bool:
    """Whether a phase knows continuous batching."""
    return serves_many(lesson) and "continuous" in lesson.load("engine").SCHEDULERS


def continuous_lesson(number: str | None) -> Lesson:
    """The phase asked for, or the newest of the main line; raises ConfigError for one without continuous batching."""
    able = [lesson for lesson in lessons() if lesson.generates and has_continuous(lesson)]
    if number is None:
        return [lesson for lesson in able if not lesson.is_side_track][-1]
    lesson = find_lesson(number)
    if lesson not in able:
        raise ConfigError(
            f"Phase {lesson.number} ({lesson.title}) has no continuous batching; choose one of "
            f"{', '.join(other.number for other in able)}, or leave --phase out."
        )
    return lesson


class Servers:
    """Makes contenders on demand and keeps them.

    Args:
        base: what all of them share: model, dtype, device, longest sequence, queue.
    """

    def __init__(self, base: EngineConfig, continuous: Lesson) -> None:
        self.base = base
        self.continuous = continuous
        self.made: dict[tuple[str, int], Server] = {}

    def get(self, name: str, max_batch_size: int = 1) -> Server:
        """``sequential``, ``padded``, ``static``, ``continuous`` (first come, first served), or a policy's name."""
        name = "continuous" if name == "fcfs" else name
        key = name, 1 if name == "sequential" else max_batch_size
        if key not in self.made:
            self.made[key] = self._make(*key)
        return self.made[key]

    def _make(self, name: str, max_batch_size: int) -> Server:
        if name == "sequential":
            lesson = sequential_lesson()
            return load_server(name, f"one at a time (phase {lesson.number})", lesson.engine, self.base)
        if name == "padded":
            title = "static, padded (transformers' way)"
            return load_server(name, title, PaddedEngine, self.base, max_batch_size=max_batch_size)
        if name == "static":
            lesson = find_lesson("04")
            title = f"static (phase {lesson.number})"
            return load_server(name, title, lesson.engine, self.base, max_batch_size=max_batch_size)
        policy = "fcfs" if name == "continuous" else name
        title = f"continuous, {policy} (phase {self.continuous.number})"
        settings = {"max_batch_size": max_batch_size, "scheduler_policy": policy}
        return load_server(name, title, self.continuous.engine, self.base, **settings)


def load_server(
    name: str, title: str, make: Callable[[EngineConfig], Any], base: EngineConfig, **settings: Any
) -> Server:
    """Load an engine with the settings that differ from ``base``, queue in front if it needs one, and warm it up."""
    is_many = hasattr(make, "add_request")
    queue = {"max_waiting_requests": base.max_waiting_requests} if is_many else {"max_waiting_requests": 1024}
    config = EngineConfig(**{**vars(base), **queue, **settings})
    gc.collect()
    before = allocated(config.device)
    engine = make(config)
    held = allocated(config.device) - before if is_cuda(config.device) else storage_bytes(held_tensors(engine))
    weights = storage_bytes(engine.model.parameters())
    memory = {
        "memory_weights_bytes": weights,
        "memory_kv_bytes": (kv := _kv_bytes(engine)),
        "memory_other_bytes": held - weights - kv,
        "peak_activation_bytes": None,
    }
    served = engine if is_many else OneAtATime(engine)
    server = Server(name, title, served, config, config.max_batch_size if is_many else 1, memory)
    drive(served, warm_up_trace(server.max_batch_size, engine.max_seq_len, is_cuda(config.device)))
    return server


def warm_up_trace(max_batch_size: int, max_seq_len: int, is_gpu: bool) -> Trace:
    """On a GPU a batch that shrinks by one a step, after prompts of several lengths; elsewhere two short answers."""
    num = max_batch_size if is_gpu else min(2, max_batch_size)
    room = max_seq_len // 2
    requests = []
    for n in range(num):
        num_prompt = min(WARM_UP_PROMPT + 7 * n if is_gpu else 8, room)
        requests.append(TraceRequest(tuple([n % 7 + 1] * num_prompt), min(n + 2, room)))
    return Trace(tuple(requests), concurrency=num)


def _kv_bytes(engine: Any) -> int:
    """Of keys and values, whatever they are kept in; phase 2 keeps none."""
    for holder in ("pool", "cache"):
        if hasattr(engine, holder):
            return int(getattr(engine, holder).num_bytes)
    if isinstance(engine, PaddedEngine):
        return engine.view.keys.nbytes + engine.view.values.nbytes
    return 0
