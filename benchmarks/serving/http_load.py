"""A trace over HTTP: a phase's server in a separate process, and streams that are opened, read and timed.

Introduced in phase 4. The time at which a request was scheduled is read from the server's log. Invariants: the process
computes with as many threads as the benchmark, and has ended when the block ends; a stream counts as answered only if
it ended with one ``done`` and the requested number of tokens.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from benchmarks.serving.results import ServedRequest, ServedRun
from benchmarks.workloads.serving import Trace, TraceRequest
from shared.errors import ConfigError
from shared.lessons import Lesson
from shared.loading.cpu_threads import most_threads

ROOT = Path(__file__).parents[2]
MODEL = "benchmarked"
START_SECONDS = 300.0
SILENCE_SECONDS = 300.0  # a stream that is silent for this long has failed


@dataclass
class ServedProcess:
    """A server that is ready; see :func:`served`."""

    pid: int
    log: Path
    url: str
    num_runs: int = 0

    def serve(self, trace: Trace) -> ServedRun:
        """Serve a trace over HTTP, with each request's queue wait as the server logged it."""
        self.num_runs += 1
        run = asyncio.run(generate_load(self.url, MODEL, trace, f"run{self.num_runs}"))
        for _attempt in range(500):  # a line may be written a moment after the end of its stream
            for line in events(self.log, "request"):
                owner, _, place = line["request_id"].rpartition("-")
                if owner == f"run{self.num_runs}" and line.get("queue_s") is not None:
                    request = run.requests[int(place)]
                    request.scheduled = request.arrived + line["queue_s"]
            if all(request.scheduled is not None for request in run.finished):
                break
            time.sleep(0.01)
        return run


@contextmanager
def served(lesson: Lesson, folder: Path, options: Sequence[str]) -> Iterator[ServedProcess]:
    """A server of the model in ``folder`` by a phase, with these options of its command ``serve``; SIGTERM ends the
    block like any exception. Raises ConfigError if it does not become ready.
    """
    command = [sys.executable, "-m", lesson.module_name, "serve", str(folder), "--log-format", "json"]
    command += ["--served-model-name", MODEL, "--port", "0", *options]
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        with log.open("wb") as stderr:  # in its own session: Ctrl-C is for the benchmark, which then ends the server
            null = subprocess.DEVNULL
            process = subprocess.Popen(command, env=environment(), stdout=null, stderr=stderr, start_new_session=True)
        try:
            yield ServedProcess(process.pid, log, _url(process, log))
        finally:
            signal.signal(signal.SIGTERM, before)
            process.kill()
            process.wait()


def environment() -> dict[str, str]:
    """For a process that computes with as many threads as this one."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"OMP_NUM_THREADS": str(most_threads()), "PYTHONPATH": paths}


def events(log: Path, name: str) -> list[dict[str, Any]]:
    """The log's lines about one kind of event, except for a line still being written."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}\n")]
    return [line for line in found if line["event"] == name]


def _url(process: "subprocess.Popen[bytes]", log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if ready := events(log, "ready"):
            return str(ready[0]["url"])
        time.sleep(0.05)
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    why = said[-1] if said else f"it said nothing in {START_SECONDS:.0f} s"
    raise ConfigError(f"The server did not become ready: {why}")


async def generate_load(url: str, model: str, trace: Trace, run_id: str = "run") -> ServedRun:
    """Send a trace, greedily and ignoring end of sequence, and read every answer. A turn of a conversation follows the
    previous one. ``run_id`` begins the ``X-Request-Id`` of each request, which ends with its index in the run.
    """
    served = [ServedRequest(0.0, len(request.prompt_ids)) for request in trace.requests]
    queue = iter(enumerate(trace.requests))
    options = {"model": model, "temperature": 0, "ignore_eos": True}
    start = time.perf_counter()

    async def send(n: int, request: TraceRequest, arrived: float) -> None:
        served[n].arrived = arrived
        body = options | {"prompt": request.prompt_ids, "max_tokens": request.new_tokens}
        await stream(url, f"{run_id}-{n}", body, served[n], start)
        if request.turns and served[n].error is None:
            following = request.next_turn(served[n].token_ids)
            served.append(ServedRequest(0.0, len(following.prompt_ids), turn=served[n].turn + 1))
            await send(len(served) - 1, following, time.perf_counter() - start)

    async def one_after_another() -> None:
        freed = 0.0
        for n, request in queue:
            await send(n, request, freed)
            freed = time.perf_counter() - start

    async with asyncio.TaskGroup() as tasks:
        for _ in range(trace.concurrency or 0):
            tasks.create_task(one_after_another())
        for n, request in enumerate(trace.requests) if trace.concurrency is None else ():
            arrival = request.arrival or 0.0
            await asyncio.sleep(max(0.0, start + arrival - time.perf_counter()))
            tasks.create_task(send(n, request, arrival))
    return ServedRun(served, steps=None, num_forwards=None)


class Exchange(asyncio.Protocol):
    """A request and its answer on a separate connection; ``read`` gets each piece of the answer's body.

    It is parsed by httptools, which is written in C. With httpx a piece took 80 µs, which limited 64 streams to 12,000
    tokens per second.
    """

    def __init__(self, request: bytes, read: Callable[["Exchange", bytes], None]) -> None:
        self.request, self.read = request, read
        self.parser = httptools.HttpResponseParser(self)
        self.heard = time.perf_counter()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def status(self) -> int:
        return int(self.parser.get_status_code())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self.request)

    def data_received(self, data: bytes) -> None:
        self.heard = time.perf_counter()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(error.__context__ or error)

    def on_body(self, body: bytes) -> None:
        self.read(self, body)

    def on_message_complete(self) -> None:
        self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc or ConnectionError("the server closed the connection"))

    def _end(self, error: BaseException | None = None) -> None:
        if not self.ended.done():
            self.ended.set_result(None) if error is None else self.ended.set_exception(error)

    async def wait(self) -> None:
        """Wait for the end of the answer; raises the error that ended it early, and TimeoutError after a long
        silence."""
        while not self.ended.done():
            await asyncio.wait({self.ended}, timeout=SILENCE_SECONDS)
            if not self.ended.done() and time.perf_counter() - self.heard > SILENCE_SECONDS:
                raise TimeoutError(f"the server said nothing for {SILENCE_SECONDS:.0f} s")
        self.ended.result()


async def stream(url: str, request_id: str, body: dict[str, Any], into: ServedRequest, start: float) -> None:
    """One request, from sending it to the end of its answer; ``start`` is the moment from which times are counted."""
    rest, ends = b"", 0

    def read(exchange: Exchange, data: bytes) -> None:
        nonlocal rest, ends
        if exchange.status != 200:
            rest += data
            return
        now = time.perf_counter() - start
        *frames, rest = (rest + data).split(b"\n\n")
        for name, payload in map(read_event, frames):
            if name == "token":
                into.token_ids.append(json.loads(payload)["token_id"])
                into.token_times.append(now)
            elif name == "error":
                into.error = json.loads(payload)["error"]["message"]
            ends += name in ("done", "error")

    server, content = urlsplit(url), json.dumps(body).encode()
    headers = {"Host": server.netloc, "X-Request-Id": request_id, "Accept": "text/event-stream", "Connection": "close"}
    headers |= {"Content-Type": "application/json", "Content-Length": str(len(content))}
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    request = f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + content
    try:
        connect = asyncio.get_running_loop().create_connection
        transport, exchange = await connect(lambda: Exchange(request, read), server.hostname or "", server.port or 80)
        try:
            await exchange.wait()
        finally:
            exchange.ended.cancel()  # a later error has no reader, and would be logged
            transport.abort()
        if exchange.status != 200:
            into.error = f"HTTP {exchange.status}: {rest.decode(errors='replace')[:200]}"
    except (OSError, httptools.HttpParserError) as error:
        into.error = f"{type(error).__name__}: {error}"
    finally:
        into.ended = time.perf_counter() - start
    if into.error is None and (ends != 1 or len(into.token_ids) != body["max_tokens"]):
        into.error = f"The stream had {len(into.token_ids)} of {body['max_tokens']} tokens and {ends} terminal events."


def read_event(frame: bytes) -> tuple[str, str]:
    """The name and the data of a server-sent event, or ""; JSON may contain characters that httpx takes for line
    ends."""
    fields = dict(line.partition(": ")[::2] for line in frame.decode().split("\n"))
    return fields.get("event", ""), fields.get("data", "")
