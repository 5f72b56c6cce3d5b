"""Facts about an engine's segments, and messages that query or change them. Introduced in phase 9.1.

The thread that steps an engine owns its segments. So a server sends that thread one of these small, picklable messages
and gets back the result of ``answer``. Invariant: a message whose ``answer`` raises has had no effect other than
registering some of its contents.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from shared.engine.prompt import check_prompt, check_queue
from shared.tracks.segments.registry import Segment, segment_id


@dataclass(frozen=True)
class SegmentInfo:
    """The facts about a segment."""

    segment_id: str
    role: str
    num_tokens: int
    num_bytes: int  # bytes of its keys and values; 0 if they are not cached
    num_users: int  # number of its occurrences in running requests


@dataclass(frozen=True)
class Content:
    """A segment's content, which determines its id."""

    role: str
    token_ids: tuple[int, ...]


class Inquiry(Protocol):
    """A message to the thread that owns an engine."""

    def answer(self, engine: Any) -> Any:
        """The answer to send back; raises InferError if the message is refused. Called between two steps."""


@dataclass(frozen=True)
class Use:
    """The segments with these ids and contents, in this order; contents are registered and will be computed."""

    segments: tuple[str | Content, ...]

    def answer(self, engine: Any) -> list[SegmentInfo]:
        """See :class:`Inquiry`. Raises UnknownSegmentError, QueueFullError, and RequestError as ``register`` does."""
        registry = engine.segments
        for one in self.segments:
            if isinstance(one, str):
                registry.touch([registry.find(one)])
        contents = {one for one in self.segments if isinstance(one, Content)}
        for one in contents:
            check_prompt(one.token_ids, engine.model.config.vocab_size, engine.max_seq_len)
        num_new = sum(segment_id(one.role, one.token_ids) not in registry.resident for one in contents)
        if num_new:
            num_waiting = len(engine.scheduler.waiting) + len(registry.wanted)
            check_queue(num_waiting, engine.config.max_waiting_requests, num_new)
        found = [one if isinstance(one, str) else engine.register(one.token_ids, one.role) for one in self.segments]
        return described(engine, map(registry.find, found))


@dataclass(frozen=True)
class Blend:
    """These segments joined, with a fraction of their tokens recomputed; other requests wait meanwhile.

    ``is_again``: the message was sent before, so a segment that has failed since then is not tried again.
    """

    segment_ids: tuple[str, ...]
    fraction: float
    is_again: bool = False

    def answer(self, engine: Any) -> SegmentInfo | None:
        """See :class:`Inquiry`; None while one of them is being computed.

        Raises RequestError as ``blend`` does, and RuntimeError if a segment cannot be computed.
        """
        registry = engine.segments
        segments = [registry.find(name) for name in self.segment_ids]
        registry.check(segments, sum(map(len, segments)))
        registry.touch(segments)
        for segment in segments:
            if self.is_again and segment.error is not None:
                raise RuntimeError(f"segment {segment.segment_id} could not be computed: {segment.error}")
            segment.error = None
            registry.want(segment)
        if not all(segment.is_resident for segment in segments):
            return None
        return described(engine, [registry.find(engine.blend(self.segment_ids, self.fraction))])[0]


@dataclass(frozen=True)
class Page:
    """Up to ``limit`` segments, least recently used first, starting after the id ``after``."""

    limit: int
    after: str | None = None

    def answer(self, engine: Any) -> tuple[list[SegmentInfo], bool]:
        """See :class:`Inquiry`; also returns whether there are more. Raises UnknownSegmentError for ``after``."""
        segments = iter(engine.segments.segments.values())
        if self.after is not None:
            last = engine.segments.find(self.after)
            next(segment for segment in segments if segment is last)
        page = list(islice(segments, self.limit + 1))
        return described(engine, page[: self.limit]), len(page) > self.limit


@dataclass(frozen=True)
class Find:
    """One segment by its id."""

    segment_id: str

    def answer(self, engine: Any) -> SegmentInfo:
        """See :class:`Inquiry`. Raises UnknownSegmentError."""
        return described(engine, [engine.segments.find(self.segment_id)])[0]


@dataclass(frozen=True)
class Forget:
    """Remove a segment: its id, tokens, keys and values."""

    segment_id: str

    def answer(self, engine: Any) -> None:
        """See :class:`Inquiry`. Raises UnknownSegmentError and SegmentInUseError."""
        engine.segments.forget(engine.segments.find(self.segment_id))


def described(engine: Any, segments: Iterable[Segment]) -> list[SegmentInfo]:
    """Facts about these segments of an engine."""
    block_bytes = engine.view.num_bytes // engine.segments.num_blocks

    def info(segment: Segment) -> SegmentInfo:
        num_bytes = 0 if segment.blocks is None else len(segment.blocks) * block_bytes
        return SegmentInfo(segment.segment_id, segment.role, len(segment), num_bytes, segment.num_users)

    return list(map(info, segments))
