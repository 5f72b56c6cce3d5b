"""A trace against a server over HTTP: streams that are opened, read and timed. Introduced in phase 4.

Requests go to ``POST /v1/completions`` as token ids and ask for named events, which are read as they come, by one
asyncio client, which reads some 20,000 events a second. Invariant: a stream counts as answered only if it ended with
one ``done`` and as many tokens as were asked for; anything else is an error with its cause.
"""

import asyncio
import json
import time
from typing import Any

import httpx

from benchmarks.serving.run import ServedRequest, ServedRun
from benchmarks.workloads.serving import Trace, TraceRequest

SILENCE_SECONDS = 300.0
"""A stream that says nothing for so long has failed."""


async def generate_load(url: str, model: str, trace: Trace, run_id: str = "run") -> ServedRun:
    """Send a trace, greedily and past any end of sequence, and read every answer.

    ``run_id`` begins the ``X-Request-Id`` of each request, whose end is its place in the trace. When requests were
    scheduled, and the engine's steps, only the server knows.
    """
    served = [ServedRequest(0.0, len(request.prompt_ids)) for request in trace.requests]
    queue = iter(enumerate(trace.requests))
    options = {"model": model, "temperature": 0, "ignore_eos": True}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=SILENCE_SECONDS, trust_env=False) as client:
        start = time.perf_counter()

        async def send(n: int, request: TraceRequest, arrived: float) -> None:
            served[n].arrived = arrived
            body = options | {"prompt": request.prompt_ids, "max_tokens": request.new_tokens}
            await _stream(client, f"{run_id}-{n}", body, served[n], start)

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


async def _stream(
    client: httpx.AsyncClient, request_id: str, body: dict[str, Any], into: ServedRequest, start: float
) -> None:
    """One request, from sending it to the end of its answer."""
    rest, ends = b"", 0
    headers = {"X-Request-Id": request_id, "Accept": "text/event-stream"}
    try:
        async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            if response.status_code != 200:
                into.error = f"HTTP {response.status_code}: {(await response.aread()).decode(errors='replace')[:200]}"
                return
            async for data in response.aiter_raw():
                now = time.perf_counter() - start
                *frames, rest = (rest + data).split(b"\n\n")
                for name, payload in map(read_event, frames):
                    if name == "token":
                        into.token_ids.append(json.loads(payload)["token_id"])
                        into.token_times.append(now)
                    elif name == "error":
                        into.error = json.loads(payload)["error"]["message"]
                    ends += name in ("done", "error")
    except httpx.HTTPError as error:
        into.error = f"{type(error).__name__}: {error}"
    finally:
        into.ended = time.perf_counter() - start
    if into.error is None and (ends != 1 or len(into.token_ids) != body["max_tokens"]):
        into.error = f"The stream had {len(into.token_ids)} of {body['max_tokens']} tokens and {ends} terminal events."


def read_event(frame: bytes) -> tuple[str, str]:
    """The name and the data of a server-sent event, or ""; JSON may hold what httpx takes for ends of lines."""
    fields = dict(line.partition(": ")[::2] for line in frame.decode().split("\n"))
    return fields.get("event", ""), fields.get("data", "")
