"""Runs a batch on the device: the forward, then sampling. Introduced in phase 4.

``forward`` and ``sample`` are separate calls, so that the sampler's inputs (penalties, later grammar masks) are
prepared while the forward runs. Neither waits for the device. Sampled ids stay on the device: the next batch can run
before the host knows its input ids, because the runner keeps the last draws by the rows of their sequences.

Invariants: a request that raises fails alone (:mod:`shared.engine.isolation`); the runner changes no request's state,
so a step can be run again.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress

import numpy as np
import torch

from shared.cache.layout import Integers
from shared.cache.view import BatchView
from shared.engine.batch import Batch, PromptRows
from shared.engine.isolation import run_isolated
from shared.engine.sampler import Draws, PromptDraws, Sampler, SamplerOutput
from shared.models.causal_lm import CausalLM
from shared.sampling.logprobs import top_logprobs
from shared.sampling.sampler import SamplingRow

MAX_PROMPT_LOGIT_ROWS = 128
"""Rows of logits that exist at a time while prompts are scored; in fp32, 128 MB for a vocabulary of 262,144."""
NUM_DRAWS_KEPT = 4
"""Calls of ``sample`` whose ids are kept as inputs: two parts of a step, and two of the step in flight."""


@dataclass(frozen=True)
class Launched:
    """The result of a forward on the device: the batch's logit rows, without those of failed sequences."""

    batch: Batch
    logits: torch.Tensor  # [n, V]
    errors: Mapping[int, Exception]  # by the index of the sequence in the batch
    prompts: Sequence[PromptDraws] = ()


class Runner:
    """Runs ``model`` on the KV cache behind ``view``, for up to ``max_sequences`` sequences at a time."""

    def __init__(self, model: CausalLM, view: BatchView, max_sequences: int) -> None:
        self.model = model
        self.view = view
        self.sampler = Sampler(model.device, max_sequences)
        # Rows and sampled ids of each call of ``sample``: one pair, or one for each part after a failure.
        self.draws: deque[list[tuple[Integers, torch.Tensor]]] = deque(maxlen=NUM_DRAWS_KEPT)
        self.last_ids = torch.zeros(max_sequences, dtype=torch.int64, device=model.device)  # by row, of earlier draws
        self.num_tokens_computed = 0
        self.num_forwards = 0

    def forward(self, batch: Batch) -> Launched:
        """Run the batch, in parts if it raises; the written keys and values become valid when the step is committed."""
        logits: list[torch.Tensor] = []
        prompts: list[PromptDraws] = []
        errors: dict[int, Exception] = {}
        for part, result in run_isolated(lambda part: self._forward(batch.part(part)), range(len(batch))):
            if isinstance(result, Exception):
                errors[part.start] = result
            else:
                logits.append(result[0])
                prompts += [PromptDraws(part.start + scored.sequences, scored.draws) for scored in result[1]]
        if len(logits) == 1:
            return Launched(batch, logits[0], errors, prompts)
        return Launched(batch, torch.cat(logits) if logits else self.model.head.weight[:0], errors, prompts)

    def sample(self, launched: Launched, rows: Sequence[SamplingRow]) -> SamplerOutput:
        """Sample a token for each logit row of the forward.

        Args:
            rows: the sampling parameters of all logit rows of the batch, in order.
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
            places = launched.batch.layout.rows[sequences[chosen]]
            drawn = self.sampler.sample(launched.logits[chosen], rows[chosen], places.tolist())
            kept.append((places, drawn.ids))
            return drawn

        for part, result in run_isolated(run, range(len(rows))):
            if isinstance(result, Exception):
                errors[int(sequences[part.start])] = result
            else:
                draws.append(result)
        return SamplerOutput(draws, errors, launched.prompts)

    def _forward(self, batch: Batch) -> tuple[torch.Tensor, list[PromptDraws]]:
        """Logits ``[n, V]`` of the batch's logit rows, and the log-probabilities of its prompt rows."""
        tokens, logit_rows = self.view.load(batch)
        if len(batch.pending):
            self._fill_pending(batch, tokens.ids)
        hidden = self.model(tokens, self.view)
        self.num_tokens_computed += batch.num_tokens
        self.num_forwards += 1
        prompts = [] if batch.prompt_rows is None else self._score(hidden, batch.prompt_rows)
        if len(logit_rows) == 0:  # prompts that are not computed to their end, or that generate nothing
            return hidden.new_empty(0, self.model.config.vocab_size), prompts
        return self.model.logits(hidden if len(logit_rows) == batch.num_tokens else hidden[logit_rows]), prompts

    def _score(self, hidden: torch.Tensor, prompts: PromptRows) -> list[PromptDraws]:
        """Log-probabilities of prompt tokens; only ``MAX_PROMPT_LOGIT_ROWS`` rows of logits exist at a time."""
        scored = []
        most = int(prompts.num_top.max())
        for begin in range(0, len(prompts.rows), MAX_PROMPT_LOGIT_ROWS):
            piece = slice(begin, begin + MAX_PROMPT_LOGIT_ROWS)
            rows, ids = (
                self.sampler.upload(torch.from_numpy(array[piece])) for array in (prompts.rows, prompts.next_ids)
            )
            logprobs = top_logprobs(self.model.logits(hidden[rows]), ids, most)
            asking = dict(enumerate(prompts.num_top[piece].tolist()))
            scored.append(PromptDraws(prompts.sequences[piece], Draws(ids, logprobs, asking)))
        return scored

    def _fill_pending(self, batch: Batch, ids: torch.Tensor) -> None:
        """Replace the ids of pending tokens by the last ids sampled for their sequences."""
        upload = self.sampler.upload
        for rows, drawn in chain.from_iterable(self.draws):  # later draws overwrite earlier ones
            self.last_ids[upload(torch.from_numpy(rows))] = drawn
        self.draws.clear()
        sequences = np.searchsorted(batch.num_new_tokens.cumsum(), batch.pending, side="right")
        sources = upload(torch.from_numpy(batch.layout.rows[sequences]))
        ids[upload(torch.from_numpy(batch.pending))] = self.last_ids[sources]
