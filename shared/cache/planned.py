"""Blocks whose attention is planned once a step, for all layers. Introduced in phase 6.1.

The pool is phase 6's. Its view adds a plan to the arrays that a step sends anyway: :mod:`shared.attention.plan` cuts
the keys of all sequences into splits of one size, and each layer's launch only follows. Of a layer a plan depends on
nothing but the window, so there is one for each distinct window of the model, and none is made twice in a step.

In a step's one copy plans come before the block tables: for the same number of decoding sequences they have the same
sizes whatever the lengths, so everything has the same address again. Scratch for the states of the splits is allocated
once: how many there are at most follows from the GPU and the model's shape, not from the tokens of a step.

Invariants: those of :class:`shared.cache.paged_view.PagedView`; the lengths that were planned are those that the
kernels read; where nothing is launched, and with another backend than ``planned``, this is that view.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shared.attention.descriptor import AttentionPlan, DevicePlan
from shared.attention.plan import plan_decode, plan_prefill
from shared.cache.paged import PagedKVCachePool
from shared.cache.paged_view import PagedView
from shared.kernels.launch import launches
from shared.kernels.planned_attention import planned_decode
from shared.kernels.planned_prefill import planned_prefill
from shared.kernels.planned_tiling import decode_tiling, prefill_tiling
from shared.kernels.planned_workspace import PlannedWorkspace


class PlannedView(PagedView):
    """A pool of blocks behind the model; see ``BatchView``. Raises ConfigError as ``PlannedKVCachePool.view``."""

    def __init__(self, pool: "PlannedKVCachePool", num_heads: int, backend: str | None = None) -> None:
        self.windows = tuple(dict.fromkeys(pool.config.windows))  # of the layers, each once
        self.is_planned = backend in (None, "planned") and launches(pool.keys)
        super().__init__(pool, num_heads, "flash" if backend == "planned" else backend)

    def _make_workspaces(self, num_heads: int) -> None:
        if self.is_planned:
            keys = self.pool.keys
            self.shape = (num_heads, self.num_kv_heads, self.head_dim, keys.element_size())
            self.workspace = PlannedWorkspace.for_batches(self.pool.max_sequences, *self.shape, keys.device)
        else:
            super()._make_workspaces(num_heads)

    def _kernel_arrays(
        self, rows: NDArray[np.int64], ends: NDArray[np.int64], num_new: NDArray[np.int64]
    ) -> list[NDArray[np.int32]]:
        """The arrays of one plan after the other, before what the base sends."""
        arrays = super()._kernel_arrays(rows, ends, num_new)
        if not self.is_planned:
            return arrays
        self.planned = {window: self._plan_attention(ends, num_new, window) for window in self.windows}
        return [*(array for plan in self.planned.values() for array in plan.arrays()), *arrays]

    def _plan_attention(self, ends: NDArray[np.int64], num_new: NDArray[np.int64], window: int | None) -> AttentionPlan:
        """The step's plan for the layers of one window."""
        device = self.pool.keys.device
        if self.is_decode:
            self.decode_tiling = decode_tiling(len(ends), *self.shape[1:])
            return plan_decode(ends, self.decode_tiling.grid(self.num_kv_heads, device), window=window)
        self.prefill_tiling = prefill_tiling(int(num_new.sum()), len(ends), *self.shape)
        grid = self.prefill_tiling.grid(self.num_kv_heads, device)
        tokens = self.prefill_tiling.tokens(self.shape[0] // self.num_kv_heads)
        return plan_prefill(num_new, ends, grid, tokens_per_tile=tokens, window=window)

    def _receive(self, sent: Sequence[torch.Tensor]) -> None:
        if self.is_planned:
            self.plans = {}  # by window
            for window, plan in self.planned.items():
                count = len(plan.arrays())
                self.plans[window] = DevicePlan.of(plan, sent[:count])
                sent = sent[count:]
        super()._receive(sent)

    def attend(
        self, layer: int, q: torch.Tensor, *, scale: float, window: int | None = None, softcap: float | None = None
    ) -> torch.Tensor:
        """See :class:`shared.models.tokens.KVView`; of a windowed layer only what a new token can see is read."""
        if not self.is_planned:
            return super().attend(layer, q, scale=scale, window=window, softcap=softcap)
        memory = (self.layer_keys[layer], self.layer_values[layer], self.tables, self.table_starts, self.lengths)
        about: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "workspace": self.workspace}
        plan = self.plans[window]
        if not self.is_decode:
            return planned_prefill(q, *memory, plan, **about, tiling=self.prefill_tiling)
        return planned_decode(q, *memory, plan, **about, tiling=self.decode_tiling, out=self.step_attended)


class PlannedKVCachePool(PagedKVCachePool):
    """Blocks whose view plans."""

    def view(self, num_heads: int, backend: str | None = None) -> PlannedView:
        """See ``CachePoolProtocol``; raises ConfigError if our kernels have no form for the model's head size."""
        return PlannedView(self, num_heads, backend)
