"""The map of the memory against the pool's own books, on real engines with regions and with few blocks."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shared.cache.pool.prefix import PrefixSharing
from shared.engine.config import EngineConfig
from shared.engine.memory_map import HoldingState, MemoryMap
from shared.lessons import find_lesson, lessons
from shared.sampling.params import SamplingParams
from shared.scheduling.growth import preempt
from tests.steps import make_request

BLOCK, BLOCKS = 4, 8
HELD = re.compile(r"Request (\S+) holds (\d+) blocks with (\d+) tokens of (\d+) reserved\.")
PAGED = [
    lesson.number for lesson in lessons() if "kv_cache_backend=paged" in getattr(lesson.load("engine"), "SUPPORTED", ())
]


def make_engine(folder: Path, phase: str = "06", **settings: Any) -> Any:
    """By default 8 blocks of 4 tokens."""
    sizes = (
        {"block_size": BLOCK, "num_gpu_blocks": BLOCKS} if phase >= "06" and "kv_cache_backend" not in settings else {}
    )
    config = EngineConfig(model=str(folder), max_seq_len=BLOCK * BLOCKS, seed=0, **sizes, **settings)
    return find_lesson(phase).engine(config)


def add(engine: Any, name: str, num_prompt: int, num_answer: int, first: int = 1) -> None:
    params = SamplingParams(temperature=0.0, max_new_tokens=num_answer, ignore_eos=True)
    engine.add_request(list(range(first, first + num_prompt)), params, name)


def seen(engine: Any) -> MemoryMap:
    return MemoryMap.of(engine.scheduler, engine.last_step)


def check(engine: Any, memory: MemoryMap) -> None:
    """A block is in one place, of one request unless it is shared; the figures are the pool's and its audit's."""
    entries = [entry for holding in memory.holdings for entry in enumerate(holding.blocks)]
    blocks = {block for _, block in entries}
    assert len(blocks) == len(set(entries)) == memory.num_held
    assert len(blocks) == len(entries) or isinstance(getattr(engine.pool, "extension", None), PrefixSharing)
    assert blocks | set(memory.cached) <= set(range(memory.num_blocks))
    assert not blocks & set(memory.cached)
    assert memory.num_written == engine.pool.used_tokens
    assert (memory.num_blocks - memory.num_held) * memory.block_tokens == engine.pool.free_tokens
    told = {match[1]: (int(match[2]), int(match[3])) for match in map(HELD.match, engine.pool.audit()) if match}
    assert told == {h.request_id: (len(h.blocks), h.num_written) for h in memory.holdings if h.blocks}
    assert memory.num_preemptions == engine.scheduler.num_preemptions
    assert memory.num_waiting == len(engine.scheduler.waiting)


@pytest.mark.parametrize("phase", [PAGED[0], PAGED[-1]])
def test_blocks_by_hand_through_a_preemption(folder: Path, phase: str) -> None:
    """a and b have 10 tokens each and grow; 8 blocks are full at 16 tokens each, and b has to go."""
    engine = make_engine(folder, phase)
    add(engine, "a", 10, 15)
    add(engine, "b", 10, 10, first=101)
    states: dict[str, list[str]] = {"a": [], "b": []}
    while engine.has_work():
        engine.step()
        memory = seen(engine)
        check(engine, memory)
        for holding in memory.holdings:
            states[holding.request_id].append(holding.state.value)
        if engine.last_step.step == 0:
            assert [(h.request_id, h.blocks, h.num_tokens, h.num_written) for h in memory.holdings] == [
                ("a", (0, 1, 2), 11, 10),
                ("b", (3, 4, 5), 11, 10),
            ]
            assert (memory.unit, memory.block_tokens, memory.num_blocks) == ("block", BLOCK, BLOCKS)
            assert memory.written_share == 20 / 24
        if engine.last_step.preempted:
            assert engine.last_step.preempted == ("b",)
            b = memory.holdings[-1]
            assert (b.request_id, b.state, b.blocks, b.num_written) == ("b", HoldingState.PREEMPTED, (), 0)
            assert b.num_tokens > b.num_prompt_tokens == 10
    assert states["a"] == ["prefill"] + ["decode"] * 13
    preempted = states["b"].count("preempted")
    assert states["b"] == ["prefill"] + ["decode"] * 6 + ["preempted"] * preempted + ["recompute", "decode"]
    assert preempted > 1
    end = seen(engine)
    assert (end.holdings, end.num_held, end.written_share, end.num_preemptions) == ((), 0, None, 1)


def test_a_shared_block_counts_once_and_is_cached_when_its_requests_have_ended(folder: Path) -> None:
    """b begins when a's prompt is computed: it gets a's two full blocks, and one of its own."""
    engine = make_engine(folder, "08")
    add(engine, "a", 10, 4)
    engine.step()
    add(engine, "b", 10, 3)
    engine.step()
    memory = seen(engine)
    check(engine, memory)
    assert [(h.request_id, h.state, h.blocks, h.num_written, h.num_cached_tokens) for h in memory.holdings] == [
        ("a", "decode", (0, 1, 2), 11, 0),
        ("b", "prefill", (0, 1, 3), 10, 8),
    ]
    assert (memory.num_held, memory.num_written, memory.written_share) == (4, 3 + 2 * 4 + 2, 13 / 16)
    assert (memory.cached, memory.as_json()["num_free"]) == ((), 4)
    told = json.loads(json.dumps(memory.as_json()))
    assert told["written_share"] == 13 / 16
    b = {"request_id": "b", "state": "prefill", "num_prompt_tokens": 10, "num_tokens": 11, "num_written": 10}
    assert told["holdings"][1] == b | {"num_cached_tokens": 8, "blocks": [0, 1, 3]}
    while engine.has_work():
        engine.step()
        check(engine, seen(engine))
    assert json.loads(json.dumps(memory.as_json())) == told, "a map changes no more"
    end = seen(engine)
    assert (end.holdings, end.num_held, end.written_share) == ((), 0, None)
    assert sorted(end.cached) == [0, 1, 2], "12 of a's 13 tokens fill blocks, and b's are the same"
    assert json.loads(json.dumps(end.as_json())).items() >= {"num_free": 5, "cached": list(end.cached)}.items()


@pytest.mark.parametrize(("phase", "settings"), [("04", {}), ("05", {}), ("06", {"kv_cache_backend": "contiguous"})])
def test_a_region_is_one_large_block_and_mostly_empty(folder: Path, phase: str, settings: dict[str, str]) -> None:
    engine = make_engine(folder, phase, max_batch_size=3, **settings)
    add(engine, "a", 10, 4)
    add(engine, "b", 3, 4)
    engine.step()
    memory = seen(engine)
    assert (memory.unit, memory.block_tokens, memory.num_blocks, memory.num_held) == ("region", 32, 3, 2)
    assert [(h.request_id, h.blocks, h.num_written) for h in memory.holdings] == [("a", (0,), 10), ("b", (1,), 3)]
    assert memory.written_share == 13 / 64


def test_a_request_that_is_recomputed_is_marked_while_it_waits_for_its_turn(folder: Path) -> None:
    """A request that holds its memory again and is not computed yet is being recomputed; a new one is not."""
    engine = make_engine(folder, max_num_batched_tokens=4)

    def states() -> dict[str, str]:
        return {holding.request_id: holding.state.value for holding in seen(engine).holdings}

    add(engine, "a", 4, 9)
    add(engine, "b", 4, 9)
    engine.step()
    assert states() == {"a": "prefill", "b": "prefill"}
    engine.step()
    add(engine, "c", 4, 9)
    preempt(engine.scheduler, engine.scheduler.running["b"])
    assert states() == {"a": "decode", "b": "preempted"}
    engine.scheduler.schedule()
    engine.scheduler.drop_in_flight()  # a step that was broken off: b and c hold memory, and nothing is computed
    for written in ([0, 0], [5, 0]):  # c's prompt has its turn in the next step
        check(engine, seen(engine))
        assert states() == {"a": "decode", "b": "recompute", "c": "prefill"}
        assert [holding.num_written for holding in seen(engine).holdings][1:] == written
        if written == [0, 0]:
            engine.step()


def test_memory_without_an_owner_is_shown_as_lost_beside_a_request_with_its_id(folder: Path) -> None:
    engine = make_engine(folder)
    ghost = make_request("a")
    assert engine.pool.reserve(ghost, 5)
    (lost,) = seen(engine).holdings
    assert (lost.request_id, lost.state, len(lost.blocks), lost.num_written) == ("a", "lost", 2, 0)
    check(engine, seen(engine))
    add(engine, "a", 3, 4)
    engine.step()
    states = [(h.state, h.blocks, h.num_written) for h in seen(engine).holdings]
    assert states == [("prefill", (2,), 3), ("lost", (0, 1), 0)]
    engine.pool.release(ghost)
    check(engine, seen(engine))


def test_what_a_step_in_flight_still_computes_is_not_lost(folder: Path) -> None:
    engine = make_engine(folder)
    add(engine, "a", 5, 4)
    engine.scheduler.schedule()
    assert engine.abort("a")
    assert engine.pool.free_tokens == (BLOCKS - 2) * BLOCK
    assert seen(engine).holdings == (), "its blocks come back with the step"
    engine.scheduler.drop_in_flight()
    assert engine.pool.audit() == []
