"""Where the states of a step's splits wait to be merged: scratch of planned attention. Introduced in phase 6.1.

A query whose keys are cut leaves a state for each split. How many there can be follows from the programs that run at
once and not from the tokens of a step, so there is room for all from the start, and a captured launch finds it at the
same address whatever the plan. Invariant: nothing is kept from one launch to the next but counters that are zero, so
all layers use one workspace in turn.
"""

from dataclasses import dataclass
from typing import Self

import torch

from shared.attention.descriptor import DevicePlan
from shared.kernels.planned_tiling import max_states


@dataclass(frozen=True)
class PlannedWorkspace:
    """Scratch of planned attention, allocated once and used by one layer after another on one stream."""

    partial: torch.Tensor  # fp32 [states, Hq, D]
    partial_log: torch.Tensor  # fp32 [states, Hq], of base 2
    counters: torch.Tensor  # int32 [B · Hkv], zero between launches

    @classmethod
    def for_batches(
        cls,
        num_sequences: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        itemsize: int,
        device: torch.device,
    ) -> Self:
        """Scratch for whatever the tables of :mod:`shared.kernels.planned_tiling` make of a batch of up to so many
        sequences, decoded or prefilled; keys have ``itemsize`` bytes a number."""
        heads = (num_heads, num_kv_heads, head_dim)
        return cls.of(max_states(num_sequences, *heads, itemsize, device), num_sequences, *heads, device)

    @classmethod
    def of(
        cls, num_states: int, num_sequences: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
    ) -> Self:
        """Scratch for plans of up to so many states (``Grid.max_states``) and, when decoding, sequences."""
        return cls(
            torch.empty(num_states, num_heads, head_dim, dtype=torch.float32, device=device),
            torch.empty(num_states, num_heads, dtype=torch.float32, device=device),
            torch.zeros(num_sequences * num_kv_heads, dtype=torch.int32, device=device),
        )

    def check(self, plan: DevicePlan) -> None:
        """Raise ValueError for a plan that leaves more states than there is room for."""
        num_states = self.partial.shape[0]
        if plan.num_states > num_states:
            raise ValueError(f"the workspace holds {num_states} states, and the plan makes {plan.num_states}")
