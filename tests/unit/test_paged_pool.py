"""The pool of blocks against a model of it, and its view against a cache for each sequence."""

import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shared.cache import pool_size
from shared.cache.contiguous import ContiguousCache, ContiguousView, kv_bytes
from shared.cache.paged import PagedKVCachePool
from shared.checkpoints.shapes import SHAPES
from shared.engine.batch import Batch
from shared.engine.config import EngineConfig
from shared.engine.request import Request
from shared.errors import BlockError, CapacityError, ConfigError
from shared.loading.config_json import parse_config
from shared.loading.loader import load_model
from shared.sampling.params import SamplingParams

CONFIG = replace(
    parse_config(SHAPES["tiny-llama"]), num_layers=2, num_heads=4, num_kv_heads=2, head_dim=2, windows=(None, None)
)
IDS = st.sampled_from("abcde")
TOKENS = st.integers(-1, 25)


def make_pool(num_blocks: int = 6, block_size: int = 4, max_sequences: int = 4, **about: Any) -> PagedKVCachePool:
    return PagedKVCachePool(CONFIG, num_blocks, block_size, max_sequences, torch.float32, **about)


class Pool(RuleBasedStateMachine):
    """Grants and lengths in plain dicts, beside the pool."""

    @initialize(num_blocks=st.integers(1, 12), block_size=st.sampled_from([1, 2, 3, 4, 16]), rows=st.integers(1, 4))
    def begin(self, num_blocks: int, block_size: int, rows: int) -> None:
        self.pool = make_pool(num_blocks, block_size, rows, request_capacity=20)
        self.num_blocks, self.block_size, self.num_rows = num_blocks, block_size, rows
        self.capacity = min(20, num_blocks * block_size)
        self.granted: dict[str, int] = {}
        self.lengths: dict[str, int] = {}

    def num_blocks_for(self, tokens: int) -> int:
        return (tokens + self.block_size - 1) // self.block_size

    def num_free(self) -> int:
        return self.num_blocks - sum(map(self.num_blocks_for, self.granted.values()))

    @rule(request_id=IDS, tokens=TOKENS)
    def reserve(self, request_id: str, tokens: int) -> None:
        """Also to grow what a request has."""
        if not 0 <= tokens <= self.capacity:
            with pytest.raises(CapacityError, match=f"asks for {tokens} tokens and the pool has {self.capacity}"):
                self.pool.reserve(request_id, tokens)
            return
        missing = self.num_blocks_for(tokens) - self.num_blocks_for(self.granted.get(request_id, 0))
        fits = missing <= self.num_free() and (request_id in self.granted or len(self.granted) < self.num_rows)
        before = self.pool.table(request_id).tolist()
        assert self.pool.reserve(request_id, tokens) is fits
        assert self.pool.table(request_id).tolist()[: len(before)] == before, "what stands stays where it is"
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

    @rule(request_id=IDS, tokens=TOKENS)
    def shrink(self, request_id: str, tokens: int) -> None:
        if request_id not in self.granted or not self.lengths[request_id] <= tokens <= self.granted[request_id]:
            with pytest.raises(CapacityError):
                self.pool.shrink(request_id, tokens)
            return
        before = self.pool.table(request_id).tolist()
        self.pool.shrink(request_id, tokens)
        assert self.pool.table(request_id).tolist() == before[: self.num_blocks_for(tokens)]
        self.granted[request_id] = tokens

    @rule(request_id=IDS)
    def release(self, request_id: str) -> None:
        self.pool.release(request_id)
        self.granted.pop(request_id, None)
        self.lengths.pop(request_id, None)

    @rule(request_id=IDS, count=st.integers(1, 3))
    def lose_blocks_and_reclaim(self, request_id: str, count: int) -> None:
        """Blocks that were taken for a request that never got a table; those of living requests are not touched."""
        if request_id in self.granted or count > self.num_free():
            return
        lost = self.pool.allocator.allocate_many(count, request_id)
        assert len(self.pool.audit_blocks()) == count
        assert self.pool.reclaim(self.granted) == [
            f"Request {request_id} is gone and blocks {sorted(lost.tolist())} were its own."
        ]

    @rule(live=st.sets(IDS))
    def reclaim(self, live: set[str]) -> None:
        gone = [name for name in self.granted if name not in live]
        assert len(self.pool.reclaim(live)) == len(gone)
        for name in gone:
            del self.granted[name], self.lengths[name]

    @rule(request_id=IDS, block=st.integers(-1, 12))
    def give_back_what_is_not_held(self, request_id: str, block: int) -> None:
        if block in self.pool.table(request_id):
            return
        with pytest.raises(BlockError):
            self.pool.allocator.free(block, request_id)

    @invariant()
    def the_pool_is_as_the_model(self) -> None:
        pool = self.pool
        assert {name: pool.length(name) for name in "abcde"} == {name: self.lengths.get(name, 0) for name in "abcde"}
        assert pool.used_tokens == sum(self.lengths.values())
        assert pool.free_tokens == self.num_free() * self.block_size
        assert pool.audit_blocks() == []
        assert len(pool.audit()) == len(self.granted), "each that holds something, and nothing else, is reported"
        assert all(
            f"Request {name} holds {len(pool.table(name))} blocks" in " ".join(pool.audit()) for name in self.granted
        )
        tables = [pool.table(name).tolist() for name in self.granted]
        assert [len(table) for table in tables] == [self.num_blocks_for(tokens) for tokens in self.granted.values()]
        assert len({block for table in tables for block in table}) == sum(map(len, tables))
        if self.granted:
            rows, lengths, granted = pool.places(list(self.granted))
            assert [pool.tables[row, : len(table)].tolist() for row, table in zip(rows, tables, strict=True)] == tables
            assert lengths.tolist() == [self.lengths[name] for name in self.granted]
            assert granted.tolist() == list(self.granted.values())


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: pool.tables.__setitem__((0, 1), 5), "Block 5 stands in the table of a and is held by None"),
        (lambda pool: pool.tables.__setitem__((0, 1), 0), "Block 0 stands in tables 2 times"),
        (lambda pool: pool.allocator.owners.__setitem__(0, None), "Block 0 is neither free nor held"),
        (lambda pool: pool.allocator.owners.__setitem__(4, "z"), "Block 4 is free and held by z"),
        (lambda pool: pool.granted.__setitem__(0, 9), "Request a holds 2 blocks and its grant of 9 tokens fills 3"),
        (lambda pool: pool.lengths.__setitem__(0, 6), "Request a has 6 tokens and 5 were granted"),
        (lambda pool: pool.lengths.__setitem__(2, 1), "Row 2 is free and has 1 tokens of 0 granted"),
        (lambda pool: pool.free_rows.pop(), r"Of 4 rows {'a': 0} are held and \[3, 2\] free"),
        (lambda pool: setattr(pool, "used_tokens", 1), "The requests have 0 tokens and 1 are counted"),
    ],
)
def test_the_audit_finds_damage(damage, message: str) -> None:
    pool = make_pool()
    assert pool.audit() == []
    pool.reserve("a", 5)
    assert pool.audit() == ["Request a holds 2 blocks with 0 tokens of 5 granted."]
    damage(pool)
    assert any(re.match(message, line) for line in pool.audit())


@pytest.mark.parametrize("numbers", [(0, 4, 2), (4, 0, 2), (4, 4, 0)])
def test_a_pool_needs_a_block_of_a_token_for_a_sequence(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="{} blocks of {} tokens for {} sequences".format(*numbers)):
        make_pool(*numbers)


def test_a_table_grows_by_the_blocks_that_are_missing_or_not_at_all() -> None:
    pool = make_pool(6, 4, 2)
    assert pool.reserve("a", 9)
    assert pool.reserve("a", 12)
    assert pool.table("a").tolist() == [0, 1, 2], "the last block had room"
    assert pool.reserve("b", 5)
    assert pool.reserve("a", 13)
    assert (pool.table("a").tolist(), pool.table("b").tolist()) == ([0, 1, 2, 5], [3, 4])
    before = pool.audit()
    assert pool.reserve("a", 2)
    assert pool.audit() == before, "what was granted stays granted"
    assert not pool.reserve("b", 9), "no block is free"
    assert not pool.reserve("c", 0), "no row is free"
    assert pool.audit() == before, "a refusal changes nothing"
    pool.release("b")
    assert not pool.reserve("c", 9), "three blocks are needed and two are free"
    assert pool.audit() == before[:1]
    assert pool.reserve("c", 8)
    assert pool.table("c").tolist() == [3, 4]


def test_many_short_sequences_fit_where_one_long_one_does() -> None:
    """What a region would waste: 64 tokens of memory hold 16 sequences of up to 4, or one of 64."""
    pool = make_pool(16, 4, 16)
    assert [pool.reserve(str(n), 1 + n % 4) for n in range(16)] == [True] * 16
    assert not pool.reserve("0", 5)
    for n in range(16):
        pool.release(str(n))
    assert pool.reserve("long", 64)
    assert pool.audit_blocks() == []


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


@pytest.mark.parametrize(("backend", "block_size"), [(None, 1), ("naive", 3), ("sdpa", 16), ("flash", 64)])
def test_each_sequence_reads_what_a_cache_of_its_own_would_give(
    model_folder: Path, backend: str | None, block_size: int
) -> None:
    """Blocks are granted as they are needed, out of order, in memory that is NaN where nothing was written."""
    model = load_model(model_folder)
    shape, generator = model.config, torch.Generator().manual_seed(0)
    pool = PagedKVCachePool(shape, -(-32 // block_size) * 4, block_size, 4, torch.float32)
    random.Random(0).shuffle(free := pool.allocator.stack.tolist())
    pool.allocator.stack[:] = free
    pool.keys.fill_(torch.nan)
    pool.values.fill_(torch.nan)
    view = pool.view(shape.num_heads, backend)
    caches = {name: ContiguousCache(shape, 32, torch.float32) for name in "abcd"}
    alone = {n: ContiguousView(cache, "naive" if backend == "naive" else "sdpa") for n, cache in caches.items()}
    lengths = dict.fromkeys("abcd", 0)
    for step in STEPS:
        for name, new in step.items():
            assert pool.reserve(name, lengths[name] + new)
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
            torch.testing.assert_close(ours, torch.cat(theirs), rtol=1e-5, atol=1e-6)
        for name, new in step.items():
            pool.advance(name, new)
            caches[name].advance(new)
            lengths[name] += new
    assert pool.used_tokens == sum(lengths.values())
    assert pool.audit_blocks() == []


def test_a_step_that_is_not_counted_is_forgotten() -> None:
    """A forward that failed is run again from the same places."""
    pool = make_pool()
    view = pool.view(CONFIG.num_heads)
    pool.reserve("a", 10)
    pool.reserve("b", 10)
    pool.advance("a", 3)
    both = batch({"a": 3, "b": 0}, {"a": 1, "b": 4})
    view.prepare(both)
    offsets = view.offsets.clone()
    assert offsets.tolist() == [3, 12, 13, 14, 15], "blocks 0 to 2 are a's, 3 to 5 b's"
    view.prepare(batch({"b": 0}, {"b": 4}))
    assert view.offsets.tolist() == offsets[1:].tolist()
    view.prepare(both)
    assert torch.equal(view.offsets, offsets)
    assert pool.audit() == [
        "Request a holds 3 blocks with 3 tokens of 10 granted.",
        "Request b holds 3 blocks with 0 tokens of 10 granted.",
    ]


def test_the_view_writes_nothing_that_was_not_granted() -> None:
    """Also where the last block would have room."""
    pool = make_pool()
    view = pool.view(CONFIG.num_heads)
    pool.reserve("a", 5)
    view.prepare(batch({"a": 0}, {"a": 5}))
    with pytest.raises(CapacityError, match=r"would fill \[6\] tokens of \[5\] that were granted"):
        view.prepare(batch({"a": 0}, {"a": 6}))
    with pytest.raises(CapacityError, match="Request b holds no blocks"):
        view.prepare(batch({"b": 0}, {"b": 1}))


def measured(folder: Path, **given: Any) -> tuple[PagedKVCachePool, Any]:
    config = EngineConfig(model=str(folder), kv_cache_backend="paged", **given)
    model = load_model(folder)
    return PagedKVCachePool.for_engine(config, model, config.sequence_limit(model.max_positions)), model.config


def test_a_pool_takes_what_can_be_used_and_no_more(tiny_checkpoints: dict[str, Path]) -> None:
    pool, _ = measured(tiny_checkpoints["llama"], max_seq_len=100, max_batch_size=3)
    assert pool.capacity_tokens == 3 * 7 * 16
    assert pool.max_sequences == 3
    assert pool.audit() == [], "nothing is left of the forward that was measured"


def test_a_pool_takes_what_memory_is_left_beside_a_step(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoints["llama"]
    config = EngineConfig(model=str(folder), kv_cache_backend="paged", max_num_batched_tokens=640, max_seq_len=512)
    model = load_model(folder)

    def make(num_blocks: int, max_sequences: int) -> PagedKVCachePool:
        return PagedKVCachePool(model.config, num_blocks, 16, max_sequences, torch.float32)

    step = pool_size.step_bytes(config, model, 512, 640, make)
    hidden = 640 * model.config.hidden_size * 4
    assert 3 * hidden < step < 100 * hidden
    block_bytes = kv_bytes(model.config, 16, torch.float32)
    for blocks in (40, 77):
        monkeypatch.setattr(pool_size, "free_bytes", lambda device, n=blocks: 2 * (step + n * block_bytes))
        pool = PagedKVCachePool.for_engine(config, model, 512)
        assert pool.allocator.num_blocks == blocks
    monkeypatch.setattr(pool_size, "free_bytes", lambda device: 2 * (step + 31 * block_bytes))
    with pytest.raises(
        ConfigError, match=r"num_gpu_blocks is 31, all that the memory has room for: 496 tokens .* 32 blocks"
    ):
        PagedKVCachePool.for_engine(config, model, 512)


def test_the_peak_is_what_lives_at_a_time_and_not_what_was_there() -> None:
    before = torch.ones(1000)

    def run() -> None:
        a = before + 1  # 4000 bytes
        a.mul_(2).view(10, 100)
        b = torch.cat((a, a))  # 8000
        del a
        c = b + b  # 8000, where a is gone
        del b, c

    assert pool_size.peak_bytes(run, torch.device("cpu")) == 16000
    assert pool_size.peak_bytes(run, torch.device("cpu")) == 16000


def test_to_measure_loads_no_compiler() -> None:
    """PyTorch wraps what a mode defines in a function that imports its compiler when it is first called."""
    assert not hasattr(pool_size.LiveStorages.__torch_dispatch__, "__wrapped__")


def test_a_container_that_has_less_than_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pool_size.container_bytes(tmp_path) == 2**63
    for limit, expected in (("5000", 5000 - 3000 + 700), ("max", 2**63), ("100", 0)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text("3000\n")
        (tmp_path / "memory.stat").write_text("anon 10\ninactive_file 700\n")
        assert pool_size.container_bytes(tmp_path) == expected
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1234, total=9999))
    monkeypatch.setattr(pool_size, "container_bytes", lambda: 2**63)
    assert pool_size.free_bytes(torch.device("cpu")) == 1234
    with pytest.raises(ConfigError, match=r"100 blocks of 64 tokens take .* cpu has 0.00 GB free"):
        make_pool(100, 64)


def test_configs_of_other_shapes_are_counted_right() -> None:
    shape = replace(CONFIG, num_layers=3, num_kv_heads=5, head_dim=8)
    pool = PagedKVCachePool(shape, 7, 3, 2, torch.float16)
    assert pool.keys.shape == pool.values.shape == (3, 7, 3, 5, 8)
    assert pool.num_bytes == pool.keys.nbytes + pool.values.nbytes
    assert pool.capacity_tokens == pool.request_capacity == 21
