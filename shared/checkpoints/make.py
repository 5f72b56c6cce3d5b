"""Generates random checkpoints of a given shape. Introduced in phase 1b.

Tests need small models of every family; benchmarks need large ones, whose speed does not depend on the values. Both get
a folder like one from the hub: config, generation config, safetensors (in shards if large), tokenizer.

Invariant: a tensor's values depend on (seed, name, shape, kind of device) alone, never on the order or the sharding;
memory holds one tensor at a time.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared.checkpoints.byte_tokenizer import save_byte_tokenizer
from shared.checkpoints.manifest import MANIFEST_NAME, begin_manifest, is_complete, read_manifest, write_manifest
from shared.checkpoints.progress import Progress
from shared.checkpoints.safetensors_writer import FORMAT_NAMES, write_safetensors
from shared.checkpoints.shapes import SHAPES
from shared.errors import InferError

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FORMAT_NAMES}
NORM_STD = 0.2
EMBEDDING_SCALE = 0.5
FINAL_NORM_SCALE = 4.0
OWN_FILES = (
    MANIFEST_NAME,
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
)

Layout = list[tuple[str, tuple[int, ...]]]


def checkpoint_tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of a hub checkpoint with this `config.json`, embeddings first.

    Families: llama, qwen3 (QK-norm), gemma3_text (QK-norm, and four norms per layer). Tied models have no `lm_head`.
    Raises InferError for another `model_type`.
    """
    family = config["model_type"]
    if family not in ("llama", "qwen3", "gemma3_text"):
        raise InferError(f"model_type {family!r} cannot be made; the families are llama, qwen3, gemma3_text.")
    H, D, intermediate = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    query_rows, kv_rows = config["num_attention_heads"] * D, config["num_key_value_heads"] * D
    norms = ["input_layernorm", "post_attention_layernorm"]
    if family == "gemma3_text":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    yield "model.embed_tokens.weight", (config["vocab_size"], H)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        yield f"{layer}.self_attn.q_proj.weight", (query_rows, H)
        yield f"{layer}.self_attn.k_proj.weight", (kv_rows, H)
        yield f"{layer}.self_attn.v_proj.weight", (kv_rows, H)
        yield f"{layer}.self_attn.o_proj.weight", (H, query_rows)
        if family in ("qwen3", "gemma3_text"):
            yield f"{layer}.self_attn.q_norm.weight", (D,)
            yield f"{layer}.self_attn.k_norm.weight", (D,)
        yield f"{layer}.mlp.gate_proj.weight", (intermediate, H)
        yield f"{layer}.mlp.up_proj.weight", (intermediate, H)
        yield f"{layer}.mlp.down_proj.weight", (H, intermediate)
        for norm in norms:
            yield f"{layer}.{norm}.weight", (H,)
    yield "model.norm.weight", (H,)
    if not config.get("tie_word_embeddings", family == "gemma3_text"):
        yield "lm_head.weight", (config["vocab_size"], H)


def random_tensor(
    name: str, shape: tuple[int, ...], *, family: str, seed: int = 0, device: str | torch.device = "cpu"
) -> Tensor:
    """The fp32 values of one tensor, made on `device`.

    Projections are normal with variance 1 / fan-in, so that activations neither vanish nor explode. Norm weights
    scatter around 1 (Gemma adds the 1 itself), far enough that an omitted norm is detected. Embeddings are small
    compared to the layers' outputs, so that a tied model does not repeat its last token forever; the final norm
    compensates, so that logits have a standard deviation of about 2 and near-ties are rare.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))
    values = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
    if len(shape) == 1:
        scale = FINAL_NORM_SCALE if name == "model.norm.weight" else 1.0
        values.mul_(NORM_STD).add_(1.0).mul_(scale)
        return values.sub_(1.0) if family == "gemma3_text" else values
    scale = EMBEDDING_SCALE if name in ("model.embed_tokens.weight", "lm_head.weight") else 1.0
    return values.mul_(scale / math.sqrt(shape[-1]))


def make_checkpoint(
    shape: str,
    folder: Path,
    *,
    seed: int = 0,
    dtype: str | None = None,
    device: str = "cpu",
    max_shard_bytes: int = 4 << 30,
    progress: Progress | None = None,
) -> Path:
    """Write a random checkpoint of `SHAPES[shape]` into `folder` (made if need be); returns the folder.

    `dtype` (float32, bfloat16, float16) replaces the shape's own; `device` generates the values, which differ between
    GPU and CPU. A folder that already holds the same checkpoint is left unchanged; another generated checkpoint is
    overwritten. Raises InferError for an unknown shape, dtype or device, a folder with other files, or one that is not
    writable.
    """
    if shape not in SHAPES:
        raise InferError(f"There is no shape {shape!r}; known: {', '.join(SHAPES)}.")
    config = dict(SHAPES[shape])
    if dtype is not None:
        if dtype not in DTYPES:
            raise InferError(f"dtype {dtype!r} cannot be written; choose one of {', '.join(DTYPES)}.")
        config["torch_dtype"] = dtype
    if max_shard_bytes < 1:
        raise InferError(f"max_shard_bytes is {max_shard_bytes}; it must be at least 1.")
    target = _device(device)
    layout = list(checkpoint_tensors(config))
    origin = {
        "made": shape,
        "seed": seed,
        "dtype": config["torch_dtype"],
        "device": target.type,
        "max_shard_bytes": max_shard_bytes,
    }
    try:
        if is_complete(folder, origin):
            return folder
        _clear(folder)
        begin_manifest(folder, origin)
        _write_weights(folder, layout, config, seed=seed, device=target, max_bytes=max_shard_bytes, progress=progress)
        save_byte_tokenizer(config, folder)
        _write_json(folder / "generation_config.json", _generation_config(config))
        _write_json(folder / "config.json", config)
        write_manifest(folder, origin, checksums=False)
    except OSError as error:
        raise InferError(
            f"The checkpoint cannot be written to {folder} ({error.strerror or error}); "
            "free space there or choose another folder."
        ) from error
    return folder


def plan_shards(layout: Layout, item_bytes: int, max_bytes: int) -> list[Layout]:
    """Divide the layout, in order, into files of at most `max_bytes` of data; a larger tensor gets its own file."""
    shards: list[Layout] = [[]]
    used = 0
    for name, shape in layout:
        num_bytes = math.prod(shape) * item_bytes
        if shards[-1] and used + num_bytes > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append((name, shape))
        used += num_bytes
    return shards


def _write_weights(
    folder: Path,
    layout: Layout,
    config: dict[str, Any],
    *,
    seed: int,
    device: torch.device,
    max_bytes: int,
    progress: Progress | None,
) -> None:
    dtype = DTYPES[config["torch_dtype"]]
    total = dtype.itemsize * sum(math.prod(shape) for _, shape in layout)
    done = 0

    def values(shard: Sequence[tuple[str, tuple[int, ...]]]) -> Iterator[Tensor]:
        nonlocal done
        for name, shape in shard:
            yield random_tensor(name, shape, family=config["model_type"], seed=seed, device=device)
            done += dtype.itemsize * math.prod(shape)
            if progress:
                progress("write", done, total)

    shards = plan_shards(layout, dtype.itemsize, max_bytes)
    if len(shards) == 1:
        write_safetensors(folder / "model.safetensors", shards[0], dtype, values(shards[0]))
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / file_name, shard, dtype, values(shard))
        weight_map |= {name: file_name for name, _ in shard}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def _clear(folder: Path) -> None:
    """Create or empty `folder`; only files of a generated checkpoint are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest = read_manifest(folder)
    is_made = manifest is not None and "made" in manifest["origin"]
    found = sorted(path.name for path in folder.iterdir())
    foreign = [name for name in found if not is_made or not any(fnmatch(name, pattern) for pattern in OWN_FILES)]
    if foreign:
        raise InferError(
            f"{folder} contains files that are not of a generated checkpoint ({', '.join(foreign[:3])}"
            f"{', …' if len(foreign) > 3 else ''}); name a new or an empty folder."
        )
    for name in found:
        (folder / name).unlink()


def _device(device: str) -> torch.device:
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise InferError(f"device {device!r} is not known; choose cpu or cuda.") from error
    if target.type not in ("cpu", "cuda"):
        raise InferError(f"device {device!r} cannot make checkpoints; choose cpu or cuda.")
    if target.type == "cuda" and not torch.cuda.is_available():
        raise InferError(f"device is {device!r}, but PyTorch sees no CUDA device here; choose cpu.")
    return target


def _generation_config(config: dict[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
