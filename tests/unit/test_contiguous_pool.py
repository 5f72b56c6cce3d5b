"""The pool against a model of it, and the view of its regions against one contiguous cache for each sequence."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import invariant

from shared.cache.pool.contiguous import ContiguousKVCachePool
from shared.cache.view.contiguous_pool import ContiguousPoolView
from shared.checkpoints.shapes import SHAPES
from shared.engine.batch import Batch
from shared.engine.request import Request
from shared.errors import CapacityError, ConfigError
from shared.loading.config_json import parse_config
from shared.loading.loader import load_model
from tests.comparison import assert_equal
from tests.steps import make_request, put_in_flight, step_of
from tests.unit.pool_machine import PoolMachine, check_a_step_made_again, check_beside_caches

CONFIG = replace(
    parse_config(SHAPES["tiny-llama"]), num_layers=2, num_heads=4, num_kv_heads=2, head_dim=2, windows=(None, None)
)
REGIONS, CAPACITY = 3, 10


def make_pool() -> ContiguousKVCachePool:
    return ContiguousKVCachePool(REGIONS, CAPACITY)


def make_view(max_tokens: int = 20) -> ContiguousPoolView:
    return ContiguousPoolView(CONFIG, REGIONS, CAPACITY, max_tokens, torch.float32)


class Pool(PoolMachine):
    def __init__(self) -> None:
        super().__init__()
        self.set_up(make_pool(), CAPACITY)

    def fits(self, request: Request, tokens: int) -> bool:
        return request in self.granted or len(self.granted) < REGIONS

    def left_to_reserve(self, chosen: list[Request]) -> list[Request]:
        return chosen

    def expected_layout(self, chosen: list[Request], places: list[tuple[int, int]]) -> list[list[int]]:
        regions = [self.pool.regions[request] for request in chosen]
        first, ends = [first for first, _ in places], [end for _, end in places]
        slots = [
            region * CAPACITY + place
            for region, (first, end) in zip(regions, places, strict=True)
            for place in range(first, end)
        ]
        return [regions, first, ends, slots]

    @invariant()
    def each_holds_a_region_of_its_own(self) -> None:
        pool = self.pool
        assert_equal(pool.free_tokens, (REGIONS - len(self.granted)) * CAPACITY, "free tokens")
        block_tokens, holdings = pool.holdings()
        assert_equal(block_tokens, CAPACITY, "tokens of a region")
        assert_equal(len({region for (region,) in holdings.values()}), len(self.granted), "different regions")
        audit = [
            f"Request {request.request_id} holds region {region} with {self.lengths[request]} tokens of "
            f"{self.granted[request]} reserved."
            for request, (region,) in holdings.items()
        ]
        assert_equal(pool.audit(), audit, "audit: each that holds a region, and nothing else", ("line",))


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=40)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda pool: pool.free_regions.append(0),
            r"Regions 0 to 2 must each be held or free once; these are: \[0, 0, 1, 2\]",
        ),
        (lambda pool: pool.free_regions.pop(), r"once; these are: \[0, 2\]"),
        (lambda pool: pool.lengths.__setitem__(2, 4), r"Region 2 is free and has length 4 of 0 reserved"),
        (lambda pool: pool.lengths.__setitem__(0, 9), r"Region 0 holds 9 tokens and 5 are reserved"),
        (lambda pool: setattr(pool, "used_tokens", 1), r"The regions hold 0 tokens and used_tokens is 1"),
    ],
)
def test_the_audit_finds_damage(damage, message: str) -> None:
    pool = make_pool()
    assert pool.audit() == []
    pool.reserve(make_request("a"), 5)
    damage(pool)
    assert any(re.search(message, line) for line in pool.audit())


@pytest.mark.parametrize(("regions", "capacity"), [(0, 5), (5, 0)])
def test_a_pool_needs_a_place(regions: int, capacity: int) -> None:
    with pytest.raises(ConfigError, match="both must be at least 1"):
        ContiguousKVCachePool(regions, capacity)


@pytest.mark.parametrize("backend", [None, "naive", "sdpa", "flash"])
def test_each_sequence_reads_what_a_cache_of_its_own_would_give(model_folder: Path, backend: str | None) -> None:
    """Bitwise: on a CPU a sequence's attention does not depend on the other sequences of the step."""
    model, pool = load_model(model_folder), ContiguousKVCachePool(4, 32)
    view = ContiguousPoolView(model.config, 4, 32, 26, torch.float32, backend=backend)
    check_beside_caches(model, pool, view, backend, lambda num_tokens: 32)


def test_a_step_that_is_not_counted_is_forgotten() -> None:
    """Request b has the second region of 10 tokens."""
    check_a_step_made_again(make_pool(), make_view(), [3, 10, 11, 12, 13])


def test_the_view_writes_nothing_that_was_not_granted() -> None:
    """The pool refuses to say where, also after tokens in flight."""
    pool, a, b = make_pool(), make_request("a"), make_request("b")
    pool.reserve(a, 4)
    Batch.of(step_of({a: 4}), pool)
    with pytest.raises(CapacityError, match=r"would write up to \[5\] tokens and \[4\] are reserved"):
        Batch.of(step_of({a: 5}), pool)
    with pytest.raises(CapacityError, match="Request b holds no region"):
        Batch.of(step_of({b: 1}), pool)
    put_in_flight(step_of({a: 4}))
    with pytest.raises(CapacityError, match=r"would write up to \[5\] tokens and \[4\] are reserved"):
        Batch.of(step_of({a: 1}), pool)
