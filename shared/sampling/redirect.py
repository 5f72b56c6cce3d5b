"""A logits processor that moves probability from one token to another. Introduced in phase 11.1.

Budget forcing replaces the token that would end a model's thinking with a word such as "Wait", and, once the budget is
spent, every token with that end (Muennighoff et al., arXiv 2501.19393). Editing the logits instead of the sampled token
makes this work for plain decoding, for drafts verified by equality, and for rejection sampling, which needs the
distribution.

Invariant: a row's other tokens keep their logits, and the moved probability is exact: sampling from the result is
equivalent to sampling from the logits and replacing one token by the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from shared.sampling.sampler import SamplingRow

_SMALLEST = 1e-30  # smaller temperatures are raised to this one


@dataclass(frozen=True)
class RedirectProcessor:
    """How some rows of logits ``[B, V]`` are changed; the other rows stay as they are.

    Attributes:
        forced: int64 ``[2, f]``, rows, and the only token that each may sample.
        moved: int64 ``[3, m]``, rows, tokens that are not sampled, and those that get their probability.
        temperatures: float32 ``[m]``, for the rows of ``moved``.
    """

    forced: torch.Tensor
    moved: torch.Tensor
    temperatures: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[SamplingRow]) -> Self | None:
        """The processor of B rows, on the CPU; None if no row redirects anything."""
        found = [(number, *row.redirect) for number, row in enumerate(rows) if row.redirect is not None]
        if not found:
            return None
        forced = [(number, target) for number, target, source in found if source is None]
        moved = [(number, source, target) for number, target, source in found if source is not None]
        temperatures = [max(rows[number].params.temperature, _SMALLEST) for number, _, _ in moved]
        return cls(
            torch.tensor(forced, dtype=torch.int64).view(-1, 2).T.contiguous(),
            torch.tensor(moved, dtype=torch.int64).view(-1, 3).T.contiguous(),
            torch.tensor(temperatures, dtype=torch.float32),
        )

    def sent(self, upload: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """On another device."""
        return type(self)(upload(self.forced), upload(self.moved), upload(self.temperatures))

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits ``[B, V]`` of any float dtype as float32; the argument is not mutated."""
        result = logits.to(torch.float32, copy=True)
        rows, targets = self.forced
        result[rows] = -torch.inf
        result[rows, targets] = 0.0
        rows, sources, targets = self.moved
        ours, theirs = result[rows, targets], result[rows, sources]
        # T · log(exp(a / T) + exp(b / T)); the larger of the two if T is 0
        distance = (ours - theirs).abs() / self.temperatures
        result[rows, targets] = torch.maximum(ours, theirs) + self.temperatures * torch.log1p(torch.exp(-distance))
        result[rows, sources] = -torch.inf
        return result
