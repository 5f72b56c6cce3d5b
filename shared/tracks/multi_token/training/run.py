"""A training run from a model's name to an adapter's folder. Introduced in phase 11.1.

The run first generates its texts, with an engine that is closed before training begins. Texts and checkpoint go next to
the adapter's folder, in ``OUT.training``. The folder itself receives the adapter and its card, ``training.json``: what
was trained, on which texts, and the curve.

Invariant: a run started again with the same settings resumes where it stopped, and generates no text twice.
"""

import gc
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.loading.loader import load_model
from shared.loading.placement import check_device
from shared.loading.resolve import resolve_model
from shared.models.fused import fuse
from shared.tracks.multi_token.adapter import Adapter, AdapterConfig
from shared.tracks.multi_token.lora import adapt
from shared.tracks.multi_token.training.distillation import TrainingConfig, train
from shared.tracks.multi_token.training.own_texts import Texts, write_texts

Report = Callable[[str], None]


def train_adapter(
    name: str,
    folder: Path,
    shape: AdapterConfig,
    config: TrainingConfig,
    writing: dict[str, Any],
    batch: int,
    dtype: str | None = None,
    device: str = "cpu",
    pause_after: float | None = None,
    *,
    report: Report = lambda _: None,
) -> bool:
    """Train an adapter for the model ``name`` and write it to ``folder``; False if the run was paused.

    Args:
        writing: the arguments of ``write_texts``.
        batch: how many requests the engine runs at a time.
        dtype: the model's, as in ``EngineConfig``.
        report: gets a line of progress.

    Raises what ``load_model``, ``write_texts`` and ``train`` raise.
    """
    work = folder.with_name(f"{folder.name}.training")
    started = time.monotonic()
    texts, held_out = _texts(name, work, writing, batch, dtype, device, report)
    report(
        f"{len(texts.ids)} rows of {texts.ids.shape[1]} tokens to train on and {len(held_out.ids)} held out, after "
        f"{time.monotonic() - started:.0f} s"
    )
    model_dtype = None if dtype is None else getattr(torch, dtype)
    model = fuse(load_model(resolve_model(name), dtype=model_dtype, device=check_device(device)))
    torch.manual_seed(config.seed)
    adapter = Adapter(shape, model.config).to(model.device)
    adapter.start_masks(model.embedding)
    adapt(model, adapter.additions(), adapter.masks)
    num_parameters = sum(parameter.numel() for parameter in adapter.parameters())
    report(f"{num_parameters / 1e6:.2f} million parameters, {2 * num_parameters / 1e6:.1f} MB in bfloat16")

    def tell(entry: dict[str, Any]) -> None:
        found = [f"step {entry['step']:>6}  {entry['seconds']:>5.0f} s  {entry['steps_per_second']:5.1f} steps/s"]
        found += [f"{loss} {value:.3f}" for loss, value in (entry["losses"] or {}).items()]
        shares = " ".join(f"{share:.3f}" for share in entry["accepted"])
        found.append(f"held out: loss {entry['held_out_loss']:.3f}, accepted {shares}")
        report("  ".join([*found, f"{entry['tokens_per_step']:.3f} tokens a step"]))
        adapter.save(folder)

    curve = train(model, adapter, texts, held_out, config, work, pause_after=pause_after, report=tell)
    if curve is None:
        report(f"paused; the same command continues from {work}")
        return False
    adapter.save(folder)
    card: dict[str, Any] = {
        "model": Path(name).name,  # no machine path
        "adapter": asdict(shape),
        "training": asdict(config),
        "texts": writing,
        "curve": curve,
    }
    card |= {"rows": len(texts.ids), "held_out_rows": len(held_out.ids), "dtype": str(model.dtype)}
    card |= {"device": torch.cuda.get_device_name() if model.device.type == "cuda" else "cpu"}
    (folder / "training.json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    return True


def _texts(
    name: str, work: Path, writing: dict[str, Any], batch: int, dtype: str | None, device: str, report: Report
) -> tuple[Texts, Texts]:
    """The texts of an earlier run with the same arguments, or new ones."""
    work.mkdir(parents=True, exist_ok=True)
    path, description = work / "texts.safetensors", work / "texts.json"
    key = json.dumps({"model": name} | writing)
    if not (path.exists() and description.exists() and description.read_text(encoding="utf-8") == key):
        report(f"the model writes answers to {writing['num_prompts']} prompts, and to those that are held out")
        config: dict[str, Any] = {"max_batch_size": batch, "dtype": dtype, "device": device}
        written = write_texts(name, **writing, **config, report=report)
        gc.collect()  # frees the engine and its KV cache
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        tensors: dict[str, Tensor] = {}
        for part, texts in zip(("train", "held_out"), written, strict=True):
            tensors |= {f"{part}.ids": texts.ids.to(torch.int32), f"{part}.is_answer": texts.is_answer}
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
        description.write_text(key, encoding="utf-8")
    found = load_file(path)
    both = [Texts(found[f"{part}.ids"].long(), found[f"{part}.is_answer"]) for part in ("train", "held_out")]
    return both[0], both[1]
