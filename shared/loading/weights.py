"""Fills a module's parameters from a checkpoint, by an explicit map of names. Introduced in phase 1a.

Invariants: every parameter is filled by exactly one tensor of its shape, and every tensor of the map is used; otherwise
nothing is loaded and one error lists all mismatches. A few threads cast and place tensors one by one, so memory never
holds more than the target and a few tensors; a tensor that already has the target dtype and device stays memory-mapped
and costs no anonymous memory.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from shared.errors import ModelFolderError
from shared.loading.checkpoint import Checkpoint
from shared.models.families import Family

WORKERS = 4
LISTED = 12  # names shown of each kind of mismatch


def layer_tensors(family: Family, block: nn.Module, layer: int) -> dict[str, str]:
    """For each parameter of a block, the name of the checkpoint's tensor."""
    return {
        name: f"model.layers.{layer}.{family.layer_names[module]}.{kind}"
        for name, _ in block.named_parameters()
        for module, kind in [name.rsplit(".", 1)]
    }


def fill(
    module: nn.Module,
    tensor_of: dict[str, str],
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str,
    others: Iterable[str] = (),
) -> None:
    """Replace every parameter of ``module`` by the tensor that ``tensor_of`` names for it.

    Args:
        others: tensors of the checkpoint that no parameter uses; reported as an error with all other mismatches.
    """
    _check(module, tensor_of, checkpoint, sorted(others))

    def place(name: str) -> None:
        owner, _, attribute = name.rpartition(".")
        tensor = checkpoint.tensor(tensor_of[name]).to(device=device, dtype=dtype)
        setattr(module.get_submodule(owner), attribute, nn.Parameter(tensor, requires_grad=False))

    # A cast mostly waits for page faults of source and target; a few threads overlap these waits.
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(place, tensor_of))


def _check(module: nn.Module, tensor_of: dict[str, str], checkpoint: Checkpoint, unexpected: list[str]) -> None:
    missing, mis_shaped = [], []
    for name, parameter in module.named_parameters():
        tensor_name = tensor_of[name]
        if tensor_name not in checkpoint.names:
            missing.append(tensor_name)
        elif checkpoint.shape(tensor_name) != tuple(parameter.shape):
            shapes = f"{list(checkpoint.shape(tensor_name))}, not {list(parameter.shape)}"
            mis_shaped.append(f"{tensor_name} ({shapes})")
    if not missing and not unexpected and not mis_shaped:
        return
    kinds = {"missing": missing, "of another shape than config.json says": mis_shaped, "unexpected": unexpected}
    found = "; ".join(
        f"{len(names)} {kind}: {', '.join(names[:LISTED])}{', …' if len(names) > LISTED else ''}"
        for kind, names in kinds.items()
        if names
    )
    raise ModelFolderError(
        f"The weights in {checkpoint.folder} do not match its config.json: {found}. Fetch config.json and the weights "
        "of the same checkpoint."
    )
