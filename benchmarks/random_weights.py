"""Checkpoints with random weights, generated on the GPU when they are read. Introduced in phase 7.

A model with 70 billion weights would take minutes to write and to read, and its speed does not depend on the values.
Invariant: a tensor's numbers follow from its name, so each time it is read it is the same.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import shared.loading.checkpoint
from shared.checkpoints.byte_tokenizer import save_byte_tokenizer
from shared.checkpoints.make import checkpoint_tensors, random_tensor
from shared.checkpoints.shapes import SHAPES


class RandomFile:
    """Replaces an opened safetensors file: tensors are generated when read."""

    def __init__(self, path: Path, framework: str, device: str) -> None:
        self.config = json.loads((path.parent / "config.json").read_text(encoding="utf-8"))
        self.shapes = dict(checkpoint_tensors(self.config))
        is_gpu = torch.cuda.is_available() and not (path.parent / "on-cpu").exists()
        self.device = torch.device("cuda" if is_gpu else "cpu")

    def keys(self) -> list[str]:
        return list(self.shapes)

    def get_tensor(self, name: str) -> torch.Tensor:
        made = random_tensor(name, self.shapes[name], family=self.config["model_type"], device=self.device)
        return made.to(getattr(torch, self.config["torch_dtype"]))

    def get_slice(self, name: str) -> Any:
        return SimpleNamespace(get_shape=lambda: list(self.shapes[name]))


def make_weights_when_read() -> None:
    """In this process, checkpoints have random weights."""
    shared.loading.checkpoint.safe_open = RandomFile  # type: ignore[assignment, misc]


def random_model(shape: str, folder: Path, device: str) -> Path:
    """A folder with everything except weights."""
    folder = folder / shape
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]), encoding="utf-8")
    (folder / "model.safetensors").touch()
    if device == "cpu":
        (folder / "on-cpu").touch()
    save_byte_tokenizer(SHAPES[shape], folder)
    return folder
