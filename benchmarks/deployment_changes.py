"""What is lost while replicas are replaced, added and removed under load: it should be nothing. Follows phase 11.

First all replicas are updated again and again. Then, in another deployment, the load rises and falls, and replicas
follow. Invariant: a stream counts as lost unless it had every token that it asked for, and one end.

    python -m benchmarks.deployment_changes --model ./tiny-llama --updates 100 --out benchmarks/reports
"""

import asyncio
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from benchmarks.command import run
from benchmarks.report import Report, read_value, rounded
from benchmarks.serving.deployed import Streams, deployed, keep_busy, samples, served_by
from benchmarks.setup import Setup
from benchmarks.view import Column, Table, View, count, text

PROMPT_TOKENS, NEW_TOKENS = 16, 100
FEWEST, MOST, TARGET = 1, 4, 4
"""Replicas of the deployment that scales, and the ongoing requests that each should have."""
LOADS = ((2, 20.0), (16, 60.0), (2, 90.0))
"""Streams open at a time, and for how many seconds."""
SAMPLE_SECONDS = 0.5
PACE = (0.02,)
"""The least seconds of a step while updates are made: streams are always open then, and take few processor seconds from
the replicas that start."""


def measure_changes(
    model: str = "smollm2-135m",
    device: str = "cpu",
    dtype: str | None = None,
    updates: int = 100,
    seconds: float = math.inf,
    streams: int = 6,
    scaling: bool = True,
    after: str | None = None,
) -> Report:
    """Updates, none of which begins after so many ``seconds`` of them, with so many ``streams`` open; then scaling.

    ``after``: a report whose updates, streams and replicas count too.
    """
    setup = Setup(model, device, dtype, 1)
    options = ["--device", setup.device, "--max-batch-size", "16", "--max-seq-len", "256", "--cpus", "0.5"]
    options += ["--dtype", setup.dtype] if setup.dtype else []
    results: dict[str, Any] = {}
    with setup.running(1):
        if updates:
            settings = {"max_batch_size": 16, "max_seq_len": 256, "num_gpu_blocks": 256}
            with (
                tempfile.TemporaryDirectory() as notes,
                served_by(setup.folder, 2, settings, Path(notes), PACE) as served,
            ):
                results["updates"] = asyncio.run(updated(setup, *served, updates, seconds, streams))
            if after:
                before, found = read_value(Path(after), "results.updates"), results["updates"]
                found |= {name: before[name] + found[name] for name in found if name not in ("open", "update_seconds")}
                found["update_seconds"] = rounded(statistics.median(found["seconds"]))
        if scaling:
            options += [f"--replicas={FEWEST}", f"--max-replicas={MOST}", f"--target-ongoing-requests={TARGET}"]
            options += ["--upscale-delay=4", "--downscale-delay=20"]
            with deployed(setup.folder, options) as url:
                results["scaling"] = asyncio.run(scaled(setup, url))
        flags: dict[str, Any] = {"updates": updates, "open": streams, "loads": LOADS if scaling else ()}
        flags |= {"new_tokens": NEW_TOKENS, "pace": PACE}
        engine = setup.config(max_batch_size=16, max_seq_len=256)
        return setup.report("deployment-changes", {"deploy": engine}, flags, results)


async def updated(
    setup: Setup, url: str, update: Callable[[], None], num_updates: int, most_seconds: float, num_open: int
) -> dict[str, Any]:
    """The streams that ran while updates were made one after the other, ``num_updates`` or as many as begin in time."""
    seconds: list[float] = []
    replicas = set(samples(url, "infer:generation_tokens_total"))

    async def update_often() -> None:
        while len(seconds) < num_updates and sum(seconds) < most_seconds:
            start = time.perf_counter()
            await asyncio.to_thread(update)
            seconds.append(time.perf_counter() - start)
            replicas.update(await asyncio.to_thread(samples, url, "infer:generation_tokens_total"))

    streams = await keep_busy(url, num_open, _prompt(setup), NEW_TOKENS, update_often())
    found = {
        "runs": 1,
        "updates": len(seconds),
        "replicas": len(replicas),
        "seconds": [rounded(each) for each in seconds],
    }
    return ended(streams) | found | {"update_seconds": rounded(statistics.median(seconds)), "open": num_open}


async def scaled(setup: Setup, url: str) -> dict[str, Any]:
    """The streams, and how many replicas ran, while one load followed the other."""
    running: list[tuple[float, int]] = []  # since which second how many
    nums: list[int] = []
    found: list[dict[str, Any]] = []
    start = time.perf_counter()

    async def watch(seconds: float) -> None:
        end = time.perf_counter() + seconds
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            while time.perf_counter() < end:
                num = (await client.get("/health")).json()["replicas"].get("RUNNING", 0)
                nums.append(num)
                if not running or running[-1][1] != num:
                    running.append((rounded(time.perf_counter() - start), num))
                await asyncio.sleep(SAMPLE_SECONDS)

    for num_open, seconds in LOADS:
        nums.clear()
        streams = await keep_busy(url, num_open, _prompt(setup), NEW_TOKENS, watch(seconds))
        found.append(ended(streams) | {"open": num_open, "fewest": min(nums), "most": max(nums), "last": nums[-1]})
    return {"loads": found, "lost": sum(each["lost"] for each in found), "running": running}


def ended(streams: Streams) -> dict[str, Any]:
    return {"streams": len(streams.requests), "lost": len(streams.errors), "errors": sorted(set(streams.errors))[:10]}


def view(report: Report) -> View:
    results, rows = report.results, list[dict[str, Any]]()
    if "updates" in results:
        found = results["updates"]
        rows.append(
            {
                **found,
                "what": f"{found['updates']} updates of 2 replicas, in {found['runs']} runs",
                "replicas": f"{found['replicas']} in all",
            }
        )
    for each in results["scaling"]["loads"] if "scaling" in results else ():
        rows.append(
            {**each, "what": "scaling", "replicas": f"{each['fewest']} to {each['most']}, at last {each['last']}"}
        )
    columns = [
        text("what", "what"),
        Column("streams open", "open", count),
        text("replicas", "replicas"),
        Column("streams", "streams", count),
        Column("lost", "lost", count),
        Column("seconds of an update", "update_seconds"),
    ]
    about = [f"Each stream has {NEW_TOKENS} tokens; {report.machine_title}; {report.date[:10]}"]
    return View(f"Replicas that change under load: {report.model['name']}", about, [Table("", columns, rows)], [])


def _prompt(setup: Setup) -> list[int]:
    return [index % setup.shape.vocab_size for index in range(PROMPT_TOKENS)]


if __name__ == "__main__":
    run(measure_changes, view, __doc__)
