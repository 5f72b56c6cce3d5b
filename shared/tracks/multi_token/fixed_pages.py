"""Pages whose numbers follow from the request: no free list, and no table on the host. Introduced in phase 11.1.

BatchSpec, an implementation of multi-token prediction, gives request r the pages from r · max_pages on. So a page is
found by arithmetic, and the sparse matrix that a kernel needs for a step (compressed sparse rows, as FlashInfer reads
it) follows from a cumulative sum of the counts. A request grows and shrinks only at its tail, and has at least one
page, since a row of the matrix must not be empty.

It is here for comparison: no engine uses it. All ``num_requests * max_pages`` pages exist from the beginning, so the
longest possible request determines how many fit in memory; no page can be shared, or serve a longer request.

Invariants: no page belongs to two requests; a request has as many pages as its tokens fill, and at least one.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.errors import CapacityError

Integers = NDArray[np.int64]


class PageTables(NamedTuple):
    """The pages of R requests as compressed sparse rows."""

    indptr: Integers  # [R + 1]
    indices: Integers  # the pages of request r, in the order of its text, are indices[indptr[r]:indptr[r + 1]]
    last_page_lengths: Integers  # [R], tokens in each request's last page, 0 only if it has none


class FixedPages:
    """``max_pages`` pages of ``page_size`` tokens for each of ``num_requests`` requests, which are numbered from 0."""

    def __init__(self, num_requests: int, max_pages: int, page_size: int) -> None:
        self.max_pages, self.page_size = max_pages, page_size
        self.num_tokens: Integers = np.zeros(num_requests, np.int64)

    def append(self, request: int, count: int) -> Integers:
        """Add ``count`` tokens at a request's end; their slots, ``page * page_size + offset``, ``[count]``.

        Raises CapacityError, and changes nothing, if they are more than its pages hold.
        """
        start = int(self.num_tokens[request])
        capacity = self.max_pages * self.page_size
        if start + count > capacity:
            raise CapacityError(f"Request {request} would have {start + count} tokens; its pages hold {capacity}.")
        self.num_tokens[request] += count
        return request * capacity + np.arange(start, start + count)

    def truncate(self, request: int, num_tokens: int) -> None:
        """Keep a request's first tokens; raises CapacityError if it has fewer."""
        if num_tokens > self.num_tokens[request]:
            raise CapacityError(f"Request {request} has {self.num_tokens[request]} tokens, and not {num_tokens}.")
        self.num_tokens[request] = num_tokens

    def tables(self) -> PageTables:
        """The pages of all requests."""
        # exercise 11.1x5: the page tables, from the lengths alone
        # hint: a request has as many pages as its tokens fill, rounded up, and at least one
        # hint: indptr is a zero and the cumulative sum of these counts
        # hint: the offset of an entry of indices is its index minus indptr of its request; np.repeat repeats it
        # hint: a full last page has page_size tokens, not 0
        counts = np.maximum(1, -(-self.num_tokens // self.page_size))
        indptr = np.append(0, counts.cumsum())
        requests = np.arange(len(counts)).repeat(counts)
        indices = requests * self.max_pages + np.arange(indptr[-1]) - indptr[requests]
        return PageTables(indptr, indices, self.num_tokens - (counts - 1) * self.page_size)
        # end exercise
