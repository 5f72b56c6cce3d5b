"""Every model at hand, in every phase: does it load, does it answer, is the answer right? Introduced in phase 3.1.

Models are those that were fetched, the folders that ``INFER_TEST_MODELS`` names, and shapes made for the occasion: tiny
ones on a CPU; on a GPU real ones, made there, one at a time, in a folder that is then removed.

An answer is right if transformers agrees token by token: it runs, in fp32 and on the weights as the phase rounded them,
over the prompt and our answer, and each of our tokens must have its highest logit, or in bf16 and fp16 one within the
bound of `shared.parity.thresholds`. Invariants: a model asked for by name is there when the check begins; whatever is
wrong with one model becomes a row, and the others are still checked.
"""

import gc
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.contenders import allocated, generating_lessons, is_cuda, load_engine
from benchmarks.report import Report, engine_settings, rounded
from benchmarks.setup import Setup, check_least
from benchmarks.timing import Steps, timed, torch_threads
from benchmarks.view import Column, Table, View, count, megabytes, text
from shared.checkpoints.demo import KNOWN_MODELS, local_model_folder
from shared.checkpoints.make import make_checkpoint
from shared.checkpoints.progress import Progress
from shared.checkpoints.shapes import SHAPES
from shared.engine.config import EngineConfig
from shared.errors import ConfigError
from shared.lessons import Lesson
from shared.loading.placement import check_device
from shared.loading.resolve import resolve_model
from shared.parity.reference import load_reference
from shared.parity.thresholds import THRESHOLDS, argmax_shortfall
from shared.text.tokenizer import Tokenizer

PROMPT = "The capital of France is"
MOST_TOKENS = 64
PATH = re.compile(r"(?<![\w.~])~?(?:/[^\s/,;:'\"]+)*/(?=[^\s/,;:'\"]+)")  # the folders before a path's last part
KEYS = ("load_seconds", "answer_seconds", "memory_bytes", "num_tokens", "flips", "shortfall", "text")
"""Of a row, beside ``model``, ``phase`` and ``problem`` (None where all is well); None where it did not come to that.

``flips`` counts tokens that are not transformers' likeliest, ``shortfall`` is how far the worst of them lies below it,
over the root mean square of its row of logits.
"""

Subject = tuple[str, Callable[[Path], Path]]
"""A model's name, and what gives its folder, making it first in the folder handed over if need be."""


def find_subjects(models: Sequence[str] | None, shapes: Sequence[str] | None, seed: int, device: str) -> list[Subject]:
    """What is to be checked, each once, in order: fetched models, folders, shapes to make."""
    at_hand: list[str] = []
    if models is None and shapes is None:
        models = [name for name in KNOWN_MODELS if local_model_folder(name) is not None]
        at_hand = [folder for folder in os.environ.get("INFER_TEST_MODELS", "").split(",") if folder]
        shapes = [name for name in SHAPES if name.startswith("tiny-") != is_cuda(device)]
    if unknown := [name for name in shapes or () if name not in SHAPES]:
        raise ConfigError(f"There is no shape {unknown[0]!r}; known: {', '.join(SHAPES)}.")

    def known(name: str) -> Subject:
        folder = resolve_model(name)
        return name if name in KNOWN_MODELS else folder.name, lambda made: folder

    def to_make(name: str) -> Subject:
        return name, lambda made: make_checkpoint(name, made, seed=seed, device=device.partition(":")[0])

    def found(path: str) -> Subject:  # one that is not there becomes a row when it is opened
        return Path(path).name, lambda made: resolve_model(path)

    return [*map(known, models or ()), *map(found, at_hand), *map(to_make, shapes or ())]


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
    check_least(new_tokens=(new_tokens, 1), seed=(seed, 0), threads=(threads, 1))
    if new_tokens > MOST_TOKENS:
        raise ConfigError(f"new_tokens is {new_tokens}; it must be at most {MOST_TOKENS}.")
    chosen = generating_lessons(phases)
    settings = EngineConfig(model="each", dtype=dtype, device=device)
    subjects = find_subjects(models, shapes, seed, device)
    steps = Steps(progress, len(subjects))
    rows: list[dict[str, Any]] = []
    with torch_threads(threads):
        for subject in subjects:
            with steps.step(subject[0]), tempfile.TemporaryDirectory(prefix="infer-sanity-") as made:
                rows += check_model(subject, Path(made), chosen, new_tokens, dtype, device)
        failed = sum(row["problem"] is not None for row in rows)
        return Report(
            name="sanity",
            model={"name": "models", "revision": None, "config_sha256": None, "config": {}},
            engines={lesson.number: engine_settings(settings, "each") for lesson in chosen},
            seed=seed,
            flags={"new_tokens": new_tokens, "device": device, "dtype": dtype, "threads": torch.get_num_threads()},
            results={"num_failed": failed, "num_checked": len(rows), "rows": rows},
            device=device,
        )


def check_model(
    subject: Subject, made: Path, chosen: Sequence[Lesson], new_tokens: int, dtype: str | None, device: str
) -> list[dict[str, Any]]:
    """A model's rows: each phase answers and is let go, then transformers judges all the answers."""
    name, folder = subject
    head = {"model": name, "problem": None}
    rows = {lesson.number: head | {"phase": lesson.number} | dict.fromkeys(KEYS) for lesson in chosen}
    try:
        setup = Setup(str(folder(made)), device, dtype)
        tokenizer = Tokenizer.load(setup.folder)
    except Exception as error:  # whatever it is, it is this model's row
        return [row | {"problem": problem(error)} for row in rows.values()]
    prompt_ids = tokenizer.encode(PROMPT)
    answers: dict[str, list[int]] = {}
    for lesson in chosen:
        try:
            answers[lesson.number] = _answer(rows[lesson.number], lesson, setup, prompt_ids, new_tokens)
            rows[lesson.number]["text"] = tokenizer.decode(answers[lesson.number])
        except Exception as error:
            rows[lesson.number]["problem"] = problem(error)
        _free(device)
    try:
        if answers:
            _judge(rows, setup, prompt_ids, answers)
    except Exception as error:
        for number in answers:
            rows[number]["problem"] = f"transformers cannot judge it: {problem(error)}"
    _free(device)
    return list(rows.values())


def problem(error: Exception) -> str:
    """The first line of what went wrong; of paths the last part, since a report holds no folder of its machine."""
    first = (str(error).strip() or type(error).__name__).partition("\n")[0]
    said = PATH.sub("", " ".join(first.split()))
    return said if isinstance(error, ValueError) else f"{type(error).__name__}: {said}"


def _answer(row: dict[str, Any], lesson: Lesson, setup: Setup, prompt_ids: list[int], new_tokens: int) -> list[int]:
    """A phase's answer; fills its row."""
    before = allocated(setup.device)
    if setup.is_gpu:
        torch.cuda.reset_peak_memory_stats(setup.device)
    started = time.perf_counter()
    config = setup.config(max_seq_len=min(512, setup.shape.max_position_embeddings))
    contender = load_engine(lesson, config)[lesson.number]
    loaded = time.perf_counter()
    token_ids = timed(contender.answer, prompt_ids, new_tokens).token_ids
    row |= {
        "load_seconds": rounded(loaded - started),
        "answer_seconds": rounded(time.perf_counter() - loaded),
        "memory_bytes": torch.cuda.max_memory_allocated(setup.device) - before if setup.is_gpu else contender.resident,
        "num_tokens": len(token_ids),
    }
    if len(token_ids) != new_tokens:
        row["problem"] = f"{len(token_ids)} tokens instead of {new_tokens}"
    return token_ids


@torch.inference_mode()
def _judge(
    rows: Mapping[str, dict[str, Any]], setup: Setup, prompt_ids: list[int], answers: Mapping[str, list[int]]
) -> None:
    """Compare with transformers in fp32; answers that are equal are run once."""
    dtype = setup.work.dtype
    truth = load_reference(setup.folder, torch.float32, round_to=None if dtype == torch.float32 else dtype)
    truth = truth.to(setup.device)
    bound = THRESHOLDS[dtype].argmax
    judged: dict[tuple[int, ...], tuple[int, float]] = {}
    for number, token_ids in answers.items():
        key, row = tuple(token_ids), rows[number]
        if key not in judged:
            ids = torch.tensor([prompt_ids + token_ids[:-1]], device=setup.device)
            logits = truth(ids, use_cache=False).logits[0, len(prompt_ids) - 1 :]
            chosen = F.one_hot(torch.tensor(token_ids, device=setup.device), logits.shape[-1])
            shortfall = argmax_shortfall(chosen, logits)
            judged[key] = int((shortfall > 0).sum()), shortfall.max().item()
        row["flips"], worst = judged[key]
        row["shortfall"] = rounded(worst)
        if worst > bound and row["problem"] is None:
            row["problem"] = f"a token lies {worst:.2g} below transformers' likeliest, and {bound:.2g} is allowed"


def _free(device: str) -> None:
    gc.collect()
    if is_cuda(device):
        torch.cuda.empty_cache()


def view(report: Report) -> View:
    """The table, then how many failed."""
    failed, checked = report.results["num_failed"], report.results["num_checked"]
    columns = [
        text("model", "model"),
        text("phase", "phase"),
        Column("load (s)", "load_seconds"),
        Column("answer (s)", "answer_seconds"),
        Column("memory (MB)", "memory_bytes", megabytes),
        Column("tokens", "num_tokens", count),
        Column("flips", "flips", count),
        text("result", lambda row: row["problem"] or "ok"),
    ]
    return View(
        f"Sanity check: every model in every phase on {report.machine_title}",
        [report.date[:10]],
        [Table("", columns, report.results["rows"], lambda row: "red" if row["problem"] else "")],
        notes=[] if failed else [f"All {checked} loaded, answered and agreed with transformers."],
        warnings=[f"{failed} of {checked} failed."] if failed else [],
    )
