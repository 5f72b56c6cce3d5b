"""The model's view of a paged KV cache during a step. Introduced in phase 6.

Layout ``[layer, block, offset, Hkv, D]``: the tokens of all blocks of a layer are contiguous, so a token has one index,
its slot, and its heads are adjacent. With ``flash`` each layer takes ``kv_write``, then ``paged_attention`` for the
decoding sequences, which are first, and ``paged_prefill`` for the others; a launch without sequences is left out.

PyTorch's operations (``sdpa``, ``naive``, and everything on a CPU) need a sequence's keys contiguous. For them one
operation gathers each sequence's blocks into a small buffer that all sequences and layers reuse. The buffer stays in
the processor's caches, so this is faster than gathering all sequences at once. A sliding-window layer gathers only the
window's blocks.

Invariant: in a decode step the results of :meth:`PagedView.write` and ``attend`` are buffers of the view, valid until
the next layer's call, at the same addresses for the same number of sequences.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from shared.cache.contiguous import kv_bytes
from shared.cache.free_memory import free_bytes
from shared.cache.fused_contiguous import check_flash_head_size
from shared.cache.paged_layout import PagedLayout, PagedSizes
from shared.cache.view import StepInputs, step_arrays, step_places
from shared.engine.batch import Batch
from shared.engine.staging import Staging
from shared.errors import ConfigError
from shared.kernels.decode_attention import DecodeWorkspace
from shared.kernels.kv_write import NormAndRotation, kv_write
from shared.kernels.launch import launches
from shared.kernels.paged_attention import paged_attention
from shared.kernels.paged_prefill import paged_prefill
from shared.models.config import ModelConfig
from shared.models.tokens import QueryKeyTransform
from shared.ops.attention import ATTENTION_BACKENDS


@dataclass(frozen=True)
class Piece:
    """The keys that a sequence attends over: tokens ``start`` to ``end`` of the gathered ``blocks``."""

    blocks: torch.Tensor  # int64
    start: int
    end: int


class PagedView:
    """Keys and values in blocks; see ``BatchView``.

    Args:
        backend: a value of ``EngineConfig.attention_backend`` up to ``flash``, which is the default.

    Raises:
        ConfigError: the device has too little memory, or ``flash`` has no kernel for the model's head size.
    """

    kv_dtype: torch.dtype | None = None  # of keys and values; None: the model's

    def __init__(
        self,
        config: ModelConfig,
        sizes: PagedSizes,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        backend: str | None = None,
    ) -> None:
        backend = backend or "flash"
        device = torch.device(device)
        self.config, self.sizes, self.block_size = config, sizes, sizes.block_size
        kv_dtype = self.kv_dtype or dtype
        self.num_bytes = kv_bytes(config, sizes.num_blocks * sizes.block_size, kv_dtype)
        if self.num_bytes > (free := free_bytes(device)):
            raise ConfigError(
                f"{sizes.num_blocks} blocks of {sizes.block_size} tokens take {self.num_bytes / 1e9:,.2f} GB and "
                f"{device} has {free / 1e9:,.2f} GB free; lower num_gpu_blocks, or leave it out to use free memory."
            )
        self.num_kv_heads, self.head_dim = config.num_kv_heads, config.head_dim
        self.token_stride = config.num_kv_heads * config.head_dim
        num_layers, num_blocks = config.num_layers, sizes.num_blocks
        shape = (num_layers, num_blocks, sizes.block_size, config.num_kv_heads, config.head_dim)
        self.keys = torch.empty(shape, dtype=kv_dtype, device=device)
        self.values = torch.empty(shape, dtype=kv_dtype, device=device)
        self.attention = ATTENTION_BACKENDS["sdpa" if backend == "flash" else backend]
        self.is_launching = launches(self.keys)
        self.is_flash = self.is_launching and backend == "flash"
        self.layer_keys, self.layer_values = self.keys.unbind(0), self.values.unbind(0)
        self.scales: Sequence[dict[str, Any]] = [{}] * num_layers  # arguments of the kernels, of keys in 8 bits
        if self.is_launching:
            heads = (sizes.max_sequences, config.num_heads, config.head_dim)
            self.queries = torch.empty(heads, dtype=dtype, device=device)
            self.attended = torch.empty_like(self.queries)
            self.buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # their first rows, by number
        else:
            self.key_rows = self.keys.view(num_layers, -1, self.token_stride).unbind(0)
            self.value_rows = self.values.view(num_layers, -1, self.token_stride).unbind(0)
        if self.is_flash:
            check_flash_head_size(config.head_dim)
            self._make_workspaces()
        else:
            self.key_blocks = self.keys.view(num_layers, num_blocks, -1).unbind(0)
            self.value_blocks = self.values.view(num_layers, num_blocks, -1).unbind(0)
            most = -(-sizes.max_seq_len // sizes.block_size) * sizes.block_size * self.token_stride
            self.gathered = torch.empty(2, most, dtype=kv_dtype, device=device)
        # Decode steps are small: a separate staging buffer keeps the room for prompts out of their copy.
        self.staging = {
            is_decode: Staging(device, self._places(is_decode, sizes.max_sequences if is_decode else sizes.max_tokens))
            for is_decode in (True, False)
        }

    def _make_workspaces(self) -> None:
        """Make workspaces for 1, 2, 4, … sequences: the fewer sequences, the more programs per sequence."""
        config, sizes = self.config, self.sizes
        about = (config.num_heads, config.num_kv_heads, config.head_dim, sizes.max_seq_len, self.keys.device)
        self.workspaces = [
            DecodeWorkspace.of(1 << n, *about) for n in range((sizes.max_sequences - 1).bit_length() + 1)
        ]

    def _places(self, is_decode: bool, max_tokens: int) -> dict[str, tuple[int, DTypeLike]]:
        """Lengths and dtypes of the staged arrays, for steps of up to ``max_tokens`` tokens."""
        B = self.sizes.max_sequences
        return {
            "lengths": (B, np.int32),
            "table_starts": (B, np.int32),
            "prompt_lengths": (B, np.int32),
            "prompt_table_starts": (B, np.int32),
            "query_starts": (B + 1, np.int32),
            **step_places(max_tokens),
            "places": (max_tokens, np.int64),
            "tables": (B * -(-self.sizes.max_seq_len // self.block_size), np.int32),
        }

    def load(self, batch: Batch) -> StepInputs:
        """See ``BatchView``."""
        layout = cast(PagedLayout, batch.layout)
        self.num_decoding, self.is_decode = layout.num_decoding, batch.is_decode
        sent = self.staging[self.is_decode].send(self._arrays(batch, layout))
        self.places = sent["places"]
        if self.is_launching and self.is_decode:  # buffers for the results of every layer
            self._take_buffers(len(batch))
        if self.is_flash:
            self._receive(layout, sent)
        else:
            self.layout, self.num_new = layout, batch.num_new_tokens.tolist()
            self.pieces: dict[int | None, list[Piece]] = {}  # by window
        return StepInputs.of(sent)

    def _take_buffers(self, num_rows: int) -> None:
        """Use the first rows of the buffers; they are kept, since slicing a tensor costs more than a lookup."""
        known = self.buffers.get(num_rows)
        if known is None:
            known = self.buffers[num_rows] = self.queries[:num_rows], self.attended[:num_rows]
        self.step_queries, self.step_attended = known

    def _arrays(self, batch: Batch, layout: PagedLayout) -> dict[str, NDArray[Any]]:
        """The arrays that a step uploads."""
        arrays: dict[str, NDArray[Any]] = {
            **step_arrays(batch),
            "places": layout.slot_mapping * self.token_stride if self.is_launching else layout.slot_mapping,
        }
        if self.is_flash:
            n, table_starts = self.num_decoding, layout.table_starts[:-1]
            arrays |= {"lengths": layout.lengths[:n], "table_starts": table_starts[:n], "tables": layout.tables}
            if not self.is_decode:  # arrays of their own: kernels are compiled for addresses that are aligned
                arrays |= {
                    "prompt_lengths": layout.lengths[n:],
                    "prompt_table_starts": table_starts[n:],
                    "query_starts": np.append(0, batch.num_new_tokens[n:].cumsum()),
                }
        return arrays

    def _receive(self, layout: PagedLayout, sent: Mapping[str, torch.Tensor]) -> None:
        """Keep the tensors that the kernels read."""
        self.decoding = sent["tables"], sent["table_starts"], sent["lengths"]
        if not self.is_decode:
            self.prompts = sent["tables"], sent["prompt_table_starts"], sent["prompt_lengths"]
            self.query_starts = sent["query_starts"]

    def write(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        qk: QueryKeyTransform,
    ) -> torch.Tensor:
        """See :class:`shared.models.tokens.KVView`."""
        if not self.is_launching:
            q, k = qk(q, k, positions)
            k, v = self._stored(layer, k, v)
            self.key_rows[layer].index_copy_(0, self.places, k.reshape(-1, self.token_stride))
            self.value_rows[layer].index_copy_(0, self.places, v.reshape(-1, self.token_stride))
            return q
        return kv_write(
            q,
            k,
            v,
            positions,
            cast(NormAndRotation, qk),
            self.layer_keys[layer],
            self.layer_values[layer],
            self.places,
            self.head_dim,
            out=self.step_queries if self.is_decode else None,
            **self.scales[layer],
        )

    def _stored(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in the dtype of the KV cache."""
        return k, v

    def attend(
        self, layer: int, q: torch.Tensor, *, scale: float, window: int | None = None, softcap: float | None = None
    ) -> torch.Tensor:
        """See :class:`shared.models.tokens.KVView`; a sliding-window layer reads only keys inside the window."""
        if not self.is_flash:
            return self._attend_gathered(layer, q, scale, window, softcap)
        about: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
        if self.is_decode:
            return self._attend_decoding(layer, q, self.step_attended, about)
        out, n = torch.empty_like(q, memory_format=torch.contiguous_format), self.num_decoding
        if n:
            self._attend_decoding(layer, q[:n], out[:n], about)
        self._attend_prompts(layer, q[n:], out[n:], about)
        return out

    def _attend_decoding(self, layer: int, q: torch.Tensor, out: torch.Tensor, about: dict[str, Any]) -> torch.Tensor:
        """Attention of the decoding sequences; ``about`` holds scale, window and softcap."""
        memory = (self.layer_keys[layer], self.layer_values[layer], *self.decoding)
        workspace = self.workspaces[(len(q) - 1).bit_length()]
        return paged_attention(q, *memory, **(about | self.scales[layer]), workspace=workspace, out=out)

    def _attend_prompts(self, layer: int, q: torch.Tensor, out: torch.Tensor, about: dict[str, Any]) -> None:
        """Attention of the other sequences."""
        memory = (self.layer_keys[layer], self.layer_values[layer], *self.prompts)
        paged_prefill(q, *memory, self.query_starts, **(about | self.scales[layer]), out=out)

    def _attend_gathered(
        self, layer: int, q: torch.Tensor, scale: float, window: int | None, softcap: float | None
    ) -> torch.Tensor:
        if window not in self.pieces:
            self.pieces[window] = self._cut(window)
        attended = []
        for queries, piece in zip(q.split(self.num_new), self.pieces[window], strict=True):
            k, v = (x.transpose(0, 1) for x in self._gathered(layer, piece))  # [Hkv, S, D]
            attended.append(self.attention(queries, k, v, scale=scale, window=window, softcap=softcap))
        return torch.cat(attended)

    def _gathered(self, layer: int, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the keys and values of a piece together: ``[S, Hkv, D]`` each, valid until the next piece."""
        count = len(piece.blocks) * self.block_size * self.token_stride
        k, v = (part[:count].view(len(piece.blocks), -1) for part in self.gathered)
        torch.index_select(self.key_blocks[layer], 0, piece.blocks, out=k)
        torch.index_select(self.value_blocks[layer], 0, piece.blocks, out=v)
        k, v = (x.view(-1, self.num_kv_heads, self.head_dim)[piece.start : piece.end] for x in (k, v))
        return k, v

    def _cut(self, window: int | None) -> list[Piece]:
        """The keys that each sequence attends over, for all layers of this window."""
        layout, pieces = self.layout, []
        about = (layout.num_cached.tolist(), layout.lengths.tolist(), layout.table_starts.tolist())
        for num_cached, end, start in zip(*about[:2], about[2][:-1], strict=True):
            first = (
                0 if window is None else max(0, num_cached + 1 - window)
            )  # the first key that the first new token attends to
            first_block = first // self.block_size
            blocks = layout.tables[start + first_block : start - (-end // self.block_size)].astype(np.int64)
            skipped = first_block * self.block_size
            pieces.append(Piece(torch.from_numpy(blocks).to(self.keys.device), first - skipped, end - skipped))
        return pieces
