"""Runs a batch on the device: the forward, and what is sampled from it. Introduced in phase 4.

``forward`` and ``sample`` are two calls, since what the sampler needs (penalties, later masks) can be made while the
forward runs. Neither waits for the device. Token ids stay there too: a batch can be made, and run, while the id that it
begins with is not yet known on the host, since the last draws are kept by the rows of their sequences.

Invariants: a request that raises fails alone (:mod:`shared.engine.isolation`); nothing here changes the state of a
request, so a step can be run again.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress

import numpy as np
import torch

from shared.cache.layout import Integers
from shared.cache.view import BatchView
from shared.engine.batch import Batch
from shared.engine.isolation import run_isolated
from shared.engine.sampler import Draws, Sampler, SamplerOutput
from shared.models.causal_lm import CausalLM
from shared.sampling.sampler import SamplingRow

NUM_DRAWS_KEPT = 4
"""Calls of ``sample`` whose ids a batch may begin with: those of a step, of two parts, and of the one in flight."""


@dataclass(frozen=True)
class Launched:
    """What a forward leaves on the device: logits of the batch's logit rows, less those of sequences that failed."""

    batch: Batch
    logits: torch.Tensor  # [n, V]
    errors: Mapping[int, Exception]  # by the number of the sequence in the batch


class Runner:
    """Runs ``model`` over the memory behind ``view``, for up to ``max_sequences`` sequences at a time."""

    def __init__(self, model: CausalLM, view: BatchView, max_sequences: int) -> None:
        self.model = model
        self.view = view
        self.sampler = Sampler(model.device, max_sequences)
        # Of each call of ``sample`` the rows and their ids: one pair, or one for each part after a failure.
        self.draws: deque[list[tuple[Integers, torch.Tensor]]] = deque(maxlen=NUM_DRAWS_KEPT)
        self.last_ids = torch.zeros(max_sequences, dtype=torch.int64, device=model.device)  # by row, of earlier draws
        self.num_tokens_computed = 0
        self.num_forwards = 0

    def forward(self, batch: Batch) -> Launched:
        """Run the batch, in parts if it raises; what is written becomes valid when the step is committed."""
        logits: list[torch.Tensor] = []
        errors: dict[int, Exception] = {}
        for part, result in run_isolated(lambda part: self._forward(batch.part(part)), range(len(batch))):
            if isinstance(result, Exception):
                errors[part.start] = result
            else:
                logits.append(result)
        if len(logits) == 1:
            return Launched(batch, logits[0], errors)
        return Launched(batch, torch.cat(logits) if logits else self.model.head.weight[:0], errors)

    def sample(self, launched: Launched, rows: Sequence[SamplingRow]) -> SamplerOutput:
        """Draw a token for each logit row that the forward left.

        Args:
            rows: how, of all logit rows of the batch, in their order.
        """
        errors, draws = dict(launched.errors), []
        sequences = launched.batch.logit_sequences
        if errors:
            is_left = ~np.isin(sequences, list(errors))
            rows, sequences = list(compress(rows, is_left)), sequences[is_left]

        kept: list[tuple[Integers, torch.Tensor]] = []
        self.draws.append(kept)

        def run(part: range) -> Draws:
            chosen = slice(part.start, part.stop)
            drawn = self.sampler.sample(launched.logits[chosen], rows[chosen])
            kept.append((launched.batch.layout.rows[sequences[chosen]], drawn.ids))
            return drawn

        for part, result in run_isolated(run, range(len(rows))):
            if isinstance(result, Exception):
                errors[int(sequences[part.start])] = result
            else:
                draws.append(result)
        return SamplerOutput(draws, errors)

    def _forward(self, batch: Batch) -> torch.Tensor:
        """Logits ``[n, V]`` of the batch's logit rows."""
        tokens, logit_rows = self.view.load(batch)
        if len(batch.pending):
            self._fill_pending(batch, tokens.ids)
        hidden = self.model(tokens, self.view)
        self.num_tokens_computed += batch.num_tokens
        self.num_forwards += 1
        return self.model.logits(hidden if len(logit_rows) == batch.num_tokens else hidden[logit_rows])

    def _fill_pending(self, batch: Batch, ids: torch.Tensor) -> None:
        """Put the ids that were drawn last for their sequences in the places of those that the host does not know."""
        upload = self.sampler.upload
        for rows, drawn in chain.from_iterable(self.draws):  # the later one counts
            self.last_ids[upload(torch.from_numpy(rows))] = drawn
        self.draws.clear()
        sequences = np.searchsorted(batch.num_new_tokens.cumsum(), batch.pending, side="right")
        sources = upload(torch.from_numpy(batch.layout.rows[sequences]))
        ids[upload(torch.from_numpy(batch.pending))] = self.last_ids[sources]
