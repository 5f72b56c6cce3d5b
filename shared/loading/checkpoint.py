"""Reads the safetensors files of an untrusted model folder. Introduced in phase 1a.

One ``model.safetensors``, or shards listed by ``model.safetensors.index.json``. Files are memory-mapped, so reading a
tensor uses page cache and no anonymous memory. Invariants: neither pickled weights nor files outside the folder are
ever opened (the hub's cache, whose snapshots link to its own blobs, counts as one folder).
"""

import json
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shared.errors import ModelFolderError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Checkpoint:
    """Names, shapes and tensors of a folder's weights. Raises ModelFolderError for missing, damaged or unsafe files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        if (folder / SINGLE).exists() or (folder / SINGLE).is_symlink():
            self._file_of = dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        elif (folder / INDEX).exists():
            self._read_index()
        else:
            raise ModelFolderError(self._nothing_to_load())

    @property
    def names(self) -> set[str]:
        """Every tensor of the checkpoint."""
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, from its file's header alone."""
        return tuple(self._files[self._file_of[name]].get_slice(name).get_shape())

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor as stored, on the CPU, mapped from its file."""
        return self._files[self._file_of[name]].get_tensor(name)

    def _read_index(self) -> None:
        path = self.folder / INDEX
        try:
            weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            entries = [(str(name), shard) for name, shard in weight_map.items()]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelFolderError(
                f"{path} is not an index of shards ({type(error).__name__}: {error}); it must be a JSON object with a "
                "weight_map of tensor name to file name. Fetch it again."
            ) from None
        for name, shard in entries:
            if not isinstance(shard, str) or shard not in self._files:
                self._open(shard)
            self._file_of[name] = shard
        lost = sorted(name for name, shard in self._file_of.items() if name not in self._files[shard].keys())  # noqa: SIM118
        if lost:
            raise ModelFolderError(
                f"{path} places {len(lost)} tensors in files that do not hold them, {lost[0]} the first; the index and "
                "the shards are of different checkpoints. Fetch them again."
            )

    def _open(self, file_name: Any) -> Any:
        path = self._safe_path(file_name)
        try:
            self._files[file_name] = safe_open(path, framework="pt", device="cpu")
        except FileNotFoundError:
            raise ModelFolderError(
                f"{self.folder} lacks the weight file {file_name}; the download is incomplete, so fetch it again."
            ) from None
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelFolderError(
                f"{path} is not a whole safetensors file ({error}); it is truncated or damaged, so fetch it again."
            ) from None
        return self._files[file_name]

    def _safe_path(self, file_name: Any) -> Path:
        """The file's path, if its name is a plain file name and its link target is inside the folder."""
        where = f"{self.folder / INDEX} names the shard {file_name!r}"
        if not isinstance(file_name, str) or not file_name.endswith(".safetensors") or "\0" in file_name:
            raise ModelFolderError(f"{where}; only .safetensors files are loaded, never pickled weights (.bin, .pt).")
        pure = PurePosixPath(file_name)
        if pure.is_absolute() or ".." in pure.parts or "\\" in file_name:
            raise ModelFolderError(f"{where}, which leads out of the folder; a shard must be a file inside it.")
        path = self.folder / file_name
        if not path.resolve().is_relative_to(_root(self.folder)):
            raise ModelFolderError(
                f"{path} is a link that leads out of the folder, to {path.resolve()}; copy the file into the folder, "
                "or give the folder that holds it."
            )
        return path

    def _nothing_to_load(self) -> str:
        pickled = sorted(p.name for p in self.folder.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".pkl"))
        if pickled:
            return (
                f"{self.folder} holds {pickled[0]}, a pickle, which can run code when it is opened and is refused; "
                "give a folder with safetensors (transformers' save_pretrained writes them)."
            )
        shards = sorted(p.name for p in self.folder.glob("*.safetensors"))
        if shards:
            return (
                f"{self.folder} holds {shards[0]} but neither {SINGLE} nor {INDEX}; the index tells which shard holds "
                "which tensor, so fetch it too."
            )
        return f"{self.folder} holds no weights: expected {SINGLE}, or shards with {INDEX}."


def _root(folder: Path) -> Path:
    """The folder that links may point into: the model folder, or its repository for a snapshot in the hub's cache."""
    resolved = folder.resolve()
    if resolved.parent.name == "snapshots" and (resolved.parent.parent / "blobs").is_dir():
        return resolved.parent.parent
    return resolved
