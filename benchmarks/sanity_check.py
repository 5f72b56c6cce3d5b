"""Every model at hand, in every phase: does it load, does it answer, is the answer right? Introduced in phase 3.1.

Models are those that were fetched, the folders that ``INFER_TEST_MODELS`` names, and shapes made for the occasion: tiny
ones on a CPU; on a GPU real ones, made there, one at a time, in a folder that is then removed.

An answer is right if transformers agrees token by token: it runs, in fp32 and on the weights as the phase rounded them,
over the prompt and our answer, and each of our tokens must have its highest logit, or in bf16 and fp16 one within the
bound of `shared.parity.thresholds`. Invariant: whatever is wrong with one model becomes a row, and the others are still
checked.
"""

import gc
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.contenders import allocated, generating_lessons, held_tensors, is_cuda, storage_bytes
from benchmarks.generation.sanity_subjects import Subject, find_subjects
from benchmarks.report import Report, engine_settings, rounded
from benchmarks.timing import Steps, run, torch_threads
from shared.checkpoints.progress import Progress
from shared.engine.config import EngineConfig
from shared.errors import ConfigError
from shared.lessons import Lesson, lessons
from shared.loading.config_json import read_config
from shared.loading.placement import check_device, default_dtype
from shared.parity.reference import load_reference
from shared.parity.thresholds import THRESHOLDS, argmax_shortfall

PROMPT = "The capital of France is"
MOST_TOKENS = 64
PATH = re.compile(r"(?<![\w.~])~?(?:/[^\s/,;:'\"]+)*/(?=[^\s/,;:'\"]+)")  # the folders before a path's last part


@dataclass(frozen=True)
class Row:
    """One model in one phase; ``problem`` is None where all is well.

    ``flips`` counts tokens that are not transformers' likeliest, ``shortfall`` is how far the worst of them lies below
    it, over the root mean square of its row of logits; both None where it did not come to that.
    """

    model: str
    phase: str
    problem: str | None
    load_seconds: float | None = None
    answer_seconds: float | None = None
    memory_bytes: int | None = None
    num_tokens: int | None = None
    flips: int | None = None
    shortfall: float | None = None
    text: str | None = None


@dataclass
class PhaseAnswer:
    """What one phase said, to be judged once its engine is gone."""

    row: Row
    prompt_ids: list[int]
    token_ids: list[int]


def check_models(
    *,
    models: Sequence[str] | None = None,
    phases: Sequence[str] | None = None,
    shapes: Sequence[str] | None = None,
    new_tokens: int = 12,
    seed: int = 0,
    dtype: str | None = None,
    device: str = "cpu",
    threads: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """A row for each model in each phase; with ``models`` or ``shapes`` those alone are checked.

    Raises ConfigError or ModelFolderError, before anything is computed, for settings that make no sense and for a model
    that was asked for by name and is not there.
    """
    check_device(device)
    if not 1 <= new_tokens <= MOST_TOKENS:
        raise ConfigError(f"new_tokens is {new_tokens}; it must be from 1 to {MOST_TOKENS}.")
    if seed < 0 or (threads is not None and threads < 1):
        raise ConfigError(f"seed is {seed} and threads {threads}; they must be at least 0 and 1.")
    chosen = generating_lessons(
        [lesson.number for lesson in lessons() if lesson.generates] if phases is None else phases
    )
    subjects = find_subjects(models, shapes, seed, device)
    settings = EngineConfig(model="each", dtype=dtype, device=device)

    steps = Steps(progress, len(subjects))
    rows: list[Row] = []
    with torch_threads(threads):
        for subject in subjects:
            with steps.step(subject.name), tempfile.TemporaryDirectory(prefix="infer-sanity-") as made:
                rows += check_model(subject, Path(made), chosen, new_tokens, dtype, device)
        return Report(
            name="sanity",
            model={"name": "models", "revision": None, "config_sha256": None, "config": {}},
            engines={lesson.number: engine_settings(settings, "each") for lesson in chosen},
            seed=seed,
            flags={"new_tokens": new_tokens, "device": device, "dtype": dtype, "threads": torch.get_num_threads()},
            results={
                "num_failed": sum(row.problem is not None for row in rows),
                "num_checked": len(rows),
                "rows": [asdict(row) for row in rows],
            },
            device=device,
        )


def check_model(
    subject: Subject, made: Path, chosen: Sequence[Lesson], new_tokens: int, dtype: str | None, device: str
) -> list[Row]:
    """A model's rows: each phase answers and is let go, then transformers judges all the answers."""
    try:
        folder = subject.folder(made)
        shape = read_config(folder)
    except Exception as error:  # whatever it is, it is this model's row
        return [Row(subject.name, lesson.number, problem(error)) for lesson in chosen]
    rows: dict[str, Row] = {}
    answers: dict[str, PhaseAnswer] = {}
    for lesson in chosen:
        config = EngineConfig(
            model=str(folder), dtype=dtype, device=device, max_seq_len=min(512, shape.max_position_embeddings)
        )
        try:
            answers[lesson.number] = _answer(subject.name, lesson, config, new_tokens)
        except Exception as error:
            rows[lesson.number] = Row(subject.name, lesson.number, problem(error))
        _let_go(device)
    if answers:
        weights = getattr(torch, dtype) if dtype else default_dtype(shape, torch.device(device))
        try:
            rows |= _judge(folder, answers, weights, device)
        except Exception as error:
            reason = f"transformers cannot judge it: {problem(error)}"
            rows |= {number: _with(answer.row, problem=reason) for number, answer in answers.items()}
        _let_go(device)
    return [rows[lesson.number] for lesson in chosen]


def problem(error: Exception) -> str:
    """The first line of what went wrong; of paths the last part, since a report holds no folder of its machine."""
    first = (str(error).strip() or type(error).__name__).partition("\n")[0]
    text = PATH.sub("", " ".join(first.split()))
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


def _answer(name: str, lesson: Lesson, config: EngineConfig, new_tokens: int) -> PhaseAnswer:
    before = allocated(config.device)
    if is_cuda(config.device):
        torch.cuda.reset_peak_memory_stats(config.device)
    started = time.perf_counter()
    engine = lesson.engine_alone(config)
    loaded = time.perf_counter()
    prompt_ids = engine.tokenizer.encode(PROMPT)
    answer = run(engine, prompt_ids, new_tokens)
    ended = time.perf_counter()
    if is_cuda(config.device):
        held = torch.cuda.max_memory_allocated(config.device) - before
    else:
        held = storage_bytes(held_tensors(engine))
    row = Row(
        name,
        lesson.number,
        None if len(answer.token_ids) == new_tokens else f"{len(answer.token_ids)} tokens instead of {new_tokens}",
        load_seconds=rounded(loaded - started),
        answer_seconds=rounded(ended - loaded),
        memory_bytes=held,
        num_tokens=len(answer.token_ids),
        text=engine.tokenizer.decode(answer.token_ids),
    )
    return PhaseAnswer(row, prompt_ids, answer.token_ids)


@torch.inference_mode()
def _judge(folder: Path, answers: dict[str, PhaseAnswer], dtype: torch.dtype, device: str) -> dict[str, Row]:
    """Compare with transformers in fp32; answers that are equal are run once."""
    truth = load_reference(folder, torch.float32, round_to=None if dtype == torch.float32 else dtype).to(device)
    bound = THRESHOLDS[dtype].argmax
    judged: dict[tuple[int, ...], tuple[int, float]] = {}
    rows = {}
    for number, answer in answers.items():
        key = tuple(answer.token_ids)
        if key not in judged:
            ids = torch.tensor([answer.prompt_ids + answer.token_ids[:-1]], device=device)
            logits = truth(ids, use_cache=False).logits[0, len(answer.prompt_ids) - 1 :]
            chosen = F.one_hot(torch.tensor(answer.token_ids, device=device), logits.shape[-1])
            shortfall = argmax_shortfall(chosen, logits)
            judged[key] = int((shortfall > 0).sum()), shortfall.max().item()
        flips, worst = judged[key]
        wrong = f"a token lies {worst:.2g} below transformers' likeliest, and {bound:.2g} is allowed"
        told = answer.row.problem or (None if worst <= bound else wrong)
        rows[number] = _with(answer.row, problem=told, flips=flips, shortfall=rounded(worst))
    return rows


def _with(row: Row, **changes: Any) -> Row:
    return Row(**asdict(row) | changes)


def _let_go(device: str) -> None:
    gc.collect()
    if is_cuda(device):
        torch.cuda.empty_cache()
