"""A trace against a server over HTTP: streams that are opened, read and timed. Introduced in phase 4.

Requests go to ``POST /v1/completions`` as token ids, through httpx, and their events are read as they come. Reading
tens of thousands of events a second keeps a Python process busy, so a trace may be dealt out to several processes; what
is timed is then the server and not its client. Invariants: a token's moment is when its line had been read; a stream
counts as answered only if it ended with one ``done`` and as many tokens as were asked for; anything else is an error
with its cause.
"""

import asyncio
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import httpx

from benchmarks.serving.run import ServedRequest, ServedRun
from benchmarks.workloads.serving import Trace, TraceRequest

START_SECONDS = 60.0
"""A client process that is not ready by then is broken."""
SILENCE_SECONDS = 300.0
"""A stream that says nothing for so long has failed."""
Share = list[tuple[int, TraceRequest]]


class EventReader:
    """Cuts a stream's bytes into events, however they arrive: a name (None without one) and the data.

    Lines end with a line feed alone: JSON may hold the other characters that Python and httpx take for line ends.
    """

    def __init__(self) -> None:
        self.rest = b""
        self.event: str | None = None

    def feed(self, data: bytes) -> list[tuple[str | None, str]]:
        """The events whose data these bytes complete."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        events = []
        for line in lines:
            name, _, value = line.decode().rstrip("\r").partition(": ")
            if name == "event":
                self.event = value
            elif name == "data":
                events.append((self.event, value))
                self.event = None
        return events


def request_body(request: TraceRequest, model: str) -> dict[str, Any]:
    """Greedy, past any end of sequence."""
    return {
        "model": model,
        "prompt": list(request.prompt_ids),
        "max_tokens": request.new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


def generate_load(url: str, model: str, trace: Trace, clients: int = 1, run_id: str = "run") -> ServedRun:
    """Send a trace and read every answer.

    Args:
        clients: processes that share the work; streams of a closed loop and arrivals are dealt out in turn.
        run_id: begins the ``X-Request-Id`` of each request, whose end is its place in the trace.

    When requests were scheduled, and the engine's steps, only the server knows.
    """
    clients = max(1, min(clients, len(trace.requests), trace.concurrency or len(trace.requests)))
    shares: list[Share] = [list(enumerate(trace.requests))[n::clients] for n in range(clients)]
    streams = [None if trace.concurrency is None else len(range(trace.concurrency)[n::clients]) for n in range(clients)]
    served: dict[int, ServedRequest] = {}
    if clients == 1:
        served = asyncio.run(_send(url, model, shares[0], streams[0], run_id))
    else:
        context = multiprocessing.get_context("spawn")
        started = context.Barrier(clients)  # a process that takes its share has waited for all others to be ready
        with ProcessPoolExecutor(clients, context, started.wait, (START_SECONDS,)) as pool:
            futures = [pool.submit(_work, url, model, *work, run_id) for work in zip(shares, streams, strict=True)]
            for future in futures:
                served |= future.result()
    return ServedRun([served[n] for n in range(len(trace.requests))], steps=None, num_forwards=None)


def _work(url: str, model: str, share: Share, streams: int | None, run_id: str) -> dict[int, ServedRequest]:
    return asyncio.run(_send(url, model, share, streams, run_id))


async def _send(url: str, model: str, share: Share, streams: int | None, run_id: str) -> dict[int, ServedRequest]:
    served = {n: ServedRequest(0.0, len(request.prompt_ids)) for n, request in share}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(SILENCE_SECONDS)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout, trust_env=False) as client:
        start = time.perf_counter()

        async def send(n: int, request: TraceRequest, arrived: float) -> None:
            served[n].arrived = arrived
            await _stream(client, f"{run_id}-{n}", request_body(request, model), request.new_tokens, served[n], start)

        if streams is None:
            tasks = []
            for n, request in share:
                arrival = request.arrival or 0.0
                await asyncio.sleep(max(0.0, start + arrival - time.perf_counter()))
                tasks.append(asyncio.create_task(send(n, request, arrival)))
            await asyncio.gather(*tasks)
        else:
            queue = iter(share)

            async def one_stream() -> None:
                freed = 0.0
                for n, request in queue:
                    await send(n, request, freed)
                    freed = time.perf_counter() - start

            await asyncio.gather(*(one_stream() for _ in range(streams)))
    return served


async def _stream(
    client: httpx.AsyncClient, request_id: str, body: dict[str, Any], new_tokens: int, into: ServedRequest, start: float
) -> None:
    """One request, from sending it to the end of its answer."""
    reader, ends = EventReader(), 0
    try:
        async with client.stream(
            "POST", "/v1/completions", json=body, headers={"X-Request-Id": request_id}
        ) as response:
            if response.status_code != 200:
                said = (await response.aread()).decode(errors="replace")
                into.error = f"HTTP {response.status_code}: {said[:200]}"
            else:
                async for data in response.aiter_raw():
                    now = time.perf_counter() - start
                    for event, payload in reader.feed(data):
                        if event == "token":
                            into.token_ids.append(json.loads(payload)["token_id"])
                            into.token_times.append(now)
                        elif event == "error":
                            into.error = json.loads(payload)["error"]["message"]
                        ends += event in ("done", "error")
    except httpx.HTTPError as error:
        into.error = f"{type(error).__name__}: {error}"
    into.ended = time.perf_counter() - start
    if into.error is None and (ends != 1 or len(into.token_ids) != new_tokens):
        into.error = f"The stream had {len(into.token_ids)} of {new_tokens} tokens and {ends} terminal events."
