"""What chunks buy and cost: time to the first token, distance to full concatenation. Introduced in phase 9.1.

The distance is that of two distributions of the next token, at each token of a text that follows documents: chunked,
and computed as one prompt. The documents are pages of this repository. Invariant: both engines compute the same ids, in
one process, in turns; the chunks are in the cache before the clock starts.

    python -m benchmarks.chunks --out benchmarks/reports
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import Report, describe_model, engine_settings, rounded, write_report
from benchmarks.view import Column, Table, View, percent, text
from shared.engine.config import EngineConfig
from shared.lessons import find_lesson
from shared.sampling.params import SamplingParams

PAGES = Path(__file__).parents[1] / "docs"
ONE = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
BLOCK = 16


class Recorder:
    """A model that keeps the hidden states of its last forward."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, tokens: Any, kv: Any) -> torch.Tensor:
        self.hidden: torch.Tensor = self.model(tokens, kv)
        return self.hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def make_engines(model: str, num_tokens: int) -> dict[str, Any]:
    """Phase 9 without prefix caching, which would find the prompt of the trial before, and phase 9.1."""
    about: dict[str, Any] = {
        "max_seq_len": num_tokens,
        "max_batch_size": 4,
        "num_gpu_blocks": 2 * num_tokens // BLOCK,
        "prefill_chunk_size": num_tokens,
        "use_prefix_caching": False,
    }
    engines = {phase: find_lesson(phase).engine(EngineConfig(model=model, **about)) for phase in ("09", "09.1")}
    for engine in engines.values():
        engine.runner.model = Recorder(engine.model)
    return engines


def documents(tokenizer: Any, count: int, length: int) -> list[list[int]]:
    """``count`` pieces of ``length`` tokens, from different pages as far as there are enough."""
    pages = [tokenizer.encode(page.read_text(encoding="utf-8")) for page in sorted(PAGES.glob("*.md"))]
    pieces = [page[start : start + length] for start in range(0, 8 * length, length) for page in pages]
    return [piece for piece in pieces if len(piece) == length][:count]


def first_token(engine: Any, prompt: list[int], chunk_ids: list[str] | None = None) -> float:
    """Seconds to the first token of a prompt."""
    started = time.perf_counter()
    engine.add_request(prompt, ONE, **({} if chunk_ids is None else {"chunk_ids": chunk_ids}))
    while engine.has_work():
        engine.step()
    return time.perf_counter() - started


@torch.inference_mode()
def last_logits(engine: Any, count: int) -> torch.Tensor:
    """Log-probabilities ``[count, V]`` after the last tokens of the last forward."""
    logits: torch.Tensor = engine.model.logits(engine.runner.model.hidden[-count:])
    return logits.float().log_softmax(-1)


def register(engine: Any, chunks: list[list[int]]) -> list[str]:
    """Compute the chunks, and return their ids."""
    chunk_ids = [engine.register(chunk) for chunk in chunks]
    while engine.has_work():
        engine.step()
    return chunk_ids


def measure(model: str, trials: int, num_documents: int, length: int, question: int, continuation: int) -> Report:
    """Times for ``num_documents`` of ``length`` tokens, and distances for 1 to 16 documents of half that length."""
    engines = make_engines(model, num_documents * length + 256)
    plain, chunked = engines["09"], engines["09.1"]
    pieces = documents(plain.tokenizer, num_documents + 1, length)
    chunks, own = pieces[:num_documents], pieces[-1][:question]
    started = time.perf_counter()
    names = register(chunked, chunks)
    seconds: dict[str, list[float]] = {"register": [time.perf_counter() - started], "plain": [], "chunked": []}
    for _ in range(trials):
        seconds["plain"].append(first_token(plain, [token_id for chunk in chunks for token_id in chunk] + own))
        seconds["chunked"].append(first_token(chunked, own, names))
    times = {name: statistics.median(all_of) for name, all_of in seconds.items()}
    rows: list[dict[str, Any]] = []
    half = length // 2
    pieces = documents(plain.tokenizer, 16, half + continuation)
    for count in (1, 2, 4, 8, 16):
        kl, agrees, ranks = [], [], []
        for last in range(0, 16, 4):  # the text behind the documents continues the last of them
            chosen = [pieces[(last + 1 + n) % 16] for n in range(count)]
            own = chosen[-1][half:]
            names = register(chunked, [piece[:half] for piece in chosen])
            first_token(plain, [token_id for piece in chosen for token_id in piece[:half]] + own)
            first_token(chunked, own, names)
            expected, found = last_logits(plain, continuation), last_logits(chunked, continuation)
            kl.append((expected.exp() * (expected - found)).sum(-1))
            agrees.append(expected.argmax(-1) == found.argmax(-1))
            following = torch.tensor(own[1:])[:, None]
            ranks.append(torch.stack([x[:-1].gather(1, following).mean() for x in (expected, found)]))
        losses = -torch.stack(ranks).mean(0)
        rows.append(
            {
                "documents": count,
                "kl": rounded(torch.cat(kl).mean().item()),
                "kl_median": rounded(torch.cat(kl).median().item()),
                "agreement": rounded(torch.cat(agrees).float().mean().item()),
                "loss_plain": rounded(losses[0].item()),
                "loss_chunked": rounded(losses[1].item()),
            }
        )
    about = describe_model(model)
    results = {
        "seconds": {name: rounded(value) for name, value in times.items()},
        "times": rounded(times["plain"] / times["chunked"]),
        "distance": {str(row.pop("documents")): row for row in rows},
    }
    flags = {"trials": trials, "documents": num_documents, "length": length, "question": question}
    shown = {phase: engine_settings(engine.config, about["name"]) for phase, engine in engines.items()}
    return Report("chunks", about, shown, 0, flags, results)


def view(report: Report) -> View:
    """The report's tables."""
    times = [{"what": name, "seconds": seconds} for name, seconds in report.results["seconds"].items()]
    tables = [
        Table("First token", [text("what", "what"), Column("seconds", "seconds")], times),
        Table(
            "Distance to full concatenation",
            [
                Column("documents", "documents", str),
                Column("KL, mean", "kl", lambda kl: f"{max(kl, 0):.3f}"),
                Column("top-1 agreement", "agreement", percent),
                Column("loss, concatenated", "loss_plain"),
                Column("loss, chunked", "loss_chunked"),
            ],
            [{"documents": count} | row for count, row in report.results["distance"].items()],
        ),
    ]
    return View(f"Chunks: {report.model['name']}", [report.machine_title], tables)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    report = measure(given.model, given.trials, 8, 512, 32, 64)
    print(report.line())
    if given.out is not None:
        write_report(report, given.out, view=view(report))
