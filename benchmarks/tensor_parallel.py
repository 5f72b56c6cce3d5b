"""The gain from several GPUs for one model: engines with 1 and N ranks, compared with what the memory allows.

Introduced in phase 12.1. Each part is a separate process that writes its figures as soon as it has them, so that a
hanging part loses no others; ``report`` puts them together. Weights are random and generated on the GPUs when read, one
whole tensor at a time. So no checkpoint is written, and N ranks have shards of one rank's weights.

    python -m benchmarks.tensor_parallel engine --shape qwen3-8b --ranks 1 --out DIR
    python -m benchmarks.tensor_parallel engine --shape qwen3-8b --ranks 2 --sums nccl --out DIR
    python -m benchmarks.tensor_parallel report --shape qwen3-8b --ranks 2 --out DIR
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.command import present
from benchmarks.decoding import WARM, Decoding, decoding, first_token
from benchmarks.hardware import measure_ceilings
from benchmarks.random_weights import make_weights_when_read, random_model
from benchmarks.report import Report, engine_settings, rounded
from benchmarks.roofline import DecodeWork, weight_bytes
from benchmarks.view import View, table_of
from shared.checkpoints.shapes import SHAPES
from shared.engine.config import EngineConfig
from shared.lessons import find_lesson
from shared.loading.config_json import parse_config

CASES = {"one": (1, 0.0), "many": (64, 0.0), "drawn": (64, 1.0)}  # requests, and their temperature
PROMPT, CONTEXT, STEPS, TRIALS = 8192, 128, 40, 3


def prompt_of(n: int, length: int) -> list[int]:
    return [(31 * n + 7 * k * k + k) % 400 + 20 for k in range(length)]


def step_ms(together: Decoding) -> float:
    """Milliseconds per step, the mean of many."""
    return 1e3 * statistics.mean(together.steps(STEPS)[0])


def measure_engine(given: argparse.Namespace, save: Callable[[dict[str, Any]], None]) -> None:
    """Steps, prompts and memory of an engine with ``given.ranks`` ranks."""
    make_weights_when_read()
    phase = find_lesson("12" if given.ranks == 1 else "12.1")
    is_tiny = given.shape.startswith("tiny")
    prompt = 64 if is_tiny else PROMPT
    with tempfile.TemporaryDirectory() as temporary:
        folder = random_model(given.shape, Path(temporary), given.device)
        config = EngineConfig(
            model=str(folder),
            device=given.device,
            seed=0,
            max_seq_len=prompt + 256,
            max_batch_size=4 if is_tiny else given.batch,
            prefill_chunk_size=64 if is_tiny else given.chunk,
            max_num_batched_tokens=4096,
            num_gpu_blocks=2600 if given.batch == 64 else 1200,
            use_prefix_caching=False,
            quantization=given.quantization,
            tensor_parallel_size=given.ranks,
            all_reduce_backend=given.sums if given.ranks > 1 else None,
        )
        engine = phase.engine(config)
    figures: dict[str, Any] = {
        "ranks": given.ranks,
        "weight_bytes": weight_bytes(engine.model),
        "kv_bytes": engine.view.num_bytes,
        "kv_tokens": engine.pool.capacity_tokens,
        "settings": engine_settings(config, given.shape),
    }
    if given.ranks > 1 and given.device == "cuda":
        peers = engine.group.ranks.peers
        figures["way"] = None if peers is None else peers.way
    save(figures)
    figures["answer"] = [output.token_id for output in engine.generate(prompt_of(0, 32), decoding(32))]
    figures["num_replays"] = engine.stats()["CUDA graph replays"]
    save(figures)
    for case, (count, temperature) in CASES.items():
        if count <= config.max_batch_size:
            params = decoding((WARM + STEPS) * TRIALS + 4 * count + 64, temperature=temperature)
            together = Decoding(engine, [(prompt_of(n, CONTEXT), params) for n in range(count)])
            figures[f"{case}_ms"] = rounded(statistics.median(step_ms(together) for _ in range(TRIALS)))
            together.end()
            save(figures)
    first_token(engine, prompt_of(1, prompt))
    figures["prompt_ms"] = rounded(1e3 * min(first_token(engine, prompt_of(2 + n, prompt)) for n in range(TRIALS)))
    save(figures)
    if given.ranks == 1 and given.device == "cuda":
        figures["ceilings"] = measure_ceilings("cuda").results()
        save(figures)
    if given.ranks > 1:
        engine.group.close()


def make_report(folder: Path, shape: str, num_ranks: int) -> Report:
    """The report of the parts in ``folder``."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("part-*.json"))}
    one = found[f"part-engine-{shape}-1"]
    work = DecodeWork(parse_config(dict(SHAPES[shape]), shape), getattr(torch, SHAPES[shape]["torch_dtype"]))
    reference = one["answer"]
    rate = one["ceilings"]["read_gb_per_second"] * 1e9
    results: dict[str, Any] = {"ceilings": one.pop("ceilings")}
    engines = {}
    for name, figures in found.items():
        if name.startswith(f"part-engine-{shape}-"):
            ranks, key = figures["ranks"], name.removeprefix(f"part-engine-{shape}-")
            engines[key] = figures.pop("settings")
            answer = figures.pop("answer")
            as_one = [a == b for a, b in zip(answer, reference, strict=True)]
            figures["answer_as_one"] = [*as_one, False].index(False)  # tokens, up to the first difference
            for case, (count, _) in CASES.items():
                limit = work.num_bytes(CONTEXT + 80, count) / ranks / rate
                figures[f"{case}_gain"] = rounded(one[f"{case}_ms"] / figures[f"{case}_ms"])
                figures[f"{case}_limit_ms"] = rounded(1e3 * limit)
            figures["prompt_gain"] = rounded(one["prompt_ms"] / figures["prompt_ms"])
            figures["weight_share"] = rounded(figures["weight_bytes"] * ranks / one["weight_bytes"])
            figures["kv_share"] = rounded(figures["kv_bytes"] * ranks / one["kv_bytes"])
            results[key] = figures
    model = {"name": shape, "revision": None, "config": SHAPES[shape]}
    flags = {"context": CONTEXT, "prompt": PROMPT, "trials": TRIALS, "ranks": num_ranks, "weights": "random"}
    return Report("tensor-parallel", model, engines, 0, flags, results, "cuda")


def view(report: Report) -> View:
    """One table."""
    ends = "_ms", "_limit_ms", "_gain"
    rows = {
        key: {name: value for name, value in report.results[key].items() if name.endswith(ends)}
        for key in report.engines
    }
    return View(f"Tensor parallel: {report.model['name']}", [report.machine_title], [table_of("", "ranks, sums", rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("engine", "report"))
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sums", default="peer", choices=("peer", "nccl"))
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    kind = "" if given.ranks == 1 else f"-{given.sums}"
    given.out.mkdir(parents=True, exist_ok=True)

    def save(figures: dict[str, Any]) -> None:
        part = given.out / f"part-engine-{given.shape}-{given.ranks}{kind}.json"
        part.write_text(json.dumps(figures, indent=1), encoding="utf-8")
        print(json.dumps({key: value for key, value in figures.items() if key != "settings"}), flush=True)

    if given.part == "report":
        report = make_report(given.out, given.shape, given.ranks)
        present(report, view(report), given.out, Console())
        return
    measure_engine(given, save)
    sys.stdout.flush()
    os._exit(0)  # communicators of ranks that are gone may keep a process alive


if __name__ == "__main__":
    main()
