"""The registry of segments: which contents are known, which the KV cache holds, and which requests use them.

The host side.

A segment is a piece of context (a document, a system prompt) that is computed once, by itself, as if it were a prompt.
Its keys and values depend only on its own tokens, so they can be used wherever the segment occurs. Its id is the
SHA-256 of its role and token ids, so equal contents are the same segment, however often they are registered. A segment
whose blocks were evicted keeps its id and tokens; it is recomputed when a request uses it. Ids and tokens are bounded
too: among the segments that no request names, the least recently used are forgotten. Introduced in phase 9.1.

Invariants: ids and tokens take at most ``max_bytes``. A segment named by a request, even a waiting one, is not
forgotten. Only segments that no admitted request uses are evicted: whole, and least recently used first. The blocks of
a segment that is being computed belong to the request that computes it, until it is complete. At most one request at a
time computes a segment.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from shared.cache.pool.blocks import Blocks
from shared.engine.request import Request, RequestStatus
from shared.errors import RequestError, SegmentInUseError, UnknownSegmentError

REMEMBERED_BYTES = 64 * 2**20
"""Maximum bytes of the ids and tokens of segments that an engine keeps: enough for 8,000 segments of 2,000 tokens, for
example."""
_SEGMENT_BYTES = 512  # size of a segment without its role and tokens


@dataclass(eq=False)
class Segment:
    """A segment's content, and the blocks with its keys and values."""

    segment_id: str
    role: str
    token_ids: Sequence[int]
    blocks: Blocks | None = None  # they hold its tokens in order; None: not computed, or evicted
    num_users: int = 0  # number of occurrences in admitted requests
    error: str | None = None  # why the last attempt to compute it failed

    @property
    def is_resident(self) -> bool:
        """Whether the KV cache holds its keys and values."""
        return self.blocks is not None

    @property
    def remembered_bytes(self) -> int:
        """The cost of keeping its content, at 4 bytes per token."""
        return _SEGMENT_BYTES + len(self.role) + 4 * len(self)

    def __len__(self) -> int:
        return len(self.token_ids)


def segment_id(role: str, token_ids: Sequence[int]) -> str:
    """The id of a content: the first 32 hexadecimal digits of SHA-256 of its role and token ids."""
    packed = np.array(token_ids, "<i4").tobytes()
    return hashlib.sha256(role.encode("utf-8", "surrogatepass") + b"\0" + packed).hexdigest()[:32]


class SegmentRegistry:
    """All segments of an engine, the requests made of them, and the requests computing them.

    Until a pool has joined, segments are refused, and ``refusal`` says why.
    """

    refusal = "This engine's KV cache holds no segments."

    def __init__(self, max_bytes: int = REMEMBERED_BYTES) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0  # bytes of the kept ids and tokens
        self.num_evictions = 0
        self.free: Callable[[Blocks], None] | None = None
        self.num_blocks = self.block_size = 0  # of the pool
        self.wanted: dict[Segment, None] = {}  # to be computed, although no request waits for them
        self.segments: OrderedDict[str, Segment] = OrderedDict()  # by id, least recently used first
        self.resident: OrderedDict[str, Segment] = OrderedDict()  # least recently used first
        self.contexts: WeakKeyDictionary[Request, tuple[Segment, ...]] = WeakKeyDictionary()  # segments of each request
        self.computing: dict[Request, Segment] = {}

    def join(self, free: Callable[[Blocks], None], num_blocks: int, block_size: int) -> None:
        """Keep segments in a pool, whose function ``free`` takes back blocks."""
        self.free, self.num_blocks, self.block_size = free, num_blocks, block_size

    def add(self, role: str, token_ids: Sequence[int]) -> Segment:
        """The segment with this content; the existing one if there is one. Others are forgotten to free memory for a
        new one.

        Raises RequestError if segments are refused, or if requests name too many others.
        """
        if self.free is None:
            raise RequestError(self.refusal)
        name = segment_id(role, token_ids)
        if name not in self.segments:
            segment = Segment(name, role, array("i", token_ids))
            self._evict(segment.remembered_bytes)
            self.segments[name] = segment
            self.num_bytes += segment.remembered_bytes
        self.segments.move_to_end(name)
        return self.segments[name]

    def find(self, name: str) -> Segment:
        """A segment by its id; raises UnknownSegmentError if it was never registered, or was forgotten."""
        segment = self.segments.get(name)
        if segment is None:
            raise UnknownSegmentError(
                f"There is no segment {name[:80]!r}; register its content, perhaps again, and use the id that this "
                f"returns ({len(self.segments)} are registered)."
            )
        return segment

    def forget(self, segment: Segment) -> None:
        """Remove a segment's id, tokens, keys and values. Raises SegmentInUseError if a request names it."""
        if segment in self._named():
            raise SegmentInUseError(
                f"Segment {segment.segment_id} is being computed, or a request names it; "
                "delete it when they have finished."
            )
        self._forget(segment)

    def _forget(self, segment: Segment) -> None:
        self.drop(segment)
        del self.segments[segment.segment_id]
        self.num_bytes -= segment.remembered_bytes

    def _evict(self, num_bytes: int) -> None:
        """Forget the least recently used segments until ``num_bytes`` fit; forget none if that is impossible."""
        excess = self.num_bytes + num_bytes - self.max_bytes
        if excess <= 0:
            return
        named, leaving = self._named(), []
        for segment in self.segments.values():
            if excess > 0 and segment not in named:
                leaving.append(segment)
                excess -= segment.remembered_bytes
        if excess > 0:
            raise RequestError(
                f"The segment takes {num_bytes} bytes to remember; there are {self.max_bytes} for all segments, and "
                "requests name too many others: register it when they have finished."
            )
        for segment in leaving:
            self._forget(segment)

    def _named(self) -> set[Segment]:
        """The segments of all waiting and running requests, and those that are or will be computed."""
        named = {segment for segment in self.resident.values() if segment.num_users}
        for request, segments in self.contexts.items():
            if request.status not in (RequestStatus.FINISHED, RequestStatus.FAILED):
                named.update(segments)
        return named.union(self.wanted, self.computing.values())

    def register(self, role: str, token_ids: Sequence[int]) -> str:
        """Add a segment and queue its computation; returns its id. Raises RequestError as ``add`` and ``check`` do."""
        if self.free is not None:
            self.check([Segment("", role, tuple(token_ids))], 1)
        segment = self.add(role, token_ids)
        self.want(segment)
        return segment.segment_id

    def want(self, segment: Segment) -> None:
        """Queue a segment's computation, unless it is resident."""
        if not segment.is_resident:
            self.wanted[segment] = None

    def check(self, segments: Iterable[Segment], num_own_tokens: int) -> None:
        """Raise RequestError if the pool could never hold these segments together with ``num_own_tokens`` tokens."""
        counts = [len(segment) for segment in dict.fromkeys(segments)] + [num_own_tokens]
        needed = sum(-(-count // self.block_size) for count in counts)
        if needed > self.num_blocks:
            raise RequestError(
                f"The request needs {needed} blocks, for {len(counts) - 1} segments and up to {num_own_tokens} tokens "
                f"of its own, and the KV cache has {self.num_blocks}; use fewer or shorter segments."
            )

    def missing(self, request: Request) -> list[Segment]:
        """The segments of a request that must be computed before it can be admitted; without duplicates, in order."""
        return [segment for segment in dict.fromkeys(self.contexts.get(request, ())) if not segment.is_resident]

    def context_length(self, request: Request) -> int:
        """The number of a request's tokens that belong to segments."""
        return sum(map(len, self.contexts.get(request, ())))

    def store(self, segment: Segment, blocks: Blocks) -> None:
        """Keep the blocks of a segment that has been computed."""
        segment.blocks, segment.error = blocks, None
        self.resident[segment.segment_id] = segment

    def touch(self, segments: Iterable[Segment]) -> None:
        """Make segments the most recently used."""
        for segment in segments:
            self.segments.move_to_end(segment.segment_id)
            if segment.is_resident:
                self.resident.move_to_end(segment.segment_id)

    def acquire(self, segments: Sequence[Segment]) -> None:
        """Count a user for each of these resident segments; they stay until ``release``."""
        for segment in segments:
            segment.num_users += 1
        self.touch(segments)

    def release(self, segments: Sequence[Segment]) -> None:
        """Undo ``acquire``."""
        for segment in segments:
            segment.num_users -= 1

    def evict(self, num_blocks: int) -> int:
        """Drop unused segments until at least ``num_blocks`` blocks are free, or none is left; returns how many are."""
        num_freed = 0
        # exercise 09.1x3: evict whole segments, the least recently used first
        # hint: `resident` is in the order of use, and dropping changes it: iterate over a list of its values
        # hint: a segment with users is skipped; stop as soon as num_blocks blocks are free
        # hint: drop (below) frees the blocks of one segment and returns how many they were; the segment stays known
        for segment in list(self.resident.values()):
            if num_freed >= num_blocks:
                break
            if segment.num_users == 0:
                num_freed += self.drop(segment)
        # end exercise
        return num_freed

    def drop(self, segment: Segment) -> int:
        """Free the blocks of a segment, and return how many they were; the segment stays known.

        Raises SegmentInUseError if a request uses it.
        """
        if segment.num_users:
            raise SegmentInUseError(
                f"Segment {segment.segment_id} is used in {segment.num_users} places of running requests; "
                "evict it when they have finished."
            )
        blocks = segment.blocks
        if blocks is None or self.free is None:
            return 0
        self.free(blocks)
        self.num_evictions += 1
        del self.resident[segment.segment_id]
        segment.blocks = None
        return len(blocks)

    def unused_blocks(self) -> Blocks:
        """The number of blocks of all segments that no request uses."""
        return _joined(segment for segment in self.resident.values() if segment.num_users == 0)

    def blocks(self) -> Blocks:
        """The blocks of all resident segments."""
        return _joined(self.resident.values())

    def used_tokens(self) -> int:
        """Tokens of the segments that requests use; each segment counts once."""
        return sum(len(segment) for segment in self.resident.values() if segment.num_users)

    def audit(self, users: Iterable[Request]) -> list[str]:
        """One message per violated invariant; ``users`` are the requests that have acquired their segments."""
        counted: dict[Segment, int] = dict.fromkeys(self.segments.values(), 0)
        for request in users:
            for segment in self.contexts[request]:
                counted[segment] += 1
        found = [
            f"Segment {segment.segment_id} counts {segment.num_users} users and has {count}."
            for segment, count in counted.items()
            if segment.num_users != count
        ]
        for segment in self.segments.values():
            if segment.is_resident != (segment.segment_id in self.resident):
                found.append(
                    f"Segment {segment.segment_id} is resident: {segment.is_resident}; the registry says otherwise."
                )
            if segment.num_users and not segment.is_resident:
                found.append(f"Segment {segment.segment_id} is used and its keys and values are gone.")
            if segment.blocks is not None and len(segment.blocks) != -(-len(segment) // self.block_size):
                found.append(f"Segment {segment.segment_id} has {len(segment)} tokens in {len(segment.blocks)} blocks.")
        remembered = sum(segment.remembered_bytes for segment in self.segments.values())
        if self.num_bytes != remembered or remembered > self.max_bytes:
            found.append(
                f"Segments take {remembered} bytes, {self.num_bytes} are counted, {self.max_bytes} are allowed."
            )
        if not self._named() <= set(self.segments.values()):
            found.append("A segment that a request names is forgotten.")
        if len(set(self.computing.values())) != len(self.computing):
            found.append("A segment is computed by two requests.")
        return found


def _joined(segments: Iterable[Segment]) -> Blocks:
    blocks = [segment.blocks for segment in segments if segment.blocks is not None]
    return np.concatenate(blocks) if blocks else np.zeros(0, np.int32)
