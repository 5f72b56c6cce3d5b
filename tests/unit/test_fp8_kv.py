"""A KV cache in 8 bits behind an engine: the same answers however requests are scheduled, and twice the tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch

import phases.phase_09.engine as phase_09
import shared.cache.pool_size as pool_size
from shared.cache.contiguous import kv_bytes
from shared.cache.fp8_memory import fp8_memory
from shared.engine.config import EngineConfig
from shared.errors import ConfigError
from shared.loading.config_json import read_config
from tests.mixed_requests import ALIKE, ARRIVALS, GREEDY, LONG, MIXED, Requests, serve, tokens

FP8: dict[str, Any] = {"kv_cache_dtype": "fp8"}


@pytest.fixture
def with_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of phase 10, in the loop before it."""
    monkeypatch.setattr(phase_09, "SUPPORTED", phase_09.SUPPORTED | {"kv_cache_dtype"})
    monkeypatch.setitem(phase_09.MEMORY, "paged", fp8_memory)


def make(folder: Path, **settings: Any) -> phase_09.Engine:
    return phase_09.Engine(EngineConfig(model=str(folder), seed=7, **settings))


def test_earlier_phases_refuse_it_and_name_the_phase() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype = 'fp8' arrives in phase 10; leave it at 'auto'"):
        EngineConfig(**FP8).check(phase_09.SUPPORTED)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype is 'fp8' and kv_cache_backend is 'contiguous'"):
        EngineConfig(kv_cache_backend="contiguous", **FP8)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("requests", [MIXED, ALIKE, LONG], ids=["mixed", "alike", "long"])
@pytest.mark.usefixtures("with_fp8")
def test_answers_depend_on_no_other_request(tiny_checkpoints: dict[str, Path], family: str, requests: Requests) -> None:
    """Not on chunks, shared prefixes, preemption, overlap, or the order of arrival."""
    folder, about = tiny_checkpoints[family], FP8 | {"max_seq_len": 640 if requests is LONG else 128}
    alone = make(folder, use_prefix_caching=False, use_chunked_prefill=False, max_batch_size=1, **about)
    expected = [tokens(serve(alone, [request], [0])[0][0]) for request in requests]
    small = {"num_gpu_blocks": 220 if requests is LONG else 43, "block_size": 3, "prefill_chunk_size": 16}
    engine = make(folder, overlap_scheduling=True, **small, **about)
    arrivals = (ARRIVALS * 3)[: len(requests)]
    for _ in range(2):  # the second time with prefixes in the cache
        assert [tokens(outputs) for outputs in serve(engine, requests, arrivals)[0]] == expected
    assert engine.scheduler.num_prefix_hits > 0
    assert engine.view.keys.dtype == torch.uint8


@pytest.mark.usefixtures("with_fp8")
def test_a_preempted_request_gets_the_same_tokens(tiny_checkpoints: dict[str, Path]) -> None:
    requests: Requests = [([n] * 10, GREEDY | {"max_new_tokens": 20}) for n in range(4)]
    about: dict[str, Any] = FP8 | {"max_seq_len": 32, "block_size": 4}
    expected = [tokens(outputs) for outputs in serve(make(tiny_checkpoints["qwen3"], **about), requests, [0] * 4)[0]]
    engine = make(tiny_checkpoints["qwen3"], num_gpu_blocks=14, **about)
    assert [tokens(outputs) for outputs in serve(engine, requests, [0] * 4)[0]] == expected
    assert engine.load().num_preemptions > 0


@pytest.mark.parametrize(("dtype", "times"), [("bfloat16", 2), ("float32", 4)])
@pytest.mark.usefixtures("with_fp8")
def test_the_same_bytes_hold_more_tokens(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, dtype: str, times: int
) -> None:
    config = read_config(tiny_checkpoints["llama"])
    monkeypatch.setattr(pool_size, "step_bytes", lambda *about: 0)
    monkeypatch.setattr(pool_size, "free_bytes", lambda device: 200 * kv_bytes(config, 16, torch.float32))
    about: dict[str, Any] = {"dtype": dtype, "max_seq_len": 512, "max_batch_size": 1000}
    engines = [make(tiny_checkpoints["llama"], **about, **settings) for settings in ({}, FP8)]
    wide, narrow = (engine.stats() for engine in engines)
    assert narrow["cache capacity (tokens)"] == wide["cache capacity (tokens)"] * times
    assert narrow["cache bytes"] == wide["cache bytes"] == engines[1].view.keys.nbytes * 2
    free = [engine.pool.free_tokens for engine in engines]
    assert free[1] == free[0] * times, "admission counts the smaller blocks"
