"""Tables of how often each token occurs in a request's prompt and output, for penalties. Introduced in phase 2.

Penalties read the whole history of a request. Uploading it again at every step would cost more with every token. So the
counts stay on the device: a request has a row, its known tokens are entered once, and each sampled token is added right
after sampling, before the host knows it. Updates are in place, so the tables keep their addresses, as CUDA graphs
require. A row of V tokens takes 5 * V bytes: 64 MB for 100 requests and a vocabulary of 128,000 tokens.

Invariant: a row holds the counts of the tokens entered, and of those added since.
"""

from collections.abc import Sequence
from typing import Self

import torch


class TokenCounts:
    """Tables ``[R, V]``: ``in_prompt``, bool, whether a token occurs in the prompt, and ``in_output``, int32 counts."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device | str | None = None) -> None:
        self.in_prompt = torch.zeros(num_rows, vocab_size, dtype=torch.bool, device=device)
        self.in_output = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=device)

    @classmethod
    def of(
        cls, histories: Sequence[tuple[Sequence[int], Sequence[int]]], *, device: torch.device | str | None = None
    ) -> Self:
        """A table of these prompts and outputs, only as wide as their largest id requires: later columns would be
        zero."""
        width = 1 + max((max(ids) for history in histories for ids in history if ids), default=-1)
        counts = cls(len(histories), width, device)
        for row, (prompt_ids, output_ids) in enumerate(histories):
            counts.enter(
                row, *(torch.tensor(ids, dtype=torch.int64, device=device) for ids in (prompt_ids, output_ids))
            )
        return counts

    def enter(self, row: int, prompt_ids: torch.Tensor, output_ids: torch.Tensor) -> None:
        """Replace the counts of a row. The ids are int64, on the tables' device."""
        self.in_prompt[row].zero_().index_fill_(0, prompt_ids, True)
        self.in_output[row].zero_()
        self.add(torch.full_like(output_ids, row), output_ids)

    def copy(self, source: int, row: int) -> None:
        """Copy the counts of one row to another."""
        self.in_prompt[row] = self.in_prompt[source]
        self.in_output[row] = self.in_output[source]

    def add(self, rows: torch.Tensor, ids: torch.Tensor) -> None:
        """Count output token ``ids[n]`` in row ``rows[n]``, both int64 ``[n]``; a repeated pair counts repeatedly."""
        flat = self.in_output.view(-1)
        flat.scatter_add_(0, rows * self.in_output.shape[1] + ids, flat.new_ones(()).expand(len(ids)))

    @property
    def num_bytes(self) -> int:
        return self.in_prompt.nbytes + self.in_output.nbytes
