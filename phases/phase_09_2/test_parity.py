"""Phase 9.2 gives the outputs of phase 9 while nothing is dropped; masks and moved tokens give the same attention."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from phases.phase_09.engine import Engine as Uncompressed
from phases.phase_09_2.engine import Engine
from shared.engine.config import EngineConfig
from shared.engine.request import Request
from shared.sampling.params import SamplingParams
from shared.tracks.compression.selection import Budget
from tests.mixed_requests import ALIKE, ARRIVALS, ARRIVE, GREEDY, MIXED, SMALL, Requests, seen, serve, tokens
from tests.random_loads import computes_at_once

SNAP: dict[str, Any] = {
    "compress_method": "snapkv",
    "layer_budget": 40,
    "layer_upper_budget": 56,
    "p_attn": 0.35,  # a model with random weights attends to all keys almost equally
    "query_window_size": 12,
    "steps_between_compressions": 16,
    "block_size": 4,
    "max_seq_len": 256,
    "dtype": "float32",
}
PROMPTS = [[(31 * n + 7 * m) % 250 for n in range(30 + 40 * m)] for m in range(3)]
LONG: Requests = [(prompt, GREEDY | {"max_new_tokens": 90}) for prompt in PROMPTS]


def make(folder: Path, phase: Any = Engine, **config: Any) -> Any:
    return phase(EngineConfig(model=str(folder), **config))


def running(engine: Any) -> list[Request]:
    return list(engine.scheduler.running.values())


def test_with_a_budget_above_the_length_outputs_are_those_of_phase_9(model_folder: Path) -> None:
    requests, arrivals = [*ALIKE, *MIXED], [*ARRIVE, *ARRIVALS]
    options = SMALL | {"overlap_scheduling": model_folder.name != "tiny-qwen3"}
    expected = seen(serve(make(model_folder, Uncompressed, **options), requests, arrivals)[0])
    roomy = {"compress_method": "snapkv", "layer_budget": 128, "steps_between_compressions": 8}
    engine = make(model_folder, **options, **roomy)
    assert seen(serve(engine, requests, arrivals)[0]) == expected
    assert engine.num_compressions == 0
    assert seen(serve(make(model_folder, **options), requests, arrivals)[0]) == expected


@pytest.mark.parametrize("method", ["snapkv", "rkv", "topp", "streaming"])
def test_masked_and_moved_tokens_give_the_same_outputs(tiny_checkpoints: dict[str, Path], method: str) -> None:
    for family in ("llama", "gemma3_text") if method == "snapkv" else ("qwen3",):
        logits: list[list[torch.Tensor]] = []
        for fake in (False, True):
            engine = make(tiny_checkpoints[family], **SNAP | {"compress_method": method}, if_fake_compress=fake)
            logits.append([])
            compress, noted = engine.pool.extension.compress, list[list[int]]()

            def note(*of: Any, compress: Any = compress, noted: list[list[int]] = noted) -> int:
                noted += of[-1].counts.tolist()
                return compress(*of)

            engine.pool.extension.compress = note
            with_logits(engine, logits[-1])
            serve(engine, LONG)
            assert engine.num_compressions > 10
            assert method == "streaming" or len({count for counts in noted for count in counts}) > 1, "heads differ"
            assert (engine.num_freed_blocks > 0) != fake
        assert len(logits[0]) == len(logits[1])
        for moved, masked in zip(*logits, strict=True):
            torch.testing.assert_close(moved, masked, atol=2e-5, rtol=1e-4)


def answers_of(engine: Any) -> list[list[int | None]]:
    return [tokens(outputs) for outputs in serve(engine, [*LONG, *LONG])[0]]


def with_logits(engine: Any, into: list[torch.Tensor]) -> None:
    """Keep a copy of every step's logits; none is computed in parts."""
    computes_at_once(engine)
    forward = engine.runner.forward

    def kept(batch: Any) -> Any:
        launched = forward(batch)
        into.append(launched.logits.clone())
        return launched

    engine.runner.forward = kept


def test_a_sliding_window_keeps_its_window(tiny_checkpoints: dict[str, Path]) -> None:
    engine = make(tiny_checkpoints["gemma3_text"], **SNAP)
    engine.add_request(PROMPTS[2], SamplingParams(**GREEDY, max_new_tokens=50))
    while engine.num_compressions < 2:
        engine.step()
    packed = engine.pool.extension.packed[running(engine)[0]]
    windows = engine.model.config.windows
    assert {window is None for window in windows} == {True, False}
    for counts, window in zip(packed.counts.tolist(), windows, strict=True):
        assert window is None or counts == [min(window, packed.num_tokens)] * len(counts)


def test_an_interrupted_compression_is_repeated(folder: Path) -> None:
    expected = answers_of(make(folder, **SNAP))
    engine = make(folder, **SNAP)
    compress, step, calls = engine.view.attention.compress, engine.step, []

    def interrupted(sequence: Any, place: Any) -> Any:
        packed = compress(sequence, place)
        calls.append(packed)
        if len(calls) in (3, 8):
            raise KeyboardInterrupt
        return packed

    def stepping() -> Any:
        try:
            return step()
        except KeyboardInterrupt:
            return step()

    compressed, counted = engine.scheduler.compressed, list[tuple[bool, int]]()

    def counting(request: Request, kept: Any, num_freed: int) -> None:
        counted.append((kept is not None, num_freed))
        compressed(request, kept, num_freed)

    engine.scheduler.compressed = counting
    engine.view.attention.compress, engine.step = interrupted, stepping
    assert answers_of(engine) == expected
    assert (engine.num_compressions, engine.num_freed_blocks) == tuple(map(sum, zip(*counted, strict=True)))
    assert engine.load().num_preemptions == 2


def test_a_preempted_request_comes_to_the_same_cache(folder: Path) -> None:
    """Six requests in a pool that holds one without compression, compared with the same requests in a pool that holds
    all."""
    roomy, small = (make(folder, **SNAP, num_gpu_blocks=n) for n in (400, 64))
    caches: list[dict[tuple[str, int], tuple[list[Any], torch.Tensor]]] = []
    for engine in (roomy, small):
        caches.append(caches_of(engine, seen_answers := []))
        if engine is roomy:
            expected = seen_answers
    assert small.load().num_preemptions > 0
    assert seen_answers == expected
    common = caches[0].keys() & caches[1].keys()
    assert len(common) == len(caches[0]) > 10
    for point in common:
        (counts, keys), (same_counts, same_keys) = caches[0][point], caches[1][point]
        assert counts == same_counts
        torch.testing.assert_close(keys, same_keys, atol=1e-5, rtol=1e-4)


def test_requests_that_share_a_prefix_keep_what_they_keep_alone(folder: Path) -> None:
    """A conversation of 150 tokens continues in five ways: without sharing, with it, and also with few blocks."""
    requests: Requests = [([*PROMPTS[2], *PROMPTS[2][:40], n], GREEDY | {"max_new_tokens": 60}) for n in range(5)]
    caches: list[Any] = []
    answers: list[list[Any]] = []
    for is_sharing, num_blocks in ((False, 400), (True, 400), (True, 64)):
        engine = make(
            folder, **SNAP, use_prefix_caching=is_sharing, num_gpu_blocks=num_blocks, attn_reduce_method="max"
        )
        assert engine.view.attention.kept.budget == Budget(40, 56, 0.35, reduction="max")
        free_memory, asked = engine.scheduler.free_memory, list[Request]()

        def noted(request: Request, free_memory: Any = free_memory, asked: list[Request] = asked) -> bool:
            asked.append(request)
            return free_memory(request)

        engine.scheduler.free_memory = noted
        answers.append([])
        caches.append(caches_of(engine, answers[-1], requests))
        assert bool(asked) == (num_blocks == 64), "a prefix that is shared cannot be packed"
        if num_blocks == 400:
            assert engine.load().num_prefix_hits == (4 * 136 if is_sharing else 0), "all but the window of 12 queries"
        engine.pool.drop_cached()
        assert engine.pool.audit() == []
        assert answers[-1] == answers[0]
        assert caches[-1].keys() == caches[0].keys()
        assert len(caches[0]) >= 15
        for point, (counts, keys) in caches[0].items():
            assert counts == caches[-1][point][0]
            torch.testing.assert_close(keys, caches[-1][point][1], atol=1e-5, rtol=1e-4)


def caches_of(
    engine: Any, answers: list[Any], requests: Requests = (*LONG, *LONG)
) -> dict[tuple[str, int], tuple[list[Any], torch.Tensor]]:
    """What is packed at each compression of each request, at its last compression of that length."""
    caches, compressed = {}, engine.scheduler.compressed

    def noted(request: Request, kept: Any, num_freed: int) -> None:
        cells = engine.view.attention.kept.cells.packed(np.arange(sum(map(sum, kept))), engine.pool.table(request))
        name = request.request_id, request.num_computed_tokens
        caches[name] = kept, engine.view.attention.kept.keys[torch.from_numpy(cells)].clone()
        compressed(request, kept, num_freed)

    engine.scheduler.compressed = noted
    answers += [tokens(outputs) for outputs in serve(engine, requests)[0]]
    return caches


FEW = SNAP | {"layer_budget": 37, "layer_upper_budget": 42, "steps_between_compressions": 8, "max_seq_len": 96}
LENGTHS, NEW = (1, 40, 60), (5, 30)


class Machine(RuleBasedStateMachine):
    """Requests arrive, compress, lose their memory and are aborted; each gives the same output as alone."""

    def __init__(self, folder: Path, alone: dict[tuple[int, int, int], list[int]]) -> None:
        super().__init__()
        self.folder, self.alone, self.engine = folder, alone, None
        self.said: dict[str, list[int]] = {}
        self.asked: dict[str, tuple[int, int]] = {}

    @initialize(more=st.integers(0, 20), block_size=st.sampled_from([1, 3]), overlap=st.booleans())
    def begin(self, more: int, block_size: int, overlap: bool) -> None:
        self.engine = make(
            self.folder,
            **FEW | {"block_size": block_size},
            num_gpu_blocks=96 // block_size + more,
            overlap_scheduling=overlap,
        )
        self.block_size = block_size

    @rule(length=st.sampled_from(LENGTHS), num_new=st.sampled_from(NEW))
    def add(self, length: int, num_new: int) -> None:
        name = str(len(self.asked))
        self.asked[name], self.said[name] = (length, num_new), []
        self.engine.add_request(PROMPTS[1][:length], SamplingParams(**GREEDY, max_new_tokens=num_new), name)

    @rule(count=st.integers(1, 25))
    def step(self, count: int) -> None:
        for _ in range(count):
            for output in self.engine.step():
                self.said[output.request_id].append(output.token_id)
            self.hold()

    @rule(number=st.integers(0, 30))
    def abort(self, number: int) -> None:
        self.engine.abort(str(number))

    def hold(self) -> None:
        pool: Any = self.engine.pool
        assert pool.audit_blocks() == []
        for request in running(self.engine):
            one, cells = pool.extension.holding(pool, request), pool.extension.cells
            num_packed = one.packed.total if one.num_packed_slots else 0
            filled = num_packed + (one.length - one.num_packed_slots) * cells.per_block // cells.block_size
            held = pool.num_held[one.row] * cells.per_block
            reserved = pool.granted[pool.rows[request]] - pool.lengths[pool.rows[request]]
            assert held < filled + (reserved + 2 * pool.block_size) * pool.extension.cells.per_block / pool.block_size

    @invariant()
    def what_was_said_is_right(self) -> None:
        for name, (length, num_new) in self.asked.items():
            said = self.said[name]
            assert said == self.alone[self.block_size, length, num_new][: len(said)]

    def teardown(self) -> None:
        if self.engine is not None:
            while self.engine.has_work():
                self.step(1)
            assert self.engine.pool.audit() == []


@pytest.fixture(scope="module")
def alone(tiny_checkpoints: dict[str, Path]) -> dict[tuple[int, int, int], list[int]]:
    """A request's output when it runs alone, by block size, prompt length, and new tokens."""
    said = {}
    for block_size in (1, 3):  # less than a block is not dropped, so outputs depend on it
        engine = make(tiny_checkpoints["llama"], **FEW | {"block_size": block_size}, use_prefix_caching=False)
        for length, num_new in product(LENGTHS, NEW):
            outputs = engine.generate(PROMPTS[1][:length], SamplingParams(**GREEDY, max_new_tokens=num_new))
            said[block_size, length, num_new] = [output.token_id for output in outputs]
    return said


def test_any_order_of_arrivals_steps_and_aborts(tiny_checkpoints: dict[str, Path], alone: Any) -> None:
    size = settings(max_examples=12, stateful_step_count=15)
    run_state_machine_as_test(lambda: Machine(tiny_checkpoints["llama"], alone), settings=size)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("block_size", [1, 3])
def test_requests_that_compress_lose_their_memory_and_share_prefixes(
    tiny_checkpoints: dict[str, Path], alone: Any, block_size: int, overlap: bool
) -> None:
    machine = Machine(tiny_checkpoints["llama"], alone)
    machine.begin(0, block_size, overlap)
    for _ in range(4):  # the second begins once the first's prompt is computed, and is compressed as it grows
        machine.add(40, 30)
        machine.step(1)
    for _ in range(6):
        machine.step(5)
        machine.what_was_said_is_right()
    machine.teardown()
    machine.what_was_said_is_right()
    load = machine.engine.load()
    assert min(machine.engine.num_compressions, load.num_prefix_hits, load.num_preemptions) > 0
