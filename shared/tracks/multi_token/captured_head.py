"""The sampler head's passes as CUDA graphs. Introduced in phase 11.1.

A guess takes about fifteen launches: an embedding, two small blocks, the output head. Launching them takes the host
about as long as they take the GPU, which is otherwise idle between two steps. So they are captured for 1, 2, 4, ...
rows: a single pass and, for greedy guesses, all passes together with the sampling between them. The latter run right
after the forward, before the accepted tokens are known. They guess after every token, so the weights are read once for
all of them.

Invariant: the logits are those of :meth:`shared.tracks.multi_token.adapter.Adapter.logits`; logits and guesses are
valid until the next replay.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from shared.engine.executor.graphs import Capture, CapturedStep, Computed
from shared.kernels.sampling.sampler import make_counters, sample
from shared.models.causal_lm import CausalLM
from shared.sampling.sampler import SamplingBatch
from shared.tracks.multi_token.adapter import Adapter


class CapturedHead:
    """Records passes for up to ``most_rows`` rows, and complete guesses after as many requests' tokens."""

    @torch.inference_mode()
    def __init__(self, adapter: Adapter, model: CausalLM, most_rows: int, capture: Capture) -> None:
        k, device = adapter.config.num_masks, model.device
        most_guessed = most_rows * (k + 1)  # k drafts, and the token before them
        self.previous = torch.zeros(most_guessed, dtype=torch.int64, device=device)
        shape = (k, most_guessed, model.config.hidden_size)
        self.hidden = torch.zeros(shape, dtype=model.dtype, device=device)  # a single pass uses the first row's
        self.counters = make_counters(most_guessed, device)
        self.passes: dict[int, CapturedStep] = {}
        self.chains: dict[int, CapturedStep] = {}
        sizes = [*(2**n for n in range((most_guessed - 1).bit_length())), most_guessed]
        for size in reversed(sizes):  # the largest first, so that the others reuse its memory

            def run(size: int) -> Computed:
                return Computed(adapter.logits(model, self.previous[:size], self.hidden[0, :size]))

            def run_all(size: int) -> Computed:
                ids = [self.previous[:size]]
                for hidden in self.hidden[:, :size]:
                    logits = adapter.candidate_logits(model, ids[-1], hidden)
                    ids.append(sample(logits, SamplingBatch(size), counters=self.counters))
                return Computed(torch.stack(ids[1:], dim=1))

            self.chains[size] = capture(partial(run_all, size))
            if size < 2 * most_rows:
                self.passes[size] = capture(partial(run, size))

    def __call__(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """Logits ``[n, V]`` of ``previous [n]`` and ``hidden [n, H]``."""
        n = len(previous)
        self.previous[:n].copy_(previous)
        self.hidden[0, :n].copy_(hidden)
        return self._replayed(self.passes, n)

    def guess(self, previous: Sequence[Tensor], states: Sequence[Tensor]) -> Tensor:
        """The most likely guesses ``[n, k]`` after n tokens, from the states of the masks after each.

        Args:
            previous: the tokens of each request, int64 ``[groups]``, on the device.
            states: hidden states ``[groups, masks, H]``, of at most k masks; guesses without a mask are meaningless.
        """
        n = sum(map(len, previous))
        torch.cat(tuple(previous), out=self.previous[:n])
        if len({of_request.shape[1] for of_request in states}) == 1:
            torch.cat(
                [of_request.transpose(0, 1) for of_request in states], 1, out=self.hidden[: states[0].shape[1], :n]
            )
        else:
            first = 0
            for of_request in states:
                self.hidden[: of_request.shape[1], first : first + len(of_request)].copy_(of_request.transpose(0, 1))
                first += len(of_request)
        return self._replayed(self.chains, n)

    def _replayed(self, graphs: dict[int, CapturedStep], n: int) -> Tensor:
        captured = graphs[min(size for size in graphs if size >= n)]
        captured.replay()
        return captured.results.hidden[:n]
