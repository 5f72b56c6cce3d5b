"""What chunks buy on a GPU: the first token, steps whose requests share a document, and nothing to share.

Introduced in phase 9.1. Phase 9 gets the same tokens as one prompt, and so reads a document's keys for each request,
from a copy of its own or, with prefix caching, from one. Decode steps are timed while all requests decode, as the mean
of consecutive steps. *Rotating* is what a step would cost more if PyTorch's operations rotated every key of the context
when it is read. Invariant: the engines that are compared have the same number of blocks, and take turns.

    python -m benchmarks.shared_chunks --model FOLDER --out benchmarks/reports
"""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks.chunks import BLOCK, register
from benchmarks.command import run
from benchmarks.decoding import WARM, Decoding, decoding, first_token
from benchmarks.report import Report, rounded
from benchmarks.setup import Setup, free_memory
from benchmarks.timing import SyntheticPrompts, in_turns
from benchmarks.view import View, table_of
from shared.chunks.relocation import relocate
from shared.lessons import find_lesson
from shared.ops.rope import inverse_frequencies

QUESTION, STEPS = 32, 40
Context = tuple[list[int], list[str]]  # the ids of a prompt, and the chunks before it


@contextmanager
def engines(setup: Setup, about: dict[str, Any], *phases: tuple[str, dict[str, Any]]) -> Iterator[list[Any]]:
    """An engine for each phase and its settings, until the end of the block."""
    made = [find_lesson(phase).engine(setup.config(**about | more)) for phase, more in phases]
    yield made
    for engine in made:
        vars(engine).clear()
    made.clear()
    free_memory()


def step_times(trials: int, *parties: tuple[Any, list[Context]]) -> list[float]:
    """Milliseconds a decode step of each engine with its requests."""
    together = []
    for engine, contexts in parties:
        # The first request decodes beside all prompts.
        params = decoding((WARM + STEPS) * trials + 4 * len(contexts) + 64)
        requests = [(prompt, params, None, chunks) if chunks else (prompt, params) for prompt, chunks in contexts]
        together.append(Decoding(engine, requests))
    calls = {n: partial(step_ms, one) for n, one in enumerate(together)}
    found = [statistics.median(times) for times in in_turns(calls, trials).values()]
    for one in together:
        one.end()
    return found


def step_ms(together: Decoding) -> float:
    """Milliseconds of a step, the mean of many."""
    return 1e3 * statistics.mean(together.steps(STEPS)[0])


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


def measure(
    model: str,
    trials: int = 3,
    device: str = "cuda",
    documents: int = 16,
    length: int = 1024,
    shared: int = 8192,
    requests: int = 64,
) -> Report:
    """First token behind ``documents`` of ``length`` tokens; decode steps of many ``requests``, behind one document of
    ``shared`` tokens, behind one of ``length`` each, and behind none."""
    setup, plain, results = Setup(model, device), {"use_prefix_caching": False}, {}
    about: dict[str, Any] = {"seed": 0, "max_batch_size": requests}
    about |= {"prefill_chunk_size": 2048, "max_num_batched_tokens": 2048 + requests}
    room = QUESTION + (WARM + STEPS) * trials + 4 * requests + 80
    context = documents * length
    sizes = {"max_seq_len": context + room, "num_gpu_blocks": (2 * context + 8 * room) // BLOCK}
    with engines(setup, about | sizes, ("09", plain), ("09.1", plain)) as (full, chunked):
        config, draw = full.model.config, SyntheticPrompts(full.model.config.vocab_size, 0)
        pieces, question = [draw.draw(length) for _ in range(documents)], draw.draw(QUESTION)
        names, whole = register(chunked, pieces), [token_id for piece in pieces for token_id in piece]
        for engine in (full, chunked):  # compiles what is left to compile
            first_token(engine, question)
        first_token(chunked, question, None, names)
        calls = {
            "plain_ms": lambda: first_token(full, whole + question),
            "chunked_ms": lambda: first_token(chunked, question, None, names),
        }
        seconds = in_turns(calls, trials)
        steps = step_times(trials, (full, [(whole + question, [])]), (chunked, [(question, names)]))
        results["first"] = {name: 1e3 * statistics.median(all_of) for name, all_of in seconds.items()}
        results["one"] = {"plain_ms": steps[0], "chunked_ms": steps[1]}
        results["one"]["rotating_ms"] = rotating_ms(config, context, device)
        configs = {"09": full.config, "09.1": chunked.config}
    questions = [draw.draw(QUESTION) for _ in range(requests)]
    sizes = {"max_seq_len": shared + room, "num_gpu_blocks": requests * (shared + room) // BLOCK}
    prefix = {"use_prefix_caching": True}
    with engines(setup, about | sizes, ("09", plain), ("09", prefix), ("09.1", plain)) as (full, prefixed, chunked):
        document = draw.draw(shared)
        name = register(chunked, [document])
        first_token(prefixed, document + question)
        all_of: list[Context] = [(document + one, []) for one in questions]
        found = step_times(trials, (full, all_of), (prefixed, all_of), (chunked, [(one, name) for one in questions]))
        results["shared"] = dict(zip(("plain_ms", "prefix_ms", "chunked_ms"), found, strict=True))
    sizes = {"max_seq_len": length + room, "num_gpu_blocks": requests * (length + room + BLOCK) // BLOCK}
    with engines(setup, about | sizes, ("09", plain), ("09.1", plain)) as (full, chunked):
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
    return setup.report("shared-chunks", configs, flags, results)


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
    table = table_of("", "what", {cases[case]: row for case, row in report.results.items()})
    return View(f"Shared chunks: {report.model['name']}", [report.machine_title], [table])


if __name__ == "__main__":
    run(measure, view, __doc__)
