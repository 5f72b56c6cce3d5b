"""A step of an adapter's training, captured on a GPU. Introduced in phase 11.1.

A step of a small model has thousands of launches that take a few microseconds each: two forwards, a backward pass and
the optimizer. Launching them takes the host longer than running them takes the GPU. So after a few steps, a whole step
is recorded as a CUDA graph: gradients get fixed addresses, the learning rate is a number on the device, and each step's
texts are copied to the addresses of the first ones.

Invariant: a recorded step computes the same as the steps before it.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from shared.tracks.multi_token.training.own_texts import Texts

NUM_EAGER = 3
"""Steps before one is recorded: by then kernels are compiled, and the optimizer has its state."""


class Losses(NamedTuple):
    """The losses of a step, each a scalar."""

    base: Tensor
    sampler: Tensor
    latent: Tensor


class TrainingStep:
    """Takes steps with AdamW; ``parameters`` are all on one device."""

    def __init__(
        self, losses: Callable[[Texts, Tensor], Losses], parameters: Iterable[torch.nn.Parameter], learning_rate: float
    ) -> None:
        self.losses, self.parameters = losses, list(parameters)
        self.device = self.parameters[0].device
        self.is_recording = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=torch.tensor(learning_rate, device=self.device) if self.is_recording else learning_rate,
            betas=(0.9, 0.98),
            weight_decay=0.01,
            capturable=self.is_recording,
        )
        self.num_steps = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, texts: Texts, anchors: Tensor, learning_rate: float) -> Losses:
        """Take a step; texts and anchors must have the shapes of the first step's. The losses are valid until the next
        step."""
        for group in self.optimizer.param_groups:
            if self.is_recording:
                group["lr"].fill_(learning_rate)
            else:
                group["lr"] = learning_rate
        if not self.is_recording:
            return self._run(texts, anchors)
        if self.num_steps == 0:
            self.inputs = Texts(texts.ids.clone(), texts.is_answer.clone()), anchors.clone()
            self.stream = torch.cuda.Stream(self.device)
        kept, places = self.inputs
        kept.ids.copy_(texts.ids)
        kept.is_answer.copy_(texts.is_answer)
        places.copy_(anchors)
        self.num_steps += 1
        if self.num_steps <= NUM_EAGER:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                found = self._run(*self.inputs)
            torch.cuda.current_stream().wait_stream(self.stream)
            return found
        if self.graph is None:
            self.optimizer.zero_grad(set_to_none=True)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.found = self._run(*self.inputs)
        self.graph.replay()
        return self.found

    def _run(self, texts: Texts, anchors: Tensor) -> Losses:
        found = self.losses(texts, anchors)
        self.optimizer.zero_grad(set_to_none=True)
        sum(found).backward()  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        return Losses(*(loss.detach() for loss in found))
