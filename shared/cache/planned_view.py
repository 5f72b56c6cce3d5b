"""The model's view of a paged KV cache whose attention is planned. Introduced in phase 6.1.

The plans are uploaded in the step's one copy, before the block tables. The workspace for split sequences is allocated
once: the maximum number of attention states depends on the GPU and the model's shape, not on the tokens of a step.

Invariants: those of :class:`shared.cache.paged_view.PagedView`; without kernels, and with any backend other than
``planned``, this view behaves as that one.
"""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from shared.attention.descriptor import NUM_ARRAYS, DevicePlan
from shared.cache.paged_layout import PagedLayout, PagedSizes
from shared.cache.paged_view import PagedView
from shared.cache.planned_layout import AttentionPlanner, PlannedLayout, StepPlans
from shared.engine.batch import Batch
from shared.kernels.launch import launches
from shared.kernels.planned_attention import planned_decode
from shared.kernels.planned_prefill import planned_prefill
from shared.kernels.planned_workspace import PlannedWorkspace
from shared.models.config import ModelConfig


class PlannedView(PagedView):
    """Keys and values in blocks; see ``BatchView``.

    ``planner`` makes the plans; None: attention is not planned. Raises ConfigError as ``PagedView`` does.
    """

    def __init__(
        self,
        config: ModelConfig,
        sizes: PagedSizes,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        backend: str | None = None,
    ) -> None:
        device = torch.device(device)
        is_planned = backend in (None, "planned") and launches(torch.empty(0, dtype=dtype, device=device))
        windows = tuple(dict.fromkeys(config.windows))
        itemsize = dtype.itemsize if dtype == torch.float32 else (self.kv_dtype or dtype).itemsize
        self.planner = AttentionPlanner(config, windows, itemsize, device) if is_planned else None
        self.names = {  # names of each plan's arrays in the staging
            (kind, window): [f"{kind} plan {n} of window {window}" for n in range(NUM_ARRAYS)]
            for kind in StepPlans._fields
            for window in windows
        }
        super().__init__(config, sizes, dtype, device, "flash" if backend == "planned" else backend)

    def _make_workspaces(self) -> None:
        if self.planner is None:
            super()._make_workspaces()
            return
        config = self.config
        heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        about = (self.sizes.max_sequences, *heads, self.planner.itemsize, self.keys.device)
        self.workspace = PlannedWorkspace.for_batches(*about)

    def _places(self, is_decode: bool, max_tokens: int) -> dict[str, tuple[int, DTypeLike]]:
        places = super()._places(is_decode, max_tokens)
        if self.planner is None:
            return places
        tables = places.pop("tables")
        counts = self.planner.most_numbers(max_tokens, self.sizes.max_sequences)
        for (kind, _), names in self.names.items():
            if kind == "decode" or not is_decode:
                places |= {name: (count, np.int32) for name, count in zip(names, counts, strict=True)}
        return places | {"tables": tables}

    def _arrays(self, batch: Batch, layout: PagedLayout) -> dict[str, NDArray[Any]]:
        arrays = super()._arrays(batch, layout)
        if self.planner is not None:
            for kind, plans in cast(PlannedLayout, layout).plans._asdict().items():
                for window, plan in plans.items():
                    arrays |= zip(self.names[kind, window], plan.arrays(), strict=True)
        return arrays

    def _receive(self, layout: PagedLayout, sent: Mapping[str, torch.Tensor]) -> None:
        super()._receive(layout, sent)
        if self.planner is None:
            return
        n, B, T = self.num_decoding, len(layout.rows), len(layout.slot_mapping)
        if n:
            self.decode_tiling = self.planner.decode_tiling(n)
        if n < B:
            self.prefill_tiling = self.planner.prefill_tiling(T - n, B - n)
        self.plans = {
            (kind, window): DevicePlan.of(plan, [sent[name] for name in self.names[kind, window]])
            for kind, plans in cast(PlannedLayout, layout).plans._asdict().items()
            for window, plan in plans.items()
        }

    def _attend_decoding(self, layer: int, q: torch.Tensor, out: torch.Tensor, about: dict[str, Any]) -> torch.Tensor:
        if self.planner is None:
            return super()._attend_decoding(layer, q, out, about)
        memory = (self.layer_keys[layer], self.layer_values[layer], *self.decoding)
        plan, about = self.plans["decode", about["window"]], about | self.scales[layer]
        about |= {"tiling": self.decode_tiling, "workspace": self.workspace}
        return planned_decode(q, *memory, plan, **about, out=out)

    def _attend_prompts(self, layer: int, q: torch.Tensor, out: torch.Tensor, about: dict[str, Any]) -> None:
        if self.planner is None:
            super()._attend_prompts(layer, q, out, about)
            return
        memory = (self.layer_keys[layer], self.layer_values[layer], *self.prompts)
        plan, about = self.plans["prefill", about["window"]], about | self.scales[layer]
        about |= {"tiling": self.prefill_tiling, "workspace": self.workspace}
        planned_prefill(q, *memory, plan, **about, out=out)
