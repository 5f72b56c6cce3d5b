"""What a compressed KV cache costs: perplexity, distance to the full cache, needles found. Introduced in phase 9.2.

Run as ``python -m benchmarks.compression [MODEL [CONTEXT [LEAST]]]``; prints two Markdown tables. The texts are
chapters of the course. A context is computed and compressed once, then the tokens that follow are scored. Each row
takes a mass p, by which every head keeps what it needs, at least ``LEAST`` (*a head*); the columns beside it give every
head the mean of those counts: the same tokens in all, chosen by the same scores (*alike*), or the newest (*newest*,
StreamingLLM).
"""

import sys
from pathlib import Path
from statistics import mean

import torch

from shared.cache.condensed import CondensedKVCachePool
from shared.cache.condensed_view import CondensedView
from shared.cache.paged_layout import PagedSizes
from shared.compression.compressors import COMPRESSORS, Compressor
from shared.compression.selection import Budget
from shared.engine.batch import Batch
from shared.engine.request import Request
from shared.loading.loader import load_model
from shared.loading.resolve import resolve_model
from shared.models.causal_lm import CausalLM
from shared.sampling.params import SamplingParams
from shared.scheduling.schedule import Schedule, Scheduled
from shared.text.tokenizer import Tokenizer

CHAPTERS = [Path(__file__).parents[1] / "tutorial" / f"phase_{name}.md" for name in ("01a", "03", "04", "06", "08")]
NUM_SCORED, WINDOW = 256, 32
MASSES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
NEEDLE, QUESTION = "\n\nThe secret number of {} is {}.\n\n", "\n\nThe secret number of {} is"
PLACES = ("Lisbon", "the harbour", "Anna", "the red house", "Oslo", "the old library", "Peter", "the bakery")


class Scorer:
    """A model with one sequence in a KV cache whose dropped tokens are masked, so that it can be compressed again."""

    def __init__(self, model: CausalLM, num_tokens: int, least: int) -> None:
        self.model, self.least = model, least
        sizes = PagedSizes(-(-num_tokens // 16), 16, 1, num_tokens, num_tokens)
        first = self.compressor("snapkv")
        about = first, Budget(least, least), WINDOW, False
        self.view = CondensedView(model.config, sizes, model.dtype, model.device, "sdpa", *about)
        self.pool = CondensedKVCachePool(self.view.cells, 1, num_tokens)

    def compressor(self, method: str) -> Compressor:
        """A compressor with the model's attention scale."""
        return COMPRESSORS[method](self.model.config.attention_scale)

    @torch.inference_mode()
    def read(self, ids: list[int], num_context: int) -> None:
        """Compute the first ``num_context`` tokens."""
        self.request = Request("0", ids, SamplingParams(), 0)
        self.pool.reserve(self.request, len(ids))
        self._forward(0, num_context)
        self.pool.commit(self.request, num_context)
        self.num_context = num_context

    @torch.inference_mode()
    def follow(self, method: str | None, budget: Budget) -> tuple[torch.Tensor, float]:
        """Log-probabilities fp64 ``[T, V]`` of the other tokens after a compression, and the mean kept by a head."""
        self.pool.packed.clear()
        kept = float(self.num_context)
        if method is not None:
            self.view.compressor, self.view.budget = self.compressor(method), budget
            packed = self.view.compress(self.pool.holding(self.request))
            if packed is not None:
                self.pool.compress(self.request, packed)
                kept = float(packed.counts.mean())
        hidden = self._forward(self.num_context, self.request.num_tokens)
        return self.model.logits(hidden).double().log_softmax(-1), kept

    def forget(self) -> None:
        """Release the sequence."""
        self.pool.release(self.request)

    def _forward(self, start: int, end: int) -> torch.Tensor:
        self.request.num_computed_tokens = start
        batch = Batch.of(Schedule(1, (Scheduled(self.request, start, end - start, 0, 0),)), self.pool)
        return self.model(self.view.load(batch).tokens, self.view)


def ways(scorer: Scorer, p: float) -> dict[str, tuple[torch.Tensor, float]]:
    """What follows, by the three ways of one row, and the mean kept."""
    found = {"a head": scorer.follow("snapkv", Budget(scorer.least, scorer.num_context, p))}
    same = round(found["a head"][1])
    for name, method in (("alike", "snapkv"), ("newest", "streaming")):
        found[name] = scorer.follow(method, Budget(same, same, p))
    return found


def texts(scorer: Scorer, tokenizer: Tokenizer, num_context: int) -> None:
    """Perplexity and KL of what follows chapters."""
    rows: dict[float, list[list[float]]] = {p: [] for p in MASSES}
    full_losses = []
    for chapter in CHAPTERS:
        ids = tokenizer.encode(chapter.read_text(encoding="utf-8"))[: num_context + NUM_SCORED]
        scorer.read(ids, num_context)
        expected, _ = scorer.follow(None, Budget(1, 1))
        after = torch.tensor(ids[num_context + 1 :])[:, None]

        def loss(found: torch.Tensor, after: torch.Tensor = after) -> float:
            return found[:-1].gather(1, after).mean().neg().item()

        full_losses.append(loss(expected))
        for p in MASSES:
            found = ways(scorer, p)
            row = [found["a head"][1] / num_context]
            for logits, _ in found.values():
                row += [loss(logits), (expected.exp() * (expected - logits)).sum(-1).mean().item()]
            rows[p].append(row)
        scorer.forget()
    full = torch.tensor(full_losses).mean().exp().item()
    print(f"\nContext {num_context}, {len(CHAPTERS)} texts, {NUM_SCORED} tokens each; perplexity in full: {full:.2f}\n")
    print("| p | kept | perplexity: a head | alike | newest | KL: a head | alike | newest |\n|" + "---:|" * 8)
    for p, of_texts in rows.items():
        kept, *figures = torch.tensor(of_texts).mean(0).tolist()
        perplexities = [f"{torch.tensor(x).exp().item():.2f}" for x in figures[0::2]]
        divergences = [f"{x:.3f}" for x in figures[1::2]]
        print("| " + " | ".join([f"{p}", f"{kept:.0%}", *perplexities, *divergences]) + " |", flush=True)


def needles(scorer: Scorer, tokenizer: Tokenizer, num_context: int) -> None:
    """How many of the numbers are repeated, if the compression sees the question, and if it comes before it."""
    print(f"\nNeedles of {len(PLACES)} found in {num_context} tokens\n")
    print("| p | question | kept | a head | alike | newest |\n|---:|---|---:|---:|---:|---:|")
    counts: dict[tuple[float, str], list[list[float]]] = {}
    in_full = []
    for number, place in enumerate(PLACES):
        text = tokenizer.encode(CHAPTERS[number % len(CHAPTERS)].read_text(encoding="utf-8"))[:num_context]
        secret = str(1000 + 7919 * (number + 3) % 9000)
        at = (number + 1) * num_context // (len(PLACES) + 2)
        needle, question = (tokenizer.encode(one.format(place, secret)) for one in (NEEDLE, QUESTION))
        answer = tokenizer.encode(f"{QUESTION.format(place)} {secret}")[len(question) :]
        body = [*text[:at], *needle, *text[at : num_context - len(needle)]]
        target = torch.tensor(answer)

        def has(found: torch.Tensor, target: torch.Tensor = target) -> bool:
            return torch.equal(found[-len(target) - 1 : -1].argmax(-1), target)

        for when, seen in (("before", len(body) + len(question) - 1), ("after", len(body))):
            scorer.read([*body, *question, *answer], seen)
            if when == "before":
                in_full.append(has(scorer.follow(None, Budget(1, 1))[0]))
            for p in MASSES[1::2]:
                found = ways(scorer, p)
                row = [found["a head"][1] / seen, *(float(has(logits)) for logits, _ in found.values())]
                counts.setdefault((p, when), []).append(row)
            scorer.forget()
    for (p, when), rows in sorted(counts.items()):
        kept, *right = (list(column) for column in zip(*rows, strict=True))
        print(f"| {p} | {when} | {mean(kept):.0%} | " + " | ".join(f"{sum(one):.0f}" for one in right) + " |")
    print(f"\nFull cache: {sum(in_full)}")


def main(name: str = "smollm2-135m", num_context: str = "1024", least: str = "40") -> None:
    """Print the tables."""
    folder, context = resolve_model(name), int(num_context)
    scorer, tokenizer = Scorer(load_model(folder), context + NUM_SCORED, int(least)), Tokenizer.load(folder)
    texts(scorer, tokenizer, context)
    needles(scorer, tokenizer, context)


if __name__ == "__main__":
    main(*sys.argv[1:4])
