"""Other implementations of decode attention, over the paged KV cache or over a copy of it. Introduced in phase 6.1.

FlashInfer (arXiv 2501.01005) reads blocks as we do; it is timed where it is installed. PyTorch has no attention over
block tables: its operations want a sequence's keys in one piece. So they are timed in two ways, with the blocks
gathered first, as an engine would have to, and over keys that happen to lie in one piece, which bounds what a better
gather could bring. Invariant: a peer takes the same inputs as our kernels, and its result is compared before it is
timed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.kernels.case import Call, Peer
from benchmarks.kernels.paged_cases import BLOCK_SIZE, PagedSequences
from shared.errors import ConfigError

FLASHINFER_WORKSPACE = 256 << 20
FLASHINFER = ("flashinfer", "flashinfer_tensor_cores")
PEERS = (*FLASHINFER, "sdpa_gathered", "sdpa_contiguous", "flex_gathered", "flex_contiguous")
Maker = Callable[[PagedSequences], Call]


def paged_peers(sequences: PagedSequences, dtype: torch.dtype) -> dict[str, Peer]:
    """``PEERS`` over these sequences; making a call raises ConfigError where it cannot be had, with the reason."""
    device = sequences.lengths.device
    in_order = PagedSequences(sequences.shape, device, None).attend  # what a pool holds that is taken for one piece
    found = {name: Peer(partial(_flashinfer, sequences, dtype, name), sequences.attend) for name in FLASHINFER}
    for name, library in (("sdpa", _sdpa), ("flex", _flex)):
        found[f"{name}_gathered"] = Peer(partial(_pytorch, sequences, library, _gathered), sequences.attend)
        found[f"{name}_contiguous"] = Peer(partial(_pytorch, sequences, library, _contiguous), in_order)
    return found


def _flashinfer(sequences: PagedSequences, dtype: torch.dtype, name: str) -> Call:
    try:
        import flashinfer
    except ImportError as error:
        raise ConfigError(f"FlashInfer cannot be imported ({error}).") from error
    shape, device = sequences.shape, sequences.lengths.device
    indptr = torch.tensor(np.cumsum([0, *map(len, sequences.rows)]), dtype=torch.int32, device=device)
    last = torch.tensor([(length - 1) % BLOCK_SIZE + 1 for length in shape.lengths], dtype=torch.int32, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device),
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=name.endswith("tensor_cores"),
        paged_kv_indptr_buffer=torch.empty_like(indptr),
        paged_kv_indices_buffer=torch.empty_like(sequences.tables),
        paged_kv_last_page_len_buffer=torch.empty_like(last),
    )
    types = {"q_data_type": dtype, "kv_data_type": dtype}
    wrapper.plan(indptr, sequences.tables, last, *shape.heads, BLOCK_SIZE, sm_scale=shape.scale, **types)
    return lambda q, keys, values: wrapper.run(q, (keys, values))


def _pytorch(sequences: PagedSequences, library: Maker, memory: Maker) -> Call:
    """``library``'s attention over what ``memory`` makes of a pool: keys or values ``[B, S, Hkv, D]``."""
    dense, attend = memory(sequences), library(sequences)

    def call(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return attend(q[:, :, None], dense(keys).transpose(1, 2), dense(values).transpose(1, 2))[:, :, 0]

    return call


def _gathered(sequences: PagedSequences) -> Call:
    """Every sequence's blocks, padded to the longest, are copied into one piece first."""
    widest, longest = max(map(len, sequences.rows)), max(sequences.shape.lengths)
    padded = torch.tensor([row + [0] * (widest - len(row)) for row in sequences.rows], device=sequences.lengths.device)
    rows = padded.flatten()
    return lambda pool: pool.index_select(0, rows).view(len(padded), -1, *pool.shape[2:])[:, :longest]


def _contiguous(sequences: PagedSequences) -> Call:
    """The pool taken for one contiguous cache: other numbers for a sequence than its blocks hold, as many of them."""
    lengths = sequences.shape.lengths
    if set(lengths) != {lengths[0]} or lengths[0] % BLOCK_SIZE:
        raise ConfigError("Sequences of different lengths do not lie in one piece without padding.")
    return lambda pool: pool.view(len(lengths), lengths[0], *pool.shape[2:])


def _sdpa(sequences: PagedSequences) -> Call:
    mask = None
    if len(set(sequences.shape.lengths)) > 1:
        place = torch.arange(max(sequences.shape.lengths), device=sequences.lengths.device)
        mask = (place[None, :] < sequences.lengths[:, None])[:, None, None, :]
    return partial(F.scaled_dot_product_attention, attn_mask=mask, scale=sequences.shape.scale, enable_gqa=True)


def _flex(sequences: PagedSequences) -> Call:
    shape, lengths = sequences.shape, sequences.lengths
    if lengths.device.type != "cuda":
        raise ConfigError("FlexAttention is compiled, which is not asked for at demo size.")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    mask = None
    if len(set(shape.lengths)) > 1:

        def is_key(b: Any, h: Any, query: Any, key: Any) -> Any:
            return key < lengths[b]

        mask = create_block_mask(is_key, shape.num_sequences, None, 1, max(shape.lengths), device=lengths.device)
    return partial(compiled, block_mask=mask, scale=shape.scale, enable_gqa=True)
