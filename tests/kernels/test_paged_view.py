"""Blocks behind kernels: what a plain cache for each sequence gives, by one write and one read for all of them."""

import dataclasses

import pytest
import torch

from shared.cache.paged import PagedKVCachePool
from shared.cache.paged_layout import PagedSizes
from shared.cache.paged_view import PagedView
from shared.engine.batch import Batch
from shared.errors import ConfigError
from shared.kernels.kv_write import kv_write_kernel
from shared.kernels.paged_attention import paged_attention_kernel
from shared.kernels.paged_prefill import paged_prefill_kernel
from tests.kernels.sequences import (
    CAPACITY,
    DEVICE,
    LAYERS,
    alone,
    assert_as_near_as_alone,
    load,
    poisoned,
    run,
    token_ids,
)
from tests.steps import commit, make_request, step_of

STEPS = [  # past tiny-gemma3's window of 16; b leaves, and its blocks go to others
    {"a": 15, "b": 2},
    {"b": 1, "a": 1},
    {"a": 1, "d": 4},
    {"d": 1, "a": 1},
]
LEAVES_AFTER = {1: "b"}
NUM_DECODE = sum(next(iter(step.values())) == 1 for step in STEPS)  # steps with a decoding sequence, which is first
NUM_PREFILL = sum(set(step.values()) != {1} for step in STEPS)


def make_memory(config, block_size, dtype=torch.float32, backend=None):
    sizes = PagedSizes(-(-100 // block_size), block_size, 4, 30, CAPACITY)
    view = poisoned(PagedView(config, sizes, dtype, DEVICE, backend))
    return PagedKVCachePool(sizes.num_blocks, block_size, 4, CAPACITY), view


@pytest.mark.parametrize(
    ("family", "backend", "block_size"),
    [("qwen3", None, 1), ("gemma3_text", "flash", 3), ("gemma3_text", "sdpa", 16)],
)
def test_every_sequence_is_answered_as_if_alone(tiny_checkpoints, num_launches, family, backend, block_size):
    model = load(tiny_checkpoints[family], family)
    pool, view = make_memory(model.config, block_size, backend=backend)
    actual = run(model, pool, view, STEPS, LEAVES_AFTER)
    assert pool.audit_blocks() == []
    torch.testing.assert_close(actual, alone(model, STEPS, LEAVES_AFTER), rtol=2e-4, atol=2e-5)
    layers, is_flash = len(LAYERS[family]), backend != "sdpa"
    assert num_launches(kv_write_kernel) == len(STEPS) * layers, "one write a layer for all sequences"
    assert num_launches(paged_attention_kernel) == is_flash * NUM_DECODE * layers, "one read a layer for all"
    assert num_launches(paged_prefill_kernel) == is_flash * NUM_PREFILL * layers
    assert num_launches() == (len(STEPS) + is_flash * (NUM_DECODE + NUM_PREFILL)) * layers


def test_batches_of_any_size_are_loaded_to_the_same_addresses(tiny_checkpoints):
    """What a CUDA graph would record, tables of any length included; a step with prompts has other addresses."""
    model = load(tiny_checkpoints["qwen3"], "qwen3")
    pool, view = make_memory(model.config, 2)
    a, b, c = (make_request(name, token_ids(name)) for name in "abc")
    addresses, places = {}, []  # by what a step has: decoding sequences, prompts, both
    steps = [{a: 1, b: 1}] * 4 + [{c: 7, a: 2}, {c: 1, b: 1, a: 1}, {a: 1, b: 2}, {a: 1}]
    for step in steps:
        for request, new in step.items():
            assert pool.reserve(request, request.num_computed_tokens + new)
        schedule = step_of(step)
        tokens, logit_rows, _ = view.load(Batch.of(schedule, pool))
        lengths = [request.num_computed_tokens + new for request, new in step.items()]
        tables = [pool.table(request).tolist() for request in step]
        starts, n = [sum(map(len, tables[:n])) for n in range(len(tables))], view.num_decoding
        expected = [[block for table in tables for block in table], starts[:n], lengths[:n]]
        assert [array.tolist() for array in view.decoding] == expected
        read = view.decoding
        if not view.is_decode:
            assert [array.tolist() for array in view.prompts] == [expected[0], starts[n:], lengths[n:]]
            counts = [*step.values()][n:]
            assert view.query_starts.tolist() == [sum(counts[:m]) for m in range(len(counts) + 1)]
            read = *read, *view.prompts, view.query_starts
        places.append(view.places.tolist())
        sent = (tokens.ids, tokens.positions, logit_rows, view.places)
        arrays = [tensor for tensor in (*sent, *read) if len(tensor)]  # an empty one has no address
        addresses.setdefault(len(arrays), set()).add(tuple(tensor.data_ptr() for tensor in arrays))
        commit(pool, schedule)
    assert [len(found) for found in addresses.values()] == [1, 1, 1]
    stride = model.config.num_kv_heads * model.config.head_dim
    expected = [[0, 2], [1, 3], [4, 6], [5, 7]]  # a has the blocks 0 and 2, b 1 and 3, of two tokens each
    assert places[:4] == [[place * stride for place in step] for step in expected]


def test_a_decode_forward_allocates_nothing_for_attention(tiny_checkpoints, randn):
    """Its queries, its results and its scratch are the view's own."""
    config = load(tiny_checkpoints["llama"], "llama").config
    pool, view = make_memory(config, 16)
    a = make_request("a")
    pool.reserve(a, 1)
    view.load(Batch.of(step_of({a: 1}), pool))
    attended = view.attend(0, randn(1, config.num_heads, config.head_dim), scale=1.0)
    assert attended.data_ptr() == view.attended.data_ptr()
    assert [workspace.num_sequences for workspace in view.workspaces] == [1, 2, 4]


def test_a_head_size_without_a_kernel(tiny_checkpoints):
    config = dataclasses.replace(load(tiny_checkpoints["llama"], "llama").config, head_dim=80)
    with pytest.raises(ConfigError, match=r"head size is 80 and .*flash"):
        make_memory(config, 16, backend="flash")
    make_memory(config, 16, backend="sdpa")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("block_size", [1, 16])
def test_sixteen_bits(tiny_checkpoints, family, dtype, block_size):
    model, exact = load(tiny_checkpoints[family], family, dtype), load(tiny_checkpoints[family], family)
    ours = run(model, *make_memory(model.config, block_size, dtype), STEPS, LEAVES_AFTER)
    assert_as_near_as_alone(ours, model, exact, STEPS, LEAVES_AFTER)
