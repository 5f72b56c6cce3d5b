"""Requests and the steps that compute them, for tests of memory that need no engine and no scheduler."""

from collections.abc import Iterable, Mapping

import numpy as np

from shared.cache.layout.slots import Layout
from shared.cache.pool.interface import CachePoolProtocol
from shared.engine.request import Request
from shared.sampling.params import SamplingParams
from shared.scheduling.schedule import Schedule, Scheduled


def make_request(name: str, token_ids: Iterable[int] = range(64)) -> Request:
    """A request that has so many tokens; without them, ids that are equal to their positions."""
    return Request(name, list(token_ids), SamplingParams(), 0)


def step_of(step: Mapping[Request, int]) -> Schedule:
    """A step that computes so many tokens of each request, after those that are scheduled; it counts nothing."""
    return Schedule(1, tuple(Scheduled(request, request.num_scheduled_tokens, new) for request, new in step.items()))


def put_in_flight(schedule: Schedule) -> None:
    """Count what a step computes as scheduled, as a scheduler does at once."""
    for entry in schedule:
        entry.request.num_scheduled_tokens += entry.num_tokens


def commit(pool: CachePoolProtocol, schedule: Schedule) -> None:
    """Count what a step has computed, in the pool and in its requests."""
    for entry in schedule:
        request = entry.request
        pool.commit(request, entry.num_tokens)
        request.num_computed_tokens += entry.num_tokens
        request.num_scheduled_tokens = max(request.num_scheduled_tokens, request.num_computed_tokens)


def arrays_of(layout: Layout) -> list[list[int]]:
    """The arrays of a layout as lists, in the order of its fields."""
    return [value.tolist() for value in vars(layout).values() if isinstance(value, np.ndarray)]
