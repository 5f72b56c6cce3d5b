"""Regions behind kernels: what a plain cache for each sequence gives, by one write and one read for all of them."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shared.cache.contiguous import ContiguousCache, ContiguousView
from shared.cache.contiguous_pool import ContiguousKVCachePool
from shared.engine.batch import Batch
from shared.engine.request import Request
from shared.engine.staging import Staging
from shared.errors import ConfigError
from shared.kernels.decode_attention import decode_attention_kernel
from shared.kernels.kv_write import kv_write_kernel
from shared.kernels.launch import INTERPRETED
from shared.loading.loader import load_model
from shared.models.tokens import Tokens
from shared.sampling.params import SamplingParams

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
LAYERS = {"llama": (0, 2), "qwen3": (1, 2), "gemma3_text": (4, 5)}  # Gemma's: the last with a window, the first without
CAPACITY = 40
STEPS = [  # past tiny-gemma3's window of 16; b leaves, and d gets its region
    {"a": 17, "b": 3, "c": 1},
    {"a": 1, "b": 1, "c": 1},
    {"c": 1, "a": 1},
    {"d": 5},
    {"d": 1, "a": 1, "c": 1},
]
LEAVES_AFTER = {2: "b"}


def load(folder, family, dtype=torch.float32):
    """A model cut to two layers, since each costs the interpreter seconds; the memory has room for all."""
    model = load_model(folder, dtype=dtype, device=DEVICE)
    model.blocks = torch.nn.ModuleList(model.blocks[layer] for layer in LAYERS[family])
    return model


def batch(lengths, step):
    return Batch.of(
        [
            Request(
                name, token_ids(name)[: lengths[name] + new], SamplingParams(), 0, num_computed_tokens=lengths[name]
            )
            for name, new in step.items()
        ]
    )


def token_ids(name):
    return [(ord(name) * 31 + 113 * n) % 512 for n in range(CAPACITY)]


def make_pool(config, dtype=torch.float32, regions=3):
    pool = ContiguousKVCachePool(config, regions, CAPACITY, dtype, DEVICE)
    pool.keys.fill_(float("nan"))
    pool.values.fill_(float("nan"))
    return pool


def run(model, pool, view):
    """Hidden states of each step; sequences come and go as STEPS says."""
    lengths, outputs = dict.fromkeys("abcd", 0), []
    for number, step in enumerate(STEPS):
        for name in step:
            assert pool.reserve(name, CAPACITY)
        tokens, _ = view.prepare(batch(lengths, step))
        outputs.append(model(tokens, view))
        for name, new in step.items():
            pool.advance(name, new)
            lengths[name] += new
        if number in LEAVES_AFTER:
            pool.release(LEAVES_AFTER[number])
    return torch.cat(outputs)


def alone(model):
    """The same hidden states, from a cache of its own for each sequence."""
    views = {}
    for name in "abcd":
        cache = ContiguousCache(model.config, CAPACITY, model.dtype, DEVICE)
        views[name] = ContiguousView(cache, "naive")
    outputs = []
    for step in STEPS:
        for name, new in step.items():
            view, start = views[name], views[name].cache.length
            view.prepare(new)
            ids = torch.tensor(token_ids(name)[start : start + new], device=DEVICE)
            outputs.append(model(Tokens(ids, torch.arange(start, start + new, device=DEVICE)), view))
            view.cache.advance(new)
    return torch.cat(outputs)


@pytest.mark.parametrize(
    ("family", "backend"),
    [("llama", None), ("qwen3", "flash"), ("gemma3_text", "flash"), ("gemma3_text", "sdpa")],
)
def test_every_sequence_is_answered_as_if_alone(tiny_checkpoints, num_launches, family, backend):
    model = load(tiny_checkpoints[family], family)
    pool = make_pool(model.config)
    actual = run(model, pool, pool.view(model.config.num_heads, backend))
    torch.testing.assert_close(actual, alone(model), rtol=2e-4, atol=2e-5)
    layers = len(LAYERS[family])
    assert num_launches(kv_write_kernel) == len(STEPS) * layers, "one write a layer for all sequences"
    num_decode = 0 if backend == "sdpa" else sum(set(step.values()) == {1} for step in STEPS)
    assert num_launches(decode_attention_kernel) == num_decode * layers, "one read a layer for all sequences"


def test_the_same_number_of_sequences_uses_the_same_addresses(tiny_checkpoints):
    """What a CUDA graph would record."""
    model = load(tiny_checkpoints["qwen3"], "qwen3")
    pool = make_pool(model.config)
    view = pool.view(model.config.num_heads)
    lengths = dict.fromkeys("ab", 0)
    for name in "ab":
        pool.reserve(name, CAPACITY)
    addresses, starts = set(), []
    for _ in range(3):
        tokens, _ = view.prepare(batch(lengths, {"a": 1, "b": 1}))
        assert view.lengths.tolist() == [length + 1 for length in lengths.values()]
        assert view.regions.tolist() == [0, 1]
        starts.append(view.offsets.tolist())
        if not INTERPRETED:  # on a CPU each plan is numpy's own memory
            addresses.add(tuple(t.data_ptr() for t in (tokens.ids, view.offsets, view.regions, view.lengths)))
        for name in lengths:
            pool.advance(name, 1)
            lengths[name] += 1
    assert len(addresses) <= 1
    D, stride = model.config.head_dim, CAPACITY * model.config.num_kv_heads * model.config.head_dim
    assert starts == [[n * D, stride + n * D] for n in range(3)]


def test_a_head_size_without_a_kernel(tiny_checkpoints):
    config = dataclasses.replace(load(tiny_checkpoints["llama"], "llama").config, head_dim=80)
    with pytest.raises(ConfigError, match=r"head size is 80 and .*flash"):
        make_pool(config).view(config.num_heads, "flash")
    make_pool(config).view(config.num_heads, "sdpa")


class Copies(TorchDispatchMode):
    """Counts operations that copy between memories."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten._to_copy)
        return func(*args, **(kwargs or {}))


@pytest.mark.gpu
def test_a_plan_arrives_in_one_copy_whole_and_typed():
    staging = Staging(DEVICE)
    generator = np.random.default_rng(0)
    for size in (3, 1, 20_000, 5):
        arrays = [
            generator.integers(1 << 40, size=size),
            generator.integers(1 << 20, size=2 * size + 1).astype(np.int32),
            generator.random(size).astype(np.float32),
            generator.random(3),
        ]
        with Copies() as copies:
            sent = staging.send(arrays)
        assert copies.count == 1
        for array, tensor in zip(arrays, sent, strict=True):
            assert tensor.device.type == "cuda"
            assert tensor.cpu().numpy().dtype == array.dtype
            assert np.array_equal(tensor.cpu().numpy(), array)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_sixteen_bits(tiny_checkpoints, family, dtype):
    model, exact = load(tiny_checkpoints[family], family, dtype), load(tiny_checkpoints[family], family)
    pool = make_pool(model.config, dtype)
    expected = alone(exact)
    ours = run(model, pool, pool.view(model.config.num_heads)).float() - expected
    assert ours.norm() <= 1.5 * (alone(model).float() - expected).norm()
