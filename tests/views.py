"""Views of paged memory for tests, of parts as a phase puts them together."""

from typing import Any

import torch

from shared.cache.layout.paged import PagedSizes
from shared.cache.layout.planned import AttentionPlanner
from shared.cache.view.block_storage import BlockStorage, PlainStorage
from shared.cache.view.paged import PagedView
from shared.cache.view.paged_attention import paged_or_operations
from shared.cache.view.planned_attention import PlannedAttention, is_planned, planner_arguments
from shared.models.config import ModelConfig


def paged_view(
    config: ModelConfig,
    sizes: PagedSizes,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    backend: str | None = None,
    storage: BlockStorage | None = None,
) -> PagedView:
    """Phase 6's view; ``storage`` as if of the model's dtype, if there is none."""
    storage = storage or PlainStorage(config, sizes, dtype, device)
    return PagedView(config, sizes, dtype, storage, paged_or_operations(config, sizes, storage, backend))


def planned_view(
    config: ModelConfig,
    sizes: PagedSizes,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    backend: str | None = None,
    storage: BlockStorage | None = None,
) -> Any:
    """Phase 6.1's view."""
    storage = storage or PlainStorage(config, sizes, dtype, device)
    if not is_planned(storage, backend):
        return paged_view(config, sizes, dtype, device, backend, storage)
    planner = AttentionPlanner(**planner_arguments(config, dtype, storage))
    return PagedView(config, sizes, dtype, storage, PlannedAttention(planner, sizes, storage))
