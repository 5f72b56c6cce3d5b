"""The pool against a model of it, and its view against one contiguous cache for each sequence."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shared.cache.contiguous import ContiguousCache, ContiguousView
from shared.cache.contiguous_pool import ContiguousKVCachePool
from shared.checkpoints.shapes import SHAPES
from shared.engine.batch import Batch
from shared.engine.request import Request
from shared.errors import CapacityError, ConfigError
from shared.loading.config_json import parse_config
from shared.loading.loader import load_model
from shared.sampling.params import SamplingParams

CONFIG = replace(
    parse_config(SHAPES["tiny-llama"]), num_layers=2, num_heads=4, num_kv_heads=2, head_dim=2, windows=(None, None)
)
SLOTS, CAPACITY = 3, 10
IDS = st.sampled_from("abcde")
TOKENS = st.integers(-1, CAPACITY + 1)


class Pool(RuleBasedStateMachine):
    """Grants and lengths in plain dicts, beside the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = ContiguousKVCachePool(CONFIG, SLOTS, CAPACITY, torch.float32)
        self.granted: dict[str, int] = {}
        self.lengths: dict[str, int] = {}

    @rule(request_id=IDS, tokens=TOKENS)
    def reserve(self, request_id: str, tokens: int) -> None:
        if not 0 <= tokens <= CAPACITY:
            with pytest.raises(
                CapacityError, match=f"Request {request_id} asks for {tokens} tokens and a region has 10"
            ):
                self.pool.reserve(request_id, tokens)
            return
        fits = request_id in self.granted or len(self.granted) < SLOTS
        assert self.pool.reserve(request_id, tokens) is fits
        if fits:
            self.granted[request_id] = max(self.granted.get(request_id, 0), tokens)
            self.lengths.setdefault(request_id, 0)

    @rule(request_id=IDS, tokens=TOKENS)
    def advance(self, request_id: str, tokens: int) -> None:
        length = self.lengths.get(request_id)
        if length is None or tokens < 0 or length + tokens > self.granted[request_id]:
            with pytest.raises(CapacityError):
                self.pool.advance(request_id, tokens)
            return
        self.pool.advance(request_id, tokens)
        self.lengths[request_id] += tokens

    @rule(request_id=IDS, tokens=TOKENS)
    def truncate(self, request_id: str, tokens: int) -> None:
        if not 0 <= tokens <= self.lengths.get(request_id, -1):
            with pytest.raises(CapacityError):
                self.pool.truncate(request_id, tokens)
            return
        self.pool.truncate(request_id, tokens)
        self.lengths[request_id] = tokens

    @rule(request_id=IDS)
    def release(self, request_id: str) -> None:
        self.pool.release(request_id)
        self.granted.pop(request_id, None)
        self.lengths.pop(request_id, None)

    @invariant()
    def the_pool_is_as_the_model(self) -> None:
        pool = self.pool
        assert {name: pool.length(name) for name in "abcde"} == {name: self.lengths.get(name, 0) for name in "abcde"}
        assert pool.used_tokens == sum(self.lengths.values())
        assert pool.free_tokens == (SLOTS - len(self.granted)) * CAPACITY
        assert len(pool.audit()) == len(self.granted), "each that holds a region, and nothing else, is reported"
        assert all(f"Request {name} holds region" in " ".join(pool.audit()) for name in self.granted)
        if self.granted:
            regions, lengths, granted = pool.places(list(self.granted))
            assert len(set(regions.tolist())) == len(self.granted)
            assert lengths.tolist() == [self.lengths[name] for name in self.granted]
            assert granted.tolist() == list(self.granted.values())


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: pool.free_regions.append(0), r"Of regions 0 to 2 these are held or free: \[0, 0, 1, 2\]"),
        (lambda pool: pool.free_regions.pop(), r"these are held or free: \[0, 2\]"),
        (lambda pool: pool.lengths.__setitem__(2, 4), r"Region 2 is free and has length 4 of 0 granted"),
        (lambda pool: pool.lengths.__setitem__(0, 9), r"Region 0 holds 9 tokens and 5 were granted"),
        (lambda pool: setattr(pool, "used_tokens", 1), r"The regions hold 0 tokens and 1 are counted"),
    ],
)
def test_the_audit_finds_damage(damage, message: str) -> None:
    pool = ContiguousKVCachePool(CONFIG, SLOTS, CAPACITY, torch.float32)
    assert pool.audit() == []
    pool.reserve("a", 5)
    damage(pool)
    assert any(re.search(message, line) for line in pool.audit())


@pytest.mark.parametrize(("regions", "capacity"), [(0, 5), (5, 0)])
def test_a_pool_needs_a_place(regions: int, capacity: int) -> None:
    with pytest.raises(ConfigError, match="at least 1 of 1"):
        ContiguousKVCachePool(CONFIG, regions, capacity, torch.float32)


def batch(lengths: dict[str, int], num_new: dict[str, int]) -> Batch:
    """So many new tokens behind those that each sequence has."""
    requests = []
    for name, new in num_new.items():
        ids = list(range(lengths[name] + new))
        requests.append(Request(name, ids, SamplingParams(), 0, num_computed_tokens=lengths[name]))
    return Batch.of(requests)


STEPS = [  # prompts of different lengths; all decode; a part decodes; a prompt beside; several tokens at once
    {"a": 5, "b": 1, "c": 20},
    {"a": 1, "b": 1, "c": 1},
    {"c": 1, "a": 1},
    {"d": 17, "b": 1},
    {"d": 2, "a": 3, "c": 1},
    {"d": 1},
    {"b": 1, "d": 1, "c": 1, "a": 1},
]


@pytest.mark.parametrize("backend", [None, "naive", "sdpa", "flash"])
def test_each_sequence_reads_what_a_cache_of_its_own_would_give(model_folder: Path, backend: str | None) -> None:
    """To the last bit: on a CPU a sequence's attention does not know who else is in the step."""
    model = load_model(model_folder)
    shape, generator = model.config, torch.Generator().manual_seed(0)
    pool = ContiguousKVCachePool(shape, 4, 32, torch.float32)
    pool.keys.fill_(torch.nan)
    pool.values.fill_(torch.nan)
    view = pool.view(shape.num_heads, backend)
    caches = {name: ContiguousCache(shape, 32, torch.float32) for name in "abcd"}
    alone = {n: ContiguousView(cache, "naive" if backend == "naive" else "sdpa") for n, cache in caches.items()}
    lengths = dict.fromkeys("abcd", 0)
    for step in STEPS:
        for name in step:
            assert pool.reserve(name, 32)
        tokens, logit_rows = view.prepare(batch(lengths, step))
        assert tokens.ids.tolist() == tokens.positions.tolist()
        assert logit_rows.tolist() == (np.cumsum(list(step.values())) - 1).tolist()
        for name, new in step.items():
            alone[name].prepare(new)
        T = sum(step.values())
        for layer, block in enumerate(model.blocks):
            attention = block.attention
            q = torch.randn(T, shape.num_heads, shape.head_dim, generator=generator)
            k, v = torch.randn(2, T, shape.num_kv_heads, shape.head_dim, generator=generator)
            options = {"scale": attention.scale, "window": attention.window, "softcap": attention.softcap}
            ours = view.attend(layer, view.write(layer, q, k, v, tokens.positions, attention.qk), **options)
            theirs, start = [], 0
            for name, new in step.items():
                rows = slice(start, start := start + new)
                one = alone[name]
                rotated = one.write(layer, q[rows], k[rows], v[rows], tokens.positions[rows], attention.qk)
                theirs.append(one.attend(layer, rotated, **options))
            assert torch.equal(ours, torch.cat(theirs)), (step, layer)
        for name, new in step.items():
            pool.advance(name, new)
            caches[name].advance(new)
            lengths[name] += new
    assert pool.used_tokens == sum(lengths.values())


def test_a_step_that_is_not_counted_is_forgotten() -> None:
    """A forward that failed is run again from the same places."""
    pool = ContiguousKVCachePool(CONFIG, SLOTS, CAPACITY, torch.float32)
    view = pool.view(CONFIG.num_heads)
    pool.reserve("a", 10)
    pool.reserve("b", 10)
    pool.advance("a", 3)
    both = batch({"a": 3, "b": 0}, {"a": 1, "b": 4})
    view.prepare(both)
    rows = view.rows.clone()
    view.prepare(batch({"b": 0}, {"b": 4}))
    assert view.rows.tolist() == rows[2:].tolist()
    view.prepare(both)
    assert torch.equal(view.rows, rows)
    assert pool.audit() == [
        "Request a holds region 0 with 3 tokens of 10 granted.",
        "Request b holds region 1 with 0 tokens of 10 granted.",
    ]


def test_the_view_writes_nothing_that_was_not_granted() -> None:
    pool = ContiguousKVCachePool(CONFIG, SLOTS, CAPACITY, torch.float32)
    view = pool.view(CONFIG.num_heads)
    pool.reserve("a", 4)
    view.prepare(batch({"a": 0}, {"a": 4}))
    with pytest.raises(CapacityError, match=r"would fill \[5\] tokens of \[4\] that were granted"):
        view.prepare(batch({"a": 0}, {"a": 5}))
    with pytest.raises(CapacityError, match="Request b holds no region"):
        view.prepare(batch({"b": 0}, {"b": 1}))
