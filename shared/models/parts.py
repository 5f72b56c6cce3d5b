"""Replaces parts of a model's blocks by others with the same interface. Introduced in phase 3.

A part is a norm, a projection, or a group of projections with the same input: everything that a block's forward calls.
Fused, packed, quantized, low-rank, compiled and sharded parts replace the plain ones. Invariant: the family's block is
kept, and its own forward runs.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from shared.models.attention import NormAndRotate
from shared.models.norm import RMSNorm
from shared.models.projection import ProjectionGroup
from shared.ops.gated import GatedOp


def replace_parts(module: nn.Module, replaced: Callable[[nn.Module], nn.Module | None]) -> None:
    """Replace each part by ``replaced(part)``, in place; if that is None, descend into the part.

    The norms of queries and keys are kept, since the KV view reads them.
    """
    for name, part in module.named_children():
        if isinstance(part, NormAndRotate):
            continue
        other = replaced(part)
        if other is None:
            replace_parts(part, replaced)
        else:
            setattr(module, name, other)
    find_at_once(module)


def find_at_once(module: nn.Module) -> None:
    """Also turns parts and parameters into plain attributes: looking one up through ``nn.Module`` takes as long as a
    small operation.

    Parts and parameters can still be replaced later, but the module must no longer be moved or cast, and none of them
    may be deleted.
    """
    vars(module).update(module.named_children())
    vars(module).update(module.named_parameters(recurse=False))


def merged_biases(members: Iterable[Any]) -> list[torch.Tensor]:
    """The biases of merged projections, with zeros for those without a bias; empty if none has one."""
    members = list(members)
    if all(member.bias is None for member in members):
        return []
    like = next(member.bias for member in members if member.bias is not None)
    return [like.new_zeros(len(member.weight)) if member.bias is None else member.bias for member in members]


class MergedGroup(nn.Module):
    """A :class:`ProjectionGroup` as one matrix, which ``merge`` makes from its projections."""

    def __init__(self, group: ProjectionGroup, merge: Callable[[Iterable[nn.Module]], Any]) -> None:
        super().__init__()
        members: list[Any] = list(group.children())
        self.sizes = [len(member.weight) for member in members]
        self.matrix = merge(members)
        find_at_once(self)

    def heads(
        self, x: torch.Tensor, size: int, norm: RMSNorm | None = None, gate: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """As of :class:`ProjectionGroup`."""
        y = self.matrix(x, norm, None, gate).view(len(x), -1, size)
        return y.split_with_sizes([columns // size for columns in self.sizes], dim=1)

    def activated(
        self, x: torch.Tensor, activation: GatedOp, norm: RMSNorm | None = None, gate: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As of :class:`ProjectionGroup`."""
        return self.matrix(x, norm, None, gate, activation)
