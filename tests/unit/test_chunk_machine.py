"""Any order of registering, adding, stepping, failing, breaking off, evicting and aborting, in too little memory.

Beside the pool stands a naive model of its memory: which token, with which tokens before it, was written to each slot.
So a chunk that is evicted while it is used, computed twice at once or read from the wrong place shows as a request that
reads what it should not.
"""

from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared.cache.paged_layout import PagedSizes
from shared.chunks.layout import ChunkLayout
from shared.chunks.pool import ChunkKVCachePool
from shared.chunks.registry import Chunk, ChunkRegistry
from shared.chunks.scheduler import ChunkScheduler
from shared.engine.config import EngineConfig
from shared.engine.prompt import check_prompt
from shared.engine.request import Request, RequestStatus
from shared.errors import RequestError
from shared.sampling.params import SamplingParams
from shared.scheduling.schedule import Schedule
from shared.text.stopping import FinishReason
from shared.text.tokenizer import Tokenizer
from tests.unit.scheduling_loop import Loop, run_machine

MAX_SEQ_LEN = 40
MET = ("computed", "recomputed", "evicted", "preempted", "shared", "failed", "forgotten", "full")


class ChunkMachine(RuleBasedStateMachine):
    tokenizer: Tokenizer
    met: ClassVar[dict[str, int]] = dict.fromkeys(MET, 0)

    @initialize(
        about=st.fixed_dictionaries(
            {
                "block_size": st.sampled_from([1, 2, 3, 4]),
                "max_batch_size": st.integers(1, 4),
                "prefill_chunk_size": st.integers(1, 9),
                "use_prefix_caching": st.booleans(),
            }
        ),
        num_blocks=st.integers(4, 16),
        num_in_flight=st.integers(0, 1),
        max_bytes=st.integers(2000, 6000),
    )
    def begin(self, about: dict[str, Any], num_blocks: int, num_in_flight: int, max_bytes: int) -> None:
        config = EngineConfig(**about)
        self.registry = ChunkRegistry(max_bytes)
        sizes = PagedSizes(num_blocks, config.block_size, config.max_batch_size, 64, MAX_SEQ_LEN)
        self.pool = ChunkKVCachePool(sizes, None, self.registry, about["use_prefix_caching"])
        self.scheduler = ChunkScheduler(config, self.pool, MAX_SEQ_LEN, self.registry)
        self.loop = Loop(self.scheduler, self.tokenizer, lambda request, index: 1000 + index, num_in_flight)
        self.slots: dict[int, tuple[int, ...]] = {}
        self.requests: list[Request] = []
        self.ended: dict[Request, FinishReason] = {}
        self.num_computed: dict[Chunk, int] = {}

    @rule(role=st.sampled_from("ab"), count=st.integers(1, 9), is_wanted=st.booleans())
    def register(self, role: str, count: int, is_wanted: bool) -> None:
        before = set(self.registry.chunks)
        try:
            chunk = self.registry.add(role, [ord(role) + n for n in range(count)])
        except RequestError:
            ChunkMachine.met["full"] += 1
            return
        ChunkMachine.met["forgotten"] += not before <= set(self.registry.chunks)
        try:
            self.registry.check([chunk], 1)
        except RequestError:
            return
        if is_wanted:
            self.registry.want(chunk)

    @rule(data=st.data(), own=st.integers(1, 5), answer=st.integers(1, 6))
    def ask(self, data: st.DataObject, own: int, answer: int) -> None:
        known = list(self.registry.chunks.values())
        chunks = data.draw(st.lists(st.sampled_from(known), max_size=4)) if known else []
        ids = [token_id for chunk in chunks for token_id in chunk.token_ids] + [7 + n for n in range(own)]
        params, name = SamplingParams(max_new_tokens=answer), str(len(self.requests))
        try:
            check_prompt(ids, 2000, MAX_SEQ_LEN)
            self.scheduler.check(name, len(ids), params)
            self.registry.check(chunks, own + answer)
        except RequestError:
            return
        request = Request(name, ids, params, 0)
        if chunks:
            self.registry.contexts[request] = tuple(chunks)
        self.requests.append(self.loop.add(request))

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.one_step()

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        self.one_step(data.draw(st.sampled_from(list(self.scheduler.running.values()))))

    @rule()
    def break_off(self) -> None:
        if self.scheduler.has_work():
            self.run(self.scheduler.schedule())
        self.hear(self.loop.break_off())

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        if self.loop.abort(request.request_id):
            self.ended[request] = FinishReason.LENGTH

    @rule(count=st.integers(0, 9))
    def evict(self, count: int) -> None:
        in_use = [chunk for request in self.pool.users for chunk in self.registry.contexts[request]]
        ChunkMachine.met["evicted"] += self.registry.evict(count) > 0
        assert all(chunk.is_resident for chunk in in_use)

    def one_step(self, failing: Request | None = None) -> None:
        resident = set(self.registry.resident)
        schedule = self.scheduler.schedule()
        ChunkMachine.met["evicted"] += bool(resident - set(self.registry.resident))
        ChunkMachine.met["preempted"] += len(schedule.preempted)
        self.run(schedule)
        if schedule:
            self.loop.in_flight.append(schedule)
        while len(self.loop.in_flight) > (self.loop.num_in_flight if schedule else 0):
            done = self.loop.in_flight.popleft()
            before = {chunk for chunk in self.registry.chunks.values() if not chunk.is_resident}
            self.loop.finish(done, [failing] if failing in done.requests else [])
            self.scheduler.finish(self.loop.processor.catch_up())
            for chunk in before:
                if chunk.is_resident:
                    self.num_computed[chunk] = self.num_computed.get(chunk, 0) + 1
                    ChunkMachine.met["computed"] += 1
                    ChunkMachine.met["recomputed"] += self.num_computed[chunk] > 1
        self.hear(self.loop.processor.take())

    def hear(self, outputs: list) -> None:
        by_name = {request.request_id: request for request in self.requests}
        for output in outputs:
            if output.finish_reason is not None:
                assert by_name[output.request_id] not in self.ended
                self.ended[by_name[output.request_id]] = output.finish_reason
                ChunkMachine.met["failed"] += output.finish_reason is FinishReason.ERROR

    def run(self, schedule: Schedule) -> None:
        """What the device does: each sequence writes its new tokens, then reads its chunks and all its own tokens."""
        if not schedule:
            return
        layout, size = self.pool.layout(schedule), self.pool.block_size
        for source, target in layout.copies.tolist():
            for offset in range(size):
                self.slots[target * size + offset] = self.slots[source * size + offset]
        slots, places = iter(layout.slot_mapping.tolist()), {}
        for request, start, num_tokens, *_ in schedule:
            assert not self.registry.missing(request)
            for index in range(start, start + num_tokens):
                places[request, index] = next(slots)
                self.slots[places[request, index]] = self.known(request, index)
        ranges = layout.ranges if isinstance(layout, ChunkLayout) else ()
        ChunkMachine.met["shared"] += len({(one.sequence, *one.blocks) for one in ranges}) > len(
            {tuple(one.blocks) for one in ranges}
        )
        for sequence, (request, start, num_tokens, *_) in enumerate(schedule):
            mine, end = [one for one in ranges if one.sequence == sequence], 0
            for chunk, one in zip(self.registry.contexts.get(request, ()), mine, strict=True):
                assert (one.offset, one.length) == (end, len(chunk))
                end += len(chunk)
                for j in range(one.length):
                    assert self.slots[one.blocks[j // size] * size + j % size] == tuple(chunk.token_ids[: j + 1])
            table = self.pool.table(request)
            for index in range(start + num_tokens - end):
                read = self.slots[int(table[index // size]) * size + index % size]
                assert read == self.known(request, end + index), f"request {request.request_id}, token {index}"

    def known(self, request: Request, index: int) -> tuple[int, ...]:
        """A token with those before it; chunks that stand before it are marked as such."""
        ids = request.token_ids + [1000 + len(request.output_ids) + n for n in range(request.num_pending_tokens + 1)]
        mark = (-1,) if request in self.registry.contexts else ()
        return (*mark, *ids[: index + 1])

    @invariant()
    def accounts_agree(self) -> None:
        if hasattr(self, "pool"):
            pool = self.pool
            assert pool.audit_blocks() == []
            held = {block for request in pool.rows for block in pool.table(request).tolist()}
            held |= {*pool.tree.blocks().tolist(), *self.registry.blocks().tolist()} - {*pool.cached_blocks()}
            assert pool.allocator.num_free + len(pool.cached_blocks()) + len(held) == pool.allocator.num_blocks
            assert not held & {*pool.cached_blocks()}
            assert pool.free_tokens == (pool.allocator.num_free + len(pool.cached_blocks())) * pool.block_size

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        for _ in range(1000):
            if not self.loop.has_work():
                break
            self.one_step()
        assert not self.loop.has_work(), "it does not end"
        assert set(self.ended) == set(self.requests), "every request ends"
        assert all(request.status in (RequestStatus.FINISHED, RequestStatus.FAILED) for request in self.requests)
        assert self.pool.audit() == []
        assert not self.registry.computing
        assert not self.pool.users
        self.pool.drop_cached()
        assert self.pool.allocator.num_free == self.pool.allocator.num_blocks


def test_registry_pool_and_scheduler_agree_with_a_model_of_the_memory(
    tiny_checkpoints: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")
    ChunkMachine.tokenizer = Tokenizer.load(tiny_checkpoints["llama"])
    run_machine(ChunkMachine, lambda: all(ChunkMachine.met.values()), max_examples=80, stateful_step_count=30)
    assert all(ChunkMachine.met.values()), f"the runs met too little: {ChunkMachine.met}"
