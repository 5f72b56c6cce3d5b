"""Regions behind kernels: what a plain cache for each sequence gives, by one write and one read for all of them."""

import dataclasses

import pytest
import torch

from shared.cache.contiguous_pool import ContiguousKVCachePool
from shared.cache.contiguous_pool_view import ContiguousPoolView
from shared.engine.batch import Batch
from shared.errors import ConfigError
from shared.kernels.decode_attention import decode_attention_kernel
from shared.kernels.kv_write import kv_write_kernel
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

STEPS = [  # past tiny-gemma3's window of 16; b leaves, and d gets its region
    {"a": 17, "b": 3, "c": 1},
    {"a": 1, "b": 1, "c": 1},
    {"c": 1, "a": 1},
    {"d": 5},
    {"d": 1, "a": 1, "c": 1},
]
LEAVES_AFTER = {2: "b"}


def make_memory(config, dtype=torch.float32, backend=None, regions=3):
    view = poisoned(ContiguousPoolView(config, regions, CAPACITY, 30, dtype, DEVICE, backend))
    return ContiguousKVCachePool(regions, CAPACITY), view


@pytest.mark.parametrize(
    ("family", "backend"),
    [("qwen3", None), ("gemma3_text", "flash"), ("gemma3_text", "sdpa")],
)
def test_every_sequence_is_answered_as_if_alone(tiny_checkpoints, num_launches, family, backend):
    model = load(tiny_checkpoints[family], family)
    actual = run(model, *make_memory(model.config, backend=backend), STEPS, LEAVES_AFTER)
    torch.testing.assert_close(actual, alone(model, STEPS, LEAVES_AFTER), rtol=2e-4, atol=2e-5)
    layers = len(LAYERS[family])
    assert num_launches(kv_write_kernel) == len(STEPS) * layers, "one write a layer for all sequences"
    num_decode = 0 if backend == "sdpa" else sum(set(step.values()) == {1} for step in STEPS)
    assert num_launches(decode_attention_kernel) == num_decode * layers, "one read a layer for all sequences"


def test_batches_of_any_size_are_loaded_to_the_same_addresses(tiny_checkpoints):
    """What a CUDA graph would record."""
    model = load(tiny_checkpoints["qwen3"], "qwen3")
    pool, view = make_memory(model.config)
    a, b, c = (make_request(name, token_ids(name)) for name in "abc")
    for request in (a, b, c):
        pool.reserve(request, CAPACITY)
    addresses, places = set(), []
    for step in ({a: 1, b: 1}, {a: 1, b: 1}, {b: 1, c: 1, a: 1}, {b: 1}, {c: 20, a: 2}, {a: 1, b: 1}):
        before = [request.num_computed_tokens for request in step]
        schedule = step_of(step)
        tokens, logit_rows, _ = view.load(Batch.of(schedule, pool))
        assert view.lengths.tolist() == [n + new for n, new in zip(before, step.values(), strict=True)]
        assert view.regions.tolist() == [pool.regions[request] for request in step]
        places.append(view.places.tolist())
        sent = (tokens.ids, tokens.positions, logit_rows, view.places, view.regions, view.lengths)
        addresses.add(tuple(tensor.data_ptr() for tensor in sent))
        commit(pool, schedule)
    assert len(addresses) == 1
    D, stride = model.config.head_dim, CAPACITY * model.config.num_kv_heads * model.config.head_dim
    assert places[:4] == [
        [0, stride],
        [D, stride + D],
        [stride + 2 * D, 2 * stride, 2 * D],
        [stride + 3 * D],
    ]
    assert places[4] == [2 * stride + n * D for n in range(1, 21)] + [3 * D, 4 * D]


def test_a_head_size_without_a_kernel(tiny_checkpoints):
    config = dataclasses.replace(load(tiny_checkpoints["llama"], "llama").config, head_dim=80)
    with pytest.raises(ConfigError, match=r"head size is 80 and .*flash"):
        make_memory(config, backend="flash")
    make_memory(config, backend="sdpa")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_sixteen_bits(tiny_checkpoints, family, dtype):
    model, exact = load(tiny_checkpoints[family], family, dtype), load(tiny_checkpoints[family], family)
    ours = run(model, *make_memory(model.config, dtype), STEPS, LEAVES_AFTER)
    assert_as_near_as_alone(ours, model, exact, STEPS, LEAVES_AFTER)
