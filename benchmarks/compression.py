"""What a compressed KV cache costs: perplexity, KL, and retrieval, by budget. Introduced in phase 9.2.

A context is computed and compressed once, then the tokens that follow are scored. A budget is a share of the context
that a head keeps on average. *Alike* gives every head this number. If heads differ, each keeps what it needs for mass
p, between two thirds and four thirds of the budget (the default settings' ratio) or, with *free*, whatever it needs
above 40. A search finds the p at which the mean meets the budget. The texts are chapters of the course.

    python -m benchmarks.compression --out benchmarks/reports
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import run
from benchmarks.report import Report, describe_model, rounded
from benchmarks.view import Column, Lines, Row, Table, View, percent, text
from benchmarks.workloads.retrieval import NUM_PAIRS, Case, needles, pairs
from shared.cache.layout.paged import PagedSizes
from shared.cache.pool.extension import NoExtension
from shared.cache.pool.paged import PagedKVCachePool
from shared.cache.view.block_storage import PlainStorage
from shared.cache.view.operations_attention import OperationsAttention
from shared.cache.view.paged import PagedView
from shared.engine.batch import Batch
from shared.engine.request import Request
from shared.loading.loader import load_model
from shared.loading.resolve import resolve_model
from shared.models.causal_lm import CausalLM
from shared.sampling.params import SamplingParams
from shared.scheduling.schedule import Schedule, Scheduled
from shared.text.tokenizer import Tokenizer
from shared.tracks.compression.compressors import COMPRESSORS
from shared.tracks.compression.kept_cells import KeptCells
from shared.tracks.compression.layout import Packed
from shared.tracks.compression.operations_attention import CondensedOperations
from shared.tracks.compression.pool import CompressedRequests
from shared.tracks.compression.selection import Budget

CHAPTERS = [Path(__file__).parents[1] / "tutorial" / f"phase_{name}.md" for name in ("01a", "03", "04", "06", "08")]
NUM_SCORED, WINDOW, BLOCK = 256, 32, 16
FLOOR = 40  # tokens: the sinks, the recent ones, and a few more
SHARES, RETRIEVED = (0.12, 0.18, 0.25, 0.37, 0.5, 0.75, 1.0), (0.12, 0.25, 0.5)
ALIKE = (1.0, 1.0)


@dataclass(frozen=True)
class Way:
    """A way to spend a budget: the heads differ within ``bounds``, which are shares of it; None: from ``FLOOR`` to
    all."""

    title: str
    method: str
    bounds: tuple[float, float] | None = (2 / 3, 4 / 3)

    def bounded(self, share: float, num_context: int, p: float) -> Budget:
        """The budget of heads that need the mass p."""
        mean, bounds = round(share * num_context), self.bounds if share < 1 else ALIKE
        least, most = (FLOOR, num_context) if bounds is None else (round(mean * x) for x in bounds)
        return Budget(max(least, FLOOR), max(most, FLOOR), p)


WAYS = {
    "snapkv": Way("SnapKV", "snapkv"),
    "rkv": Way("R-KV", "rkv"),
    "topp": Way("top-p", "topp"),
    "snapkv_free": Way("SnapKV, heads free", "snapkv", None),
    "streaming": Way("sinks and newest", "streaming", ALIKE),
    "topp_alike": Way("top-p, heads alike", "topp", ALIKE),
    "snapkv_alike": Way("SnapKV, heads alike", "snapkv", ALIKE),
}


class Scorer:
    """A model with one sequence in a KV cache whose dropped tokens are masked, so that it can be compressed again."""

    def __init__(self, model: CausalLM, num_tokens: int) -> None:
        self.model = model
        sizes = PagedSizes(-(-num_tokens // BLOCK), BLOCK, 1, num_tokens, num_tokens)
        options = COMPRESSORS["none"](1.0), Budget(FLOOR, FLOOR), WINDOW, False
        self.request = Request("0", [0], SamplingParams(), 0)
        storage = PlainStorage(model.config, sizes, model.dtype, model.device)
        self.kept = KeptCells(model.config, sizes, model.dtype, storage, *options)
        attention = CondensedOperations(OperationsAttention(storage, "sdpa"), self.kept)
        self.view = PagedView(model.config, sizes, model.dtype, storage, attention)
        cells = self.kept.cells
        self.requests = CompressedRequests(cells, NoExtension())
        self.pool = PagedKVCachePool(cells.num_blocks, cells.block_size, 1, num_tokens, self.requests)

    @torch.inference_mode()
    def read(self, ids: list[int], num_context: int) -> None:
        """Compute the first ``num_context`` tokens of a new sequence."""
        self.pool.release(self.request)
        self.request = Request("0", ids, SamplingParams(), 0)
        self.pool.reserve(self.request, len(ids))
        self._forward(0, num_context)
        self.pool.commit(self.request, num_context)
        self.num_context = num_context

    @torch.inference_mode()
    def compress(self, method: str, budget: Budget) -> tuple[Packed | None, float]:
        """What a compression of the context keeps (None: everything), and the average share that a head keeps."""
        self.requests.packed.clear()
        self.kept.compressor, self.kept.budget = COMPRESSORS[method](self.model.config.attention_scale), budget
        holding = self.requests.holding(self.pool, self.request)
        packed = self.kept.compress(holding, lambda packed: holding.table)
        return packed, 1.0 if packed is None else float(packed.counts.mean()) / self.num_context

    @torch.inference_mode()
    def follow(self, packed: Packed | None) -> torch.Tensor:
        """Log-probabilities fp64 ``[T, V]`` of the tokens after the context, from ``packed`` keys."""
        self.requests.packed.clear()
        if packed is not None:
            self.requests.compress(self.pool, self.request, packed)
        hidden = self._forward(self.num_context, self.request.num_tokens)
        return self.model.logits(hidden).double().log_softmax(-1)

    def spend(self, way: Way, share: float) -> tuple[torch.Tensor, float]:
        """Figures for the following tokens if heads keep the share ``share`` on average, found by bisection for p, and
        what they really keep."""
        low, high = 0.0, 32.0
        for _ in range(1 if way.bounds == ALIKE or share >= 1 else 12):
            x = (low + high) / 2
            packed, kept = self.compress(way.method, way.bounded(share, self.num_context, 1 - 2**-x))
            if abs(kept - share) < 0.01 * share:
                break
            low, high = (x, high) if kept < share else (low, x)
        return self.follow(packed), kept

    def _forward(self, start: int, end: int) -> torch.Tensor:
        self.request.num_computed_tokens = start
        batch = Batch.of(Schedule(1, (Scheduled(self.request, start, end - start, 0, 0),)), self.pool)
        return self.model(self.view.load(batch).tokens, self.view)


def texts(scorer: Scorer, tokenizer: Tokenizer, num_context: int) -> dict[str, Any]:
    """Perplexity and KL of the tokens after chapters, by way and share, and the full cache's perplexity."""
    found: dict[str, dict[str, list[list[float]]]] = {way: {name(share): [] for share in SHARES} for way in WAYS}
    full = []
    for chapter in CHAPTERS:
        ids = tokenizer.encode(chapter.read_text(encoding="utf-8"))[: num_context + NUM_SCORED]
        scorer.read(ids, num_context)
        expected, after = scorer.follow(None), torch.tensor(ids[num_context + 1 :])[:, None]
        full.append(-expected[:-1].gather(1, after).mean().item())
        for way, by_share in found.items():
            for share in SHARES:
                got, kept = scorer.spend(WAYS[way], share)
                kl = (expected.exp() * (expected - got)).sum(-1).mean().item()
                by_share[name(share)].append([-got[:-1].gather(1, after).mean().item(), kl, kept])
        print(f"{chapter.stem} is done", flush=True)
    ways: dict[str, Any] = {}
    for way, by_share in found.items():
        ways[way] = {}
        for percentage, rows in by_share.items():
            loss, kl, kept = torch.tensor(rows).mean(0).tolist()
            options = {"perplexity": torch.tensor(loss).exp().item(), "kl": max(kl, 0.0), "kept": kept}
            ways[way][percentage] = {key: rounded(value) for key, value in options.items()}
    return {"full_perplexity": rounded(torch.tensor(full).mean().exp().item()), "ways": ways}


def retrieval(scorer: Scorer, cases: Iterator[Case]) -> dict[str, Any]:
    """How many answers are reproduced token for token, by way and share: with the question *before* the compression,
    whose window sees it, with the question *after* it, and with the full cache.
    """
    counts: dict[str, Any] = {
        when: {way: {name(share): 0 for share in RETRIEVED} for way in WAYS} for when in ("before", "after")
    }
    counts |= {"cases": 0, "full": 0}
    for body, question, answer in cases:
        counts["cases"] += 1
        for when, seen in (("before", len(body) + len(question) - 1), ("after", len(body))):
            scorer.read([*body, *question, *answer], seen)
            if when == "before":
                counts["full"] += says(scorer.follow(None), answer)
            for way, share in ((way, share) for way in WAYS for share in RETRIEVED):
                counts[when][way][name(share)] += says(scorer.spend(WAYS[way], share)[0], answer)
    return counts


def says(found: torch.Tensor, answer: list[int]) -> bool:
    """Whether the most likely tokens at the end are the answer."""
    return found[-len(answer) - 1 : -1].argmax(-1).tolist() == answer


def name(share: float) -> str:
    """A share as a report's key: percent."""
    return f"{100 * share:.0f}"


def measure(model: str = "smollm2-135m", context: int = 1024) -> Report:
    """All measurements, for one model."""
    folder = resolve_model(model)
    scorer, tokenizer = Scorer(load_model(folder), context + NUM_SCORED), Tokenizer.load(folder)
    results = {
        "texts": texts(scorer, tokenizer, context),
        "needles": retrieval(scorer, needles(tokenizer, CHAPTERS, context)),
        "pairs": retrieval(scorer, pairs(tokenizer, context)),
    }
    flags = {"context": context, "scored": NUM_SCORED, "window": WINDOW, "pairs": NUM_PAIRS, "floor": FLOOR}
    return Report("compression", describe_model(model), {}, 0, flags, results)


def view(report: Report) -> View:
    """Tables of retrieval, and lines of perplexity and KL."""
    found, shares = report.results["texts"], [name(share) for share in SHARES]
    rows = [{"way": WAYS[way].title} | by_share for way, by_share in found["ways"].items()]
    which = text("", "way")
    tables, panels = [], []
    figures = ("Perplexity", "perplexity", "{:.2f}"), ("KL to the full cache, nats", "kl", "{:.3f}")
    for title, key, form in figures:
        columns = [Column(f"{share} %", partial(_get, share, key), form.format) for share in shares]
        tables.append(Table(f"{title}, by the share that is kept", [which, *columns], rows))
        lines = [(row["way"], [row[share][key] for share in shares if share != "100"]) for row in rows]
        panels.append(Lines(f"{title}, by percent kept", [100 * share for share in SHARES[:-1]], lines))
    kept = [Column(f"{share} %", partial(_get, share, "kept"), percent) for share in shares]
    tables.append(Table("What was really kept", [which, *kept], rows))
    for title, key in (("Needles", "needles"), ("Key-value pairs", "pairs")):
        counts = report.results[key]
        for when in ("before", "after"):
            rows = [{"way": WAYS[way].title} | by_share for way, by_share in counts[when].items()]
            heading = f"{title}: found of {counts['cases']} (full cache: {counts['full']}), question {when} compression"
            columns = [Column(f"{name(share)} %", name(share), str) for share in RETRIEVED]
            tables.append(Table(heading, [which, *columns], rows))
    options = (
        f"context {report.flags['context']}, {len(CHAPTERS)} texts of {NUM_SCORED} tokens, fp32; {report.date[:10]}"
    )
    full = f"perplexity with the full cache: {found['full_perplexity']}"
    return View(f"Compression: {report.model['name']}", [options, full], tables, panels=panels)


def _get(share: str, key: str, row: Row) -> float:
    value: float = row[share][key]
    return value


if __name__ == "__main__":
    run(measure, view, __doc__)
