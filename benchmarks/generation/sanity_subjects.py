"""The models of a sanity check: fetched ones, folders at hand, and shapes to make. Introduced in phase 3.1.

Invariant: a model asked for by name is there when the check begins; one that merely lies around need not be.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contenders import is_cuda
from shared.checkpoints.demo import KNOWN_MODELS, local_model_folder
from shared.checkpoints.make import make_checkpoint
from shared.checkpoints.shapes import SHAPES
from shared.errors import ConfigError
from shared.loading.resolve import resolve_model


@dataclass(frozen=True)
class Subject:
    """A model to check; ``folder`` gives its folder, making it first in the folder handed over if need be."""

    name: str
    folder: Callable[[Path], Path]


def find_subjects(models: Sequence[str] | None, shapes: Sequence[str] | None, seed: int, device: str) -> list[Subject]:
    """What is to be checked, each once, in order: fetched models, folders, shapes to make."""
    if models is None and shapes is None:
        models = [name for name in KNOWN_MODELS if local_model_folder(name) is not None]
        here = [_at_hand(folder) for folder in os.environ.get("INFER_TEST_MODELS", "").split(",") if folder]
        shapes = [name for name in SHAPES if name.startswith("tiny-") != is_cuda(device)]
    else:
        here = []
    for name in shapes or ():
        if name not in SHAPES:
            raise ConfigError(f"There is no shape {name!r}; known: {', '.join(SHAPES)}.")

    def known(name: str) -> Subject:
        folder = resolve_model(name)
        return Subject(name if name in KNOWN_MODELS else folder.name, lambda made: folder)

    def made(name: str) -> Subject:
        return Subject(name, lambda folder: make_checkpoint(name, folder, seed=seed, device=device.partition(":")[0]))

    return [*map(known, models or ()), *here, *map(made, shapes or ())]


def _at_hand(path: str) -> Subject:
    """A folder that the environment names; one that is not there becomes a row when it is opened."""
    return Subject(Path(path).name, lambda made: resolve_model(path))
