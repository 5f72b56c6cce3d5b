"""Who serves in the serving benchmarks: an engine with its configuration, loaded once. Introduced in phase 4.

The ways to serve: one request after another, by the last phase that answers one at a time; static batches, by phase 4
and once more padded; continuous batching in regions, under each policy, and in blocks. Invariants: all have the same
model and dtype, and the same longest sequence where nothing else is said; each is warmed up when it is loaded, at every
size of batch that it can have on a GPU, so that no trace pays for compilation.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.contenders import allocated, held_tensors, is_cuda, storage_bytes
from benchmarks.serving.engine_load import OneAtATime, Servable, drive
from benchmarks.serving.lineup import Lineup
from benchmarks.serving.padded_baseline import PaddedEngine
from benchmarks.serving.results import figures
from benchmarks.serving.run import ServedRun
from benchmarks.workloads.serving import Trace, TraceRequest
from shared.engine.config import EngineConfig
from shared.engine.warm_up import rounds, serve_rounds, warm_up_prompt
from shared.lessons import Lesson, find_lesson


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
        before = self.engine.stats()["tokens computed"]
        run = self.serve(trace, max_seconds)
        found = figures(run, self.max_batch_size, self.config.max_decode_interval)
        computed = self.engine.stats()["tokens computed"] - before
        return run, {"title": self.title} | found | {"tokens_computed": computed} | self.memory


class Servers:
    """Makes contenders on demand and keeps them; ``configs`` are those of all it ever made, by name and batch size.

    Args:
        base: what all of them share: model, dtype, device, longest sequence, queue.
    """

    def __init__(self, base: EngineConfig, lineup: Lineup) -> None:
        self.base = base
        self.lineup = lineup
        self.made: dict[tuple[str, int], Server] = {}
        self.configs: dict[str, EngineConfig] = {}

    def get(self, name: str, max_batch_size: int = 1) -> Server:
        """A contender of the lineup (``continuous`` is first come, first served) or a policy's name."""
        name = "continuous" if name == "fcfs" else name
        key = name, 1 if name == "sequential" else max_batch_size
        if key not in self.made:
            self.made[key] = self._make(*key)
        return self.made[key]

    @contextmanager
    def lent(self, name: str, title: str, lesson: Lesson, **settings: Any) -> Iterator[Server]:
        """A contender with settings of its own, gone when the block ends."""
        server = self._load(name, title, lesson.engine, **settings)
        try:
            yield server
        finally:
            del server.engine
            gc.collect()
            if is_cuda(self.base.device):
                torch.cuda.empty_cache()

    def _make(self, name: str, max_batch_size: int) -> Server:
        lineup = self.lineup
        if name == "sequential":
            return self._load(name, f"one at a time (phase {lineup.sequential.number})", lineup.sequential.engine)
        if name == "padded":
            title = "static, padded (transformers' way)"
            return self._load(name, title, PaddedEngine, max_batch_size=max_batch_size)
        if name == "static":
            lesson = find_lesson("04")
            return self._load(name, f"static (phase {lesson.number})", lesson.engine, max_batch_size=max_batch_size)
        if lesson_in_blocks := lineup.in_blocks.get(name):
            return self._load(name, titled(lesson_in_blocks), lesson_in_blocks.engine, max_batch_size=max_batch_size)
        policy = "fcfs" if name == "continuous" else name
        title = f"continuous, {policy} (phase {lineup.slots.number})"
        settings = {"max_batch_size": max_batch_size, "scheduler_policy": policy}
        return self._load(name, title, lineup.slots.engine, **settings)

    def _load(self, name: str, title: str, make: Callable[[EngineConfig], Any], **settings: Any) -> Server:
        server = load_server(name, title, make, self.base, **settings)
        self.configs[f"{name}_{server.max_batch_size}"] = server.config
        return server


def titled(lesson: Lesson) -> str:
    """A phase as a contender: ``paged memory (phase 06)``."""
    return f"{lesson.title[:1].lower()}{lesson.title[1:]} (phase {lesson.number})"


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
    pool = getattr(engine, "pool", None)
    capacity = pool.capacity_tokens if pool is not None else server.max_batch_size * engine.max_seq_len
    sizes = (server.max_batch_size, engine.max_seq_len)
    serve_rounds(served, rounds(*sizes, is_gpu=is_cuda(config.device), capacity_tokens=capacity))
    return server


def warm_up_trace(max_batch_size: int, max_seq_len: int, is_gpu: bool) -> Trace:
    """The last round of a warm-up, for clients of a server."""
    together = rounds(max_batch_size, max_seq_len, is_gpu=is_gpu)[-1]
    requests = (TraceRequest(tuple(warm_up_prompt(n, prompt)), new) for n, (prompt, new) in enumerate(together))
    return Trace(tuple(requests), concurrency=len(together))


def _kv_bytes(engine: Any) -> int:
    """Of keys and values, whatever they are kept in; phase 2 keeps none."""
    if isinstance(engine, PaddedEngine):
        return engine.view.keys.nbytes + engine.view.values.nbytes
    return int(engine.stats().get("cache bytes", 0))
