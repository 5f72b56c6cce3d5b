"""What is known of an engine's chunks, and messages that ask for it or change it. Introduced in phase 9.1.

The thread that steps an engine owns its chunks, so a server sends it one of these messages, which are small and
picklable, and gets back what ``answer`` returns. Invariant: a message whose ``answer`` raises has at most registered
some of its contents.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from shared.engine.prompt import check_prompt, check_queue
from shared.tracks.segments.registry import Chunk, chunk_id


@dataclass(frozen=True)
class ChunkInfo:
    """What is known of a chunk."""

    chunk_id: str
    role: str
    num_tokens: int
    num_bytes: int  # of its keys and values, 0 if they are not in the cache
    num_users: int  # places in running requests


@dataclass(frozen=True)
class Content:
    """A chunk's content, from which its id follows."""

    role: str
    token_ids: tuple[int, ...]


class Inquiry(Protocol):
    """A message to the thread that owns an engine."""

    def answer(self, engine: Any) -> Any:
        """What to send back; raises InferError if the message is refused. Call it between two steps."""


@dataclass(frozen=True)
class Use:
    """The chunks with these ids and contents, in this order; contents are registered and will be computed."""

    chunks: tuple[str | Content, ...]

    def answer(self, engine: Any) -> list[ChunkInfo]:
        """See :class:`Inquiry`. Raises UnknownChunkError, QueueFullError, and RequestError as ``register`` does."""
        registry = engine.chunks
        for one in self.chunks:
            if isinstance(one, str):
                registry.touch([registry.find(one)])
        contents = {one for one in self.chunks if isinstance(one, Content)}
        for one in contents:
            check_prompt(one.token_ids, engine.model.config.vocab_size, engine.max_seq_len)
        num_new = sum(chunk_id(one.role, one.token_ids) not in registry.resident for one in contents)
        if num_new:
            num_waiting = len(engine.scheduler.waiting) + len(registry.wanted)
            check_queue(num_waiting, engine.config.max_waiting_requests, num_new)
        found = [one if isinstance(one, str) else engine.register(one.token_ids, one.role) for one in self.chunks]
        return described(engine, map(registry.find, found))


@dataclass(frozen=True)
class Blend:
    """These chunks, put together with a fraction of their tokens recomputed; other requests wait meanwhile.

    ``is_again``: the message was sent before, and a chunk that could not be computed since is not tried once more.
    """

    chunk_ids: tuple[str, ...]
    fraction: float
    is_again: bool = False

    def answer(self, engine: Any) -> ChunkInfo | None:
        """See :class:`Inquiry`; None while one of them is computed.

        Raises RequestError as ``blend`` does, and RuntimeError if a chunk cannot be computed.
        """
        registry = engine.chunks
        chunks = [registry.find(name) for name in self.chunk_ids]
        registry.check(chunks, sum(map(len, chunks)))
        registry.touch(chunks)
        for chunk in chunks:
            if self.is_again and chunk.error is not None:
                raise RuntimeError(f"chunk {chunk.chunk_id} could not be computed: {chunk.error}")
            chunk.error = None
            registry.want(chunk)
        if not all(chunk.is_resident for chunk in chunks):
            return None
        return described(engine, [registry.find(engine.blend(self.chunk_ids, self.fraction))])[0]


@dataclass(frozen=True)
class Page:
    """Up to ``limit`` chunks, the least recently used first, behind the one with the id ``after``."""

    limit: int
    after: str | None = None

    def answer(self, engine: Any) -> tuple[list[ChunkInfo], bool]:
        """See :class:`Inquiry`; also whether more follow. Raises UnknownChunkError for ``after``."""
        chunks = iter(engine.chunks.chunks.values())
        if self.after is not None:
            last = engine.chunks.find(self.after)
            next(chunk for chunk in chunks if chunk is last)
        page = list(islice(chunks, self.limit + 1))
        return described(engine, page[: self.limit]), len(page) > self.limit


@dataclass(frozen=True)
class Find:
    """One chunk by its id."""

    chunk_id: str

    def answer(self, engine: Any) -> ChunkInfo:
        """See :class:`Inquiry`. Raises UnknownChunkError."""
        return described(engine, [engine.chunks.find(self.chunk_id)])[0]


@dataclass(frozen=True)
class Forget:
    """Remove a chunk: id, tokens, keys and values."""

    chunk_id: str

    def answer(self, engine: Any) -> None:
        """See :class:`Inquiry`. Raises UnknownChunkError and ChunkInUseError."""
        engine.chunks.forget(engine.chunks.find(self.chunk_id))


def described(engine: Any, chunks: Iterable[Chunk]) -> list[ChunkInfo]:
    """What is known of these chunks of an engine that has chunks."""
    block_bytes = engine.view.num_bytes // engine.chunks.num_blocks

    def info(chunk: Chunk) -> ChunkInfo:
        num_bytes = 0 if chunk.blocks is None else len(chunk.blocks) * block_bytes
        return ChunkInfo(chunk.chunk_id, chunk.role, len(chunk), num_bytes, chunk.num_users)

    return list(map(info, chunks))
