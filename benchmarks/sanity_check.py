"""Every model at hand, in every phase: does it load, does it answer, is the answer right? Introduced in phase 3.1.

transformers, in fp32 and on the weights as the phase rounded them, must give each of our tokens the highest logit, or
in bf16 and fp16 one within the bound of `shared.parity.thresholds`. Invariant: a model asked for by name is there when
the check begins; whatever is wrong with one model becomes a row, and the others are still checked.
"""

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.contenders import generating_lessons
from benchmarks.report import Report, engine_settings, rounded
from benchmarks.setup import Setup, check_least, free_memory
from benchmarks.timing import Steps, run, torch_threads
from benchmarks.view import Column, Table, View, count, text
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

Row = dict[str, Any]
"""Of one model in one phase; ``problem`` is None where all is well. A figure is missing where it was not measured.

``flips`` counts tokens that are not transformers' likeliest, ``shortfall`` is how far the worst of them lies below it,
over the root mean square of its row of logits.
"""
Subject = tuple[str, Callable[[Path], Path]]
"""A model's name, and what gives its folder, making it first in the folder handed over if need be."""


def find_subjects(models: Sequence[str] | None, shapes: Sequence[str] | None, seed: int, device: str) -> list[Subject]:
    """What is to be checked, each once, in order: fetched models, folders, shapes to make."""
    subjects: list[Subject] = []
    if models is None and shapes is None:
        models = [name for name in KNOWN_MODELS if local_model_folder(name) is not None]
        for path in filter(None, os.environ.get("INFER_TEST_MODELS", "").split(",")):
            subjects.append((Path(path).name, partial(_resolve, path)))  # one that is not there becomes a row
        shapes = [name for name in SHAPES if name.startswith("tiny-") != device.startswith("cuda")]
    if unknown := [name for name in shapes or () if name not in SHAPES]:
        raise ConfigError(f"There is no shape {unknown[0]!r}; known: {', '.join(SHAPES)}.")
    asked = [(name, resolve_model(name)) for name in models or ()]
    named = [(name if name in KNOWN_MODELS else found.name, partial(_resolve, name)) for name, found in asked]
    make = partial(make_checkpoint, seed=seed, device=device.partition(":")[0])
    return [*named, *subjects, *((name, partial(make, name)) for name in shapes or ())]


def _resolve(model: str, made: Path) -> Path:
    return resolve_model(model)


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
    """A row for each model in each phase; with ``models`` or ``shapes`` those alone are checked. Raises ConfigError or
    ModelFolderError before anything is computed.
    """
    check_device(device)
    check_least(new_tokens=(new_tokens, 1), seed=(seed, 0), threads=(threads, 1))
    if new_tokens > MOST_TOKENS:
        raise ConfigError(f"new_tokens is {new_tokens}; it must be at most {MOST_TOKENS}.")
    chosen = generating_lessons(phases)
    settings = engine_settings(EngineConfig(dtype=dtype, device=device), "each")
    subjects = find_subjects(models, shapes, seed, device)
    steps, rows = Steps(progress, len(subjects)), []
    with torch_threads(threads):
        for subject in subjects:
            with steps.step(subject[0]), tempfile.TemporaryDirectory(prefix="infer-sanity-") as made:
                rows += check_model(subject, Path(made), chosen, new_tokens, dtype, device)
        failed = sum(row["problem"] is not None for row in rows)
        flags = {"new_tokens": new_tokens, "device": device, "dtype": dtype, "threads": torch.get_num_threads()}
        results = {"num_failed": failed, "num_checked": len(rows), "rows": rows}
        engines = {lesson.number: settings for lesson in chosen}
        return Report("sanity", {"name": "models", "revision": None}, engines, seed, flags, results, device)


def check_model(
    subject: Subject, made: Path, chosen: Sequence[Lesson], new_tokens: int, dtype: str | None, device: str
) -> list[Row]:
    """A model's rows: each phase answers and is let go, then transformers judges all the answers."""
    name, folder = subject
    rows: list[Row] = [{"model": name, "phase": lesson.number, "problem": None} for lesson in chosen]
    with _noting(rows):
        setup = Setup(str(folder(made)), device, dtype)
        tokenizer = Tokenizer.load(setup.folder)
        prompt_ids = tokenizer.encode(PROMPT)
        answers: list[tuple[Row, list[int]]] = []
        for lesson, row in zip(chosen, rows, strict=True):
            with _noting([row]):
                answers.append((row, _answer(row, lesson, setup, prompt_ids, new_tokens)))
                row["text"] = tokenizer.decode(answers[-1][1])
            free_memory()
        with _noting([row for row, _ in answers], "transformers cannot judge it: "):
            _judge(answers, setup, prompt_ids)
        free_memory()
    return rows


@contextmanager
def _noting(rows: Sequence[Row], said: str = "") -> Iterator[None]:
    """Whatever goes wrong inside becomes the problem of these rows."""
    try:
        yield
    except Exception as error:
        for row in rows:
            row["problem"] = said + problem(error)


def problem(error: Exception) -> str:
    """The first line of what went wrong; of paths the last part, since a report holds no folder of its machine."""
    first = (str(error).strip() or type(error).__name__).partition("\n")[0]
    said = PATH.sub("", " ".join(first.split()))
    return said if isinstance(error, ValueError) else f"{type(error).__name__}: {said}"


def _answer(row: Row, lesson: Lesson, setup: Setup, prompt_ids: list[int], new_tokens: int) -> list[int]:
    """A phase's answer; fills its row."""
    config = setup.config(max_seq_len=min(512, setup.shape.max_position_embeddings))
    token_ids = run(lesson.engine_alone(config), prompt_ids, new_tokens).token_ids
    row["num_tokens"] = len(token_ids)
    if len(token_ids) != new_tokens:
        row["problem"] = f"{len(token_ids)} tokens instead of {new_tokens}"
    return token_ids


@torch.inference_mode()
def _judge(answers: Sequence[tuple[Row, list[int]]], setup: Setup, prompt_ids: list[int]) -> None:
    """Compare with transformers in fp32."""
    dtype, bound = setup.work.dtype, THRESHOLDS[setup.work.dtype].argmax
    truth = load_reference(setup.folder, torch.float32, round_to=None if dtype == torch.float32 else dtype)
    truth = truth.to(setup.device)
    for row, token_ids in answers:
        ids = torch.tensor([prompt_ids + token_ids[:-1]], device=setup.device)
        logits = truth(ids, use_cache=False).logits[0, len(prompt_ids) - 1 :]
        chosen = F.one_hot(torch.tensor(token_ids, device=setup.device), logits.shape[-1])
        shortfall = argmax_shortfall(chosen, logits)
        row["flips"], row["shortfall"] = int((shortfall > 0).sum()), rounded(worst := shortfall.max().item())
        if worst > bound and row["problem"] is None:
            row["problem"] = f"a token lies {worst:.2g} below transformers' likeliest, and {bound:.2g} is allowed"


def view(report: Report) -> View:
    """The table, then how many failed."""
    failed, checked = report.results["num_failed"], report.results["num_checked"]
    columns = [
        text("model", "model"),
        text("phase", "phase"),
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
