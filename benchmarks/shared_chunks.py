"""What chunks buy on a GPU: the first token, steps whose requests share a document, and nothing to share.

Introduced in phase 9.1. Phase 9 gets the same tokens as one prompt, and so reads a document's keys for each request,
from a copy of its own or, with prefix caching, from one. Decode steps are timed while all requests decode, as the mean
of consecutive steps. *Rotating* is what a step would cost more if PyTorch's operations rotated every key of the context
when it is read. Invariant: the engines that are compared have the same number of blocks, and take turns.

    python -m benchmarks.shared_chunks --model FOLDER --out benchmarks/reports
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.chunks import first_token, register
from benchmarks.report import Report, describe_model, engine_settings, rounded, write_report
from benchmarks.setup import free_memory
from benchmarks.timing import SyntheticPrompts
from benchmarks.view import Column, Table, View, text
from shared.chunks.relocation import relocate
from shared.engine.config import EngineConfig
from shared.lessons import find_lesson
from shared.ops.rope import inverse_frequencies
from shared.sampling.params import SamplingParams

BLOCK, QUESTION, STEPS, WARM_UP = 16, 32, 40, 4
Context = tuple[list[int], list[str]]  # the ids of a prompt, and the chunks before it


@contextmanager
def engines(about: dict[str, Any], *phases: tuple[str, dict[str, Any]]) -> Iterator[list[Any]]:
    """An engine for each phase and its settings, until the end of the block."""
    made = [find_lesson(phase).engine(EngineConfig(**about | more)) for phase, more in phases]
    yield made
    for engine in made:
        vars(engine).clear()
    made.clear()
    free_memory()


class Decoding:
    """Requests that decode together, from when the last of them has its first token."""

    def __init__(self, engine: Any, contexts: list[Context], trials: int, temperature: float = 0.0) -> None:
        self.engine = engine
        num_new = (WARM_UP + STEPS) * trials + 4 * len(contexts) + 64  # the first request decodes beside all prompts
        params = SamplingParams(temperature=temperature, max_new_tokens=num_new, ignore_eos=True)
        self.names = [
            engine.add_request(prompt, params, **({"chunk_ids": chunks} if chunks else {}))
            for prompt, chunks in contexts
        ]
        engine.step()
        while len(engine.last_step.decoded) < len(contexts):
            engine.step()

    def step_ms(self) -> float:
        """Milliseconds a step."""
        for _ in range(WARM_UP):
            self.engine.step()
        started = time.perf_counter()
        for _ in range(STEPS):
            self.engine.step()
        return 1e3 * (time.perf_counter() - started) / STEPS

    def end(self) -> None:
        for name in self.names:
            self.engine.abort(name)
        while self.engine.has_work():
            self.engine.step()


def turns(trials: int, calls: Sequence[Callable[[], float]]) -> list[float]:
    """The median result of each call; they take turns."""
    found: list[list[float]] = [[] for _ in calls]
    for trial in range(trials):
        for n in range(len(calls)) if trial % 2 else reversed(range(len(calls))):
            found[n].append(calls[n]())
    return [statistics.median(one) for one in found]


def step_times(trials: int, *parties: tuple[Any, list[Context]]) -> list[float]:
    """Milliseconds a decode step of each engine with its requests."""
    decoding = [Decoding(engine, contexts, trials) for engine, contexts in parties]
    found = turns(trials, [one.step_ms for one in decoding])
    for one in decoding:
        one.end()
    return found


def rotating_ms(config: Any, num_tokens: int, device: str) -> float:
    """Milliseconds to rotate this many keys of every layer."""
    keys = torch.randn(num_tokens, config.num_kv_heads, config.head_dim, device=device, dtype=torch.bfloat16)
    frequencies = inverse_frequencies(config.layer_rope(0), config.head_dim).to(device)
    distances = torch.arange(num_tokens, device=device)
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for end in ends:
        relocate(keys, distances, frequencies)
        end.record()
    ends[1].synchronize()
    return config.num_layers * ends[0].elapsed_time(ends[1])


def measure(model: str, trials: int, device: str, documents: int, length: int, shared: int, requests: int) -> Report:
    """First token behind ``documents`` of ``length`` tokens; decode steps of many ``requests``, behind one document of
    ``shared`` tokens, behind one of ``length`` each, and behind none."""
    plain, results = {"use_prefix_caching": False}, {}
    about: dict[str, Any] = {"model": model, "device": device, "seed": 0, "max_batch_size": requests}
    about |= {"prefill_chunk_size": 2048, "max_num_batched_tokens": 2048 + requests}
    room = QUESTION + (WARM_UP + STEPS) * trials + 4 * requests + 80
    context = documents * length
    sizes = {"max_seq_len": context + room, "num_gpu_blocks": (2 * context + 8 * room) // BLOCK}
    with engines(about | sizes, ("09", plain), ("09.1", plain)) as (full, chunked):
        config, draw = full.model.config, SyntheticPrompts(full.model.config.vocab_size, 0)
        pieces, question = [draw.draw(length) for _ in range(documents)], draw.draw(QUESTION)
        names, whole = register(chunked, pieces), [token_id for piece in pieces for token_id in piece]
        for engine in (full, chunked):  # compiles what is left to compile
            first_token(engine, question)
        first_token(chunked, question, names)
        calls = (lambda: first_token(full, whole + question), lambda: first_token(chunked, question, names))
        seconds = turns(trials, calls)
        steps = step_times(trials, (full, [(whole + question, [])]), (chunked, [(question, names)]))
        results["first"] = {"plain_ms": 1e3 * seconds[0], "chunked_ms": 1e3 * seconds[1]}
        results["one"] = {"plain_ms": steps[0], "chunked_ms": steps[1]}
        results["one"]["rotating_ms"] = rotating_ms(config, context, device)
        name = describe_model(model)["name"]
        shown = {phase: engine_settings(one.config, name) for phase, one in (("09", full), ("09.1", chunked))}
    questions = [draw.draw(QUESTION) for _ in range(requests)]
    sizes = {"max_seq_len": shared + room, "num_gpu_blocks": requests * (shared + room) // BLOCK}
    prefix = {"use_prefix_caching": True}
    with engines(about | sizes, ("09", plain), ("09", prefix), ("09.1", plain)) as (full, prefixed, chunked):
        document = draw.draw(shared)
        name = register(chunked, [document])
        first_token(prefixed, document + question)
        all_of: list[Context] = [(document + one, []) for one in questions]
        found = step_times(trials, (full, all_of), (prefixed, all_of), (chunked, [(one, name) for one in questions]))
        results["shared"] = dict(zip(("plain_ms", "prefix_ms", "chunked_ms"), found, strict=True))
    sizes = {"max_seq_len": length + room, "num_gpu_blocks": requests * (length + room + BLOCK) // BLOCK}
    with engines(about | sizes, ("09", plain), ("09.1", plain)) as (full, chunked):
        pieces = [draw.draw(length) for _ in range(requests)]
        names = register(chunked, pieces)
        own: list[Context] = [(one, [name]) for one, name in zip(questions, names, strict=True)]
        long: list[Context] = [(piece + one, []) for piece, one in zip(pieces, questions, strict=True)]
        found = step_times(trials, (full, long), (chunked, own))
        results["each"] = {"plain_ms": found[0], "chunked_ms": found[1]}
        chunked.chunks.evict(10**9)
        found = step_times(trials, (full, long), (chunked, long))
        results["none"] = {"plain_ms": found[0], "chunked_ms": found[1]}
    for row in results.values():
        row["times"] = row["plain_ms"] / row["chunked_ms"]
    flags = {"trials": trials, "documents": documents, "length": length, "shared": shared, "requests": requests}
    results = {case: {name: rounded(value) for name, value in row.items()} for case, row in results.items()}
    return Report("shared-chunks", describe_model(model), shown, 0, flags, results, device)


def view(report: Report) -> View:
    """One table."""
    flags = report.flags
    cases = {
        "first": f"first token behind {flags['documents']} documents of {flags['length']} tokens",
        "one": "a step of one request behind them",
        "shared": f"a step of {flags['requests']} behind one document of {flags['shared']} tokens",
        "each": f"a step of {flags['requests']}, each behind its own document of {flags['length']} tokens",
        "none": f"a step of {flags['requests']} with prompts as long, without chunks",
    }
    columns = [text("what", "what"), Column("phase 9, ms", "plain_ms"), Column("chunks, ms", "chunked_ms")]
    columns.append(Column("times", "times"))
    rows = [{"what": cases[case]} | row for case, row in report.results.items()]
    notes = [
        f"With prefix caching phase 9 takes {report.results['shared']['prefix_ms']:.2f} ms behind one document.",
        f"Rotating the keys of one request at every step would take {report.results['one']['rotating_ms']:.2f} ms.",
    ]
    return View(f"Shared chunks: {report.model['name']}", [report.machine_title], [Table("", columns, rows)], notes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--shared", type=int, default=8192)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    sizes = given.documents, given.length, given.shared, given.requests
    measured = measure(given.model, given.trials, given.device, *sizes)
    print(measured.line())
    if given.out is not None:
        write_report(measured, given.out, view=view(measured))
