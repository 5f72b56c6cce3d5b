"""One forward's work as arrays: which tokens, of which sequences, and the rows that need logits. Introduced in phase 4.

A scheduler thinks in requests, a model in tokens laid end to end. A batch is the second made from the first: all that
whatever runs the model is told. It holds arrays and ids and no request, so it could be sent to another process.
Invariants: the tokens of a sequence stand together and in order, in the order of ``request_ids``; positions are the
requests' own (logical), while the place of a token in the memory is the memory's affair (physical).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from shared.engine.request import Request
from shared.sampling.sampler import SamplingRow

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """T new tokens of B sequences."""

    request_ids: tuple[str, ...]  # B of them
    token_ids: Integers  # [T]
    positions: Integers  # [T]
    num_new_tokens: Integers  # [B], at least 1 each; they add up to T
    logit_rows: Integers  # [n], the tokens whose logits are asked for: here each sequence's last
    sampling_rows: tuple[SamplingRow, ...]  # n of them, how the token behind each of those is chosen

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Self:
        """The tokens that the memory lacks of each request: its whole prompt, or the token that was drawn last."""
        B = len(requests)
        # exercise 04.1: lay the requests' new tokens end to end
        # hint: of each request the memory lacks token_ids[num_computed_tokens:]; concatenate those
        # hint: the next token is drawn at each one's last row: the running sum of the counts, num_new.cumsum(), less 1
        # hint: a position is an index in the token's own request, so it starts anew with each request
        # hint: positions: np.arange over all rows, less the row where the sequence begins, plus what is computed of it
        # hint: np.repeat(one number for each request, num_new) spreads it over the request's rows
        computed = np.fromiter((request.num_computed_tokens for request in requests), np.int64, B)
        ends = np.fromiter((request.num_tokens for request in requests), np.int64, B)
        num_new = ends - computed
        last_rows = num_new.cumsum() - 1
        if len(last_rows) == 0 or last_rows[-1] == B - 1:  # one new token each, as in every decode step
            ids = np.fromiter((request.last_token_id for request in requests), np.int64, B)
            positions = computed
        else:
            ids = np.concatenate([request.token_ids[request.num_computed_tokens :] for request in requests])
            first_rows = last_rows + 1 - num_new
            positions = np.arange(len(ids)) + np.repeat(computed - first_rows, num_new)
        # end exercise
        return cls(
            tuple(request.request_id for request in requests),
            ids,
            positions,
            num_new,
            last_rows,
            tuple(request.sampling_row() for request in requests),
        )

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)
