"""The host side of two KV caches: the model's, and that of its draft model. Introduced in phase 11.

The draft model reads the same text, but needs its own keys and values. For each request its pool holds a *draft
request* with the same tokens, of which the draft model may have computed more or fewer. A request is admitted, and
grows, only if both pools have space.

Invariants: a request has a draft request exactly while it holds space; both pools have reserved the same number of
tokens, up to the draft model's maximum; this module commits only the model's tokens, and the drafter commits those of
draft requests.
"""

from collections.abc import Iterable
from dataclasses import replace

from shared.cache.pool.interface import CachePoolProtocol
from shared.engine.request import Request


class PairedPool:
    """Reserves in both pools; everything else is delegated to ``target``, the model's pool. See
    ``CachePoolProtocol``."""

    def __init__(self, target: CachePoolProtocol, draft: CachePoolProtocol) -> None:
        self.target, self.draft = target, draft
        self.draft_requests: dict[Request, Request] = {}
        self.granted: dict[Request, int] = {}  # tokens
        self.max_sequences = target.max_sequences
        self.request_capacity = target.request_capacity
        self.capacity_tokens = min(target.capacity_tokens, draft.capacity_tokens)
        self.watermark_tokens = target.watermark_tokens
        self.must_wait, self.length, self.layout = target.must_wait, target.length, target.layout
        self.commit, self.commit_next, self.truncate = target.commit, target.commit_next, target.truncate
        self.holdings, self.cached_blocks = target.holdings, target.cached_blocks

    def admit(self, request: Request) -> int:
        """The draft model's cached prefix may be shorter or longer than the model's."""
        params = replace(request.params, logprobs=None, prompt_logprobs=None)
        arguments = (request.request_id, request.prompt_ids, params, request.seed, request.end_ids)
        draft_request = self.draft_requests[request] = Request(
            *arguments, output_ids=list(request.output_ids), serial=request.serial
        )
        self.granted[request] = 0
        self.draft.admit(draft_request)
        return self.target.admit(request)

    def reserve(self, request: Request, num_tokens: int) -> bool:
        draft_request, granted = self.draft_requests[request], self.granted[request]
        if not self.target.reserve(request, num_tokens):
            return False
        if not self.draft.reserve(draft_request, min(num_tokens, self.draft.request_capacity)):
            self.target.shrink(request, granted)
            return False
        self.granted[request] = max(granted, num_tokens)
        return True

    def reserve_next(self, requests: Iterable[Request]) -> list[Request]:
        """``reserve`` does this."""
        return list(requests)

    def shrink(self, request: Request, num_tokens: int) -> None:
        """In both pools. Drafts whose slots are freed are discarded."""
        draft_request = self.draft_requests[request]
        self.target.shrink(request, num_tokens)
        self.draft.shrink(draft_request, num_tokens)
        self.granted[request] = max(self.target.length(request), min(num_tokens, self.granted[request]))
        num_written = max(num_tokens - self.draft.length(draft_request), 0)
        draft_request.draft_ids = draft_request.draft_ids[: num_written + 1]  # the last one has no keys yet

    def release(self, request: Request) -> None:
        self.target.release(request)
        draft_request = self.draft_requests.pop(request, None)
        if draft_request is not None:
            self.draft.release(draft_request)
            del self.granted[request]

    @property
    def used_tokens(self) -> int:
        return self.target.used_tokens

    @property
    def free_tokens(self) -> int:
        """In the pool with less free space."""
        return min(self.target.free_tokens, self.draft.free_tokens)

    def drop_cached(self) -> None:
        self.target.drop_cached()
        self.draft.drop_cached()

    def audit(self) -> list[str]:
        found = [*self.target.audit(), *(f"Draft model: {message}" for message in self.draft.audit())]
        unknown = self.target.holdings()[1].keys() - self.draft_requests.keys()
        unknown |= self.draft.holdings()[1].keys() - set(self.draft_requests.values())
        return found + [f"Request {request.request_id} holds space and has no draft request." for request in unknown]
