"""The sampler: one token id per row of logits, for greedy and random rows together. Introduced in phase 2.

A ``SamplingBatch`` holds the parameters of a step's rows as arrays; ``sample`` applies the logits processors that any
row needs and takes the arg-max of logits plus Gumbel noise. Invariants: the input logits are never mutated, arithmetic
is float32 whatever their dtype, and a row's token is the same in every batch.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from shared.sampling.noise import Stream, gumbel, seed_pattern
from shared.sampling.params import SamplingParams
from shared.sampling.processors import (
    apply_min_p,
    apply_output_penalties,
    apply_repetition_penalty,
    apply_temperature,
    apply_top_k,
    apply_top_p,
)
from shared.sampling.token_counts import TokenCounts

_INT64_MAX = torch.iinfo(torch.int64).max
_FLOAT32 = torch.finfo(torch.float32)


class SamplingRow(NamedTuple):
    """One row of a step: its sampling parameters, its seed, and its index in the request.

    ``index`` counts generated tokens from 0 and selects the noise. Only penalties read the prompt and output ids.
    """

    params: SamplingParams
    seed: int
    index: int  # type: ignore[assignment]  # a tuple's method of this name is not needed
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    masked_ids: Sequence[int] = ()  # ids that must not be sampled, since they would end the output before min_tokens
    serial: int = 0  # of the request
    num_drafts: int = 0  # how many of the last output_ids may turn out wrong (phase 11); the previous row has one fewer
    draft_id: int | None = None  # the draft for this row's token
    allowed: NDArray[np.bool_] | None = None  # the tokens that the row's grammar allows, [V] (phase 12)
    # an id, and the one that it replaces; None: it replaces any (phase 11.1)
    redirect: tuple[int, int | None] | None = None
    constraint: object = None  # if the device computes the mask: the request's grammar, and its state after the output

    @property
    def adjusts_logits(self) -> bool:
        """Whether the row has biases, masked ids or penalties."""
        return bool(self.masked_ids) or self.params.adjusts_logits


@dataclass(frozen=True)
class SamplingBatch:
    """The sampling parameters of B rows as arrays on the logits' device. A field is None when no row needs it."""

    num_rows: int
    temperature: torch.Tensor | None = None  # float32 [B], 0 for a greedy row; None: all rows are greedy
    drawing_rows: torch.Tensor | None = None  # int64 [n], the rows that sample; None: all of them, or none
    seeds: torch.Tensor | None = None  # int64 [B]; set with temperature, as is indices
    indices: torch.Tensor | None = None  # int64 [B]
    log_min_p: torch.Tensor | None = None  # float32 [B], -inf for a row without min_p
    top_k: torch.Tensor | None = None  # int64 [B], above max_top_k for a row without a limit
    max_top_k: int | None = None  # the largest limit in top_k
    top_p: torch.Tensor | None = None  # float64 [B]
    bias_rows: torch.Tensor | None = None  # int64 [n]: the logit of bias_ids[i] in row bias_rows[i] ...
    bias_ids: torch.Tensor | None = None  # int64 [n]; set with bias_rows, as is biases; a pair occurs once
    biases: torch.Tensor | None = None  # float32 [n] ... gets biases[i] added; -inf masks the token
    penalised_rows: torch.Tensor | None = None  # int64 [p], rows with a penalty; set with the fields below
    repetition_penalty: torch.Tensor | None = None  # float32 [p]
    frequency_penalty: torch.Tensor | None = None  # float32 [p]
    presence_penalty: torch.Tensor | None = None  # float32 [p]
    count_rows: torch.Tensor | None = None  # int64 [p], the row of ``counts`` that each penalised row reads
    counts: TokenCounts | None = None

    @property
    def is_simple(self) -> bool:
        """Whether logits are neither biased nor penalised."""
        return self.biases is None and self.counts is None

    @classmethod
    def of(cls, rows: Sequence[SamplingRow], *, device: torch.device | str | None = None) -> Self:
        """The arrays for ``rows``, in their order, on ``device`` (None: the CPU)."""
        drawn, adjusted = cls.of_draws(rows, device=device), cls.of_adjustments(rows, device=device)
        fields = {name: value for name, value in vars(adjusted).items() if value is not None}
        return dataclasses.replace(drawn, **fields)

    @classmethod
    def of_adjustments(
        cls,
        rows: Sequence[SamplingRow],
        *,
        counts: TokenCounts | None = None,
        count_rows: Sequence[int] = (),
        device: torch.device | str | None = None,
    ) -> Self:
        """Only what ``adjust_logits`` reads: biases, masks and penalties. ``counts`` are tables that hold the tokens of
        the rows with a penalty, and each row's index in them; None makes tables of their ids.
        """
        if not any(row.adjusts_logits for row in rows):
            return cls(len(rows))
        return cls(len(rows), **_biases(rows, device), **_penalties(rows, counts, count_rows, device))  # type: ignore[arg-type]

    @classmethod
    def of_draws(cls, rows: Sequence[SamplingRow], *, device: torch.device | str | None = None) -> Self:
        """What a draw reads once the logits have been adjusted."""
        params = [row.params for row in rows]
        batch: dict[str, torch.Tensor | int | None] = {}
        drawing = [b for b, p in enumerate(params) if not p.is_greedy]
        if drawing:
            batch["temperature"] = _float32([p.temperature for p in params], 0.0, device)
            batch["seeds"] = torch.tensor([seed_pattern(row.seed) for row in rows], device=device)
            batch["indices"] = torch.tensor([row.index for row in rows], device=device)
            if len(drawing) < len(rows):
                batch["drawing_rows"] = torch.tensor(drawing, device=device)
            if any(params[b].min_p > 0 for b in drawing):
                logs = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
                batch["log_min_p"] = torch.tensor(logs, dtype=torch.float32, device=device)
            limits = [params[b].top_k for b in drawing]
            if any(k is not None for k in limits):
                batch["max_top_k"] = min(max(k for k in limits if k is not None), _INT64_MAX - 1)
                batch["top_k"] = torch.tensor([min(p.top_k or _INT64_MAX, _INT64_MAX) for p in params], device=device)
            if any(params[b].top_p < 1 for b in drawing):
                batch["top_p"] = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)
        return cls(len(rows), **batch)  # type: ignore[arg-type]


def _biases(rows: Sequence[SamplingRow], device: torch.device | str | None) -> dict[str, torch.Tensor]:
    found = [
        (b, token_id, bias)
        for b, row in enumerate(rows)
        for token_id, bias in {**dict(row.params.logit_bias), **dict.fromkeys(row.masked_ids, -math.inf)}.items()
    ]
    if not found:
        return {}
    bias_rows, ids, biases = zip(*found, strict=True)
    return {
        "bias_rows": torch.tensor(bias_rows, device=device),
        "bias_ids": torch.tensor(ids, device=device),
        "biases": torch.tensor(biases, dtype=torch.float32, device=device),
    }


def _penalties(
    rows: Sequence[SamplingRow],
    counts: TokenCounts | None,
    count_rows: Sequence[int],
    device: torch.device | str | None,
) -> dict[str, torch.Tensor | TokenCounts]:
    penalised = [b for b, row in enumerate(rows) if row.params.has_penalties]
    if not penalised:
        return {}
    if counts is None:
        histories = [(rows[b].prompt_ids, rows[b].output_ids) for b in penalised]
        counts, chosen = TokenCounts.of(histories, device=device), list(range(len(penalised)))
    else:
        chosen = [count_rows[b] for b in penalised]
    params = [rows[b].params for b in penalised]
    return {
        "penalised_rows": torch.tensor(penalised, device=device),
        # Outside float32's normal range, a repetition penalty becomes 0 or inf, and logits become NaN.
        "repetition_penalty": _float32([p.repetition_penalty for p in params], _FLOAT32.tiny, device),
        "frequency_penalty": torch.tensor([p.frequency_penalty for p in params], dtype=torch.float32, device=device),
        "presence_penalty": torch.tensor([p.presence_penalty for p in params], dtype=torch.float32, device=device),
        "count_rows": torch.tensor(chosen, device=device),
        "counts": counts,
    }


def _float32(values: Sequence[float], smallest: float, device: torch.device | str | None) -> torch.Tensor:
    clamped = [min(max(value, smallest), _FLOAT32.max) for value in values]
    return torch.tensor(clamped, dtype=torch.float32, device=device)


def sample(logits: torch.Tensor, batch: SamplingBatch, *, stream: Stream = Stream.DRAW) -> torch.Tensor:
    """Sample a token for every row, int64 [B], from logits [B, V] in any float dtype, which are not mutated.

    Greedy rows take the exact arg-max of the logits that ``adjust_logits`` returns, the lowest id among equals. Other
    rows sample from the softmax of these logits, scaled by the temperature and filtered, by the Gumbel-max trick with
    random numbers of ``stream``. Raises ValueError if ``logits`` and ``batch`` differ in rows.
    """
    if logits.shape[0] != batch.num_rows:
        raise ValueError(f"logits have {logits.shape[0]} rows, the sampling batch has {batch.num_rows}")
    logits = adjust_logits(logits, batch)
    if batch.temperature is None:
        return logits.argmax(-1)
    if batch.drawing_rows is None:
        return _draw(logits, batch, slice(None), stream)
    ids = logits.argmax(-1)
    ids[batch.drawing_rows] = _draw(logits[batch.drawing_rows], batch, batch.drawing_rows, stream)
    return ids


def adjust_logits(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Apply logit biases, masks and penalties, which also affect greedy rows, to logits [B, V] in any float dtype.

    ``batch`` has the parameters of the B rows, on the same device. ``logits`` are not mutated. Returns float32 [B, V];
    ``logits`` itself if no row has any of these.
    """
    if batch.is_simple:
        return logits
    logits = logits.to(torch.float32, copy=True)
    if batch.biases is not None:
        assert batch.bias_rows is not None
        assert batch.bias_ids is not None
        biased = logits[batch.bias_rows, batch.bias_ids] + batch.biases
        # A masked token's logit is replaced, not added to: if it were +inf, the sum would be NaN.
        biased = torch.where(batch.biases == -torch.inf, batch.biases, biased)
        logits[batch.bias_rows, batch.bias_ids] = biased
    if batch.counts is not None:
        assert batch.count_rows is not None
        assert batch.repetition_penalty is not None
        assert batch.frequency_penalty is not None
        assert batch.presence_penalty is not None
        num_outputs = batch.counts.in_output[batch.count_rows]  # [p, columns of the tables]
        seen = batch.counts.in_prompt[batch.count_rows] | (num_outputs > 0)
        columns = slice(num_outputs.shape[1])
        rows = apply_repetition_penalty(logits[batch.penalised_rows, columns], seen, batch.repetition_penalty)
        rows = apply_output_penalties(rows, num_outputs, batch.frequency_penalty, batch.presence_penalty)
        logits[batch.penalised_rows, columns] = rows
    return logits


def _draw(logits: torch.Tensor, batch: SamplingBatch, rows: torch.Tensor | slice, stream: Stream) -> torch.Tensor:
    assert batch.seeds is not None
    assert batch.indices is not None
    scores = filter_logits(logits, batch, rows)
    # in place, since scores is a copy
    scores += gumbel(batch.seeds[rows], batch.indices[rows], stream, scores.shape[-1])
    return scores.argmax(-1)


def filter_logits(logits: torch.Tensor, batch: SamplingBatch, rows: torch.Tensor | slice) -> torch.Tensor:
    """The logits whose softmax the rows sample from: scaled by the temperature, with -inf where a limit excludes the
    token.

    ``logits`` are those of ``rows`` alone, [n, V], as ``adjust_logits`` returns them; each row samples. Returns a
    float32 copy.
    """
    assert batch.temperature is not None
    scores = apply_temperature(logits.float(), batch.temperature[rows])
    if batch.log_min_p is not None:
        scores = apply_min_p(scores, batch.log_min_p[rows])
    if batch.top_k is not None:
        scores = apply_top_k(scores, batch.top_k[rows], batch.max_top_k)
    if batch.top_p is not None:
        scores = apply_top_p(scores, batch.top_p[rows])
    return scores
