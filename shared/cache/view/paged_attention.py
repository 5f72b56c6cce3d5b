"""Attention over blocks with kernels that follow the block tables. Introduced in phase 6.

Each layer launches ``paged_attention`` for the decoding sequences, which come first, and ``paged_prefill`` for the
others; a launch without sequences is skipped. Invariant: the arrays of a decode step have the same addresses in every
step.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.cache.layout.paged import PagedLayout, PagedSizes
from shared.cache.view.attention import Arrays, ArraySpecs, PagedAttentionProtocol, Scores
from shared.cache.view.block_storage import BlockStorage
from shared.cache.view.operations_attention import OperationsAttention
from shared.engine.batch import Batch
from shared.kernels.attention.decode_attention import DecodeWorkspace
from shared.kernels.attention.paged_attention import paged_attention
from shared.kernels.attention.paged_prefill import paged_prefill
from shared.kernels.launch import check_head_size, launches
from shared.models.config import ModelConfig
from shared.ops.attention import ATTENTION_BACKENDS


class PagedAttention(PagedAttentionProtocol):
    """Two launches at most; see :class:`shared.cache.view.attention.PagedAttentionProtocol`.

    Raises ConfigError if there is no kernel for the model's head size.
    """

    def __init__(self, config: ModelConfig, sizes: PagedSizes, storage: BlockStorage) -> None:
        check_head_size(config.head_dim)
        self.sizes, self.storage = sizes, storage
        arguments = (config.num_heads, config.num_kv_heads, config.head_dim, sizes.max_seq_len, storage.keys.device)
        self.workspaces = [  # for 1, 2, 4, … sequences: the fewer sequences, the more programs for each
            DecodeWorkspace.of(1 << n, *arguments) for n in range((sizes.max_sequences - 1).bit_length() + 1)
        ]

    def staged(self, is_decode: bool, max_tokens: int) -> ArraySpecs:
        return staged_tables(self.sizes)

    def arrays(self, batch: Batch, layout: PagedLayout) -> Arrays:
        return table_arrays(batch, layout)

    def receive(self, batch: Batch, layout: PagedLayout, sent: Mapping[str, Tensor]) -> None:
        self.is_decode, self.num_decoding = batch.is_decode, layout.num_decoding
        self.decoding = sent["tables"], sent["table_starts"], sent["lengths"]
        if not self.is_decode:
            self.prompts = sent["tables"], sent["prompt_table_starts"], sent["prompt_lengths"], sent["query_starts"]

    def attend(self, layer: int, q: Tensor, options: Scores, out: Tensor | None) -> Tensor:
        options = options | self.storage.arguments[layer]
        memory, n = (self.storage.layer_keys[layer], self.storage.layer_values[layer]), self.num_decoding
        if self.is_decode:
            workspace = self.workspaces[(n - 1).bit_length()]
            return paged_attention(q, *memory, *self.decoding, **options, workspace=workspace, out=out)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if n:
            workspace = self.workspaces[(n - 1).bit_length()]
            paged_attention(q[:n], *memory, *self.decoding, **options, workspace=workspace, out=out[:n])
        self.attend_prompts(layer, q[n:], options, out[n:])
        return out

    def attend_prompts(self, layer: int, q: Tensor, options: dict[str, Any], out: Tensor) -> None:
        """Attention of the sequences that do not decode; ``options`` are the kernel's arguments by name."""
        memory = (self.storage.layer_keys[layer], self.storage.layer_values[layer])
        paged_prefill(q, *memory, *self.prompts, **options, out=out)


def staged_tables(sizes: PagedSizes) -> ArraySpecs:
    """Lengths and dtypes of the arrays of ``table_arrays``."""
    B = sizes.max_sequences
    return {
        "lengths": (B, np.int32),
        "table_starts": (B, np.int32),
        "prompt_lengths": (B, np.int32),
        "prompt_table_starts": (B, np.int32),
        "query_starts": (B + 1, np.int32),
        "tables": (B * -(-sizes.max_seq_len // sizes.block_size), np.int32),
    }


def table_arrays(batch: Batch, layout: PagedLayout) -> Arrays:
    """Lengths and block tables of the decoding sequences, and of the others.

    The others have separate arrays, since kernels are compiled for aligned addresses.
    """
    n, table_starts = layout.num_decoding, layout.table_starts[:-1]
    arrays: Arrays = {"lengths": layout.lengths[:n], "table_starts": table_starts[:n], "tables": layout.tables}
    if not batch.is_decode:
        arrays |= {
            "prompt_lengths": layout.lengths[n:],
            "prompt_table_starts": table_starts[n:],
            "query_starts": np.append(0, batch.num_new_tokens[n:].cumsum()),
        }
    return arrays


def paged_or_operations(
    config: ModelConfig, sizes: PagedSizes, storage: BlockStorage, backend: str | None
) -> PagedAttention | OperationsAttention:
    """The kernels where they run and ``backend`` is not one of PyTorch's operations."""
    if launches(storage.keys) and backend in (None, "flash"):
        return PagedAttention(config, sizes, storage)
    return OperationsAttention(storage, backend if backend in ATTENTION_BACKENDS else "sdpa")
