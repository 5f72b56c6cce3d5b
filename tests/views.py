"""Views of paged memory for tests, of parts as a phase puts them together."""

from typing import Any

import torch

from shared.cache.block_storage import BlockStorage, PlainStorage
from shared.cache.paged_attention import paged_or_operations
from shared.cache.paged_layout import PagedSizes
from shared.cache.paged_view import PagedView
from shared.cache.planned_attention import PlannedAttention, is_planned, planner_arguments
from shared.cache.planned_layout import AttentionPlanner
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
