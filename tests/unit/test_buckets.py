"""The sizes to which captured steps are padded."""

from itertools import pairwise

import pytest

from shared.engine.executor.buckets import Bucket, Buckets
from tests.comparison import assert_equal


def sizes(max_sequences: int) -> list[int]:
    return [bucket.num_tokens for bucket in Buckets.of(max_sequences, max_sequences + 512).decode]


def test_the_sizes_of_decode_steps() -> None:
    assert_equal(sizes(64), [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64], "sizes for 64 sequences")
    assert_equal(sizes(200)[-6:], [96, 112, 128, 160, 192, 200], "the largest sizes for 200 sequences")


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8, 9, 24, 64, 100, 128, 129, 200, 256, 1000])
def test_a_full_batch_has_a_bucket_and_little_is_padded(most: int) -> None:
    found = sizes(most)
    assert_equal(found, sorted({*found}), f"sizes for {most} sequences: ascending, each once")
    assert found[-1:] == [most], f"{most} of {most} sequences would run eagerly; the largest bucket is {found[-1:]}"
    wide = [(before, after) for before, after in pairwise(found) if after - before > min(max(1, before), 32)]
    assert wide == [], f"between these sizes more than half, or more than 32, is padding: {wide}"


def test_a_step_gets_the_smallest_bucket_that_holds_it() -> None:
    buckets = Buckets.of(24, 24 + 512)
    assert buckets.smallest(1, 1) == Bucket(1, 1, True)
    assert buckets.smallest(17, 17) == buckets.smallest(24, 24) == Bucket(24, 24, True)
    assert buckets.smallest(3, 17) == Bucket(32, 24, False)
    assert buckets.smallest(2, 536) == buckets.mixed[-1] == Bucket(536, 24, False)
    assert buckets.smallest(2, 537) is None
    assert all(bucket.num_sequences == min(24, bucket.num_tokens) for bucket in buckets.mixed)


def test_small_engines_have_few() -> None:
    buckets = Buckets.of(1, 9)
    assert (buckets.decode, buckets.mixed) == ((Bucket(1, 1, True),), (Bucket(9, 1, False),))
