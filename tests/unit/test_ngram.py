"""Lookup of the newest tokens in the text before them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shared.speculation.ngram as ngram
from shared.engine.request import Request, RequestStatus
from shared.sampling.params import SamplingParams
from shared.scheduling.schedule import Schedule, Scheduled
from shared.speculation.ngram import NGramDrafter, NGramIndex
from tests.comparison import assert_equal


def longest_suffix(ids: list[int], longest: int) -> tuple[int, int]:
    """The length of the longest suffix of at least two ids that occurs before, and the end of its last occurrence."""
    for length in range(min(longest, len(ids) - 1), 1, -1):
        for end in range(len(ids) - 1, length - 1, -1):
            if ids[end - length : end] == ids[-length:]:
                return length, end
    return 0, 0


@given(
    pieces=st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=9),
    longest=st.sampled_from([2, 3, 32]),
    count=st.integers(1, 8),
)
def test_the_longest_suffix_is_continued_from_its_last_occurrence(
    pieces: list[list[int]], longest: int, count: int
) -> None:
    """However the tokens arrived."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram, "LONGEST", longest)
        patch.setattr(ngram, "MOST_VISITED", 1000)
        index, ids = NGramIndex(), []
        for piece in pieces:
            index.extend(piece)
            ids += piece
            length, end = longest_suffix(ids, longest)
            found = index.following(count)
            if not length:
                assert found == []
                continue
            continued = list(ids)
            for n in range(count):
                continued.append(continued[end + n])  # what is proposed may be read again
            assert found == continued[len(ids) :]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("abc", ""),
        ("abcab", "cabca"),
        ("abXabYab", "YabYa"),  # the later of equals
        ("cabXabYcab", "XabYc"),  # the longer, although earlier
        ("aaaa", "aaaaa"),
    ],
)
def test_examples(text: str, expected: str) -> None:
    assert_equal(following(text), expected, f"what follows {text!r}")


def following(text: str) -> str:
    """Five letters, or none; a letter is a token."""
    index = NGramIndex()
    index.extend([ord(letter) for letter in text])
    return "".join(map(chr, index.following(5)))


def test_a_search_compares_the_latest_places_and_no_suffix_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a search takes the same time however long the text is."""
    text = "ZwcabXYwcabYZwcab"
    assert_equal(following(text), "XYwca", "the longest of all")
    monkeypatch.setattr(ngram, "MOST_VISITED", 1)
    assert_equal(following(text), "YZwca", "the latest, if one place is compared")
    monkeypatch.setattr(ngram, "MOST_VISITED", 32)
    monkeypatch.setattr(ngram, "LONGEST", 2)
    assert_equal(following(text), "YZwca", "the latest of equals, if two tokens are compared")
    monkeypatch.setattr(ngram, "LONGEST", 3)
    assert_equal(following("cab1zab2cab"), "1zab2", "the longer of both, if three tokens are compared")


def test_a_step_costs_the_same_in_a_long_text() -> None:
    """A text in which the newest pair occurs everywhere: as many tokens are read."""

    class Counted(list[int]):
        num_read = 0

        def __getitem__(self, place: Any) -> Any:
            self.num_read += 1
            return super().__getitem__(place)

        def __iter__(self) -> Any:
            raise AssertionError("the whole text is read")

    def num_read(size: int) -> int:
        index = NGramIndex()
        index.extend([n % 2 for n in range(size)] + [5, 0, 1])
        index.ids = ids = Counted(index.ids)
        index.extend([0, 1])
        index.following(5)
        return ids.num_read

    assert 0 < num_read(20_000) == num_read(2_000)


def test_only_what_was_granted_is_proposed_and_nothing_for_a_request_that_has_ended() -> None:
    requests = [Request(str(n), [1, 2, 3, 1, 2], SamplingParams(), 0, status=RequestStatus.RUNNING) for n in range(3)]
    requests[2].status = RequestStatus.FINISHED
    for request in requests:
        request.draft_ids = [9]
    drafter = NGramDrafter()
    schedule = Schedule(
        1, (Scheduled(requests[0], 4, 3, 2, 3), Scheduled(requests[1], 4, 1), Scheduled(requests[2], 4, 3, 2, 3))
    )
    drafter.propose(schedule)
    assert [request.draft_ids for request in requests] == [[3, 1], [9], []]
    index = drafter.indices[requests[0]]
    requests[0].append(3)
    requests[0].append(4)
    drafter.propose(schedule)
    assert requests[0].draft_ids == []
    assert index.ids == [1, 2, 3, 1, 2, 3, 4]
    assert drafter.indices[requests[0]] is index, "extended, not made again"


def proposals(prompt: list[int], prediction: list[int], output: list[int]) -> list[int]:
    """Four tokens that are proposed after an output, of which each token comes in a step of its own."""
    params = SamplingParams(prediction_ids=tuple(prediction))
    request = Request("a", prompt, params, 0, status=RequestStatus.RUNNING)
    drafter = NGramDrafter()
    for token_id in output:
        request.append(token_id)
        drafter.propose(Schedule(1, (Scheduled(request, request.num_tokens - 1, 5, 4, 5),)))
        index = drafter.indices[request]
        known = index.ids[index.offset + len(prompt) - 1 :]
        assert known == [prompt[-1], *request.output_ids]
    return request.draft_ids


PREDICTION = [50, 51, 52, 53, 54, 55, 56]
VARIED = [n % 7 for n in range(100)]


@pytest.mark.parametrize("prompt", [[9], [8, 9], [*VARIED, 9], [*VARIED, *[9, 50] * 60, 9]], ids=len)
def test_a_prediction_is_proposed_from_the_first_token_of_the_answer_on(prompt: list[int]) -> None:
    """Also where the two newest tokens are at many places of the prompt."""
    assert proposals(prompt, PREDICTION, [50]) == [51, 52, 53, 54]
    assert proposals(prompt, PREDICTION, [50, 51, 52]) == [53, 54, 55, 56]


def test_a_prediction_is_found_again_behind_what_differs() -> None:
    assert proposals([*VARIED, 9], PREDICTION, [60, 61]) == []
    assert proposals([*VARIED, 9], PREDICTION, [60, 61, 51, 52]) == [53, 54, 55, 56]
    assert proposals([*VARIED, 9], PREDICTION, [50, 51, 70, 71, 52]) == [], "one token is not enough"
    assert proposals([*VARIED, 9], PREDICTION, [50, 51, 70, 71, 52, 53])[:3] == [54, 55, 56]


def test_a_prediction_is_preferred_to_the_prompt_and_the_answer_to_both() -> None:
    prompt = [1, 2, 3, 4, 9, 1, 2, 5, 6, 8]
    assert proposals(prompt, [], [7, 1, 2]) == [5, 6, 8, 7]
    assert proposals(prompt, [0, 1, 2, 20, 21, 22, 23], [7, 1, 2]) == [20, 21, 22, 23]
    assert proposals(prompt, [0, 1, 2, 20, 21, 22, 23], [7, 1, 2, 30, 31, 1, 2]) == [30, 31, 1, 2]
