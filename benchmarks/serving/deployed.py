"""Replicas that record their steps, to check the simulator. Follows phase 11.

Invariant: Ray and everything that it started are gone when the block ends.
"""

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.serving.http_load import MODEL, START_SECONDS, environment
from benchmarks.step_times import StepCounts
from shared.engine.config import EngineConfig
from shared.engine.warm_up import warm_up
from shared.lessons import newest_lesson


@contextmanager
def served_by(
    folder: Path, num_replicas: int, settings: dict[str, Any], notes: Path, pace: Sequence[float]
) -> Iterator[str]:
    """The URL of a model on replicas, as ``infer deploy`` starts them; Ray belongs only to this process.

    Engines record their steps in the folder ``notes``. A step takes at least as long as ``pace`` says, as if it were
    computed on a device that the processors need not wait for.
    """
    from shared.deployment import application
    from shared.server.process import address_of, bind
    from shared.server.settings import ServerConfig

    os.environ.update(environment())
    bound = bind("127.0.0.1", 0)
    url, port = address_of(bound), bound.getsockname()[1]
    bound.close()
    most = settings["max_batch_size"]
    fleet = application.Fleet(
        replicas=num_replicas,
        max_replicas=num_replicas,
        target_ongoing_requests=most,
        upscale_delay=0.0,
        downscale_delay=0.0,
        max_ongoing_requests=64 * most,
        ranks=1,
        cpus=0.25,
        gpus=0.0,
        router="prefix",
    )
    config = EngineConfig(str(folder), **settings)
    application.start()
    try:
        application.listen("127.0.0.1", port)
        application.deploy(partial(load_noting, notes, pace, config), ServerConfig(MODEL), fleet, is_process=False)
        yield url
    finally:
        application.end()


def load_noting(notes: Path, pace: Sequence[float], config: EngineConfig) -> Any:
    """The newest phase's engine, warmed up, which records its steps.

    For each step, it writes its start, its counts, and its seconds (up to the next step if there is one) into one file
    per process. ``pace``: the minimum seconds of a step, for each of its counts.
    """
    engine = newest_lesson().engine(config)
    warm_up(engine)
    file = (notes / f"{os.getpid()}.jsonl").open("a", buffering=1)
    step, counts = engine.step, StepCounts()
    begun, counted = 0.0, list[float]()

    def noted() -> Any:
        nonlocal begun, counted
        now = time.perf_counter()
        if counted:
            file.write(f"{json.dumps([begun, counted, now - begun])}\n")
        begun, outputs = now, step()
        counted = counts.of(engine.last_step)
        least = sum(each * count for each, count in zip(pace, counted, strict=False))
        time.sleep(max(0.0, least - (time.perf_counter() - begun)))
        if counted and not engine.has_work():
            file.write(f"{json.dumps([begun, counted, time.perf_counter() - begun])}\n")
            counted = []
        return outputs

    engine.step = noted
    return engine


def noted_steps(notes: Path) -> list[tuple[float, list[float], float]]:
    """For each step of all replicas: its start (the clock of ``time.perf_counter``), its counts and its seconds."""
    lines = [line for file in notes.glob("*.jsonl") for line in file.read_text().splitlines()]
    return [(begun, counts, seconds) for begun, counts, seconds in map(json.loads, lines)]


def samples(url: str, name: str) -> dict[str, float]:
    """The values of a metric, by replica."""
    text = httpx.get(f"{url}/metrics", trust_env=False, timeout=START_SECONDS).text
    found = re.findall(rf'^{name}{{.*replica="(\w+)".*}} (\S+)$', text, re.MULTILINE)
    return {replica: float(value) for replica, value in found}
