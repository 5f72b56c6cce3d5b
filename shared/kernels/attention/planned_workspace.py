"""The workspace of planned attention: the states of a step's splits before merging. Introduced in phase 6.1.

A query whose keys are split has a state for each split. The maximum number of states depends on how many programs run
at once, not on the tokens of a step. So the workspace is allocated once, and captured launches find it at the same
address whatever the plan. Invariant: only zeroed counters persist between layers; copied keys persist from a layer's
copy to its attention. So all layers share one workspace.
"""

from dataclasses import dataclass
from typing import Self

import torch

from shared.attention.descriptor import DevicePlan
from shared.kernels.attention.planned_tiling import max_states
from shared.kernels.attention.prompt_keys import PromptKeys


@dataclass(frozen=True)
class PlannedWorkspace:
    """Workspace of planned attention, allocated once and shared by all layers on one stream."""

    partial: torch.Tensor  # fp32 [states, Hq, D]
    partial_log: torch.Tensor  # fp32 [states, Hq], base 2
    counters: torch.Tensor  # int32 [B · Hkv], zero between launches
    copied: PromptKeys | None = None  # the prompts' keys in one contiguous matrix; None: no tiling needs them

    @classmethod
    def for_batches(
        cls, num_sequences: int, num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int, device: torch.device
    ) -> Self:
        """A workspace for all plans with the tables of :mod:`shared.kernels.attention.planned_tiling`, decode or
        prefill, of up to this many sequences; keys have ``itemsize`` bytes per element.
        """
        heads = (num_heads, num_kv_heads, head_dim)
        return cls.of(max_states(num_sequences, *heads, itemsize, device), num_sequences, *heads, device)

    @classmethod
    def of(
        cls, num_states: int, num_sequences: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
    ) -> Self:
        """A workspace for plans of up to this many states (``Grid.max_states``) and, when decoding, sequences."""
        return cls(
            torch.empty(num_states, num_heads, head_dim, dtype=torch.float32, device=device),
            torch.empty(num_states, num_heads, dtype=torch.float32, device=device),
            torch.zeros(num_sequences * num_kv_heads, dtype=torch.int32, device=device),
        )

    def check(self, plan: DevicePlan) -> None:
        """Raise ValueError if the plan has more states than the workspace holds."""
        num_states = self.partial.shape[0]
        if plan.num_states > num_states:
            raise ValueError(f"the workspace holds {num_states} states and the plan has {plan.num_states}")
