"""Regions and blocks under kernels: what a plain cache for each sequence gives, by one write and one read for all."""

import dataclasses

import pytest
import torch

from shared.cache.layout.paged import PagedSizes
from shared.cache.pool.contiguous import ContiguousKVCachePool
from shared.cache.pool.paged import PagedKVCachePool
from shared.cache.view.contiguous_pool import ContiguousPoolView
from shared.errors import ConfigError
from shared.kernels.attention import decode_attention, paged_attention
from shared.kernels.attention.kv_write import kv_write_kernel
from shared.kernels.attention.paged_prefill import paged_prefill_kernel
from tests.kernels.sequences import CAPACITY, DEVICE, LAYERS, alone, load, poisoned, run
from tests.views import paged_view

STEPS = [  # past tiny-gemma3's window of 16; b leaves, and d gets its memory
    {"a": 15, "b": 2},
    {"b": 1, "a": 1},
    {"a": 1, "d": 4},
    {"d": 1, "a": 1},
    {"a": 1},
]
LEAVES_AFTER = {1: "b"}
NUM_DECODE = sum(next(iter(step.values())) == 1 for step in STEPS)  # steps with a decoding sequence, which is first
NUM_PREFILL = sum(set(step.values()) != {1} for step in STEPS)


@pytest.fixture(autouse=True)
def small_splits(monkeypatch):
    """So that tiny sequences have several."""
    for module in (decode_attention, paged_attention):
        monkeypatch.setitem(module.TILINGS, 16, decode_attention.Tiling(tile=16, max_splits=64))


def regions(config, backend):
    view = poisoned(ContiguousPoolView(config, 2, CAPACITY, 30, torch.float32, DEVICE, backend))
    return ContiguousKVCachePool(2, CAPACITY), view


def blocks(config, backend, block_size=16):
    sizes = PagedSizes(-(-100 // block_size), block_size, 2, 30, CAPACITY)
    view = poisoned(paged_view(config, sizes, torch.float32, DEVICE, backend))
    return PagedKVCachePool(sizes.num_blocks, block_size, 2, CAPACITY), view


@pytest.mark.parametrize(("family", "backend"), [("qwen3", None), ("gemma3_text", "flash"), ("gemma3_text", "sdpa")])
def test_regions_answer_every_sequence_as_if_alone(tiny_checkpoints, num_launches, family, backend):
    model = load(tiny_checkpoints[family], family)
    actual = run(model, *regions(model.config, backend), STEPS, LEAVES_AFTER)
    torch.testing.assert_close(actual, alone(model, STEPS, LEAVES_AFTER), rtol=2e-4, atol=2e-5)
    layers = len(LAYERS[family])
    assert num_launches(kv_write_kernel) == len(STEPS) * layers, "one write a layer for all sequences"
    num_decode = 0 if backend == "sdpa" else NUM_DECODE
    assert num_launches(decode_attention.decode_attention_kernel) == num_decode * layers, (
        "one read a layer for all that decode"
    )


@pytest.mark.parametrize(
    ("family", "backend", "block_size"),
    [("qwen3", None, 1), ("gemma3_text", "flash", 3), ("gemma3_text", "sdpa", 16)],
)
def test_blocks_answer_every_sequence_as_if_alone(tiny_checkpoints, num_launches, family, backend, block_size):
    model = load(tiny_checkpoints[family], family)
    pool, view = blocks(model.config, backend, block_size)
    actual = run(model, pool, view, STEPS, LEAVES_AFTER)
    assert pool.audit_blocks() == []
    torch.testing.assert_close(actual, alone(model, STEPS, LEAVES_AFTER), rtol=2e-4, atol=2e-5)
    layers, is_flash = len(LAYERS[family]), backend != "sdpa"
    assert num_launches(kv_write_kernel) == len(STEPS) * layers, "one write a layer for all sequences"
    assert num_launches(paged_attention.paged_attention_kernel) == is_flash * NUM_DECODE * layers, (
        "one read a layer for all"
    )
    assert num_launches(paged_prefill_kernel) == is_flash * NUM_PREFILL * layers
    assert num_launches() == (len(STEPS) + is_flash * (NUM_DECODE + NUM_PREFILL)) * layers


@pytest.mark.parametrize("make_memory", [regions, blocks])
def test_a_head_size_without_a_kernel(tiny_checkpoints, make_memory):
    config = dataclasses.replace(load(tiny_checkpoints["llama"], "llama").config, head_dim=80)
    with pytest.raises(ConfigError, match="head size is 80; the kernels take 16, 32"):
        make_memory(config, "flash")
    make_memory(config, "sdpa")
