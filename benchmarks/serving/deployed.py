"""``infer deploy`` as a process of its own, for the benchmarks of replicas. Follows phase 11.

Invariant: Ray and all that it started are gone when the block ends.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.serving.http_load import MODEL, ROOT, START_SECONDS, stream
from benchmarks.serving.results import ServedRequest
from benchmarks.step_times import StepCounts
from shared.engine.config import EngineConfig
from shared.engine.warm_up import warm_up
from shared.errors import ConfigError
from shared.lessons import newest_lesson

INFER = (sys.executable, "-c", "from shared.cli import app; app(prog_name='infer')")


@dataclass
class Streams:
    """What became of a continuing load; ``errors``: of those without a whole answer."""

    requests: list[ServedRequest] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@contextmanager
def deployed(folder: Path, options: Sequence[str]) -> Iterator[str]:
    """The URL of a model on replicas of the newest phase; ``options`` are those of ``infer deploy``.

    Raises ConfigError if it does not become ready.
    """
    command = [*INFER, "deploy", str(folder), "--served-model-name", MODEL, "--port", "0", *options]
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        with log.open("wb") as stderr:  # in its own session: Ctrl-C is for the benchmark, which then ends Ray
            null = subprocess.DEVNULL
            process = subprocess.Popen(
                command, env=environment(), stdout=null, stderr=stderr, cwd=ROOT, start_new_session=True
            )
        try:
            yield _url(process, log)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(START_SECONDS)


async def keep_busy(url: str, num_open: int, prompt: Sequence[int], new_tokens: int, until: Awaitable[Any]) -> Streams:
    """Streams, so many open at a time, that are begun until ``until`` is done, and read to their ends.

    Each prompt has one token more than ``prompt``, of its own.
    """
    work, streams, start = asyncio.ensure_future(until), Streams(), time.perf_counter()
    options = {"model": MODEL, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}

    async def one_after_another() -> None:
        while not work.done():
            request = ServedRequest(time.perf_counter() - start, len(prompt) + 1)
            streams.requests.append(request)
            body = options | {"prompt": [*prompt, len(streams.requests) % 256]}
            await stream(url, f"busy-{len(streams.requests)}", body, request, start)
            streams.errors += [request.error] if request.error else []
            await asyncio.sleep(0.1 if request.error else 0.0)

    await asyncio.gather(work, *(one_after_another() for _ in range(num_open)))
    return streams


@contextmanager
def served_by(
    folder: Path, num_replicas: int, settings: dict[str, Any], notes: Path | None = None, pace: Sequence[float] = ()
) -> Iterator[tuple[str, Callable[[], None]]]:
    """The URL of a model on replicas, and a function that updates them, as ``infer deploy`` does when it runs again.

    Ray is this process's own. With ``notes``, engines note their steps in that folder, and a step takes at least as
    long as ``pace`` says, as if a device computed it that the processors need not wait for.
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
    load = partial(load_noting, notes, pace, config) if notes else partial(load_warm, config)
    update = partial(application.deploy, load, ServerConfig(MODEL), fleet, is_process=False)
    application.start()
    try:
        application.listen("127.0.0.1", port)
        update()
        yield url, update
    finally:
        application.end()


def load_warm(config: EngineConfig) -> Any:
    """The newest phase's engine, warmed up."""
    engine = newest_lesson().engine(config)
    warm_up(engine)
    return engine


def load_noting(notes: Path, pace: Sequence[float], config: EngineConfig) -> Any:
    """As ``load_warm``; the engine writes when each step began, its counts, and its seconds, up to the next step if
    there is one, into a file of its process. ``pace``: the least seconds of a step, for each of its counts.
    """
    engine = load_warm(config)
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
    """Of each step of all replicas when it began (the clock of ``time.perf_counter``), its counts and its seconds."""
    lines = [line for file in notes.glob("*.jsonl") for line in file.read_text().splitlines()]
    return [(begun, counts, seconds) for begun, counts, seconds in map(json.loads, lines)]


def environment() -> dict[str, str]:
    """Of a process that computes with as many threads as this one."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": paths}


def samples(url: str, name: str) -> dict[str, float]:
    """The values of a metric, by replica."""
    text = httpx.get(f"{url}/metrics", trust_env=False, timeout=START_SECONDS).text
    found = re.findall(rf'^{name}{{.*replica="(\w+)".*}} (\S+)$', text, re.MULTILINE)
    return {replica: float(value) for replica, value in found}


def _url(process: "subprocess.Popen[bytes]", log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"is served at (\S+)", log.read_text()):
            return found[1]
        time.sleep(0.1)
    said = log.read_text().strip().splitlines()
    raise ConfigError(f"infer deploy did not become ready: {said[-1] if said else 'it said nothing'}")
