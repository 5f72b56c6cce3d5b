"""The registry of chunks: which contents are known, which the KV cache holds, and which requests use them.

The host side.

A chunk is a piece of context (a document, a system prompt) that is computed by itself, once, as if it were a prompt:
its keys and values know the chunk's own tokens only, so they serve wherever the chunk stands. Its id is the SHA-256 of
its role and token ids, so the same content is the same chunk, however often it is registered. A chunk whose blocks were
evicted keeps its id and tokens; it is computed again when a request uses it. Ids and tokens are bounded too: of the
chunks that no request names, the least recently used are forgotten. Introduced in phase 9.1.

Invariants: ids and tokens take at most ``max_bytes``; a chunk that a request names, waiting ones too, is not forgotten;
only chunks that no admitted request uses are evicted, whole, the least recently used first; the blocks of a chunk that
is being computed belong to the request that computes it, until it is complete; a chunk is computed by at most one
request at a time.
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
from shared.errors import ChunkInUseError, RequestError, UnknownChunkError

REMEMBERED_BYTES = 64 * 2**20
"""The ids and tokens of chunks that an engine remembers: 8,000 chunks of 2,000 tokens, for example."""
_CHUNK_BYTES = 512  # of a chunk without its role and tokens


@dataclass(eq=False)
class Chunk:
    """A chunk's content, and where its keys and values are."""

    chunk_id: str
    role: str
    token_ids: Sequence[int]
    blocks: Blocks | None = None  # that hold its tokens in order; None: not computed, or evicted
    num_users: int = 0  # places in admitted requests
    error: str | None = None  # why it could not be computed the last time

    @property
    def is_resident(self) -> bool:
        """Whether the KV cache holds its keys and values."""
        return self.blocks is not None

    @property
    def remembered_bytes(self) -> int:
        """What it costs to remember its content, at 4 bytes a token."""
        return _CHUNK_BYTES + len(self.role) + 4 * len(self)

    def __len__(self) -> int:
        return len(self.token_ids)


def chunk_id(role: str, token_ids: Sequence[int]) -> str:
    """The id of a content: the first 32 hexadecimal digits of SHA-256 of its role and token ids."""
    packed = np.array(token_ids, "<i4").tobytes()
    return hashlib.sha256(role.encode("utf-8", "surrogatepass") + b"\0" + packed).hexdigest()[:32]


class ChunkRegistry:
    """All chunks of an engine, and the requests that are made of them or compute them.

    Until a pool has joined there can be no chunks, and ``refusal`` says why.
    """

    refusal = "This engine's KV cache holds no chunks."

    def __init__(self, max_bytes: int = REMEMBERED_BYTES) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0  # of the remembered ids and tokens
        self.num_evictions = 0
        self.free: Callable[[Blocks], None] | None = None
        self.num_blocks = self.block_size = 0  # of the pool
        self.wanted: dict[Chunk, None] = {}  # to be computed, though no request waits for them
        self.chunks: OrderedDict[str, Chunk] = OrderedDict()  # by id, the least recently used first
        self.resident: OrderedDict[str, Chunk] = OrderedDict()  # the least recently used first
        self.contexts: WeakKeyDictionary[Request, tuple[Chunk, ...]] = WeakKeyDictionary()  # chunks of each request
        self.computing: dict[Request, Chunk] = {}

    def join(self, free: Callable[[Blocks], None], num_blocks: int, block_size: int) -> None:
        """Keep chunks in a pool, whose function ``free`` takes blocks back."""
        self.free, self.num_blocks, self.block_size = free, num_blocks, block_size

    def add(self, role: str, token_ids: Sequence[int]) -> Chunk:
        """The chunk of this content; the known one if there is one. Others are forgotten to make room for a new one.

        Raises RequestError if there can be no chunks, or if requests name too many others.
        """
        if self.free is None:
            raise RequestError(self.refusal)
        name = chunk_id(role, token_ids)
        if name not in self.chunks:
            chunk = Chunk(name, role, array("i", token_ids))
            self._make_room(chunk.remembered_bytes)
            self.chunks[name] = chunk
            self.num_bytes += chunk.remembered_bytes
        self.chunks.move_to_end(name)
        return self.chunks[name]

    def find(self, name: str) -> Chunk:
        """A chunk by its id; raises UnknownChunkError if it was never registered, or was forgotten."""
        chunk = self.chunks.get(name)
        if chunk is None:
            raise UnknownChunkError(
                f"There is no chunk {name[:80]!r}; register its content, perhaps again, and use the id that this "
                f"returns ({len(self.chunks)} are registered)."
            )
        return chunk

    def forget(self, chunk: Chunk) -> None:
        """Remove a chunk: its id and tokens, and its keys and values. Raises ChunkInUseError if a request names it."""
        if chunk in self._named():
            raise ChunkInUseError(
                f"Chunk {chunk.chunk_id} is being computed, or a request names it; delete it when they have finished."
            )
        self._forget(chunk)

    def _forget(self, chunk: Chunk) -> None:
        self.drop(chunk)
        del self.chunks[chunk.chunk_id]
        self.num_bytes -= chunk.remembered_bytes

    def _make_room(self, num_bytes: int) -> None:
        """Forget the least recently used chunks until ``num_bytes`` can be remembered; none if that is impossible."""
        excess = self.num_bytes + num_bytes - self.max_bytes
        if excess <= 0:
            return
        named, leaving = self._named(), []
        for chunk in self.chunks.values():
            if excess > 0 and chunk not in named:
                leaving.append(chunk)
                excess -= chunk.remembered_bytes
        if excess > 0:
            raise RequestError(
                f"The chunk takes {num_bytes} bytes to remember; there are {self.max_bytes} for all chunks, and "
                "requests name too many others: register it when they have finished."
            )
        for chunk in leaving:
            self._forget(chunk)

    def _named(self) -> set[Chunk]:
        """The chunks of all waiting and running requests, and those that are computed or shall be."""
        named = {chunk for chunk in self.resident.values() if chunk.num_users}
        for request, chunks in self.contexts.items():
            if request.status not in (RequestStatus.FINISHED, RequestStatus.FAILED):
                named.update(chunks)
        return named.union(self.wanted, self.computing.values())

    def register(self, role: str, token_ids: Sequence[int]) -> str:
        """Add a chunk and have it computed; returns its id. Raises RequestError as ``add`` and ``check`` do."""
        if self.free is not None:
            self.check([Chunk("", role, tuple(token_ids))], 1)
        chunk = self.add(role, token_ids)
        self.want(chunk)
        return chunk.chunk_id

    def want(self, chunk: Chunk) -> None:
        """Have a chunk computed, unless it is resident."""
        if not chunk.is_resident:
            self.wanted[chunk] = None

    def check(self, chunks: Iterable[Chunk], num_own_tokens: int) -> None:
        """Raise RequestError if the pool could never hold these chunks beside ``num_own_tokens`` tokens."""
        counts = [len(chunk) for chunk in dict.fromkeys(chunks)] + [num_own_tokens]
        needed = sum(-(-count // self.block_size) for count in counts)
        if needed > self.num_blocks:
            raise RequestError(
                f"The request needs {needed} blocks, for {len(counts) - 1} chunks and up to {num_own_tokens} tokens of "
                f"its own, and the KV cache has {self.num_blocks}; use fewer or shorter chunks."
            )

    def missing(self, request: Request) -> list[Chunk]:
        """The chunks of a request that must be computed before it can be admitted; each once, in their order."""
        return [chunk for chunk in dict.fromkeys(self.contexts.get(request, ())) if not chunk.is_resident]

    def context_length(self, request: Request) -> int:
        """Tokens of a request that are chunks."""
        return sum(map(len, self.contexts.get(request, ())))

    def store(self, chunk: Chunk, blocks: Blocks) -> None:
        """Keep the blocks of a chunk that has been computed."""
        chunk.blocks, chunk.error = blocks, None
        self.resident[chunk.chunk_id] = chunk

    def touch(self, chunks: Iterable[Chunk]) -> None:
        """Make chunks the most recently used."""
        for chunk in chunks:
            self.chunks.move_to_end(chunk.chunk_id)
            if chunk.is_resident:
                self.resident.move_to_end(chunk.chunk_id)

    def acquire(self, chunks: Sequence[Chunk]) -> None:
        """Count a user of each of these resident chunks; they stay until ``release``."""
        for chunk in chunks:
            chunk.num_users += 1
        self.touch(chunks)

    def release(self, chunks: Sequence[Chunk]) -> None:
        """Uncount what ``acquire`` counted."""
        for chunk in chunks:
            chunk.num_users -= 1

    def evict(self, num_blocks: int) -> int:
        """Drop unused chunks until at least ``num_blocks`` blocks are free, or none is left; returns how many are."""
        num_freed = 0
        # exercise 09.1x3: evict whole chunks, the least recently used first
        # hint: `resident` is in the order of use, and dropping changes it: iterate over a list of its values
        # hint: a chunk with users is skipped; stop as soon as num_blocks blocks are free
        # hint: drop (below) frees the blocks of one chunk and returns how many they were; the chunk stays known
        for chunk in list(self.resident.values()):
            if num_freed >= num_blocks:
                break
            if chunk.num_users == 0:
                num_freed += self.drop(chunk)
        # end exercise
        return num_freed

    def drop(self, chunk: Chunk) -> int:
        """Free the blocks of a chunk, and return how many they were; the chunk stays known.

        Raises ChunkInUseError if a request uses it.
        """
        if chunk.num_users:
            raise ChunkInUseError(
                f"Chunk {chunk.chunk_id} is used in {chunk.num_users} places of running requests; evict it when they "
                "have finished."
            )
        blocks = chunk.blocks
        if blocks is None or self.free is None:
            return 0
        self.free(blocks)
        self.num_evictions += 1
        del self.resident[chunk.chunk_id]
        chunk.blocks = None
        return len(blocks)

    def unused_blocks(self) -> Blocks:
        """The blocks of all chunks that no request uses."""
        return _joined(chunk for chunk in self.resident.values() if chunk.num_users == 0)

    def blocks(self) -> Blocks:
        """The blocks of all resident chunks."""
        return _joined(self.resident.values())

    def used_tokens(self) -> int:
        """Tokens of the chunks that requests use; each chunk counts once."""
        return sum(len(chunk) for chunk in self.resident.values() if chunk.num_users)

    def audit(self, users: Iterable[Request]) -> list[str]:
        """One message per violated invariant; ``users`` are the requests that have acquired their chunks."""
        counted: dict[Chunk, int] = dict.fromkeys(self.chunks.values(), 0)
        for request in users:
            for chunk in self.contexts[request]:
                counted[chunk] += 1
        found = [
            f"Chunk {chunk.chunk_id} counts {chunk.num_users} users and has {count}."
            for chunk, count in counted.items()
            if chunk.num_users != count
        ]
        for chunk in self.chunks.values():
            if chunk.is_resident != (chunk.chunk_id in self.resident):
                found.append(f"Chunk {chunk.chunk_id} is resident: {chunk.is_resident}; the registry says otherwise.")
            if chunk.num_users and not chunk.is_resident:
                found.append(f"Chunk {chunk.chunk_id} is used and its keys and values are gone.")
            if chunk.blocks is not None and len(chunk.blocks) != -(-len(chunk) // self.block_size):
                found.append(f"Chunk {chunk.chunk_id} has {len(chunk)} tokens in {len(chunk.blocks)} blocks.")
        remembered = sum(chunk.remembered_bytes for chunk in self.chunks.values())
        if self.num_bytes != remembered or remembered > self.max_bytes:
            found.append(f"Chunks take {remembered} bytes, {self.num_bytes} are counted, {self.max_bytes} are allowed.")
        if not self._named() <= set(self.chunks.values()):
            found.append("A chunk that a request names is forgotten.")
        if len(set(self.computing.values())) != len(self.computing):
            found.append("A chunk is computed by two requests.")
        return found


def _joined(chunks: Iterable[Chunk]) -> Blocks:
    blocks = [chunk.blocks for chunk in chunks if chunk.blocks is not None]
    return np.concatenate(blocks) if blocks else np.zeros(0, np.int32)
