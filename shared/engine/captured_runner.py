"""Runs batches by replaying captured steps. Introduced in phase 9.

A decode step is one graph, from the ids to the logits. A mixed step's graph ends with the hidden states: which of them
need logits differs from step to step, so those are computed by launches of their own, while the graph runs.

Invariants: a step of a bucket that was not captured is run eagerly, with the same launches; nothing that is captured
depends on the batch but through the view's buffers.
"""

import functools
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

import torch
from rich.console import Console
from rich.progress import track

from shared.cache.view import BatchView, StepInputs
from shared.engine.batch import Batch
from shared.engine.buckets import Bucket, Buckets
from shared.engine.graphs import Capture, CapturedStep, Computed, CudaGraphCapture, DrawRecorder, uncollected
from shared.engine.overlapped_runner import OverlappedRunner
from shared.engine.runner import Launched
from shared.errors import ConfigError
from shared.kernels.pending_ids import fill_pending
from shared.models.causal_lm import CausalLM

logger = logging.getLogger("infer.engine")


class BucketedView(BatchView, Protocol):
    """A view that pads steps to buckets, so that they can be captured."""

    buckets: Buckets
    bucket: Bucket | None  # of the loaded step; None: it is larger than all
    paddings: Sequence[Batch]  # a full batch of padding for each bucket, the largest first

    def advance(self) -> None:
        """Move the loaded decode step on by a token for each sequence."""
        ...


class CapturedRunner(OverlappedRunner):
    """A runner that captures the steps of its view's buckets, and replays them.

    If a capture fails, the log says why, and every step is run eagerly. Raises ConfigError if the buckets are required.

    Args:
        view: a :class:`BucketedView`.
        capture: records a step; None: as a CUDA graph.
        sampling: the keyword arguments of :class:`shared.engine.runner.Runner`.
    """

    def __init__(
        self,
        model: CausalLM,
        view: BatchView,
        max_sequences: int,
        capture: Capture | None = None,
        **sampling: Any,
    ) -> None:
        super().__init__(model, view, max_sequences, **sampling)
        self.bucketed = cast(BucketedView, view)
        self.graphs: dict[Bucket, CapturedStep] = {}
        try:
            with uncollected():
                self._capture(capture or CudaGraphCapture(model.device))
            if capture is None:
                logits = [step.results.logits for step in self.graphs.values()]
                self.sampler.recorder = DrawRecorder({each.data_ptr() for each in logits if each is not None})
        except Exception as error:
            self.graphs.clear()
            if self.bucketed.buckets.is_required:
                raise ConfigError(
                    f"use_cuda_graphs is True and CUDA graphs could not be captured ({error}); leave it out to run "
                    "steps eagerly where they cannot."
                ) from error
            logger.warning("steps run eagerly, since CUDA graphs could not be captured: %s", error, exc_info=error)

    @torch.inference_mode()
    def _capture(self, capture: Capture) -> None:
        started, paddings = time.perf_counter(), self.bucketed.paddings
        console = Console(stderr=True)
        about: dict[str, Any] = {"console": console, "transient": True, "disable": not console.is_terminal}
        for batch in track(paddings, "Capturing CUDA graphs", **about):
            inputs, bucket = self.view.load(batch), self.bucketed.bucket
            assert bucket is not None
            self.graphs[bucket] = capture(functools.partial(self._run, inputs, bucket))
        logger.info("captured %d steps in %.1f s", len(paddings), time.perf_counter() - started)

    def _run(self, inputs: StepInputs, bucket: Bucket) -> Computed:
        """The launches of a bucket."""
        fill_pending(inputs.tokens.ids, self.last_ids)
        hidden = self.model(inputs.tokens, self.view)
        return Computed(hidden, self.model.logits(hidden) if bucket.is_decode else None)

    def repeat(self, launched: Launched) -> Launched | None:
        """See :class:`shared.engine.runner.Runner`; within the ``num_ahead`` tokens that the batch was laid out for."""
        batch, bucket = launched.batch, self.bucketed.bucket
        captured = self.graphs.get(bucket) if bucket is not None and bucket.is_decode else None
        is_whole = len(batch.logit_rows) == len(batch) and not launched.errors
        if captured is None or not is_whole or launched.num_repeats == batch.layout.num_ahead:
            return None
        self.bucketed.advance()
        captured.replay()
        self.num_replays += 1
        self.num_forwards += 1
        self.num_tokens_computed += len(batch)
        logits = cast(torch.Tensor, captured.results.logits)[: len(batch)]
        return replace(launched, logits=logits, num_repeats=launched.num_repeats + 1)

    def _compute(self, batch: Batch, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        bucket = self.bucketed.bucket
        if bucket is None:
            return super()._compute(batch, inputs)
        captured = self.graphs.get(bucket)
        if captured is None:
            hidden, logits = self._run(inputs, bucket)
        else:
            captured.replay()
            hidden, logits = captured.results
            self.num_replays += 1
        if logits is None:
            return hidden, self._logits(batch, inputs, hidden)
        n = len(batch.logit_rows)
        return hidden, logits[:n] if n == batch.num_tokens else logits[inputs.logit_rows]
