"""What a request says of its tokens: which are computed next, and what the sampler receives of them."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from shared.engine.request import Request, TokenLogprobs
from shared.sampling.params import SamplingParams


def make(num_outputs: int = 0, end_ids: tuple[int, ...] = (), **params: Any) -> Request:
    """A prompt of three tokens, and outputs from before."""
    return Request("a", [1, 2, 3], SamplingParams(**params), 0, end_ids, output_ids=[*range(10, 10 + num_outputs)])


@pytest.mark.parametrize(
    ("num_outputs", "num_pending", "num_scheduled", "expected"),
    [
        (0, 0, 0, "prefilling"),
        (0, 0, 2, "prefilling"),
        (0, 1, 3, "decoding"),
        (1, 0, 3, "decoding"),
        (1, 0, 4, ""),
        (1, 1, 4, "decoding"),
        (4, 0, 0, "prefilling"),
        (4, 0, 3, "prefilling"),  # outputs are recomputed too
        (4, 0, 6, "decoding"),
    ],
)
def test_a_request_is_prefilling_until_its_newest_token_alone_is_left(
    num_outputs: int, num_pending: int, num_scheduled: int, expected: str
) -> None:
    request = make(num_outputs)
    request.num_pending_tokens, request.num_scheduled_tokens = num_pending, num_scheduled
    assert (request.is_prefilling, request.is_decoding) == (expected == "prefilling", expected == "decoding")
    assert request.num_unscheduled_tokens == 3 + num_outputs + num_pending - num_scheduled


def test_a_range_of_ids_may_lie_in_prompt_and_outputs() -> None:
    request = make(3)
    for start, stop in combinations(range(7), 2):
        packed = np.frombuffer(request.packed_ids(start, stop), np.int64)
        assert request.ids(start, stop) == packed.tolist() == request.token_ids[start:stop]


def test_ids_that_end_an_output_are_masked_until_it_is_long_enough() -> None:
    """Drafts in front of a row count."""
    request = make(1, (2, 7), min_tokens=3, stop_token_ids=(7,))
    assert [request.sampling_row(n).masked_ids for n in range(4)] == [(2, 7), (2, 7), (), ()]
    assert request.ending_ids == (2, 7)
    assert make(1, (2, 7), ignore_eos=True, stop_token_ids=(7,)).ending_ids == (7,)


def test_penalties_see_the_drafts_in_front_of_a_row() -> None:
    request, plain = make(1, frequency_penalty=1.0), make(1)
    request.draft_ids = plain.draft_ids = [20, 21]
    assert [request.sampling_row(n).output_ids for n in range(3)] == [[10], [10, 20], [10, 20, 21]]
    assert plain.sampling_row(2).output_ids is plain.output_ids


def test_recomputed_log_probabilities_of_the_prompt_replace_the_first_ones() -> None:
    first, second, again = (TokenLogprobs(-float(n), ()) for n in range(1, 4))
    request = make(prompt_logprobs=0)
    request.add_prompt_logprobs(0, [first, second])
    assert request.prompt_logprobs == [None, first, second]
    assert not request.needs_prompt_logits
    request.add_prompt_logprobs(1, [again])
    assert request.prompt_logprobs == [None, first, again]
