"""A step finds the ids that the host does not know yet where the step before it left them."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from shared.engine.executor.last_ids import LastIds
from shared.engine.runner import Runner
from shared.kernels.sampling.pending_ids import fill_pending
from shared.sampling.sampler import SamplingRow
from tests.comparison import assert_equal
from tests.unit.test_runner import Step

OVERLAPPED = partial(Runner, last_ids=LastIds)


def test_three_steps_are_run_before_any_token_is_looked_at() -> None:
    """In changing company and order."""
    step = Step(4, OVERLAPPED)
    first = step.run([0, 1, 2])
    second = step.run([2, 0])
    third = step.run([1, 3, 2])  # 3 brings its prompt, and nothing of it is in flight
    assert_equal(step.model.seen, [[10, 5, 20, 5, 5, 30], [31, 11], [21, 5, 5, 5, 40, 32]], "input ids of each step")
    found = (first.token_ids, second.token_ids, third.token_ids)
    assert_equal(found, ([11, 21, 31], [32, 12], [22, 41, 33]), "sampled ids of each step")
    counts = (step.runner.num_forwards, step.runner.num_tokens_computed)
    assert_equal(counts, (3, 6 + 2 + 6), "forwards and tokens computed")


def test_an_id_that_the_host_knows_is_taken_from_the_host() -> None:
    step = Step(2, OVERLAPPED)
    step.commit([0, 1], step.run([0, 1]))
    step.requests[0].output_ids[-1] = 17  # as a stop string or a draft may have changed it
    assert step.run([0, 1]).token_ids == [18, 22]
    assert step.model.seen[-1] == [17, 21]


@pytest.mark.failing_forwards
def test_pending_ids_reach_the_right_sequences_after_a_failure_too() -> None:
    step = Step(4, OVERLAPPED)
    step.run([0, 1, 2, 3])
    step.model.failing = {31}
    sampled = step.run([3, 2, 1, 0])
    assert (sampled.token_ids, list(sampled.errors)) == ([42, 22, 12], [1])
    assert step.run([0, 1, 3]).token_ids == [13, 23, 43]


@pytest.mark.failing_forwards
def test_pending_ids_survive_a_draw_that_was_made_in_parts() -> None:
    """Sampling that fails is halved down to the rows that fail; all its parts count as one of the few that are kept."""
    step = Step(8, OVERLAPPED)
    sample = step.runner.sampler.sample

    def drawing(logits: torch.Tensor, rows: Sequence[SamplingRow], places: Any) -> Any:
        if {11, 31, 51} & {*logits.argmax(-1).tolist()}:
            raise ValueError("injected")
        return sample(logits, rows, places)

    step.runner.sampler.sample = drawing  # type: ignore[method-assign]
    sampled = step.run(range(6))
    assert (sampled.token_ids, sorted(sampled.errors)) == ([21, 41, 61], [0, 2, 4])
    assert (step.run([6]).token_ids, step.run([7]).token_ids) == ([71], [81])
    assert step.run([1, 3, 5]).token_ids == [22, 42, 62]


def test_ids_in_flight_are_those_sampled_last_for_their_rows() -> None:
    last_ids = torch.arange(100, 108)
    ids = torch.tensor([5, -1, 7, -8, 0, -3])
    address = ids.data_ptr()
    fill_pending(ids, last_ids)
    assert_equal(ids.tolist(), [5, 100, 7, 107, 0, 102], "ids; -1 is row 0, and the last id of row n is 100 + n")
    assert ids.data_ptr() == address, "the ids are changed in place: a captured step reads this address"
