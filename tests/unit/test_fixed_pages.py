"""Pages by arithmetic: the tables against a plain list of each request's tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import CapacityError
from shared.tracks.multi_token.fixed_pages import FixedPages
from tests.comparison import assert_equal


def test_the_tables_of_three_requests() -> None:
    pages = FixedPages(3, max_pages=4, page_size=2)
    assert_equal(pages.append(0, 5).tolist(), [0, 1, 2, 3, 4], "slots of request 0")
    assert_equal(pages.append(2, 2).tolist(), [16, 17], "slots of request 2")
    tables = pages.tables()
    assert_equal(tables.indptr.tolist(), [0, 3, 4, 5], "indptr of 5, 0 and 2 tokens in pages of 2")
    assert_equal(tables.indices.tolist(), [0, 1, 2, 4, 8], "their pages")
    assert_equal(tables.last_page_lengths.tolist(), [1, 0, 2], "tokens in their last pages")


@settings(max_examples=60)
@given(st.data(), st.integers(1, 4), st.integers(1, 5), st.integers(1, 4))
def test_every_token_is_found_in_the_slot_that_it_got(data: st.DataObject, R: int, max_pages: int, size: int) -> None:
    pages, expected = FixedPages(R, max_pages, size), [list[int]() for _ in range(R)]
    for _ in range(data.draw(st.integers(0, 12), label="steps")):
        request = data.draw(st.integers(0, R - 1), label="request")
        own = expected[request]
        if data.draw(st.booleans(), label="grows"):
            count = data.draw(st.integers(0, max_pages * size - len(own)), label="count")
            own += pages.append(request, count).tolist()
        else:
            kept = data.draw(st.integers(0, len(own)), label="kept")
            pages.truncate(request, kept)
            del own[kept:]
        tables = pages.tables()
        assert_equal(len(set(tables.indices.tolist())), int(tables.indptr[-1]), "different pages")
        for number, slots in enumerate(expected):
            owned = tables.indices[tables.indptr[number] : tables.indptr[number + 1]].tolist()
            assert_equal(len(owned), max(1, -(-len(slots) // size)), f"pages of request {number}")
            found = [owned[n // size] * size + n % size for n in range(len(slots))]
            assert_equal(found, slots, f"slots of the tokens of request {number}")
            last = len(slots) - (len(owned) - 1) * size
            assert_equal(int(tables.last_page_lengths[number]), last, f"tokens in the last page of request {number}")


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    pages = FixedPages(2, max_pages=2, page_size=3)
    pages.append(1, 4)
    with pytest.raises(CapacityError, match="Request 1 would have 7 tokens; its pages hold 6"):
        pages.append(1, 3)
    with pytest.raises(CapacityError, match="Request 1 has 4 tokens, and not 5"):
        pages.truncate(1, 5)
    assert pages.tables().last_page_lengths.tolist() == [0, 1]
