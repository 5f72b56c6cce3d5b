"""The pool of blocks against a model of it, and its view against a cache for each sequence."""

import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from shared.cache import free_memory, pool_size
from shared.cache.layout.paged import PagedLayout, PagedSizes
from shared.cache.paged_memory import PagedMemory
from shared.cache.pool.paged import PagedKVCachePool
from shared.cache.view.block_storage import PlainStorage
from shared.cache.view.contiguous import kv_bytes
from shared.cache.view.interface import BatchView
from shared.cache.view.operations_attention import OperationsAttention
from shared.cache.view.paged import PagedView
from shared.cache.view.paged_attention import staged_tables
from shared.checkpoints.shapes import SHAPES
from shared.engine.batch import Batch
from shared.engine.config import EngineConfig
from shared.engine.request import Request
from shared.errors import CapacityError, ConfigError
from shared.loading.config_json import parse_config
from shared.loading.loader import load_model
from shared.models.config import ModelConfig
from shared.ops.attention import ATTENTION_BACKENDS
from tests.comparison import assert_equal
from tests.steps import commit, make_request, step_of
from tests.unit.pool_machine import PoolMachine, check_a_step_made_again, check_beside_caches
from tests.views import paged_view

CONFIG = replace(
    parse_config(SHAPES["tiny-llama"]), num_layers=2, num_heads=4, num_kv_heads=2, head_dim=2, windows=(None, None)
)


def make_pool(num_blocks: int = 6, block_size: int = 4, max_sequences: int = 4, **options: Any) -> PagedKVCachePool:
    return PagedKVCachePool(num_blocks, block_size, max_sequences, **options)


def make_view(num_blocks: int = 6, block_size: int = 4, max_sequences: int = 4, max_tokens: int = 24) -> PagedView:
    sizes = PagedSizes(num_blocks, block_size, max_sequences, max_tokens, num_blocks * block_size)
    return paged_view(CONFIG, sizes)


class Pool(PoolMachine):
    @initialize(num_blocks=st.integers(1, 12), block_size=st.sampled_from([1, 2, 3, 4, 16]), rows=st.integers(1, 4))
    def begin(self, num_blocks: int, block_size: int, rows: int) -> None:
        self.num_blocks, self.block_size, self.num_rows = num_blocks, block_size, rows
        pool = make_pool(num_blocks, block_size, rows, request_capacity=20)
        self.set_up(pool, min(20, num_blocks * block_size))

    def num_blocks_for(self, tokens: int) -> int:
        return (tokens + self.block_size - 1) // self.block_size

    def num_free(self) -> int:
        return self.num_blocks - sum(map(self.num_blocks_for, self.granted.values()))

    def fits(self, request: Request, tokens: int) -> bool:
        missing = self.num_blocks_for(tokens) - self.num_blocks_for(self.granted.get(request, 0))
        return missing <= self.num_free() and (request in self.granted or len(self.granted) < self.num_rows)

    def left_to_reserve(self, chosen: list[Request]) -> list[Request]:
        lack = [r for r in chosen if self.num_blocks_for(r.num_tokens) > self.num_blocks_for(self.granted[r])]
        return lack if len(lack) > self.num_free() else []

    def expected_layout(self, chosen: list[Request], offsets: list[tuple[int, int]]) -> list[list[int]]:
        tables, slots = [], []
        for request, (first, end) in zip(chosen, offsets, strict=True):
            table = self.pool.table(request).tolist()
            tables.append(table[: self.num_blocks_for(end)])
            slots += [
                table[place // self.block_size] * self.block_size + place % self.block_size
                for place in range(first, end)
            ]
        rows = [self.pool.rows[request] for request in chosen]
        starts = [sum(map(len, tables[:n])) for n in range(len(tables) + 1)]
        blocks = [block for table in tables for block in table]
        return [rows, [first for first, _ in offsets], [end for _, end in offsets], slots, blocks, starts, []]

    @invariant()
    def each_holds_blocks_of_its_own(self) -> None:
        pool = self.pool
        assert pool.free_tokens == self.num_free() * self.block_size
        assert pool.audit_blocks() == []
        block_tokens, holdings = pool.holdings()
        assert block_tokens == self.block_size
        assert pool.audit() == [
            f"Request {request.request_id} holds {len(table)} blocks with {self.lengths[request]} tokens of "
            f"{self.granted[request]} reserved."
            for request, table in holdings.items()
        ], "each that holds something, and nothing else, is reported"
        assert len({block for table in holdings.values() for block in table}) == sum(map(len, holdings.values()))
        for request, tokens in self.granted.items():
            table = pool.table(request).tolist()
            assert table == holdings[request]
            assert len(table) == self.num_blocks_for(tokens)
            assert pool.tables[pool.rows[request], : len(table)].tolist() == table


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=25, stateful_step_count=40)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda pool: pool.tables.__setitem__((0, 1), 5),
            "Block 5 has 0 references and is in 1 block tables: it can be allocated while in use",
        ),
        (lambda pool: pool.granted.__setitem__(0, 9), "Request a holds 2 blocks and its 9 reserved tokens fill 3"),
        (lambda pool: pool.lengths.__setitem__(0, 6), "Request a has 6 tokens and 5 are reserved"),
        (lambda pool: pool.lengths.__setitem__(2, 1), "Row 2 is free and has 1 tokens of 0 reserved"),
        (lambda pool: pool.free_rows.pop(), r"Of 4 rows \[0\] are in use and \[3, 2\] free"),
    ],
)
def test_the_audit_finds_damage(damage, message: str) -> None:
    pool = make_pool()
    assert pool.audit() == []
    pool.reserve(make_request("a"), 5)
    assert pool.audit() == ["Request a holds 2 blocks with 0 tokens of 5 reserved."]
    damage(pool)
    assert any(re.match(message, line) for line in pool.audit())


@pytest.mark.parametrize("numbers", [(0, 4, 2), (4, 0, 2), (4, 4, 0)])
def test_a_pool_needs_a_block_of_a_token_for_a_sequence(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="{} blocks of {} tokens for {} sequences".format(*numbers)):
        make_pool(*numbers)


def test_a_table_grows_by_the_blocks_that_are_missing_or_not_at_all() -> None:
    pool, (a, b, c) = make_pool(6, 4, 2), map(make_request, "abc")
    assert pool.reserve(a, 9), "nine tokens of 24 were refused"
    assert pool.reserve(a, 12), "the last block has room for 12 tokens, and they were refused"
    assert_equal(pool.table(a).tolist(), [0, 1, 2], "table of a: the last block had room", ("entry",))
    assert_equal(pool.granted[pool.rows[a]], 12, "tokens granted to a, which needed no other block than those of its 9")
    assert pool.reserve(b, 5), "five tokens were refused with three blocks free"
    assert pool.reserve(a, 13), "a fourth block was refused with one free"
    assert_equal(
        (pool.table(a).tolist(), pool.table(b).tolist()),
        ([0, 1, 2, 5], [3, 4]),
        "tables of a and b",
        ("table", "entry"),
    )
    before = pool.audit()
    assert pool.reserve(a, 2), "a smaller wish was refused"
    assert_equal(pool.audit(), before, "audit: what was granted stays granted", ("line",))
    assert not pool.reserve(b, 9), "no block is free"
    assert not pool.reserve(c, 0), "no row is free"
    assert_equal(pool.audit(), before, "audit: a refusal changes nothing", ("line",))
    pool.release(b)
    assert not pool.reserve(c, 9), "three blocks are needed and two are free"
    assert_equal(pool.audit(), before[:1], "audit: a refusal takes no row", ("line",))
    assert pool.reserve(c, 8), "two blocks were refused with two free"
    assert_equal(pool.table(c).tolist(), [3, 4], "table of c", ("entry",))


def test_a_layout_that_reaches_ahead_has_the_blocks_of_further_tokens() -> None:
    pool, a, b = make_pool(6, 4, 2), make_request("a"), make_request("b")
    assert pool.reserve(a, 6)
    assert pool.reserve(b, 9)
    layout = pool.layout(replace(step_of({a: 3, b: 4}), num_ahead=3))
    assert_equal(layout.tables.tolist(), [0, 1, 2, 3], "blocks of 6 and 7 tokens", ("entry",))
    assert_equal((layout.table_starts.tolist(), layout.num_ahead), ([0, 2, 4], 3), "where each begins, and how far")
    pool = PagedKVCachePool(6, 4, 2, request_capacity=12)
    for request in (a, b):
        assert pool.reserve(request, 12)
    layout = pool.layout(replace(step_of({a: 11, b: 11}), num_ahead=3))
    assert_equal(layout.table_starts.tolist(), [0, 3, 6], "where each begins: none has more blocks than a table")


def test_many_short_sequences_fit_where_one_long_one_does() -> None:
    """What a region would waste: 64 tokens of memory hold 16 sequences of up to 4, or one of 64."""
    pool, short = make_pool(16, 4, 16), [make_request(str(n)) for n in range(16)]
    assert_equal(
        [pool.reserve(request, 1 + n % 4) for n, request in enumerate(short)],
        [True] * 16,
        "reserve of 16 short sequences",
        ("sequence",),
    )
    assert not pool.reserve(short[0], 5), "a 17th block was granted of 16"
    for request in short:
        pool.release(request)
    assert pool.reserve(make_request("long"), 64), "64 tokens were refused with all 16 blocks free"
    assert_equal(pool.audit_blocks(), [], "audit of the blocks", ("line",))


@pytest.mark.parametrize(("backend", "block_size"), [(None, 1), ("naive", 3), ("sdpa", 16), ("flash", 64)])
def test_each_sequence_reads_what_a_cache_of_its_own_would_give(
    model_folder: Path, backend: str | None, block_size: int
) -> None:
    """Blocks are granted as they are needed, out of order."""
    model = load_model(model_folder)
    sizes = PagedSizes(-(-32 // block_size) * 4, block_size, 4, 26, 32)
    pool = PagedKVCachePool(sizes.num_blocks, block_size, 4, 32)
    random.Random(0).shuffle(free := pool.allocator.stack.tolist())
    pool.allocator.stack[:] = free
    view = paged_view(model.config, sizes, backend=backend)
    attention = cast(OperationsAttention, view.attention)
    expected = ATTENTION_BACKENDS[backend if backend in ATTENTION_BACKENDS else "sdpa"]
    assert attention.operation is expected, f"the operation of {backend}"
    check_beside_caches(model, pool, view, backend, lambda num_tokens: num_tokens, rtol=1e-5)
    most_blocks = -(-32 // block_size)
    assert cast(PlainStorage, view.storage).buffer.shape[1] == most_blocks, "a sequence of the maximum length is read"
    assert staged_tables(sizes)["tables"][0] == 4 * most_blocks, "and all sequences of that length have room"
    assert all(len(piece.blocks) <= 1 + -(-5 // block_size) for piece in attention.pieces(2)), "the window's blocks"
    assert_equal(pool.audit_blocks(), [], "audit of the blocks", ("line",))


def test_a_slot_may_exceed_an_int32() -> None:
    tables = np.array([[7, 200_000_000]], np.int32)
    layout = PagedLayout.of(np.array([0]), np.array([15]), np.array([18]), tables, 16)
    expected = [7 * 16 + 15, 200_000_000 * 16, 200_000_000 * 16 + 1]
    assert_equal(
        layout.slot_mapping.tolist(), expected, "slots of three tokens in blocks 7 and 200,000,000", ("token",)
    )


def test_a_step_that_is_not_counted_is_forgotten() -> None:
    """Blocks 0 to 2 are of request a, 3 to 5 of b."""
    check_a_step_made_again(make_pool(), make_view(), [3, 12, 13, 14, 15])


def test_the_view_writes_nothing_that_was_not_granted() -> None:
    """The pool refuses to say where; even where the last block would have space."""
    pool, a, b = make_pool(), make_request("a"), make_request("b")
    pool.reserve(a, 5)
    Batch.of(step_of({a: 5}), pool)
    with pytest.raises(CapacityError, match=r"would write up to \[6\] tokens and \[5\] are reserved"):
        Batch.of(step_of({a: 6}), pool)
    with pytest.raises(CapacityError, match="Request b holds no blocks"):
        Batch.of(step_of({b: 1}), pool)


def test_batches_of_different_sizes_are_loaded_to_the_same_addresses() -> None:
    """Those of decode steps, and those of prompts."""
    pool, view, requests = make_pool(), make_view(max_tokens=64), [make_request(name) for name in "abc"]
    for request in requests:
        pool.reserve(request, 8)
    found: dict[bool, set[tuple[int, ...]]] = {False: set(), True: set()}
    a, b, c = requests
    for step in ({a: 5, b: 1}, {a: 1}, {b: 2}, {a: 1, b: 1, c: 1}, {c: 7}, {b: 1}):
        schedule = step_of(step)
        tokens, logit_rows, _ = view.load(Batch.of(schedule, pool))
        assert tokens.positions.tolist() == tokens.ids.tolist()
        loaded = (tokens.ids, tokens.positions, logit_rows, view.offsets)
        found[not any(count > 1 for count in step.values())].add(tuple(tensor.data_ptr() for tensor in loaded))
        commit(pool, schedule)
    assert [len(addresses) for addresses in found.values()] == [1, 1]
    assert view.staging[True].arrived.nbytes < view.staging[False].arrived.nbytes, "decode steps copy less"


def measured(folder: Path, **given: Any) -> tuple[PagedKVCachePool, BatchView, ModelConfig]:
    config = EngineConfig(model=str(folder), kv_cache_backend="paged", **given)
    model = load_model(folder)
    return *PagedMemory()(config, model, config.sequence_limit(model.max_positions)), model.config


def test_a_pool_takes_what_can_be_used_and_no_more(tiny_checkpoints: dict[str, Path]) -> None:
    with pytest.raises(
        ConfigError, match=r"num_gpu_blocks is 6: 96 tokens in blocks of 16\. .* = 100 tokens, .* 7 blocks"
    ):
        measured(tiny_checkpoints["llama"], max_seq_len=100, num_gpu_blocks=6)
    assert measured(tiny_checkpoints["llama"], max_seq_len=100, num_gpu_blocks=7)[0].capacity_tokens == 7 * 16
    pool, view, shape = measured(tiny_checkpoints["llama"], max_seq_len=100, max_batch_size=3)
    assert pool.capacity_tokens == 3 * 7 * 16
    assert (pool.max_sequences, pool.request_capacity) == (3, 100)
    assert view.num_bytes == kv_bytes(shape, pool.capacity_tokens, torch.float32), "both sides have the same size"
    assert pool.audit() == [], "nothing is left of the forward that was measured"


def test_a_pool_takes_what_memory_is_left_beside_a_step(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoints["llama"]
    config = EngineConfig(model=str(folder), kv_cache_backend="paged", max_num_batched_tokens=640, max_seq_len=512)
    model = load_model(folder)

    def make(sizes: PagedSizes) -> tuple[PagedKVCachePool, PagedView]:
        pool = PagedKVCachePool(sizes.num_blocks, sizes.block_size, sizes.max_sequences)
        return pool, paged_view(model.config, sizes)

    most = config.most_tokens_of_a_step(512)
    assert most == 640 + config.max_batch_size, "prompts, and decoding requests beside them"
    step, same = (
        pool_size.step_bytes(config, model, most, *pool_size.measured_memory(config, model, longest, most, make))
        for longest in (512, 64 * 512)
    )
    hidden = most * model.config.hidden_size * 4
    assert 3 * hidden < step < 100 * hidden
    assert same == step, "the buffer of reads is no part of it"
    block_bytes = kv_bytes(model.config, 16, torch.float32)
    for blocks in (40, 77):
        monkeypatch.setattr(pool_size, "free_bytes", lambda device, n=blocks: 2 * (step + n * block_bytes))
        pool, view = PagedMemory()(config, model, 512)
        assert pool.allocator.num_blocks == blocks
        assert view.num_bytes == blocks * block_bytes
    drafting = replace(config, use_speculative_decoding=True, draft_model=str(folder))
    most = drafting.most_tokens_of_a_step(512)
    its_step = pool_size.step_bytes(drafting, model, most, *pool_size.measured_memory(config, model, 512, most, make))
    monkeypatch.setattr(pool_size, "free_bytes", lambda device: 2 * (its_step + 80 * block_bytes))
    assert PagedMemory()(drafting, model, 512)[0].allocator.num_blocks == 40, "the draft model has as many"
    monkeypatch.setattr(pool_size, "free_bytes", lambda device: 2 * (step + 31 * block_bytes))
    with pytest.raises(
        ConfigError, match=r"num_gpu_blocks is 31, all that fit in free memory: 496 tokens .* 32 blocks"
    ):
        PagedMemory()(config, model, 512)


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
    assert free_memory.container_bytes(tmp_path) == 2**63
    for limit, expected in (("5000", 5000 - 3000 + 700), ("max", 2**63), ("100", 0)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text("3000\n")
        (tmp_path / "memory.stat").write_text("anon 10\ninactive_file 700\n")
        assert free_memory.container_bytes(tmp_path) == expected
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 30, total=1 << 33))
    monkeypatch.setattr(free_memory, "container_bytes", lambda: 2**63)
    assert free_memory.free_bytes(torch.device("cpu")) == 1 << 30
    monkeypatch.setattr(free_memory, "container_bytes", lambda: 1000)
    assert free_memory.free_bytes(torch.device("cpu")) == 1000
    monkeypatch.setattr(free_memory, "container_bytes", lambda: 2 * 2 * 2 * 2 * 6400 * 4)  # of 100 blocks of 64
    make_view(100, 64)
    with pytest.raises(ConfigError, match=r"101 blocks of 64 tokens take .* cpu has 0.00 GB free"):
        make_view(101, 64)


def test_configs_of_other_shapes_are_counted_right() -> None:
    shape = replace(CONFIG, num_layers=3, num_kv_heads=5, head_dim=8)
    view = paged_view(shape, PagedSizes(7, 3, 2, 21, 21), torch.float16)
    assert view.keys.shape == view.values.shape == (3, 7, 3, 5, 8)
    assert view.num_bytes == view.keys.nbytes + view.values.nbytes
    pool = PagedKVCachePool(7, 3, 2)
    assert pool.capacity_tokens == pool.request_capacity == 21
    assert [PagedKVCachePool(count, 3, 2).watermark_tokens for count in (7, 100, 101)] == [3, 3, 6], "a hundredth"
