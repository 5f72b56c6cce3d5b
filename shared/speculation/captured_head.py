"""The passes of the sampler head as CUDA graphs. Introduced in phase 11.1.

A guess takes some fifteen launches: embedding, two small blocks, the output head. The host needs about as long for them
as the GPU, which has nothing else to do between two steps. So they are recorded, for 1, 2, 4, ... requests: one pass,
and, for requests whose guesses are the likeliest tokens, all passes with the draws between them.

Invariant: the logits are those of :meth:`shared.speculation.adapter.Adapter.logits`, and valid until the next replay,
as are the guesses.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from shared.engine.graphs import Capture, CapturedStep, Computed
from shared.engine.staging import Staging
from shared.kernels.sampler import make_counters, sample
from shared.models.causal_lm import CausalLM
from shared.sampling.sampler import SamplingBatch
from shared.speculation.adapter import Adapter


class CapturedHead:
    """Records the passes for up to ``most_rows`` requests, with ``capture``."""

    @torch.inference_mode()
    def __init__(self, adapter: Adapter, model: CausalLM, most_rows: int, capture: Capture) -> None:
        self.sizes = [*(2**n for n in range((most_rows - 1).bit_length())), most_rows]
        self.staging = Staging(model.device, {"previous": (most_rows, np.int64)})
        self.previous = self.staging.tensors["previous"].zero_()
        shape = (adapter.config.num_masks, most_rows, model.config.hidden_size)
        self.hidden = torch.zeros(shape, dtype=model.dtype, device=model.device)  # a single pass has that of the first
        self.counters = make_counters(most_rows, model.device)
        self.passes: dict[int, CapturedStep] = {}
        self.chains: dict[int, CapturedStep] = {}
        for size in reversed(self.sizes):  # the largest first: the others fit into its memory

            def run(size: int) -> Computed:
                return Computed(adapter.logits(model, self.previous[:size], self.hidden[0, :size]))

            def run_all(size: int) -> Computed:
                ids = [self.previous[:size]]
                for hidden in self.hidden[:, :size]:
                    logits = adapter.candidate_logits(model, ids[-1], hidden)
                    ids.append(sample(logits, SamplingBatch(size), counters=self.counters))
                return Computed(torch.stack(ids[1:], dim=1))

            self.passes[size] = capture(partial(run, size))
            self.chains[size] = capture(partial(run_all, size))

    def __call__(self, previous: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[n, V]`` of ``previous [n]`` and ``hidden [n, H]``."""
        n = len(previous)
        self.previous[:n].copy_(previous)
        self.hidden[0, :n].copy_(hidden)
        return self._replayed(self.passes, n)

    def guess(self, previous: Sequence[int], states: Sequence[torch.Tensor]) -> torch.Tensor:
        """The likeliest guesses ``[n, k]`` of n requests, from the states of the masks of each.

        Args:
            previous: the last token of each.
            states: hidden states ``[masks, H]``, of at most k masks; guesses without a mask mean nothing.
        """
        n = len(previous)
        self.staging.send({"previous": np.array(previous, np.int64)})
        if len({len(of_request) for of_request in states}) == 1:
            torch.stack(tuple(states), dim=1, out=self.hidden[: len(states[0]), :n])
        else:
            for place, of_request in enumerate(states):
                self.hidden[: len(of_request), place].copy_(of_request)
        return self._replayed(self.chains, n)

    def _replayed(self, graphs: dict[int, CapturedStep], n: int) -> torch.Tensor:
        captured = graphs[next(size for size in self.sizes if size >= n)]
        captured.replay()
        return captured.results.hidden[:n]
