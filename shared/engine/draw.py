"""From a step's logits to token ids on the host: the step's one wait for the device. Introduced in phase 4.

Invariants: the parameters of all rows travel in one copy, and in none where every row is greedy; the ids of all rows
come back in one, when somebody first asks for them; a row's token is the same in every batch.
"""

import dataclasses
from collections.abc import Sequence

import torch

from shared.engine.output import TokenLogprobs
from shared.engine.staging import Staging
from shared.kernels.sampler import sample
from shared.sampling.logprobs import top_logprobs
from shared.sampling.sampler import SamplingBatch, SamplingRow


class Drawn:
    """A token for each of n rows; ``logprobs`` is None for a row that did not ask, and as a whole if none did."""

    def __init__(self, token_ids: list[int] | torch.Tensor, logprobs: list[TokenLogprobs | None] | None = None) -> None:
        self._ids = token_ids
        self.logprobs = logprobs

    @property
    def token_ids(self) -> list[int]:
        """On the host; whoever asks first waits for the device."""
        if isinstance(self._ids, torch.Tensor):
            self._ids = self._ids.tolist()
        return self._ids


class Drawing:
    """Draws tokens from logits on one device."""

    def __init__(self, device: torch.device) -> None:
        self.staging = Staging(device)

    def draw(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> Drawn:
        """Choose a token for each row of logits ``[n, V]`` by the parameters of ``rows``.

        Nobody waits for the device here, unless a row wants log-probabilities.
        """
        ids = sample(logits, self._send(SamplingBatch.of(rows)))
        asking = [n for n, row in enumerate(rows) if row.params.logprobs is not None]
        logprobs = _logprobs(logits, ids, rows, asking) if asking else None
        return Drawn(ids, logprobs)

    def _send(self, batch: SamplingBatch) -> SamplingBatch:
        """The batch with its arrays on the device."""
        arrays = {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
        if not arrays:
            return batch
        sent = self.staging.send([array.numpy() for array in arrays.values()])
        return dataclasses.replace(batch, **dict(zip(arrays, sent, strict=True)))  # type: ignore[arg-type]


def _logprobs(
    logits: torch.Tensor, ids: torch.Tensor, rows: Sequence[SamplingRow], asking: Sequence[int]
) -> list[TokenLogprobs | None]:
    """What the rows in ``asking`` asked for, None for the others."""
    counts = [rows[n].params.logprobs or 0 for n in asking]
    if len(asking) < len(rows):
        places = torch.tensor(asking, device=logits.device)
        logits, ids = logits[places], ids[places]
    chosen, top, top_ids = (found.tolist() for found in top_logprobs(logits, ids, max(counts)))
    logprobs: list[TokenLogprobs | None] = [None] * len(rows)
    for place, count in enumerate(counts):
        likeliest = tuple(zip(top_ids[place][:count], top[place][:count], strict=True))
        logprobs[asking[place]] = TokenLogprobs(chosen[place], likeliest)
    return logprobs
