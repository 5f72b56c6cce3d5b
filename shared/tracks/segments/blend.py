"""Selective recomputation: concatenates segments and recomputes part of their tokens. Introduced in phase 9.1.

From layer 1 on, a later segment's keys and values are computed without the segments before it. CacheBlend (arXiv
2405.16444) recomputes a fraction of each segment's tokens with the full preceding context: those whose values in layer
1 change most, since tokens that change much in one layer change much in the next. The others keep their keys and
values.

The result depends on the preceding segments, so it is valid only for this sequence of segments. It is kept as a new
segment, whose role names the fraction and the lengths; a prompt can follow it like any segment. Once evicted, it is
recomputed like any segment: as a whole, that is, with fraction 1.

Invariants: with fraction 1, keys and values are those of the concatenated prompt; with fraction 0, those of the
segments. The segments are read and never changed. The first segment is never recomputed, since nothing precedes it.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shared.engine.prompt import check_prompt
from shared.errors import RequestError
from shared.models.causal_lm import CausalLM
from shared.models.config import ModelConfig
from shared.models.tokens import QueryKeyTransform, Tokens
from shared.ops.rope import inverse_frequencies
from shared.tracks.segments.attention import range_state
from shared.tracks.segments.layout import offsets_of
from shared.tracks.segments.registry import Segment, SegmentRegistry
from shared.tracks.segments.relocation import relocate

_ROWS = 256  # queries at a time, which bounds the memory of the scores


def most_changed(change: Tensor, lengths: Sequence[int], fraction: float) -> Tensor:
    """The tokens to recompute, int64, ascending: in each segment the ``fraction`` that changes most, rounded up.

    Args:
        change: fp32 ``[T]``, for the tokens of segments with these ``lengths``, in order.
        fraction: a number from 0 to 1.
    """
    # exercise 09.1x5: choose the tokens to recompute
    # hint: each segment has its own share: ceil(fraction · length) of its tokens
    # hint: change.split(lengths) gives the changes of each segment, topk(count).indices its largest, counted from 0
    # hint: add the segment's first position (offsets_of), join with torch.cat, and sort: attention needs their order
    chosen = [
        part.topk(math.ceil(fraction * len(part))).indices + start
        for start, part in zip(offsets_of(lengths), change.split(list(lengths)), strict=True)
    ]
    return torch.cat(chosen).sort().values
    # end exercise


class BlendView:
    """Keys and values ``[layers, S, Hkv, D]`` of a whole context, partly replaced by recomputed tokens.

    ``rows`` are the tokens of the context that a layer computes: in layers 0 and 1 all those after the first segment,
    then those chosen in layer 1. In layer 1 only the chosen ones are stored and attend.
    """

    def __init__(self, keys: Tensor, values: Tensor, lengths: Sequence[int], fraction: float) -> None:
        self.keys, self.values = keys, values
        self.lengths, self.fraction = lengths, fraction
        self.rows = torch.arange(lengths[0], sum(lengths), device=keys.device)
        self.chosen = torch.arange(len(self.rows), device=keys.device)  # of the rows

    def write(self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, qk: QueryKeyTransform) -> Tensor:
        """See :class:`shared.models.tokens.KVView`."""
        q, k = qk(q, k, positions)
        if layer == 1:
            change = (v - self.values[layer, self.rows]).float().square().sum((1, 2))
            self.chosen = most_changed(change, self.lengths[1:], self.fraction)
        stored = self.rows[self.chosen]
        self.keys[layer, stored], self.values[layer, stored] = k[self.chosen], v[self.chosen]
        return q

    def attend(
        self, layer: int, q: Tensor, *, scale: float, window: int | None = None, softcap: float | None = None
    ) -> Tensor:
        """See :class:`shared.models.tokens.KVView`; zeros for tokens that are not chosen."""
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        for some in self.chosen.split(_ROWS):
            positions = self.rows[some]
            k, v = (x[layer, : int(positions[-1]) + 1].transpose(0, 1) for x in (self.keys, self.values))
            values, _ = range_state(q[some], k, v, positions, scale=scale, window=window, softcap=softcap)
            out[some] = values.to(q.dtype)
        return out

    def narrow(self, x: Tensor) -> Tensor:
        """The hidden states of the chosen tokens, the only ones that later layers compute."""
        x, self.rows = x[self.chosen], self.rows[self.chosen]
        self.chosen = torch.arange(len(self.rows), device=self.rows.device)
        return x


@torch.inference_mode()
def recompute(
    model: CausalLM, keys: Tensor, values: Tensor, token_ids: Sequence[int], lengths: Sequence[int], fraction: float
) -> None:
    """Recompute a fraction of a context's tokens, in place.

    Args:
        keys, values: ``[layers, S, Hkv, D]`` of S tokens, rotated for positions from 0 on.
        lengths: those of the segments; their sum is S.
    """
    if fraction == 0 or len(lengths) < 2:
        return
    view = BlendView(keys, values, lengths, fraction)
    ids = torch.tensor(token_ids, device=keys.device)
    x = model.embedding(ids[view.rows])
    for layer, block in enumerate(model.blocks):
        x = block(x, Tokens(ids[view.rows], view.rows), view)
        if layer == 1:
            x = view.narrow(x)


@torch.inference_mode()
def blend_segments(
    model: CausalLM, view: Any, pool: Any, registry: SegmentRegistry, segments: Sequence[Segment], fraction: float
) -> Segment:
    """These segments joined into one, with a fraction recomputed; the cached one if it exists.

    Args:
        view, pool: a ``SegmentView`` and a ``PagedKVCachePool``.

    Raises:
        RequestError: there is no segment, one is not in the cache, ``fraction`` is not from 0 to 1, together they are
            too long, or the KV cache has no space.
    """
    if not 0 <= fraction <= 1:
        raise RequestError(f"The fraction to recompute is {fraction}; it must be from 0 to 1.")
    missing = [segment.segment_id for segment in segments if segment.blocks is None]
    if missing:
        raise RequestError(f"Segment {missing[0]} is not in the KV cache; have it computed first.")
    lengths = [len(segment) for segment in segments]
    together = [token_id for segment in segments for token_id in segment.token_ids]
    token_ids = check_prompt(together, model.config.vocab_size, pool.request_capacity)
    registry.acquire(segments)
    try:
        registry.check(segments, len(token_ids))
        whole = registry.add(f"{fraction:g} recomputed of {' + '.join(map(str, lengths))}", token_ids)
        if whole.is_resident:
            return whole
        keys, values = _concatenated(model.config, view, segments)
        recompute(model, keys, values, token_ids, lengths, fraction)
        blocks = pool.allocate(pool.blocks_for(len(token_ids)))
        if blocks is None:
            raise RequestError(
                f"The KV cache has too few free blocks for {len(token_ids)} tokens; try again when requests have "
                "finished."
            )
        slots = _slots(view, blocks, len(token_ids))
        view.keys.flatten(1, 2)[:, slots], view.values.flatten(1, 2)[:, slots] = keys, values
        registry.store(whole, blocks)
        return whole
    finally:
        registry.release(segments)


def _concatenated(config: ModelConfig, view: Any, segments: Sequence[Segment]) -> tuple[Tensor, Tensor]:
    """Copies of the segments' keys and values ``[layers, S, Hkv, D]``, with the keys moved to each segment's
    position."""
    slots = [_slots(view, segment.blocks, len(segment)) for segment in segments]
    keys, values = (part.flatten(1, 2)[:, torch.cat(slots)] for part in (view.keys, view.values))
    starts = torch.tensor(offsets_of(map(len, segments)), device=keys.device)
    distances = starts.repeat_interleave(torch.tensor([len(segment) for segment in segments], device=keys.device))
    for layer in range(config.num_layers):
        frequencies = inverse_frequencies(config.layer_rope(layer), config.head_dim).to(keys.device)
        keys[layer] = relocate(keys[layer], distances, frequencies)
    return keys, values


def _slots(view: Any, blocks: Any, num_tokens: int) -> Tensor:
    """The slots of the first ``num_tokens`` tokens in ``blocks``."""
    size, device = view.keys.shape[2], view.keys.device
    first = torch.as_tensor(blocks, device=device).long() * size
    return (first[:, None] + torch.arange(size, device=device)).flatten()[:num_tokens]
