"""Checkpoints with random weights, generated when they are read, on the reading process's GPU.

Introduced in phase 12.1. A model with 70 billion weights would take minutes to write and to read, and its speed does
not depend on the values. Invariant: a tensor is generated whole and then sharded, so the ranks' shards equal one rank's
tensors.
"""

import json
from pathlib import Path
from typing import Any

import torch

import shared.loading.checkpoint
import shared.tracks.ranks.group
from shared.checkpoints.byte_tokenizer import save_byte_tokenizer
from shared.checkpoints.make import checkpoint_tensors, random_tensor
from shared.checkpoints.shapes import SHAPES


class RandomFile:
    """Replaces an opened safetensors file: tensors are generated when read."""

    def __init__(self, path: Path, framework: str, device: str) -> None:
        self.config = json.loads((path.parent / "config.json").read_text(encoding="utf-8"))
        self.shapes = dict(checkpoint_tensors(self.config))
        is_gpu = torch.cuda.is_available() and not (path.parent / "on-cpu").exists()
        self.device = torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu")

    def keys(self) -> list[str]:
        return list(self.shapes)

    def get_tensor(self, name: str) -> torch.Tensor:
        made = random_tensor(name, self.shapes[name], family=self.config["model_type"], device=self.device)
        return made.to(getattr(torch, self.config["torch_dtype"]))

    def get_slice(self, name: str) -> Any:
        return RandomSlice(self, name)


class RandomSlice:
    """A slice of a tensor to be read."""

    def __init__(self, file: RandomFile, name: str) -> None:
        self.file, self.name = file, name

    def get_shape(self) -> list[int]:
        return list(self.file.shapes[self.name])

    def __getitem__(self, part: Any) -> torch.Tensor:
        return self.file.get_tensor(self.name)[part].clone()


def make_weights_when_read() -> None:
    """In this process, and in the ranks that it starts, checkpoints have random weights."""
    shared.loading.checkpoint.safe_open = RandomFile  # type: ignore[assignment, misc]
    shared.tracks.ranks.group.START = "from benchmarks.random_weights import worker; worker()"


def worker() -> None:
    """A rank other than 0."""
    from shared.tracks.ranks.worker import main

    make_weights_when_read()
    main()


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
