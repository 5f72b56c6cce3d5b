"""Samples token ids on the device and copies them to the host. Introduced in phase 4.

Sampling never synchronizes: what the draw reads of all rows is uploaded in one copy, or in none if every row is greedy.
While the same rows keep decoding, only their indices are uploaded. Ids and log-probabilities are copied to pinned
memory asynchronously, and an event marks the end of the copy; ``wait`` is a separate call. Invariant: a row's token
does not depend on its batch.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat

import numpy as np
import torch

from shared.cache.layout.slots import Integers
from shared.engine.executor.staging import Staging, record, upload
from shared.engine.request import TokenLogprobs
from shared.engine.sampling.drawing import Draw, Edited, Recorder, Step, launch_draw, plain
from shared.engine.sampling.penalty_tables import PenaltyTables
from shared.kernels.sampling.sampler import make_counters
from shared.sampling.logprobs import top_logprobs
from shared.sampling.params import SamplingParams
from shared.sampling.sampler import SamplingBatch, SamplingRow
from shared.scheduling.schedule import NextRows

_STAGED = {
    "indices": np.int64,  # first, since it is also sent alone
    "temperature": np.float32,
    "drawing_rows": np.int64,
    "seeds": np.int64,
    "log_min_p": np.float32,
    "top_k": np.int64,
    "top_p": np.float64,
}

_Constant = tuple[SamplingParams, int]
"""What a row's arrays are made from, apart from its index: parameters and seed."""


@dataclass(frozen=True)
class SampledTokens:
    """The token ids sampled for the n rows of a batch, on the host; rows of failed sequences are left out."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None  # for each row that requests them; None if no row does
    errors: Mapping[int, Exception] = field(default_factory=dict)  # by the index of the sequence in its batch
    prompt_logprobs: Mapping[int, list[TokenLogprobs]] = field(default_factory=dict)  # by the same index

    def __iter__(self) -> Iterator[tuple[int, TokenLogprobs | None]]:
        if self.logprobs is None:
            return zip(self.token_ids, repeat(None))
        return zip(self.token_ids, self.logprobs, strict=True)


@dataclass(frozen=True)
class Draws:
    """The ids sampled for some rows, on the device, int64 ``[n]``, and the log-probabilities that rows request.

    ``asking`` maps the rows that request log-probabilities to the number of most likely tokens each wants;
    ``logprobs`` is the result of ``top_logprobs`` for these rows.
    """

    ids: torch.Tensor
    logprobs: Sequence[torch.Tensor] = ()
    asking: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptDraws:
    """Some prompt tokens in the form of draws, all with log-probabilities, and the batch index of each token's
    sequence."""

    sequences: Integers
    draws: Draws


class SamplerOutput:
    """The sampled tokens of a batch, being copied to the host.

    Args:
        draws: the draws for all rows, in order; there are several after a failure.
        errors: the exceptions of failed sequences, by their index in the batch.
        prompts: the scored prompt tokens, in order.
    """

    def __init__(
        self, draws: Sequence[Draws], errors: Mapping[int, Exception] | None = None, prompts: Sequence[PromptDraws] = ()
    ) -> None:
        self.errors = errors or {}
        self.ids = [part.ids for part in draws]  # on the device
        self._draws = [_copied(part) for part in draws]  # in pinned memory; not valid before the event
        self._prompts = [PromptDraws(part.sequences, _copied(part.draws)) for part in prompts]
        devices = [part.ids.get_device() for part in [*draws, *(part.draws for part in prompts)] if part.ids.is_cuda]
        self._arrived = torch.cuda.Event() if devices else None
        if self._arrived is not None:
            record(self._arrived, devices[0])

    def wait(self) -> SampledTokens:
        """Wait for the device and return the tokens on the host; may be called again."""
        if self._arrived is not None:
            self._arrived.synchronize()
        ids = [token_id for part in self._draws for token_id in part.ids.tolist()]
        logprobs = None
        if any(part.asking for part in self._draws):
            logprobs = [row for part in self._draws for row in _logprobs(part)]
        prompts: dict[int, list[TokenLogprobs]] = {}
        for part in self._prompts:
            for sequence, row in zip(part.sequences.tolist(), _logprobs(part.draws), strict=True):
                assert row is not None
                prompts.setdefault(sequence, []).append(row)
        return SampledTokens(ids, logprobs, self.errors, prompts)


def _copied(draws: Draws) -> Draws:
    """The draws, being copied to the host."""
    logprobs = [tensor.to("cpu", non_blocking=True) for tensor in draws.logprobs]
    return Draws(draws.ids.to("cpu", non_blocking=True), logprobs, draws.asking)


def _logprobs(draws: Draws) -> list[TokenLogprobs | None]:
    """The log-probabilities of each row; None for rows that request none."""
    logprobs: list[TokenLogprobs | None] = [None] * len(draws.ids)
    if not draws.asking:
        return logprobs
    ids = draws.ids.tolist()
    chosen, top, top_ids = (tensor.tolist() for tensor in draws.logprobs)
    for (row, count), logprob, values, likeliest in zip(draws.asking.items(), chosen, top, top_ids, strict=True):
        shown = tuple(zip(likeliest[:count], values[:count], strict=True))
        if count > 0 and ids[row] not in likeliest[:count]:
            shown += ((ids[row], logprob),)
        logprobs[row] = TokenLogprobs(logprob, shown)
    return logprobs


class Sampler:
    """Samples tokens from logits on one device, for up to ``max_rows`` rows at a time.

    Args:
        steps: edit the logits, in order, before the draw; biases and penalties come last.
        draw: samples the tokens of all rows.
    """

    def __init__(self, device: torch.device, max_rows: int, steps: Sequence[Step] = (), draw: Draw = plain) -> None:
        self.draw = draw
        self.upload = partial(upload, device=device)
        self.staging = Staging(device, {name: (max_rows, dtype) for name, dtype in _STAGED.items()})
        self.counters = make_counters(max_rows, device)
        self.penalties = PenaltyTables(max_rows, device, self.upload)
        self.steps: list[Step] = [*steps, self.penalties]
        self.recorder: Recorder = launch_draw
        self.last_rows: list[_Constant] = []
        self.last: tuple[SamplingBatch, dict[int, int]] | None = None  # their parameters
        self.last_run = -1  # the run whose rows they are

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow], table_rows: Sequence[int]) -> Draws:
        """Sample a token for each row of logits ``[n, V]`` with the parameters of ``rows``; does not wait.

        Args:
            table_rows: the table row of each, below ``max_rows``; a request keeps its row while it runs.
        """
        batch, asking = self._parameters(rows)
        edits = [edit for step in self.steps if (edit := step(rows, table_rows)) is not None]
        drawn = logits.clone() if asking and any(edit.is_in_place for edit in edits) else logits
        ids = self.draw(Edited(drawn, batch, edits, self.counters, self.recorder), rows)
        for edit in edits:
            edit.follow(ids)
        if not asking:
            return Draws(ids)
        chosen = ids
        if len(asking) < len(rows):
            numbers = self.upload(torch.tensor(list(asking)))
            logits, chosen = logits[numbers], ids[numbers]
        return Draws(ids, top_logprobs(logits, chosen, max(asking.values())), asking)

    def _parameters(self, rows: Sequence[SamplingRow]) -> tuple[SamplingBatch, dict[int, int]]:
        """The parameters of the rows on the device, and ``Draws.asking``."""
        if isinstance(rows, NextRows):
            if rows.run.number == self.last_run and self.last is not None:
                if self.last[0].indices is not None:
                    self.staging.send({"indices": rows.run.indices + rows.num_after})
                return self.last
            self.last_run = rows.run.number
        else:
            self.last_run = -1
        constant = [(row.params, row.seed) for row in rows]
        if self.last is not None and constant == self.last_rows:
            batch, asking = self.last
            if batch.indices is not None:
                self.staging.send({"indices": np.array([row.index for row in rows], np.int64)})  # at the same address
            return batch, asking
        self.last = None  # their arrays are about to be overwritten
        batch = SamplingBatch.of_draws(rows)
        if arrays := {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}:
            sent = self.staging.send({name: array.numpy() for name, array in arrays.items()})
            batch = dataclasses.replace(batch, **sent)  # type: ignore[arg-type]
        asking = {n: row.params.logprobs for n, row in enumerate(rows) if row.params.logprobs is not None}
        self.last_rows, self.last = constant, (batch, asking)
        return batch, asking
