"""Attention over blocks with kernels that follow a plan. Introduced in phase 6.1.

The plans are uploaded in the step's one copy, before the block tables. The workspace for split sequences is allocated
once: the maximum number of attention states depends on the GPU and the model's shape, not on the tokens of a step.
The planner determines each launch's tiling and rows of queries.

Invariant: that of :class:`shared.cache.view.paged_attention.PagedAttention`.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from shared.attention.descriptor import NUM_ARRAYS, DevicePlan
from shared.cache.layout.paged import PagedLayout, PagedSizes
from shared.cache.layout.planned import AttentionPlanner, LayoutPlans, StepPlans
from shared.cache.view.attention import Arrays, ArraySpecs, NoPadding, Padding, PagedAttentionProtocol, Scores
from shared.cache.view.block_storage import BlockStorage
from shared.cache.view.paged_attention import paged_or_operations, staged_tables, table_arrays
from shared.engine.batch import Batch
from shared.engine.config import EngineConfig
from shared.kernels.attention.planned_attention import planned_decode
from shared.kernels.attention.planned_prefill import planned_prefill
from shared.kernels.attention.planned_workspace import PlannedWorkspace
from shared.kernels.attention.prompt_keys import PromptKeys
from shared.kernels.launch import check_head_size, launches
from shared.models.causal_lm import CausalLM
from shared.models.config import ModelConfig

PADDING_ROWS = 8192
"""Rows of the copy of keys that fill up the last tiles of sequences: as many as a step of 8,192 tokens needs, whatever
the number of its prompts, unless a sliding window adds tiles of 128."""


class PlannedAttention:
    """A launch for decoding requests, one or two for prompts, and their merges; see
    :class:`shared.cache.view.attention.PagedAttentionProtocol`.

    Raises ConfigError if there is no kernel for the model's head size.
    """

    def __init__(self, planner: AttentionPlanner, sizes: PagedSizes, storage: BlockStorage) -> None:
        config = planner.config
        check_head_size(config.head_dim)
        self.planner, self.sizes, self.storage = planner, sizes, storage
        self.lay_out = partial(LayoutPlans.planned, planner=planner)
        self.names = {  # names of each plan's arrays in the staging buffer
            (kind, window): [f"{kind} plan {n} of window {window}" for n in range(NUM_ARRAYS)]
            for kind in StepPlans._fields
            for window in planner.windows
        }
        heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        self.workspace = PlannedWorkspace.for_batches(
            sizes.max_sequences, *heads, planner.itemsize, storage.keys.device
        )
        if planner.can_copy:
            keys, has_windows = storage.keys, any(window is not None for window in planner.windows)
            num_rows = max(sizes.max_tokens, sizes.max_seq_len) + PADDING_ROWS
            shape = num_rows, sizes.max_sequences, config.num_kv_heads * config.head_dim
            copied = PromptKeys.of(*shape, keys.dtype, keys.device, has_windows)
            self.workspace = replace(self.workspace, copied=copied)
        self.decode_arrays: tuple[object, Arrays] = None, {}  # the last plans of a step that decodes, and their arrays
        self.received: object = None  # the plans of the last step, if it only decoded
        self.prompt_arguments: dict[str, Any] = {}  # `copies`, or mask tokens (phase 11.1), whose keys are never copied

    def staged(self, is_decode: bool, max_tokens: int) -> ArraySpecs:
        counts = self.planner.most_numbers(max_tokens, self.sizes.max_sequences)
        staged: dict[str, tuple[int, DTypeLike]] = {}
        for (kind, _), names in self.names.items():
            if kind == "decode" or not is_decode:
                staged |= {name: (count, np.int32) for name, count in zip(names, counts, strict=True)}
        return staged | staged_tables(self.sizes)

    def arrays(self, batch: Batch, layout: PagedLayout) -> Arrays:
        arrays, plans = table_arrays(batch, layout), cast(LayoutPlans, layout.extra).plans
        if not batch.is_decode:
            return arrays | self.plan_arrays(plans)
        if plans.decode is not self.decode_arrays[0]:
            self.decode_arrays = plans.decode, self.plan_arrays(plans)
        return arrays | self.decode_arrays[1]

    def plan_arrays(self, plans: StepPlans) -> Arrays:
        """The arrays of a step's plans, by their names in the staging."""
        arrays: Arrays = {}
        for kind, by_window in plans._asdict().items():
            for window, plan in by_window.items():
                arrays |= zip(self.names[kind, window], plan.arrays(), strict=True)
        return arrays

    def receive(self, batch: Batch, layout: PagedLayout, sent: Mapping[str, Tensor]) -> None:
        self.is_decode = batch.is_decode
        self.decoding = sent["tables"], sent["table_starts"], sent["lengths"]
        if not self.is_decode:
            self.prompts = sent["tables"], sent["prompt_table_starts"], sent["prompt_lengths"]
        plans = cast(LayoutPlans, layout.extra).plans
        decode = plans.decode if self.is_decode else None
        if decode is not None and decode is self.received:
            return  # the launches and the plans of the step before, at the same addresses
        self.received = None
        self.launches = self.planner.launches(batch.num_tokens, len(batch), layout.num_decoding)
        if self.workspace.copied is not None and self.launches.prefill is not None:
            self.prompt_arguments["copies"] = self.copies(layout)
        self.plans = {
            (kind, window): DevicePlan.of(plan, [sent[name] for name in self.names[kind, window]])
            for kind, by_window in plans._asdict().items()
            for window, plan in by_window.items()
        }
        self.received = decode

    def copies(self, layout: PagedLayout) -> tuple[bool, bool]:
        """Whether a step has prompts whose keys are copied, and others; a captured step may have both."""
        tiling, copied, first = self.launches.prefill.copied, self.workspace.copied, layout.num_decoding
        if tiling is None or copied is None:
            return False, True
        if self.launches.is_captured:
            return True, True
        return copied.copies(layout.num_new[first:], layout.lengths[first:], tiling.tile)

    def attend(self, layer: int, q: Tensor, options: Scores, out: Tensor | None) -> Tensor:
        memory = (self.storage.layer_keys[layer], self.storage.layer_values[layer])
        window = options["window"]
        options = {**options, **self.storage.arguments[layer], "workspace": self.workspace}
        n, first, decode, prefill, _ = self.launches
        if self.is_decode:
            return planned_decode(
                q, *memory, *self.decoding, self.plans["decode", window], **options, tiling=decode, out=out
            )
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if n:
            plan = self.plans["decode", window]
            planned_decode(q[:n], *memory, *self.decoding, plan, **options, tiling=decode, out=out[:n])
        plan, options = self.plans["prefill", window], options | self.prompt_arguments
        planned_prefill(q[first:], *memory, *self.prompts, plan, **options, tiling=prefill, out=out[first:])
        return out


def planned_attention(
    config: EngineConfig, model: CausalLM, sizes: PagedSizes, storage: BlockStorage
) -> tuple[PagedAttentionProtocol, Padding]:
    """Planned attention where it is possible; see :data:`shared.cache.paged_memory.MakeAttention`."""
    if not is_planned(storage, config.attention_backend):
        return paged_or_operations(model.config, sizes, storage, config.attention_backend), NoPadding()
    planner = AttentionPlanner(**planner_arguments(model.config, model.dtype, storage))
    return PlannedAttention(planner, sizes, storage), NoPadding()


def is_planned(storage: BlockStorage, backend: str | None) -> bool:
    """Whether attention is planned: where kernels run, unless another backend is chosen."""
    return backend in (None, "planned") and launches(storage.keys)


def planner_arguments(config: ModelConfig, dtype: torch.dtype, storage: BlockStorage) -> dict[str, Any]:
    """The arguments of a planner for a model of this dtype."""
    itemsize = dtype.itemsize if dtype == torch.float32 else storage.keys.itemsize
    options = {"config": config, "windows": tuple(dict.fromkeys(config.windows)), "itemsize": itemsize}
    return options | {"device": storage.keys.device}
