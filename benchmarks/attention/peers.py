"""Others that attend over a paged cache, or over what has been gathered from one. Introduced in phase 6.1.

PyTorch has no attention over block tables: its operations want a sequence's keys in one piece. So they are timed in two
ways, with the blocks gathered first, as an engine would have to, and over keys that happen to lie in one piece, which
bounds what a better gather could bring. FlashInfer (arXiv 2501.01005) reads blocks as we do; it is timed where it is
installed. Invariant: a peer takes the same inputs as our kernels, and its result is compared before it is timed.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.attention.cases import BLOCK_SIZE, AttentionShape, Call, PagedSequences
from shared.errors import ConfigError

FLASHINFER_WORKSPACE = 256 << 20
PEERS = (
    "sdpa_gathered",
    "sdpa_contiguous",
    "flex_gathered",
    "flex_contiguous",
    "flashinfer",
    "flashinfer_tensor_cores",
)


def peer_call(name: str, shape: AttentionShape, sequences: PagedSequences, dtype: torch.dtype) -> Call:
    """``call(q, keys, values)`` of one of ``PEERS``.

    Raises ConfigError where it cannot be had, with the reason.
    """
    if name.startswith("flashinfer"):
        return _flashinfer(shape, sequences, dtype, name == "flashinfer_tensor_cores")
    library, memory = name.split("_")
    attend = _flex(shape, sequences) if library == "flex" else _sdpa(shape, sequences)
    return _gathered(shape, sequences, attend) if memory == "gathered" else _contiguous(shape, attend)


def _gathered(shape: AttentionShape, sequences: PagedSequences, attend: Call) -> Call:
    """Every sequence's blocks, padded to the longest, are copied into one piece first."""
    widest = max(map(len, sequences.rows))
    padded = torch.tensor([row + [0] * (widest - len(row)) for row in sequences.rows], device=sequences.lengths.device)
    rows = padded.flatten()

    def call(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        def dense(memory: torch.Tensor) -> torch.Tensor:
            tokens = memory.index_select(0, rows).view(shape.num_sequences, -1, *memory.shape[2:])
            return tokens[:, : max(shape.lengths)].transpose(1, 2)  # [B, Hkv, S, D]

        return attend(q[:, :, None], dense(keys), dense(values))[:, :, 0]

    return call


def _contiguous(shape: AttentionShape, attend: Call) -> Call:
    """The pool taken for one contiguous cache: other numbers for a sequence than its blocks hold, as many of them."""
    length = shape.lengths[0]
    if set(shape.lengths) != {length} or length % BLOCK_SIZE:
        raise ConfigError("Sequences of different lengths do not lie in one piece without padding.")

    def call(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        def dense(memory: torch.Tensor) -> torch.Tensor:
            return memory.view(shape.num_sequences, length, *memory.shape[2:]).transpose(1, 2)

        return attend(q[:, :, None], dense(keys), dense(values))[:, :, 0]

    return call


def _sdpa(shape: AttentionShape, sequences: PagedSequences) -> Call:
    mask = None
    if len(set(shape.lengths)) > 1:
        place = torch.arange(max(shape.lengths), device=sequences.lengths.device)
        mask = (place[None, :] < sequences.lengths[:, None])[:, None, None, :]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=shape.scale, enable_gqa=True)

    return attend


def _flex(shape: AttentionShape, sequences: PagedSequences) -> Call:
    if sequences.lengths.device.type != "cuda":
        raise ConfigError("FlexAttention is compiled, which is not asked for at demo size.")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    mask = None
    if len(set(shape.lengths)) > 1:
        lengths = sequences.lengths

        def is_key(b: Any, h: Any, query: Any, key: Any) -> Any:
            return key < lengths[b]

        mask = create_block_mask(is_key, shape.num_sequences, None, 1, max(shape.lengths), device=lengths.device)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return compiled(q, k, v, block_mask=mask, scale=shape.scale, enable_gqa=True)

    return attend


def _flashinfer(shape: AttentionShape, sequences: PagedSequences, dtype: torch.dtype, uses_tensor_cores: bool) -> Call:
    try:
        import flashinfer
    except ImportError as error:
        raise ConfigError(f"FlashInfer cannot be imported ({error}).") from error
    device = sequences.lengths.device
    counts = [len(row) for row in sequences.rows]
    indptr = torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32, device=device)
    last = torch.tensor([(length - 1) % BLOCK_SIZE + 1 for length in shape.lengths], dtype=torch.int32, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device),
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=uses_tensor_cores,
        paged_kv_indptr_buffer=torch.empty_like(indptr),
        paged_kv_indices_buffer=torch.empty_like(sequences.tables),
        paged_kv_last_page_len_buffer=torch.empty_like(last),
    )
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    types = {"q_data_type": dtype, "kv_data_type": dtype}
    wrapper.plan(indptr, sequences.tables, last, *heads, BLOCK_SIZE, sm_scale=shape.scale, **types)
    return lambda q, keys, values: wrapper.run(q, (keys, values))
