"""The gain and cost of segments: time to the first token, distance to concatenation, answers. Introduced in phase 9.1.

The distance is between two distributions of the next token, at each token of a text that follows documents: from
segments with a fraction recomputed, and computed as one prompt. Answers are short ones to questions with known answers.
The documents are pages of this repository. Invariant: both engines compute the same ids, in one process, interleaved;
the segments are in the cache before the clock starts.

    python -m benchmarks.segments --out benchmarks/reports
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.command import run
from benchmarks.decoding import drain, first_token
from benchmarks.report import Report, rounded
from benchmarks.segment_questions import PAGES, QUESTIONS, short_answer
from benchmarks.setup import Setup
from benchmarks.timing import in_turns
from benchmarks.view import View, percent, table_of
from shared.engine.batch import Batch
from shared.engine.runner import Launched, Observer, Runner
from shared.engine.sampling.sampler import SamplerOutput
from shared.lessons import find_lesson
from shared.sampling.params import SamplingParams
from shared.sampling.sampler import SamplingRow

ANSWER = SamplingParams(temperature=0.0, max_new_tokens=10)
BLOCK = 16
FRACTIONS = (0.0, 0.05, 0.15, 0.3, 0.5, 1.0)
BLENDED = 0.15  # for the answers: the fraction that CacheBlend recommends
ANSWER_LENGTH = 128  # tokens of a document


class LastHidden(Observer):
    """Keeps the hidden states of the last forward's tokens, until the next forward."""

    def begin(self) -> None:
        pass

    def computed(self, batch: Batch, hidden: torch.Tensor) -> None:
        self.hidden = hidden[: batch.num_tokens]

    def sampled(self, launched: Launched, rows: Sequence[SamplingRow], output: SamplerOutput) -> None:
        pass


def make_engines(setup: Setup, num_tokens: int) -> dict[str, Any]:
    """Phase 9 without prefix caching, which would find the previous trial's prompt, and phase 9.1."""
    config = setup.config(
        max_seq_len=num_tokens,
        max_batch_size=4,
        num_gpu_blocks=4 * num_tokens // BLOCK,
        prefill_chunk_size=num_tokens,
        use_prefix_caching=False,
    )
    return {phase: find_lesson(phase).engine(config) for phase in ("09", "09.1")}


def documents(tokenizer: Any, count: int, length: int) -> list[list[int]]:
    """``count`` pieces of ``length`` tokens, from different pages if there are enough."""
    pages = [tokenizer.encode(page.read_text(encoding="utf-8")) for page in sorted(PAGES.glob("*.md"))]
    pieces = [page[start : start + length] for start in range(0, 8 * length, length) for page in pages]
    return [piece for piece in pieces if len(piece) == length][:count]


@torch.inference_mode()
def last_logits(engine: Any, count: int) -> torch.Tensor:
    """Log-probabilities ``[count, V]`` after the last tokens of the last forward."""
    logits: torch.Tensor = engine.model.logits(engine.runner.observers[0].hidden[-count:])
    return logits.float().log_softmax(-1)


def register(engine: Any, segments: list[list[int]]) -> list[str]:
    """Compute the segments, and return their ids."""
    segment_ids = [engine.register(segment) for segment in segments]
    drain(engine)
    return segment_ids


def distance(expected: torch.Tensor, found: torch.Tensor, own: list[int]) -> dict[str, torch.Tensor]:
    """For two ``[n, V]`` of log-probabilities after the tokens ``own``: KL, agreement, and the loss of the following
    tokens."""
    following = torch.tensor(own[1:])[:, None]
    return {
        "kl": (expected.exp() * (expected - found)).sum(-1),
        "agreement": (expected.argmax(-1) == found.argmax(-1)).float(),
        "loss_plain": -expected[:-1].gather(1, following),
        "loss_segments": -found[:-1].gather(1, following),
    }


def summary(parts: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """The means over all tokens of several texts."""
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return {name: rounded(x.mean().item()) for name, x in whole.items()} | {
        "kl_median": rounded(whole["kl"].median().item())
    }


def distances(
    engines: dict[str, Any], pieces: list[list[int]], count: int, half: int, fractions: Sequence[float | None]
) -> dict[float | None, dict[str, Any]]:
    """After ``count`` documents of ``half`` tokens, for each recomputed fraction (None: unchanged segments): the
    distance from concatenation, and the seconds that recomputing takes. The text continues the last document.
    """
    plain, reusing = engines["09"], engines["09.1"]
    for engine in engines.values():
        runner = engine.runner
        sizes = engine.pool.max_sequences, runner.most_logit_rows
        options: dict[str, Any] = {"sampler": runner.sampler, "last_ids": type(runner.last_ids)}
        engine.runner = Runner(engine.model, engine.view, *sizes, observers=[LastHidden()], **options)
    texts: dict[float | None, list[dict[str, torch.Tensor]]] = {fraction: [] for fraction in fractions}
    seconds: dict[float | None, list[float]] = {fraction: [] for fraction in fractions}
    for last in range(0, 16, 4):
        chosen = [pieces[(last + 1 + n) % 16] for n in range(count)]
        own = chosen[-1][half:]
        names = register(reusing, [piece[:half] for piece in chosen])
        first_token(plain, [token_id for piece in chosen for token_id in piece[:half]] + own)
        expected = last_logits(plain, len(own))
        for fraction in fractions:
            started = time.perf_counter()
            used = names if fraction is None else [reusing.blend(names, fraction)]
            seconds[fraction].append(time.perf_counter() - started)
            first_token(reusing, own, None, used)
            texts[fraction].append(distance(expected, last_logits(reusing, len(own)), own))
            if fraction is not None:
                reusing.segments.forget(reusing.segments.find(used[0]))
    return {
        fraction: ({} if fraction is None else {"seconds": rounded(statistics.median(seconds[fraction]))})
        | summary(texts[fraction])
        for fraction in fractions
    }


def answer(engine: Any, prompt: list[int], **more: Any) -> str:
    """The first line of a greedy answer."""
    engine.add_request(prompt, ANSWER, **more)
    text = ""
    while engine.has_work():
        text += "".join(output.text for output in engine.step())
    return short_answer(text)


def answers(plain: Any, reusing: Any, counts: tuple[int, ...]) -> dict[str, Any]:
    """For each number of documents: exact matches with concatenation, and correct answers; the position of the fact
    changes."""
    pieces = [question.piece(plain.tokenizer, ANSWER_LENGTH) for question in QUESTIONS]
    fillers = documents(plain.tokenizer, max(counts), ANSWER_LENGTH)
    found: dict[str, Any] = {}
    for count in counts:
        score = dict.fromkeys(("match", "match_blended", "right_plain", "right", "right_blended"), 0)
        for number, question in enumerate(QUESTIONS):
            chosen = fillers[: count - 1]
            chosen.insert(number % count, pieces[number])
            own = question.prompt(plain.tokenizer)
            names = register(reusing, chosen)
            blended = reusing.blend(names, BLENDED)
            texts = (
                answer(plain, [token_id for piece in chosen for token_id in piece] + own),
                answer(reusing, own, segment_ids=names),
                answer(reusing, own, segment_ids=[blended]),
            )
            reusing.segments.forget(reusing.segments.find(blended))
            right = map(question.is_answered, texts)
            row = (texts[1] == texts[0], texts[2] == texts[0], *right)
            score = {name: score[name] + one for name, one in zip(score, row, strict=True)}
        found[str(count)] = {name: rounded(hits / len(QUESTIONS)) for name, hits in score.items()}
    return found


def measure(
    model: str = "smollm2-135m",
    trials: int = 3,
    num_documents: int = 8,
    length: int = 512,
    question: int = 32,
    continuation: int = 64,
) -> Report:
    """Times for ``num_documents`` of ``length`` tokens, and distances for 1 to 16 documents of half that length."""
    setup = Setup(model)
    engines = make_engines(setup, num_documents * length + 256)
    plain, reusing = engines["09"], engines["09.1"]
    pieces = documents(plain.tokenizer, num_documents + 1, length)
    segments, own = pieces[:num_documents], pieces[-1][:question]
    started = time.perf_counter()
    names = register(reusing, segments)
    seconds = {"register": [time.perf_counter() - started]}
    calls = {
        "plain": lambda: first_token(plain, [token_id for segment in segments for token_id in segment] + own),
        "segments": lambda: first_token(reusing, own, None, names),
    }
    times = {name: statistics.median(all_of) for name, all_of in (seconds | in_turns(calls, trials)).items()}
    half = length // 2
    pieces = documents(plain.tokenizer, 16, half + continuation)
    results = {
        "seconds": {name: rounded(value) for name, value in times.items()},
        "times": rounded(times["plain"] / times["segments"]),
        "distance": {str(n): distances(engines, pieces, n, half, [None])[None] for n in (1, 2, 4, 8, 16)},
        "recomputed": {f"{part:g}": row for part, row in distances(engines, pieces, 8, half, FRACTIONS).items()},
        "answers": answers(plain, reusing, (2, 4, 8, 16)),
    }
    flags: dict[str, Any] = {"trials": trials, "documents": num_documents, "length": length, "question": question}
    flags |= {"recomputed_documents": 8, "questions": len(QUESTIONS), "blended": BLENDED}
    flags |= {"answer_length": ANSWER_LENGTH}
    return setup.report("segments", {phase: engine.config for phase, engine in engines.items()}, flags, results)


def view(report: Report) -> View:
    """The report's tables."""
    found, three = report.results, "{:.3f}".format
    shares = dict.fromkeys(next(iter(found["answers"].values())), percent)
    answered = f"Short answers: equal to concatenation, and correct; blended: {BLENDED:.0%} recomputed"
    tables = [
        table_of("First token", "what", {name: {"seconds": value} for name, value in found["seconds"].items()}),
        table_of("Distance to full concatenation", "documents", found["distance"], agreement=percent, kl=three),
        table_of("8 documents, a part recomputed", "fraction", found["recomputed"], agreement=percent, kl=three),
        table_of(answered, "documents", found["answers"], **shares),
    ]
    return View(f"Segments: {report.model['name']}", [report.machine_title], tables)


if __name__ == "__main__":
    run(measure, view, __doc__)
