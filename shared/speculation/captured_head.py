"""The pass of the sampler head as a CUDA graph. Introduced in phase 11.1.

A guess takes some twenty launches: embedding, two small blocks, the output head. The host needs about as long for them
as the GPU, which has nothing else to do between two steps. So they are recorded, for 1, 2, 4, ... requests.

Invariant: the logits are those of :meth:`shared.speculation.adapter.Adapter.logits`, and valid until the next pass.
"""

from functools import partial

import torch

from shared.engine.graphs import Capture, CapturedStep, Computed
from shared.models.causal_lm import CausalLM
from shared.speculation.adapter import Adapter


class CapturedHead:
    """Records the passes for up to ``most_rows`` rows, with ``capture``."""

    @torch.inference_mode()
    def __init__(self, adapter: Adapter, model: CausalLM, most_rows: int, capture: Capture) -> None:
        self.sizes = [*(2**n for n in range((most_rows - 1).bit_length())), most_rows]
        self.previous = torch.zeros(most_rows, dtype=torch.int64, device=model.device)
        self.hidden = torch.zeros(most_rows, model.config.hidden_size, dtype=model.dtype, device=model.device)
        self.passes: dict[int, CapturedStep] = {}
        for size in reversed(self.sizes):  # the largest first: the others fit into its memory

            def run(size: int) -> Computed:
                return Computed(adapter.logits(model, self.previous[:size], self.hidden[:size]))

            self.passes[size] = capture(partial(run, size))

    def __call__(self, previous: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[n, V]`` of ``previous [n]`` and ``hidden [n, H]``."""
        n = len(previous)
        size = next(size for size in self.sizes if size >= n)
        self.previous[:n].copy_(previous)
        self.hidden[:n].copy_(hidden)
        captured = self.passes[size]
        captured.replay()
        return captured.results.hidden[:n]
