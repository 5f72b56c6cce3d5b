"""The registry of segments: one copy of a content, who uses it, and which segments are evicted."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shared.cache.pool.blocks import BlockAllocator
from shared.engine.request import Request, RequestStatus
from shared.errors import RequestError, SegmentInUseError, UnknownSegmentError
from shared.sampling.params import SamplingParams
from shared.tracks.segments.layout import offsets_of
from shared.tracks.segments.registry import Segment, SegmentRegistry, segment_id
from tests.comparison import assert_equal

SIZE = 4


def make_registry(num_blocks: int = 12, max_bytes: int = 2**20) -> tuple[SegmentRegistry, BlockAllocator]:
    allocator, registry = BlockAllocator(num_blocks), SegmentRegistry(max_bytes)
    registry.join(allocator.free, num_blocks, SIZE)
    return registry, allocator


def resident(registry: SegmentRegistry, allocator: BlockAllocator, text: str) -> Segment:
    """A segment that is computed; a letter is a token."""
    segment = registry.add("user", [ord(letter) for letter in text])
    blocks = allocator.allocate(-(-len(segment) // SIZE))
    assert blocks is not None, "the allocator of the test is too small"
    registry.store(segment, blocks)
    return segment


@given(st.text(), st.lists(st.integers(0, 2**31 - 1)), st.text(), st.lists(st.integers(0, 2**31 - 1)))
@example("user", [1], "", [int.from_bytes(b"user", "little"), 1])
def test_ids_are_equal_for_equal_contents_only(role: str, ids: list[int], other: str, others: list[int]) -> None:
    assert (segment_id(role, ids) == segment_id(other, others)) is ((role, ids) == (other, others))


def test_an_unknown_id_and_a_memory_without_segments_are_refused() -> None:
    registry, _ = make_registry()
    with pytest.raises(
        RequestError, match=r"no segment 'ab'; register its content, perhaps again, .* \(0 are registered\)"
    ):
        registry.find("ab")
    with pytest.raises(RequestError, match="holds no segments"):
        SegmentRegistry().add("user", [1])
    assert registry.add("user", [1]) is registry.add("user", [1]) is not registry.add("system", [1])


def test_the_least_recently_used_goes_first_and_only_as_many_as_needed() -> None:
    registry, allocator = make_registry()
    a, b, c = (resident(registry, allocator, text) for text in ("aaaaaa", "bbbb", "ccc"))
    registry.acquire([a])
    registry.release([a])  # used last
    assert_equal(registry.evict(1), 1, "freed blocks")
    assert_equal([segment.is_resident for segment in (a, b, c)], [True, False, True], "resident", ("segment",))
    assert_equal(registry.evict(2), 3, "freed blocks: a segment is evicted whole")
    assert_equal([segment.is_resident for segment in (a, b, c)], [False, False, False], "resident", ("segment",))
    assert_equal(allocator.num_free, allocator.num_blocks, "free blocks")
    assert registry.find(a.segment_id) is a, "an evicted segment stays known"


def test_a_segment_in_use_is_never_evicted() -> None:
    registry, allocator = make_registry()
    a, b = resident(registry, allocator, "aaaa"), resident(registry, allocator, "bbbb")
    registry.acquire([a, a])  # one request, two places
    registry.release([a])
    c = resident(registry, allocator, "cccc")
    assert_equal(registry.evict(12), 2, "freed blocks: before the segment in use and after it")
    assert_equal([segment.is_resident for segment in (a, b, c)], [True, False, False], "resident", ("segment",))
    with pytest.raises(RequestError, match="is used in 1 places"):
        registry.drop(a)
    registry.release([a])
    assert_equal(registry.evict(0), 0, "freed blocks when none is asked for")
    assert_equal(registry.evict(12), 1, "freed blocks")


def test_what_could_never_fit_is_refused_and_a_segment_counts_once() -> None:
    registry, _ = make_registry(4)
    a, b = registry.add("user", [1] * 5), registry.add("user", [2] * 4)
    registry.check([a, b, a, a], 4)
    with pytest.raises(RequestError, match=r"needs 5 blocks, for 2 segments and up to 5 tokens of its own, .* has 4"):
        registry.check([a, b], 5)


def test_the_audit_finds_what_is_wrong() -> None:
    registry, allocator = make_registry()
    a = resident(registry, allocator, "aaaaa")
    request = Request("r", [1], SamplingParams(), 0)
    registry.contexts[request] = (a,)
    registry.acquire([a])
    assert registry.audit([request]) == []
    assert registry.audit([]) == [f"Segment {a.segment_id} counts 1 users and has 0."]
    a.blocks = np.zeros(1, np.int32)
    assert registry.audit([request]) == [f"Segment {a.segment_id} has 5 tokens in 1 blocks."]
    a.blocks = None
    assert len(registry.audit([request])) == 2


def test_ids_and_tokens_are_bounded_and_the_least_recently_used_are_forgotten() -> None:
    size = Segment("", "user", [0] * 8).remembered_bytes
    registry, allocator = make_registry(max_bytes=3 * size)
    a, b, c = (resident(registry, allocator, letter * 8) for letter in "abc")
    assert registry.add("user", a.token_ids) is a, "which is then the most recently used"
    d = registry.add("user", [0] * 8)
    with pytest.raises(UnknownSegmentError, match=f"no segment '{b.segment_id}'; register its content, perhaps again"):
        registry.find(b.segment_id)
    assert list(registry.segments.values()) == [c, a, d]
    assert (allocator.num_free, registry.audit([])) == (8, []), "its keys and values are gone too"
    registry.acquire([c])
    registry.release([c])
    assert list(registry.segments.values()) == [a, d, c], "what a request uses is the most recently used"
    registry.acquire([a, d])
    registry.release([a, d])
    again = registry.add("user", b.token_ids)
    assert (again.segment_id, again is b, again.is_resident) == (b.segment_id, False, False)
    assert list(registry.segments.values()) == [a, d, again]


def test_segments_that_requests_name_are_not_forgotten() -> None:
    size = Segment("", "user", [0] * 8).remembered_bytes
    registry, allocator = make_registry(max_bytes=3 * size)
    a, b, c = (registry.add("user", [n] * 8) for n in range(3))
    waiting, computing = Request("r", [1], SamplingParams(), 0), Request("c", [1], SamplingParams(), 0)
    registry.contexts[waiting] = (a,)
    registry.computing[computing] = b
    registry.want(c)
    with pytest.raises(RequestError, match=f"takes {size} bytes to remember; there are {3 * size} for all segments"):
        registry.add("user", [4] * 8)
    for segment in (a, b, c):
        with pytest.raises(SegmentInUseError, match="is being computed, or a request names it"):
            registry.forget(segment)
    assert list(registry.segments.values()) == [a, b, c], "a refusal forgets none"
    for status in RequestStatus:
        waiting.status = status
        is_over = status in (RequestStatus.FINISHED, RequestStatus.FAILED)
        assert (a in registry._named()) != is_over, f"a request that is {status}"
    registry.store(a, allocator.allocate(2))
    registry.acquire([a])
    assert a in registry._named(), "a step in flight may read it for a request that is over"
    with pytest.raises(RequestError, match="requests name too many others"):
        registry.add("user", [4] * 8)
    registry.release([a])
    registry.forget(a)
    d = registry.add("user", [4] * 8)
    with pytest.raises(RequestError, match="bytes to remember"):
        registry.add("user", [5] * 10 * size)
    assert list(registry.segments.values()) == [b, c, d], "nothing is forgotten for a segment that is refused"
    assert registry.audit([]) == []


def test_a_segment_costs_its_role_and_tokens_and_has_no_error_once_it_is_computed() -> None:
    assert Segment("", "user", [0] * 8).remembered_bytes - Segment("", "", []).remembered_bytes == 4 + 4 * 8
    registry, allocator = make_registry()
    segment = registry.add("user", [1])
    segment.error = "no memory"
    assert resident(registry, allocator, "\1") is segment
    assert segment.error is None


def test_pieces_follow_one_another() -> None:
    assert_equal(offsets_of([3, 1, 5]), [0, 3, 4], "offsets", ("piece",))
    assert_equal(offsets_of([]), [], "offsets", ("piece",))
