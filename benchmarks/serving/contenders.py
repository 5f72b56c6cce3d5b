"""The contenders of the serving benchmarks: one table of engines with their settings. Introduced in phase 4. Invariant:
each is warmed up on loading, on a GPU at every batch size that it can have, so that no trace includes compilation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.serving.engine_load import OneAtATime, drive
from benchmarks.serving.results import figures
from benchmarks.serving.transformers_engine import TransformersEngine
from benchmarks.serving.vllm_peer import VllmEngine, is_installed
from benchmarks.setup import free_memory, freeze_memory
from benchmarks.workloads.serving import BLOCK_SIZE, Trace
from shared.engine.config import EngineConfig
from shared.engine.warm_up import rounds, serve_rounds
from shared.errors import ConfigError
from shared.lessons import Lesson, find_lesson, lessons, newest_lesson

CONTENDERS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("sequential", "one at a time", "sequential", {}),
    ("transformers", "transformers, padded batches", "transformers", {}),
    ("static", "static", "static", {}),
    ("continuous", "continuous, fcfs", "slots", {}),
    ("fcfs", "fcfs", "last", {}),
    ("prefill_first", "prefill_first", "last", {"scheduler_policy": "prefill_first"}),
    ("decode_round_robin", "decode_round_robin", "last", {"scheduler_policy": "decode_round_robin"}),
    ("paged", "", "blocks", {}),
    ("newest", "", "newest", {}),
    ("unchunked", "", "unchunked", {}),
    ("whole", "whole prompts, one forward", "last", {"use_chunked_prefill": False}),
    ("uncached", "without prefix caching", "last", {"use_prefix_caching": False}),
    ("one_chunk", "one chunk a step", "last", {"max_prefill_chunks_per_step": 1}),
    ("alone", "decoding alone", "last", {"max_prefill_chunks_per_step": 1}),
    ("engine", "without HTTP", "last", {}),
    ("vllm", "vLLM", "vllm", {}),
    ("http", "over HTTP", "last", {}),
)
"""Name, title ("" is the phase's own), what it shows (a role of :func:`roles`, or a peer), and settings."""
PEERS = {"transformers": TransformersEngine, "vllm": VllmEngine}


@dataclass(frozen=True)
class Contender:
    """An engine class with the settings that differ from the run's."""

    name: str
    title: str
    engine: Any
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def serves_many(self) -> bool:
        return hasattr(self.engine, "add_request")


def has_continuous(lesson: Lesson) -> bool:
    """Whether a phase has continuous batching."""
    return "batching_mode=continuous" in getattr(lesson.load("engine"), "SUPPORTED", ())


def roles(main: Sequence[Lesson], last: Lesson) -> dict[str, Lesson]:
    """Which phase of the main line, up to ``last``, shows what: ``slots`` is continuous batching in regions, ``blocks``
    the first phase with blocks, ``unchunked`` the last without chunks; ``newest`` is the last one, if it is newer than
    ``blocks``.
    """
    many = [lesson for lesson in main if hasattr(lesson.engine, "add_request") and lesson.number <= last.number]
    blocks = [lesson for lesson in many if "paged" in lesson.load("engine").MEMORY]
    found = {
        "sequential": [lesson for lesson in main if not hasattr(lesson.engine, "add_request")][-1],
        "static": many[0],
        "slots": [lesson for lesson in many if has_continuous(lesson) and lesson not in blocks][-1],
        "unchunked": [lesson for lesson in many if "use_chunked_prefill" not in lesson.load("engine").SUPPORTED][-1],
        "last": last,
    }
    found |= {"blocks": blocks[0]} if blocks else {}
    return found | ({"newest": last} if blocks and last != blocks[0] else {})


def lineup(number: str | None = None) -> dict[str, Contender]:
    """The contenders up to a phase, by default the newest; raises ConfigError for one without continuous batching."""
    able = [lesson for lesson in lessons() if lesson.generates and has_continuous(lesson)]
    last = newest_lesson() if number is None else find_lesson(number)
    if last not in able:
        raise ConfigError(
            f"Phase {last.number} ({last.title}) has no continuous batching; choose one of "
            f"{', '.join(other.number for other in able)}, or leave --phase out."
        )
    shown, found = roles([lesson for lesson in lessons() if lesson.generates and not lesson.is_side_track], last), {}
    for name, title, role, settings in CONTENDERS:
        if role in PEERS and (role != "vllm" or is_installed()):
            found[name] = Contender(name, title, PEERS[role], settings)
        elif role in shown and settings.keys() <= shown[role].load("engine").SUPPORTED:
            words = title or shown[role].title[:1].lower() + shown[role].title[1:]
            found[name] = Contender(name, f"{words} (phase {shown[role].number})", shown[role].engine, settings)
    return found


class Server:
    """An engine that is loaded and warm, with a queue in front if it needs one: ready to serve a trace."""

    def __init__(self, contender: Contender, config: EngineConfig) -> None:
        arguments: tuple[Any, ...] = (config,)
        if contender.engine is VllmEngine:
            tokens = BLOCK_SIZE * config.num_gpu_blocks if config.num_gpu_blocks else None
            arguments = config.model, config.torch_dtype, config.max_seq_len, config.max_batch_size, tokens
        engine = contender.engine(*arguments)
        self.config, self.max_batch_size = config, config.max_batch_size if contender.serves_many else 1
        self.engine = engine if contender.serves_many else OneAtATime(engine)
        self.pool = getattr(engine, "pool", None)
        capacity = self.pool.capacity_tokens if self.pool is not None else self.max_batch_size * engine.max_seq_len
        sizes = self.max_batch_size, engine.max_seq_len
        serve_rounds(self.engine, rounds(*sizes, is_gpu=config.device.startswith("cuda"), capacity_tokens=capacity))
        freeze_memory()

    def measure(self, trace: Trace, max_seconds: float | None = None) -> dict[str, Any]:
        """Serve a trace with an empty cache: the run's results, the computed tokens, and the bytes of the KV cache."""
        if self.pool is not None:
            self.pool.drop_cached()
        before = self.engine.stats()["tokens computed"]
        run, stats = drive(self.engine, trace, max_seconds), self.engine.stats()
        # phase 2 and transformers have no cache of fixed size
        memory = {"memory_kv_bytes": stats.get("cache bytes", 0)}
        found = figures(run, self.max_batch_size, self.config.max_decode_interval)
        return found | {"tokens_computed": stats["tokens computed"] - before} | memory


class Servers:
    """Loads contenders on demand and keeps them; those with the same engine and settings are shared. ``configs`` holds
    those of every contender loaded so far, by name and batch size.
    """

    def __init__(self, base: EngineConfig) -> None:
        self.base = base
        self.made: dict[tuple[Any, EngineConfig], Server] = {}
        self.configs: dict[str, EngineConfig | dict[str, Any]] = {}

    def get(self, contender: Contender, max_batch_size: int, max_seq_len: int) -> Server:
        """A contender's server, with the batch size if it serves many requests; its own settings take precedence."""
        # A phase that serves one request at a time has no queue settings.
        options = {"max_batch_size": max_batch_size} if contender.serves_many else {"max_waiting_requests": 1024}
        config = EngineConfig(**{**vars(self.base), **options, "max_seq_len": max_seq_len, **contender.settings})
        key = contender.engine, config
        if key not in self.made:
            server = self.made[key] = Server(contender, config)
            used = server.engine.settings if isinstance(server.engine, VllmEngine) else config
            self.configs[f"{contender.name}_{server.max_batch_size}"] = used
        return self.made[key]

    def drop(self) -> None:
        """Free everything that is loaded."""
        for server in self.made.values():
            getattr(server.engine, "close", lambda: None)()
        self.made.clear()
        free_memory()
