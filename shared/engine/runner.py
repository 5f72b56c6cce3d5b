"""Runs a batch on the device: the forward, then sampling. Introduced in phase 4.

``forward`` and ``sample`` are separate calls, so that the sampler's inputs (penalties, later grammar masks) are
prepared while the forward runs. Neither waits for the device. A runner consists of an executor, which computes a loaded
batch, the ranks that compute it, a sampler, and observers.

Invariants: a request that raises fails alone (:mod:`shared.engine.executor.isolation`); the runner changes no
request's state, so a step can be run again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Protocol

import numpy as np
import torch

from shared.cache.layout.slots import Integers
from shared.cache.view.interface import BatchView
from shared.engine.batch import Batch, PromptRows
from shared.engine.executor.eager import Eager, Ids, MakeExecutor, no_logits
from shared.engine.executor.isolation import run_isolated
from shared.engine.executor.one_rank import Ranks
from shared.engine.sampling.sampler import Draws, PromptDraws, Sampler, SamplerOutput
from shared.errors import ConfigError
from shared.models.causal_lm import CausalLM
from shared.sampling.logprobs import top_logprobs
from shared.sampling.sampler import SamplingRow

MAX_PROMPT_LOGIT_ROWS = 128
"""Maximum rows of logits that exist at a time while prompts are scored; in fp32, 128 MB for a vocabulary of 262,144."""


@dataclass(frozen=True)
class Launched:
    """The result of a forward on the device: the batch's logit rows, without those of failed sequences."""

    batch: Batch
    logits: torch.Tensor  # [n, V]
    sequence_rows: torch.Tensor  # int64 [n], the pool's row of each logit row's sequence
    errors: Mapping[int, Exception]  # by the index of the sequence in the batch
    prompts: Sequence[PromptDraws] = ()
    num_repeats: int = 0  # forwards of the same sequences that followed the batch's


class Observer(Protocol):
    """Observes what the runner computes, as soon as it is launched."""

    def begin(self) -> None:
        """A batch begins."""
        ...

    def computed(self, batch: Batch, hidden: torch.Tensor) -> None:
        """Called when the hidden states ``[T, H]`` or more of the batch, or of a part of it, are available; the next
        part overwrites them."""
        ...

    def sampled(self, launched: Launched, rows: Sequence[SamplingRow], output: SamplerOutput) -> None:
        """Called with the tokens of all logit rows."""
        ...


class Runner:
    """Runs ``model`` on the KV cache of ``view``, for up to ``max_sequences`` sequences at a time.

    Args:
        most_logit_rows: maximum logit rows of a sequence; more than one with drafts (phase 11).
        sampler: has ``max_sequences * most_logit_rows`` rows; None: a sampler without steps.
        executor: makes the executor, which computes a loaded batch.
        last_ids: makes the table of ids that only the device knows, from the maximum numbers of sequences and of ids
            per sequence.
        ranks: the ranks that compute each batch.
        observers: fixed, since captured steps depend on them. Not with several ranks: raises ConfigError.
    """

    def __init__(
        self,
        model: CausalLM,
        view: BatchView,
        max_sequences: int,
        most_logit_rows: int = 1,
        *,
        sampler: Sampler | None = None,
        executor: MakeExecutor = Eager,
        last_ids: Callable[[int, int, torch.device], Ids] = Ids,
        ranks: Ranks | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        if observers and ranks is not None and not ranks.can_observe:
            raise ConfigError(
                "The runner has observers, and several ranks compute its model; observe a model of one rank."
            )
        self.model = model
        self.view = view
        self.most_logit_rows = most_logit_rows
        self.sampler = sampler or Sampler(model.device, max_sequences * most_logit_rows)
        self.last_ids = last_ids(max_sequences, most_logit_rows, model.device)
        self.executor = executor(model, view, self.last_ids, None if observers else most_logit_rows)
        self.sampler.recorder = self.executor.recorder
        self.ranks = ranks or Ranks()
        self.observers = tuple(observers)
        self.num_tokens_computed = 0
        self.num_forwards = 0

    @property
    def num_replays(self) -> int:
        """Forwards that were replayed as a CUDA graph (phase 9)."""
        return self.executor.num_replays

    def stats(self) -> dict[str, int]:
        """Counters for an engine's ``stats``."""
        return {"tokens computed": self.num_tokens_computed, "forward passes": self.num_forwards}

    def forward(self, batch: Batch) -> Launched:
        """Run the batch, in parts if it raises; the written keys and values become valid when the step is committed."""

        def run(part: range) -> tuple[torch.Tensor, torch.Tensor, list[PromptDraws]]:
            logits, rows, prompts = self.compute(batch.part(part))
            if len(part) < len(batch):  # the next part overwrites these buffers
                logits, rows = logits.clone(), rows.clone()
            return logits, rows, prompts

        for observer in self.observers:
            observer.begin()
        done: list[tuple[torch.Tensor, torch.Tensor]] = []
        prompts: list[PromptDraws] = []
        errors: dict[int, Exception] = {}
        for part, result in self.ranks.run(run, range(len(batch))):
            if isinstance(result, Exception):
                errors[part.start] = result
            else:
                logits, rows, scored = result
                done.append((logits, rows))
                prompts += [PromptDraws(part.start + piece.sequences, piece.draws) for piece in scored]
        if len(done) != 1:
            done.append((no_logits(self.model), torch.empty(0, dtype=torch.int64, device=self.model.device)))
            logits, rows = (torch.cat(tensors) for tensors in zip(*done, strict=True))
        return Launched(batch, logits, rows, errors, prompts)

    def repeat(self, launched: Launched) -> Launched | None:
        """A forward of the tokens that a decode step has just sampled; the step must be the last one computed.

        Returns None if the step cannot be advanced without the host; then run a new batch.
        """
        batch = launched.batch
        is_whole = len(batch.logit_rows) == len(batch) and not launched.errors
        if not is_whole or not self.ranks.can_repeat or launched.num_repeats == batch.layout.num_ahead:
            return None
        logits = self.executor.repeat(len(batch))
        if logits is None:
            return None
        self.num_tokens_computed += len(batch)
        self.num_forwards += 1
        return replace(launched, logits=logits, num_repeats=launched.num_repeats + 1)

    def compute(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, list[PromptDraws]]:
        """Logits ``[n, V]`` of the batch's logit rows, the rows of their sequences, and the log-probabilities of
        prompts."""
        inputs = self.view.load(batch)
        self.ranks.begin(batch, self.last_ids.tensor)
        hidden, logits = self.executor(batch, inputs)
        for observer in self.observers:
            observer.computed(batch, hidden)
        logits = self.ranks.logits(batch, logits)
        self.num_tokens_computed += batch.num_tokens
        self.num_forwards += 1
        prompts = [] if batch.prompt_rows is None else self._score(hidden, batch.prompt_rows)
        return logits, inputs.sequence_rows, prompts

    def sample(self, launched: Launched, rows: Sequence[SamplingRow]) -> SamplerOutput:
        """Sample a token for each logit row of the forward.

        Args:
            rows: the sampling parameters of all logit rows of the batch, in order.
        """
        errors, draws, all_rows = dict(launched.errors), [], rows
        sequences = launched.batch.logit_sequences
        if errors:
            is_left = ~np.isin(sequences, list(errors))
            rows, sequences = list(compress(rows, is_left)), sequences[is_left]

        ends, table_rows = self._rows_of(launched.batch, sequences)
        num_left = len(ends) - 1

        def run(part: range) -> Draws:
            logits, at, own, own_rows = launched.logits, launched.sequence_rows, rows, table_rows
            if len(part) < num_left:  # slicing tensors costs the host microseconds
                chosen = slice(ends[part.start], ends[part.stop])
                logits, at, own, own_rows = logits[chosen], at[chosen], rows[chosen], table_rows[chosen]
            sampled = self.ranks.sampled(launched.batch, logits)
            if sampled is None:
                sampled = self.sampler.sample(logits, own, own_rows.tolist())
            self.last_ids.keep(at, sampled.ids)
            return sampled

        for part, result in run_isolated(run, range(num_left)):
            if isinstance(result, Exception):
                errors[int(sequences[ends[part.start]])] = result
            else:
                draws.append(result)
        output = SamplerOutput(draws, errors, launched.prompts)
        for observer in self.observers:
            observer.sampled(launched, all_rows, output)
        return output

    def _rows_of(self, batch: Batch, sequences: Integers) -> tuple[Sequence[int] | Integers, Integers]:
        """Where the logit rows of each sequence begin (with n at the end), and the table row of each logit row
        ``[n]``."""
        rows = batch.layout.rows if len(sequences) == len(batch) == batch.num_tokens else batch.layout.rows[sequences]
        table_rows, ends = rows * self.most_logit_rows, range(len(sequences) + 1)
        if batch.is_decode:  # at most one row each
            return ends, table_rows
        is_first = np.ones(len(ends), np.bool_)  # of its sequence, which succeeds or fails as a whole
        is_first[1:-1] = sequences[1:] != sequences[:-1]
        starts = np.flatnonzero(is_first)
        first_rows = starts[:-1]
        numbers = np.arange(len(sequences)) - first_rows.repeat(starts[1:] - first_rows)  # within their sequences
        return starts, table_rows + numbers

    def _score(self, hidden: torch.Tensor, prompts: PromptRows) -> list[PromptDraws]:
        """Log-probabilities of prompt tokens; only ``MAX_PROMPT_LOGIT_ROWS`` rows of logits exist at a time."""
        scored = []
        most = int(prompts.num_top.max())
        for begin in range(0, len(prompts.rows), MAX_PROMPT_LOGIT_ROWS):
            piece = slice(begin, begin + MAX_PROMPT_LOGIT_ROWS)
            rows, ids = (
                self.sampler.upload(torch.from_numpy(array[piece])) for array in (prompts.rows, prompts.next_ids)
            )
            logprobs = top_logprobs(self.ranks.gather(self.model.logits(hidden[rows])), ids, most)
            asking = dict(enumerate(prompts.num_top[piece].tolist()))
            scored.append(PromptDraws(prompts.sequences[piece], Draws(ids, logprobs, asking)))
        return scored


MakeRunner = Callable[..., Runner]
"""Makes a runner; the arguments are those of :class:`Runner`."""
