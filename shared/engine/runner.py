"""Runs a batch on the device: the forward, and what is sampled from it. Introduced in phase 4.

``forward`` and ``sample`` are two calls, since what the sampler needs (penalties, later masks) can be made while the
forward runs. Neither waits for the device. Token ids stay there too: the last id of each sequence is kept in its row,
so that a batch can be made, and run, while the id that it begins with is not yet known on the host.

Invariants: a request that raises fails alone (:mod:`shared.engine.isolation`); nothing here changes the state of a
request, so a step can be run again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
import torch

from shared.cache.view import BatchView
from shared.engine.batch import Batch
from shared.engine.isolation import run_isolated
from shared.engine.sampler import Draws, Sampler, SamplerOutput
from shared.models.causal_lm import CausalLM
from shared.sampling.sampler import SamplingRow


@dataclass(frozen=True)
class Launched:
    """What a forward leaves on the device, of n logit rows: those of the batch, less those of sequences that failed."""

    batch: Batch
    logits: torch.Tensor  # [n, V]
    rows: torch.Tensor  # int64 [n], the row of each one's sequence
    errors: Mapping[int, Exception]  # by the number of the sequence in the batch


class Runner:
    """Runs ``model`` over the memory behind ``view``, for up to ``max_sequences`` sequences at a time."""

    def __init__(self, model: CausalLM, view: BatchView, max_sequences: int) -> None:
        self.model = model
        self.view = view
        self.sampler = Sampler(model.device, max_sequences)
        self.last_ids = torch.zeros(max_sequences, dtype=torch.int64, device=model.device)  # of each row's sequence
        self.num_tokens_computed = 0
        self.num_forwards = 0

    def forward(self, batch: Batch) -> Launched:
        """Run the batch, in parts if it raises; what is written becomes valid when the step is committed."""
        results: list[tuple[torch.Tensor, torch.Tensor]] = []
        errors: dict[int, Exception] = {}
        for part, result in run_isolated(lambda part: self._forward(batch.part(part)), range(len(batch))):
            if isinstance(result, Exception):
                errors[part.start] = result
            else:
                results.append(result)
        if not results:
            return Launched(batch, torch.empty(0, 1, device=self.model.device), self.last_ids[:0], errors)
        logits, rows = results[0] if len(results) == 1 else map(torch.cat, zip(*results, strict=True))
        return Launched(batch, logits, rows, errors)

    def sample(self, launched: Launched, rows: Sequence[SamplingRow]) -> SamplerOutput:
        """Draw a token for each logit row that the forward left, by the parameters of ``rows``, which has all of them
        in the batch's order.
        """
        errors, draws = dict(launched.errors), []
        sequences = launched.batch.logit_sequences
        if errors:
            is_left = ~np.isin(sequences, list(errors))
            rows, sequences = list(compress(rows, is_left)), sequences[is_left]
        for part, result in run_isolated(lambda part: self._sample(launched, rows, part), range(len(rows))):
            if isinstance(result, Exception):
                errors[int(sequences[part.start])] = result
            else:
                draws.append(result)
        return SamplerOutput(draws, errors)

    def _forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits ``[n, V]`` of the batch's logit rows, and the rows of their sequences."""
        tokens, logit_rows, rows = self.view.load(batch)
        if len(batch.pending):
            sequences = np.searchsorted(batch.num_new_tokens.cumsum(), batch.pending, side="right")
            pending, sources = (
                self.sampler.upload(torch.from_numpy(numbers))
                for numbers in (batch.pending, batch.layout.rows[sequences])
            )
            tokens.ids[pending] = self.last_ids[sources]
        hidden = self.model(tokens, self.view)
        self.num_tokens_computed += batch.num_tokens
        self.num_forwards += 1
        return self.model.logits(hidden[logit_rows]), rows

    def _sample(self, launched: Launched, rows: Sequence[SamplingRow], part: range) -> Draws:
        """Draw for some of the rows, and keep the ids as the last of their sequences."""
        chosen = slice(part.start, part.stop)
        draws = self.sampler.sample(launched.logits[chosen], rows[chosen])
        self.last_ids.index_copy_(0, launched.rows[chosen], draws.ids)
        return draws
