"""Any order of adding, stepping, failing, breaking off and aborting, with prefixes shared in too little memory.

Beside the pool stands a naive model of its memory: which token, after which tokens, was written to each slot. So a
block that is shared wrongly, given away too early or written while it is shared shows as a request that reads what it
should not.
"""

from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from shared.cache.paged_layout import PagedSizes
from shared.cache.prefix import PrefixKVCachePool
from shared.engine.config import EngineConfig
from shared.engine.request import Request
from shared.scheduling.prefix import PrefixScheduler
from shared.scheduling.schedule import Schedule
from shared.text.tokenizer import Tokenizer
from tests.unit.scheduling_loop import run_machine
from tests.unit.test_preemption_machine import MAX_SEQ_LEN, Machine


class PrefixMachine(Machine):
    """``slots`` holds what was written to each slot: the tokens up to this one."""

    pool: PrefixKVCachePool
    num_hits: ClassVar[int] = 0  # tokens, of all runs
    num_copies: ClassVar[int] = 0
    num_waits: ClassVar[int] = 0  # requests that waited for another's blocks, step by step
    num_evicted: ClassVar[int] = 0

    def make_pool(self, num_blocks: int, block_size: int, places: int) -> PrefixKVCachePool:
        self.slots: dict[int, list[int]] = {}
        self.next_prompt: list[int] = []
        return PrefixKVCachePool(PagedSizes(num_blocks, block_size, places, 64, MAX_SEQ_LEN), None)

    def make_scheduler(self, config: EngineConfig, pool: PrefixKVCachePool, is_chunked: bool) -> PrefixScheduler:
        return PrefixScheduler(config, pool, MAX_SEQ_LEN)

    def prompt(self, num_tokens: int) -> list[int]:
        return (self.next_prompt + [5] * num_tokens)[:num_tokens]

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), cut=st.integers(0, 6), more=st.integers(1, 3), answer=st.integers(1, 8))
    def add_the_next_turn(self, data: st.DataObject, cut: int, more: int, answer: int) -> None:
        """A prompt that begins with the prompt and the answer of another request, or a part of them."""
        earlier = data.draw(st.sampled_from(self.requests)).token_ids
        self.next_prompt = [*earlier[: len(earlier) - cut], *[6] * more][: MAX_SEQ_LEN - 1]
        self.add_request(str(len(self.requests)), max(1, len(self.next_prompt)), answer)
        self.next_prompt = []

    def plan(self) -> Schedule:
        num_blocks = self.pool.tree.num_blocks
        schedule = super().plan()
        PrefixMachine.num_evicted += max(0, num_blocks - self.pool.tree.num_blocks)
        PrefixMachine.num_waits += sum(map(self.pool.must_wait, self.scheduler.waiting.values()))
        self.run(schedule)
        self.check_that_no_block_is_computed_twice(schedule)
        return schedule

    def run(self, schedule: Schedule) -> None:
        """What the device does: copies, then writes; then each sequence reads all its tokens."""
        layout, size = self.pool.layout(schedule), self.pool.block_size
        PrefixMachine.num_copies += len(layout.copies)
        for source, target in layout.copies.tolist():
            for offset in range(size):
                self.slots[target * size + offset] = self.slots[source * size + offset]
        slots = iter(layout.slot_mapping.tolist())
        for request, start, num_tokens, *_ in schedule:
            for index in range(start, start + num_tokens):
                self.slots[next(slots)] = self.tokens(request)[: index + 1]
        for request, start, num_tokens, *_ in schedule:
            table = self.pool.table(request).tolist()
            for index in range(start + num_tokens):
                read = self.slots[table[index // size] * size + index % size]
                assert read == self.tokens(request)[: index + 1], f"request {request.request_id}, token {index}"

    def tokens(self, request: Request) -> list[int]:
        """Those known, and those that steps in flight draw."""
        known = len(request.output_ids)
        return request.token_ids + [self.token_at(request, known + n) for n in range(request.num_pending_tokens + 1)]

    def check_that_no_block_is_computed_twice(self, schedule: Schedule) -> None:
        """Except for the last of a request, which is computed again if there is no room for a copy."""
        size, begun = self.pool.block_size, set()
        for request, start, num_tokens, *_ in schedule.prompts:
            for end in range(start // size * size + size, min(start + num_tokens, request.num_tokens - size) + 1, size):
                block = tuple(request.token_ids[:end])
                assert block not in begun, "two requests compute the same block"
                begun.add(block)

    def check_order(self, order: list[Request]) -> None:
        """Only requests that wait for blocks are overtaken."""
        place = {request: number for number, request in enumerate(order)}
        running, waiting = list(self.scheduler.running.values()), list(self.scheduler.waiting.values())
        for request in waiting:
            if any(place[request] < place[other] for other in running):
                assert self.pool.must_wait(request), "a request that does not wait for blocks is overtaken"

    def check_no_room(self, waiting: list[Request], num_free: int) -> None:
        ready = [request for request in waiting if not self.pool.must_wait(request)]
        if ready:  # what it has in the tree stops being free when it is admitted
            of_tree = self.pool.tree.match(self.pool._tokens(ready[0]))[2] * self.pool.block_size
            assert num_free < ready[0].num_tokens + of_tree + self.pool.block_size, "what has room is admitted"

    def num_held(self) -> int:
        held = {block for request in self.pool.rows for block in self.pool.table(request).tolist()}
        return len(held | {*self.pool.tree.blocks().tolist()})

    def num_written(self) -> int:
        """A shared block counts once, and the source of a copy that is still to be made is in use too."""
        size, full = self.pool.block_size, set[int]()
        num_tokens = 0
        for request, prefix in self.pool.prefixes.items():
            if request in self.pool.rows:
                num_tokens += self.pool.length(request) - prefix.num_shared * size
                full |= {*self.pool.table(request)[: prefix.num_shared].tolist()}
                if prefix.num_blocks > prefix.num_shared:
                    full.add(int(prefix.node.blocks[-1]))
        return num_tokens + len(full) * size

    @invariant()
    def the_order_is_that_of_arrival(self) -> None:
        """Not here: see ``check_order``."""

    @invariant()
    def free_cached_and_held_blocks_are_all(self) -> None:
        pool = self.pool
        held = {block for request in pool.rows for block in pool.table(request).tolist()}
        held |= {*pool.tree.blocks().tolist()} - {*pool.cached_blocks()}
        assert pool.allocator.num_free + len(pool.cached_blocks()) + len(held) == pool.allocator.num_blocks
        assert not held & {*pool.cached_blocks()}
        assert set(pool.prefixes) == set(pool.rows)
        assert set(pool.computing.values()) <= set(pool.prefixes)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "loop"):
            PrefixMachine.num_hits += self.scheduler.num_prefix_hits
            assert self.pool.prefixes == self.pool.computing == {}


def test_tree_pool_and_scheduler_agree_with_a_model_of_the_memory(
    tiny_checkpoints: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")
    PrefixMachine.tokenizer = Tokenizer.load(tiny_checkpoints["llama"])
    counts = ("num_hits", "num_copies", "num_waits", "num_evicted")
    for count in counts:
        setattr(PrefixMachine, count, 0)
    Machine.num_preemptions = [0, 0]

    def met() -> dict[str, int]:
        return {count: getattr(PrefixMachine, count) for count in counts} | {"preempted": sum(Machine.num_preemptions)}

    run_machine(PrefixMachine, lambda: all(met().values()), max_examples=40, stateful_step_count=30)
    assert all(met().values()), f"the runs met too little: {met()}"
