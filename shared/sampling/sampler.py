"""The sampler: one token id per row of logits, for greedy and random rows together. Introduced in phase 2.

A ``SamplingBatch`` holds the parameters of a step's rows as arrays; ``sample`` applies the logits processors that any
row needs and takes the arg-max of logits plus Gumbel noise. Invariants: the input logits are never mutated, arithmetic
is float32 whatever their dtype, and a row's token is the same in every batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Self

import torch

from shared.sampling.noise import Stream, gumbel, seed_pattern
from shared.sampling.params import SamplingParams
from shared.sampling.processors import (
    apply_repetition_penalty,
    apply_temperature,
    apply_top_k,
    apply_top_p,
    seen_mask,
)

_INT64_MAX = torch.iinfo(torch.int64).max
_FLOAT32 = torch.finfo(torch.float32)


@dataclass(frozen=True)
class SamplingRow:
    """One row of a step: its sampling parameters, its seed, and its index in the request.

    ``index`` counts generated tokens from 0 and selects the noise. ``token_ids`` are the ids of prompt and output so
    far; they are read only under a repetition penalty.
    """

    params: SamplingParams
    seed: int
    index: int
    token_ids: Sequence[int]


@dataclass(frozen=True)
class SamplingBatch:
    """The sampling parameters of B rows as arrays on the logits' device. A field is None when no row needs it."""

    num_rows: int
    temperature: torch.Tensor | None = None  # float32 [B], 0 for a greedy row; None: all rows are greedy
    drawing_rows: torch.Tensor | None = None  # int64 [n], the rows that draw; None: all of them, or none
    seeds: torch.Tensor | None = None  # int64 [B]; set with temperature, as is indices
    indices: torch.Tensor | None = None  # int64 [B]
    top_k: torch.Tensor | None = None  # int64 [B], above max_top_k for a row without a limit
    max_top_k: int | None = None  # the largest limit in top_k
    top_p: torch.Tensor | None = None  # float64 [B]
    repetition_penalty: torch.Tensor | None = None  # float32 [B]
    history_rows: torch.Tensor | None = (
        None  # int64 [n], set with repetition_penalty: token history_ids[i] occurred ...
    )
    history_ids: torch.Tensor | None = None  # int64 [n] ... in row history_rows[i]

    @classmethod
    def of(cls, rows: Sequence[SamplingRow], *, device: torch.device | str | None = None) -> Self:
        """The arrays for ``rows``, in their order, on ``device`` (None: the CPU)."""
        params = [row.params for row in rows]
        batch: dict[str, torch.Tensor | int | None] = {}
        penalties = [p.repetition_penalty for p in params]
        if any(penalty != 1 for penalty in penalties):
            seen = [row.token_ids if row.params.repetition_penalty != 1 else () for row in rows]
            lengths = torch.tensor([len(ids) for ids in seen])
            # Outside float32's normal range a penalty becomes 0 or inf, and logits NaN.
            batch["repetition_penalty"] = _float32(penalties, _FLOAT32.tiny, device)
            batch["history_rows"] = torch.arange(len(rows)).repeat_interleave(lengths).to(device)
            batch["history_ids"] = torch.tensor(list(chain.from_iterable(seen)), dtype=torch.int64, device=device)
        drawing = [b for b, p in enumerate(params) if not p.is_greedy]
        if drawing:
            batch["temperature"] = _float32([p.temperature for p in params], 0.0, device)
            batch["seeds"] = torch.tensor([seed_pattern(row.seed) for row in rows], device=device)
            batch["indices"] = torch.tensor([row.index for row in rows], device=device)
            if len(drawing) < len(rows):
                batch["drawing_rows"] = torch.tensor(drawing, device=device)
            limits = [params[b].top_k for b in drawing]
            if any(k is not None for k in limits):
                batch["max_top_k"] = min(max(k for k in limits if k is not None), _INT64_MAX - 1)
                batch["top_k"] = torch.tensor([min(p.top_k or _INT64_MAX, _INT64_MAX) for p in params], device=device)
            if any(params[b].top_p < 1 for b in drawing):
                batch["top_p"] = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)
        return cls(len(rows), **batch)  # type: ignore[arg-type]


def _float32(values: Sequence[float], smallest: float, device: torch.device | str | None) -> torch.Tensor:
    clamped = [min(max(value, smallest), _FLOAT32.max) for value in values]
    return torch.tensor(clamped, dtype=torch.float32, device=device)


def sample(logits: torch.Tensor, batch: SamplingBatch, *, stream: Stream = Stream.DRAW) -> torch.Tensor:
    """Sample a token for every row.

    Greedy rows take the exact arg-max of the penalised logits, the lowest id among equals. Other rows draw from the
    softmax of the filtered, temperature-scaled logits by the Gumbel-max trick.

    Args:
        logits: [B, V] in any float dtype; not mutated.
        batch: the parameters of the B rows, on the same device.
        stream: the random stream to draw from.

    Returns:
        int64 [B].

    Raises:
        ValueError: ``logits`` and ``batch`` differ in rows.
    """
    if logits.shape[0] != batch.num_rows:
        raise ValueError(f"logits have {logits.shape[0]} rows, the sampling batch has {batch.num_rows}")
    if batch.repetition_penalty is not None:
        assert batch.history_rows is not None
        assert batch.history_ids is not None
        seen = seen_mask(batch.history_rows, batch.history_ids, logits.shape)
        logits = apply_repetition_penalty(logits.float(), seen, batch.repetition_penalty)
    if batch.temperature is None:
        return logits.argmax(-1)
    if batch.drawing_rows is None:
        return _draw(logits, batch, slice(None), stream)
    ids = logits.argmax(-1)
    ids[batch.drawing_rows] = _draw(logits[batch.drawing_rows], batch, batch.drawing_rows, stream)
    return ids


def _draw(logits: torch.Tensor, batch: SamplingBatch, rows: torch.Tensor | slice, stream: Stream) -> torch.Tensor:
    assert batch.temperature is not None
    assert batch.seeds is not None
    assert batch.indices is not None
    scores = apply_temperature(logits.float(), batch.temperature[rows])
    if batch.top_k is not None:
        scores = apply_top_k(scores, batch.top_k[rows], batch.max_top_k)
    if batch.top_p is not None:
        scores = apply_top_p(scores, batch.top_p[rows])
    scores += gumbel(batch.seeds[rows], batch.indices[rows], stream, scores.shape[-1])  # in place: scores is a copy
    return scores.argmax(-1)


def log_probabilities(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities, float32 [B], of ``ids`` [B] under raw logits [B, V] (before any logits processor)."""
    return logits.log_softmax(-1, dtype=torch.float32).gather(-1, ids[:, None]).squeeze(-1)
