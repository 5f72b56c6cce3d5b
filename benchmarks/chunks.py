"""What chunks buy and cost: time to the first token, distance to full concatenation, answers. Introduced in phase 9.1.

The distance is that of two distributions of the next token, at each token of a text that follows documents: chunked,
with a fraction recomputed, and computed as one prompt. Answers are short ones to questions of known answers. The
documents are pages of this repository. Decoding without chunks is timed too. Invariant: both engines compute the same
ids, in one process, in turns; the chunks are in the cache before the clock starts.

    python -m benchmarks.chunks --out benchmarks/reports
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.chunk_questions import PAGES, QUESTIONS, short_answer
from benchmarks.report import Report, describe_model, engine_settings, rounded, write_report
from benchmarks.view import Column, Table, View, percent, text
from shared.engine.config import EngineConfig
from shared.lessons import find_lesson
from shared.sampling.params import SamplingParams

ONE = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
ANSWER = SamplingParams(temperature=0.0, max_new_tokens=10)
BLOCK = 16
FRACTIONS = (0.0, 0.05, 0.15, 0.3, 0.5, 1.0)
BLENDED = 0.15  # of the answers: the fraction that CacheBlend recommends
ANSWER_LENGTH = 128  # tokens of a document


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
        "num_gpu_blocks": 4 * num_tokens // BLOCK,
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


def distance(expected: torch.Tensor, found: torch.Tensor, own: list[int]) -> dict[str, torch.Tensor]:
    """Of two ``[n, V]`` of log-probabilities after the tokens ``own``: KL, agreement, and the loss of what follows."""
    following = torch.tensor(own[1:])[:, None]
    return {
        "kl": (expected.exp() * (expected - found)).sum(-1),
        "agreement": (expected.argmax(-1) == found.argmax(-1)).float(),
        "loss_plain": -expected[:-1].gather(1, following),
        "loss_chunked": -found[:-1].gather(1, following),
    }


def summary(parts: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """The means over all tokens of several texts."""
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return {name: rounded(x.mean().item()) for name, x in whole.items()} | {
        "kl_median": rounded(whole["kl"].median().item())
    }


def recomputed(plain: Any, chunked: Any, pieces: list[list[int]], count: int, half: int) -> list[dict[str, Any]]:
    """Distance and seconds for each of FRACTIONS, with ``count`` documents; the first token is that behind them."""
    texts: dict[float, list[dict[str, torch.Tensor]]] = {fraction: [] for fraction in FRACTIONS}
    seconds: dict[float, list[float]] = {fraction: [] for fraction in FRACTIONS}
    for last in range(0, 16, 4):
        chosen = [pieces[(last + 1 + n) % 16] for n in range(count)]
        own = chosen[-1][half:]
        names = register(chunked, [piece[:half] for piece in chosen])
        first_token(plain, [token_id for piece in chosen for token_id in piece[:half]] + own)
        expected = last_logits(plain, len(own))
        for fraction in FRACTIONS:
            started = time.perf_counter()
            blended = chunked.blend(names, fraction)
            seconds[fraction].append(time.perf_counter() - started)
            first_token(chunked, own, [blended])
            texts[fraction].append(distance(expected, last_logits(chunked, len(own)), own))
            chunked.chunks.forget(chunked.chunks.find(blended))
    return [
        {"fraction": fraction, "seconds": rounded(statistics.median(seconds[fraction])), **summary(texts[fraction])}
        for fraction in FRACTIONS
    ]


def answer(engine: Any, prompt: list[int], **more: Any) -> str:
    """The first line of a greedy answer."""
    engine.add_request(prompt, ANSWER, **more)
    text = ""
    while engine.has_work():
        text += "".join(output.text for output in engine.step())
    return short_answer(text)


def answers(plain: Any, chunked: Any, counts: tuple[int, ...]) -> dict[str, Any]:
    """For each number of documents: exact matches with concatenation, and correct answers; the fact's place changes."""
    pieces = [question.piece(plain.tokenizer, ANSWER_LENGTH) for question in QUESTIONS]
    fillers = documents(plain.tokenizer, max(counts), ANSWER_LENGTH)
    found: dict[str, Any] = {}
    for count in counts:
        score = dict.fromkeys(("match", "match_blended", "right_plain", "right", "right_blended"), 0)
        for number, question in enumerate(QUESTIONS):
            chosen = fillers[: count - 1]
            chosen.insert(number % count, pieces[number])
            own = question.prompt(plain.tokenizer)
            names = register(chunked, chosen)
            blended = chunked.blend(names, BLENDED)
            texts = (
                answer(plain, [token_id for piece in chosen for token_id in piece] + own),
                answer(chunked, own, chunk_ids=names),
                answer(chunked, own, chunk_ids=[blended]),
            )
            chunked.chunks.forget(chunked.chunks.find(blended))
            right = map(question.is_answered, texts)
            row = (texts[1] == texts[0], texts[2] == texts[0], *right)
            score = {name: score[name] + one for name, one in zip(score, row, strict=True)}
        found[str(count)] = {name: rounded(hits / len(QUESTIONS)) for name, hits in score.items()}
    return found


def decode_ratio(engines: dict[str, Any], trials: int) -> float:
    """Decode speed of phase 9.1 over that of phase 9, of four requests without chunks; the median of paired trials."""
    params = SamplingParams(temperature=0.0, max_new_tokens=48, ignore_eos=True)
    ratios = []
    for trial in range(trials + 1):  # the first warms up
        seconds = {}
        for phase in sorted(engines, reverse=trial % 2 == 0):
            engine = engines[phase]
            for n in range(4):
                engine.add_request([7 + n] * 64, params)
            engine.step()
            started = time.perf_counter()
            while engine.has_work():
                engine.step()
            seconds[phase] = time.perf_counter() - started
        ratios.append(seconds["09"] / seconds["09.1"])
    return statistics.median(ratios[1:])


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
        texts = []
        for last in range(0, 16, 4):  # the text behind the documents continues the last of them
            chosen = [pieces[(last + 1 + n) % 16] for n in range(count)]
            own = chosen[-1][half:]
            names = register(chunked, [piece[:half] for piece in chosen])
            first_token(plain, [token_id for piece in chosen for token_id in piece[:half]] + own)
            first_token(chunked, own, names)
            texts.append(distance(last_logits(plain, continuation), last_logits(chunked, continuation), own))
        rows.append({"documents": count, **summary(texts)})
    about = describe_model(model)
    results = {
        "seconds": {name: rounded(value) for name, value in times.items()},
        "times": rounded(times["plain"] / times["chunked"]),
        "distance": {str(row.pop("documents")): row for row in rows},
        "recomputed": {f"{row.pop('fraction'):g}": row for row in recomputed(plain, chunked, pieces, 8, half)},
        "answers": answers(plain, chunked, (2, 4, 8, 16)),
        "decode_ratio": rounded(decode_ratio(engines, max(trials, 5))),
    }
    flags: dict[str, Any] = {"trials": trials, "documents": num_documents, "length": length, "question": question}
    flags |= {
        "recomputed_documents": 8,
        "questions": len(QUESTIONS),
        "blended": BLENDED,
        "answer_length": ANSWER_LENGTH,
    }
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
        Table(
            "8 documents of which a fraction is recomputed",
            [
                Column("fraction", "fraction", str),
                Column("seconds", "seconds"),
                Column("KL, mean", "kl", lambda kl: f"{max(kl, 0):.3f}"),
                Column("top-1 agreement", "agreement", percent),
                Column("loss", "loss_chunked"),
            ],
            [{"fraction": fraction} | row for fraction, row in report.results["recomputed"].items()],
        ),
        Table(
            "Short answers: equal to concatenation, and correct",
            [
                Column("documents", "documents", str),
                Column("equal, chunks", "match", percent),
                Column(f"equal, {BLENDED:.0%} recomputed", "match_blended", percent),
                Column("correct, concatenated", "right_plain", percent),
                Column("correct, chunks", "right", percent),
                Column(f"correct, {BLENDED:.0%} recomputed", "right_blended", percent),
            ],
            [{"documents": count} | row for count, row in report.results["answers"].items()],
        ),
    ]
    said = f"Decoding without chunks: {report.results['decode_ratio']:.2f} × the speed of phase 9."
    return View(f"Chunks: {report.model['name']}", [report.machine_title, said], tables)


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
