"""From logits to token ids on the device, and from there to the host. Introduced in phase 4.

To sample asks the host for nothing: the parameters of all rows travel in one copy, and in none where every row is
greedy; ids and log-probabilities are copied to pinned memory behind the computation, and an event says when they are
there. To wait for it is a call of its own. Invariant: a row's token is the same in every batch.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from shared.engine.request import TokenLogprobs
from shared.engine.staging import Staging
from shared.kernels.sampler import make_counters, sample
from shared.sampling.logprobs import top_logprobs
from shared.sampling.sampler import SamplingBatch, SamplingRow

_PLACES = {
    "temperature": np.float32,
    "repetition_penalty": np.float32,
    "drawing_rows": np.int64,
    "seeds": np.int64,
    "indices": np.int64,
    "top_k": np.int64,
    "top_p": np.float64,
}


@dataclass(frozen=True)
class SampledTokens:
    """What was drawn for the n rows of a batch, on the host; rows of sequences that failed are left out."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None  # of each row that asked; None if none did
    errors: Mapping[int, Exception] = field(default_factory=dict)  # by the number of the sequence in its batch

    def __iter__(self) -> Iterator[tuple[int, TokenLogprobs | None]]:
        return zip(self.token_ids, self.logprobs or [None] * len(self.token_ids), strict=True)


@dataclass(frozen=True)
class Draws:
    """What was drawn for some rows, on the device: ids int64 ``[n]``, and where rows ask for log-probabilities, those.

    ``logprobs`` is what ``top_logprobs`` gives for the rows that are the keys of ``asking``; its values are how many of
    the likeliest tokens each wants.
    """

    ids: torch.Tensor
    logprobs: Sequence[torch.Tensor] = ()
    asking: Mapping[int, int] = field(default_factory=dict)


class SamplerOutput:
    """Tokens of a batch on their way to the host.

    Args:
        draws: of the rows in order: all together, or in parts after a failure.
        errors: of the sequences that failed, by their number in the batch.
    """

    def __init__(self, draws: Sequence[Draws], errors: Mapping[int, Exception] | None = None) -> None:
        self.errors = errors or {}
        self._draws = [  # in pinned memory, and not there before the event
            Draws(
                part.ids.to("cpu", non_blocking=True),
                [tensor.to("cpu", non_blocking=True) for tensor in part.logprobs],
                part.asking,
            )
            for part in draws
        ]
        self._arrived = torch.cuda.Event() if any(part.ids.is_cuda for part in draws) else None
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> SampledTokens:
        """Wait for the device; the tokens on the host. May be called again."""
        if self._arrived is not None:
            self._arrived.synchronize()
        ids = [token_id for part in self._draws for token_id in part.ids.tolist()]
        if not any(part.asking for part in self._draws):
            return SampledTokens(ids, None, self.errors)
        return SampledTokens(ids, [row for part in self._draws for row in _logprobs(part)], self.errors)


def _logprobs(draws: Draws) -> list[TokenLogprobs | None]:
    """What each row asked for, None for the others."""
    logprobs: list[TokenLogprobs | None] = [None] * len(draws.ids)
    chosen, top, top_ids = (tensor.tolist() for tensor in draws.logprobs) if draws.asking else ([], [], [])
    for place, (row, count) in enumerate(draws.asking.items()):
        likeliest = tuple(zip(top_ids[place][:count], top[place][:count], strict=True))
        logprobs[row] = TokenLogprobs(chosen[place], likeliest)
    return logprobs


class Sampler:
    """Draws tokens from logits on one device, for up to ``max_rows`` rows at a time."""

    def __init__(self, device: torch.device, max_rows: int) -> None:
        self.device = device
        self.staging = Staging(device, {name: (max_rows, dtype) for name, dtype in _PLACES.items()})
        self.counters = make_counters(max_rows, device)

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> Draws:
        """Choose a token for each row of logits ``[n, V]`` by the parameters of ``rows``, without waiting."""
        ids = sample(logits, self._send(SamplingBatch.of(rows)), counters=self.counters)
        asking = {n: row.params.logprobs for n, row in enumerate(rows) if row.params.logprobs is not None}
        if not asking:
            return Draws(ids)
        chosen = ids
        if len(asking) < len(rows):
            places = self.upload(torch.tensor(list(asking)))
            logits, chosen = logits[places], ids[places]
        return Draws(ids, top_logprobs(logits, chosen, max(asking.values())), asking)

    def _send(self, batch: SamplingBatch) -> SamplingBatch:
        """The batch with its arrays on the device."""
        arrays = {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
        if not arrays:
            return batch
        sent = self.staging.send({name: array.numpy() for name, array in arrays.items() if name in _PLACES})
        history = {name: self.upload(array) for name, array in arrays.items() if name not in _PLACES}
        return dataclasses.replace(batch, **sent, **history)  # type: ignore[arg-type]

    def upload(self, array: torch.Tensor) -> torch.Tensor:
        """A tensor of any length on the device; nothing waits, since it goes by pinned memory."""
        return array.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else array
