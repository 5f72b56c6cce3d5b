"""Computes batches by replaying captured steps. Introduced in phase 9.

A decode step is one graph, from the ids to the logits. A mixed step's graph ends with hidden states, those of all
tokens or of as many as its bucket's sequences may sample from: how many do differs from step to step, so separate
launches compute the logits.

Invariants: a step whose bucket was not captured runs eagerly, with the same launches; captured launches depend on the
batch only through the view's buffers. A scored prompt whose graph has not all hidden states runs eagerly too.
"""

import functools
import logging
import time
from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from rich.console import Console
from rich.progress import track

from shared.cache.view.interface import BatchView, StepInputs
from shared.engine.batch import Batch
from shared.engine.executor.buckets import Bucket, Buckets
from shared.engine.executor.eager import Eager, Ids, logits_of, no_logits
from shared.engine.executor.graphs import Capture, CapturedStep, Computed, CudaGraphCapture, DrawRecorder, uncollected
from shared.engine.sampling.drawing import Recorder, launch_draw
from shared.errors import ConfigError
from shared.kernels.sampling.pending_ids import fill_pending
from shared.models.causal_lm import CausalLM

logger = logging.getLogger("infer.engine")


class BucketedView(BatchView, Protocol):
    """A view that pads steps to buckets, so that they can be captured."""

    buckets: Buckets
    bucket: Bucket | None  # the bucket of the loaded step; None: it is larger than any bucket
    paddings: Sequence[Batch]  # a full batch of padding for each bucket, the largest first

    def advance(self) -> None:
        """Advance the loaded decode step by one token per sequence."""
        ...


class Captured:
    """Captures the steps of its view's buckets and replays them; a :class:`shared.engine.executor.eager.Executor`.

    If a capture fails, the reason is logged and every step runs eagerly. Raises ConfigError if the buckets are
    required.

    Args:
        view: a :class:`BucketedView`.
        most_logit_rows: as :class:`shared.engine.executor.eager.Eager`.
        capture: records a step; None: as a CUDA graph.
    """

    def __init__(
        self,
        model: CausalLM,
        view: BatchView,
        last_ids: Ids,
        most_logit_rows: int | None = None,
        *,
        capture: Capture | None = None,
    ) -> None:
        self.model, self.view, self.last_ids = model, cast(BucketedView, view), last_ids
        self.most_logit_rows = most_logit_rows
        self.eager = Eager(model, view, last_ids, most_logit_rows)  # for steps that are larger than all buckets
        self.num_replays = 0
        self.recorder: Recorder = launch_draw
        self.graphs: dict[Bucket, CapturedStep] = {}
        try:
            with uncollected():
                self._capture(capture or CudaGraphCapture(model.device))
            if capture is None:
                logits = [step.results.logits for step in self.graphs.values()]
                self.recorder = DrawRecorder({each.data_ptr() for each in logits if each is not None})
        except Exception as error:
            self.graphs.clear()
            if self.view.buckets.is_required:
                raise ConfigError(
                    f"use_cuda_graphs is True and CUDA graphs could not be captured ({error}); leave it out to run "
                    "steps eagerly where they cannot."
                ) from error
            logger.warning("steps run eagerly, since CUDA graphs could not be captured: %s", error, exc_info=error)

    def __call__(self, batch: Batch, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`shared.engine.executor.eager.Executor`."""
        bucket, n = self.view.bucket, len(batch.logit_rows)
        if bucket is None:
            return self.eager(batch, inputs)
        num_rows = None if batch.prompt_rows is not None else self.num_rows(bucket)
        captured = self.graphs.get(bucket) if num_rows == self.num_rows(bucket) else None
        if captured is None:
            hidden, logits = self._run(inputs, bucket, num_rows)
        else:
            captured.replay()
            hidden, logits = captured.results
            self.num_replays += 1
        if logits is not None:
            return hidden, logits[:n] if n == batch.num_tokens else logits[inputs.logit_rows]
        if num_rows is None:
            return hidden, logits_of(self.model, batch, inputs, hidden)
        return hidden, self.model.logits(hidden[:n]) if n else no_logits(self.model)

    def num_rows(self, bucket: Bucket) -> int | None:
        """How many hidden states a mixed bucket's graph ends with. None: those of all tokens, since all are read, or
        since more than half of the tokens may be sampled from."""
        num_rows = None if self.most_logit_rows is None else self.most_logit_rows * bucket.num_sequences
        return None if num_rows is None or bucket.is_decode or 2 * num_rows > bucket.num_tokens else num_rows

    def repeat(self, num_sequences: int) -> torch.Tensor | None:
        """See :class:`shared.engine.executor.eager.Executor`."""
        bucket = self.view.bucket
        captured = self.graphs.get(bucket) if bucket is not None and bucket.is_decode else None
        if captured is None:
            return None
        self.view.advance()
        captured.replay()
        self.num_replays += 1
        return cast(torch.Tensor, captured.results.logits)[:num_sequences]

    @torch.inference_mode()
    def _capture(self, capture: Capture) -> None:
        started, paddings = time.perf_counter(), self.view.paddings
        console = Console(stderr=True)
        options: dict[str, Any] = {"console": console, "transient": True, "disable": not console.is_terminal}
        for batch in track(paddings, "Capturing CUDA graphs", **options):
            inputs, bucket = self.view.load(batch), self.view.bucket
            assert bucket is not None
            self.graphs[bucket] = capture(functools.partial(self._run, inputs, bucket, self.num_rows(bucket)))
        logger.info("captured %d steps in %.1f s", len(paddings), time.perf_counter() - started)

    def _run(self, inputs: StepInputs, bucket: Bucket, num_rows: int | None) -> Computed:
        """The launches of a bucket."""
        fill_pending(inputs.tokens.ids, self.last_ids.tensor)
        rows = None if num_rows is None else inputs.logit_rows[:num_rows]
        hidden = self.model(inputs.tokens, self.view, rows)
        return Computed(hidden, self.model.logits(hidden) if bucket.is_decode else None)
