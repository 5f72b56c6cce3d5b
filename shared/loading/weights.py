"""Fills a module's parameters from a checkpoint, using an explicit name map. Introduced in phase 1a.

Invariants: every parameter is filled from its source (:mod:`shared.loading.sources`), and every tensor is used;
otherwise nothing is loaded and one error lists all mismatches. A few threads cast and place tensors one by one, so
memory never holds more than the target and a few tensors; a tensor that already has the target dtype and device stays
memory-mapped and costs no anonymous memory.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from shared.errors import ModelFolderError
from shared.loading.checkpoint import Checkpoint
from shared.loading.sources import Source, sources
from shared.models.families import Family

WORKERS = 4
LISTED = 12  # names shown for each kind of mismatch


def layer_sources(family: Family, block: nn.Module, layer: int) -> dict[str, Source]:
    """For each parameter of a block, the checkpoint's tensor, part of a tensor, or several tensors that form it."""
    return sources(block, family.layer_names, f"model.layers.{layer}.")


def fill(
    module: nn.Module,
    source_of: dict[str, Source],
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str,
    others: Iterable[str] = (),
) -> None:
    """Replace every parameter of ``module`` by what its source in ``source_of`` gives.

    Args:
        others: tensors of the checkpoint that no parameter uses; reported as an error with all other mismatches.
    """
    _check(module, source_of, checkpoint, sorted(others))

    def place(name: str) -> None:
        owner, _, attribute = name.rpartition(".")
        tensor = source_of[name].read(checkpoint).to(device=device, dtype=dtype)
        setattr(module.get_submodule(owner), attribute, nn.Parameter(tensor, requires_grad=False))

    # A cast mostly waits for page faults of source and target; a few threads overlap these waits.
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(place, source_of))


def _check(module: nn.Module, source_of: dict[str, Source], checkpoint: Checkpoint, unexpected: list[str]) -> None:
    missing: dict[str, None] = {}  # in order, without duplicates: a tensor may form several parameters
    mis_shaped: dict[str, None] = {}
    for name, parameter in module.named_parameters():
        absent = [tensor for tensor in source_of[name].names if tensor not in checkpoint.names]
        missing |= dict.fromkeys(absent)
        if not absent:
            mis_shaped |= dict.fromkeys(source_of[name].mismatches(checkpoint, tuple(parameter.shape)))
    if not missing and not unexpected and not mis_shaped:
        return
    kinds = {
        "missing": list(missing),
        "of another shape than config.json says": list(mis_shaped),
        "unexpected": unexpected,
    }
    found = "; ".join(
        f"{len(names)} {kind}: {', '.join(names[:LISTED])}{', …' if len(names) > LISTED else ''}"
        for kind, names in kinds.items()
        if names
    )
    raise ModelFolderError(
        f"The weights in {checkpoint.folder} do not match its config.json: {found}. Fetch config.json and the weights "
        "of the same checkpoint."
    )
