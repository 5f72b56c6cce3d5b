"""The contiguous cache with kernels: one launch to write, one to attend. Introduced in phase 3.1.

The step's inputs (slots of the new tokens, sequence length) are in device buffers that are filled once a step and read
by the kernels. So a decode step calls the same kernels with the same arguments each time, as a CUDA graph requires.
``flash`` is our kernel for decode steps; a prefill uses PyTorch's attention. What no kernel does, and on a CPU
everything, the view of phase 3 does.
Invariant: in a decode step the results of :meth:`FusedContiguousView.write` and ``attend`` are buffers of the view,
valid until the next layer's call.
"""

from typing import Any, cast

import torch
from torch import Tensor

from shared.cache.view.contiguous import ContiguousCache, ContiguousView
from shared.kernels.attention.decode_attention import DecodeWorkspace, decode_attention
from shared.kernels.attention.kv_write import NormAndRotation, kv_write
from shared.kernels.launch import check_head_size, launches
from shared.models.tokens import QueryKeyTransform


class FusedContiguousView:
    """The model's view of a cache during one step, written and (with ``flash``) read by kernels.

    Args:
        num_heads: the model's query heads, Hq.
        backend: ``naive``, ``sdpa`` or ``flash``, which is the default.

    Raises ConfigError if ``flash`` has no kernel for the model's head size.
    """

    def __init__(self, cache: ContiguousCache, num_heads: int, backend: str | None = None) -> None:
        backend = backend or "flash"
        self.cache = cache
        self.operations = ContiguousView(cache, "sdpa" if backend == "flash" else backend)
        self.is_launching = launches(cache.keys)
        self.is_flash = self.is_launching and backend == "flash"
        if not self.is_launching:
            return
        device = cache.keys.device
        _, num_kv_heads, capacity, head_dim = cache.keys.shape
        if self.is_flash:
            check_head_size(head_dim)
            self.workspace = DecodeWorkspace.of(1, num_heads, num_kv_heads, head_dim, capacity, device)
        self.head_dim = head_dim
        self.head_stride = capacity * head_dim
        self.layer_keys = cache.keys[:, None].unbind(0)  # of each layer [1, Hkv, capacity, D]
        self.layer_values = cache.values[:, None].unbind(0)
        self.offsets = torch.empty(capacity, dtype=torch.int64, device=device)  # of the new tokens' rows
        self.lengths = torch.zeros(1, dtype=torch.int32, device=device)  # including the new tokens
        self.regions = torch.zeros(1, dtype=torch.int32, device=device)
        self.queries = torch.empty(1, num_heads, head_dim, dtype=cache.keys.dtype, device=device)
        self.attended = torch.empty_like(self.queries)

    def prepare(self, num_new: int) -> None:
        """Set up a step of ``num_new`` tokens, which follow the cached ones."""
        self.num_new = num_new
        if not (self.is_flash and num_new == 1):
            self.operations.prepare(num_new)
        if self.is_launching:
            start, end = self.cache.length, self.cache.length + num_new
            D = self.head_dim
            self.new_offsets = self.offsets[:num_new]
            torch.arange(start * D, end * D, D, out=self.new_offsets)
            self.lengths.fill_(end)

    def write(self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, qk: QueryKeyTransform) -> Tensor:
        if not self.is_launching:
            return self.operations.write(layer, q, k, v, positions, qk)
        memory = self.layer_keys[layer], self.layer_values[layer], self.new_offsets, self.head_stride
        out = self.queries if self.num_new == 1 else None
        return kv_write(q, k, v, positions, cast(NormAndRotation, qk), *memory, out=out)

    def attend(
        self, layer: int, q: Tensor, *, scale: float, window: int | None = None, softcap: float | None = None
    ) -> Tensor:
        limits: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
        if not (self.is_flash and self.num_new == 1):
            return self.operations.attend(layer, q, **limits)
        memory = self.layer_keys[layer], self.layer_values[layer], self.regions, self.lengths
        return decode_attention(q, *memory, **limits, workspace=self.workspace, out=self.attended)
