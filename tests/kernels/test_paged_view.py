"""Blocks behind kernels: what a plain cache for each sequence gives, by one write and one read for all of them."""

import dataclasses

import pytest
import torch

from shared.cache.contiguous import ContiguousCache, ContiguousView
from shared.cache.paged import PagedKVCachePool
from shared.engine.batch import Batch
from shared.engine.request import Request
from shared.errors import ConfigError
from shared.kernels.kv_write import kv_write_kernel
from shared.kernels.launch import INTERPRETED
from shared.kernels.paged_attention import paged_attention_kernel
from shared.kernels.paged_prefill import paged_prefill_kernel
from shared.loading.loader import load_model
from shared.models.tokens import Tokens
from shared.sampling.params import SamplingParams

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
LAYERS = {"llama": (2,), "qwen3": (1,), "gemma3_text": (4, 5)}  # Gemma's: the last with a window, the first without
CAPACITY = 40
STEPS = [  # past tiny-gemma3's window of 16; b leaves, and its blocks go to others
    {"a": 15, "b": 2},
    {"b": 1, "a": 1},
    {"a": 1, "d": 4},
    {"d": 1, "a": 1},
]
LEAVES_AFTER = {1: "b"}


def load(folder, family, dtype=torch.float32):
    """A model cut to a layer or two, since each costs the interpreter seconds; the memory has room for all."""
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


def make_pool(config, block_size, dtype=torch.float32):
    pool = PagedKVCachePool(config, -(-100 // block_size), block_size, 4, dtype, DEVICE)
    pool.keys.fill_(float("nan"))
    pool.values.fill_(float("nan"))
    return pool


def run(model, pool, view):
    """Hidden states of each step; sequences come, grow and go as STEPS says, and get blocks as they need them."""
    lengths, outputs = dict.fromkeys("abd", 0), []
    for number, step in enumerate(STEPS):
        for name, new in step.items():
            assert pool.reserve(name, lengths[name] + new)
        tokens, _ = view.prepare(batch(lengths, step))
        outputs.append(model(tokens, view).clone())
        for name, new in step.items():
            pool.advance(name, new)
            lengths[name] += new
        if number in LEAVES_AFTER:
            pool.release(LEAVES_AFTER[number])
    assert pool.audit_blocks() == []
    return torch.cat(outputs)


def alone(model):
    """The same hidden states, from a cache of its own for each sequence."""
    views = {}
    for name in "abd":
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
    ("family", "backend", "block_size"),
    [("llama", None, 16), ("qwen3", "flash", 1), ("gemma3_text", "flash", 3), ("gemma3_text", "sdpa", 16)],
)
def test_every_sequence_is_answered_as_if_alone(tiny_checkpoints, num_launches, family, backend, block_size):
    model = load(tiny_checkpoints[family], family)
    pool = make_pool(model.config, block_size)
    actual = run(model, pool, pool.view(model.config.num_heads, backend))
    torch.testing.assert_close(actual, alone(model), rtol=2e-4, atol=2e-5)
    layers, is_flash = len(LAYERS[family]), backend != "sdpa"
    num_decode = sum(set(step.values()) == {1} for step in STEPS)
    assert num_launches(kv_write_kernel) == len(STEPS) * layers, "one write a layer for all sequences"
    assert num_launches(paged_attention_kernel) == is_flash * num_decode * layers, "one read a layer for all of them"
    assert num_launches(paged_prefill_kernel) == is_flash * (len(STEPS) - num_decode) * layers
    assert num_launches() == num_launches(kv_write_kernel) + is_flash * len(STEPS) * layers


def test_the_same_number_of_sequences_uses_the_same_addresses(tiny_checkpoints):
    """What a CUDA graph would record, tables of any length included."""
    model = load(tiny_checkpoints["qwen3"], "qwen3")
    pool = make_pool(model.config, 2)
    view = pool.view(model.config.num_heads)
    lengths = dict.fromkeys("ab", 0)
    addresses, offsets = set(), []
    for _ in range(4):
        for name in lengths:
            pool.reserve(name, lengths[name] + 1)
        tokens, _ = view.prepare(batch(lengths, {"a": 1, "b": 1}))
        assert view.lengths.tolist() == [length + 1 for length in lengths.values()]
        tables = [pool.table(name).tolist() for name in "ab"]
        assert view.tables.tolist() == [*tables[0], *tables[1]]
        assert view.table_starts.tolist() == [0, len(tables[0])]
        assert view.query_starts.tolist() == [0, 1, 2]
        offsets.append(view.offsets.tolist())
        if not INTERPRETED:  # on a CPU each plan is numpy's own memory
            plan = (tokens.ids, tokens.positions, view.offsets, view.lengths, view.table_starts, view.tables)
            addresses.add(tuple(t.data_ptr() for t in plan))
        for name in lengths:
            pool.advance(name, 1)
            lengths[name] += 1
    assert len(addresses) <= 1
    stride = model.config.num_kv_heads * model.config.head_dim
    places = [[0, 2], [1, 3], [4, 6], [5, 7]]  # a has the blocks 0 and 2, b 1 and 3, of two tokens each
    assert offsets == [[place * stride for place in step] for step in places]


def test_a_decode_forward_allocates_nothing_for_attention(tiny_checkpoints, randn):
    """Its queries, its results and its scratch are the view's own."""
    config = load(tiny_checkpoints["llama"], "llama").config
    pool = make_pool(config, 16)
    view = pool.view(config.num_heads)
    pool.reserve("a", 1)
    view.prepare(batch({"a": 0}, {"a": 1}))
    attended = view.attend(0, randn(1, config.num_heads, config.head_dim), scale=1.0)
    assert attended.data_ptr() == view.attended.data_ptr()
    assert [workspace.num_sequences for workspace in view.workspaces] == [1, 2, 4]


def test_a_head_size_without_a_kernel(tiny_checkpoints):
    config = dataclasses.replace(load(tiny_checkpoints["llama"], "llama").config, head_dim=80)
    with pytest.raises(ConfigError, match=r"head size is 80 and .*flash"):
        make_pool(config, 16).view(config.num_heads, "flash")
    make_pool(config, 16).view(config.num_heads, "sdpa")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("block_size", [1, 16])
def test_sixteen_bits(tiny_checkpoints, family, dtype, block_size):
    model, exact = load(tiny_checkpoints[family], family, dtype), load(tiny_checkpoints[family], family)
    pool = make_pool(model.config, block_size, dtype)
    expected = alone(exact)
    ours = run(model, pool, pool.view(model.config.num_heads)).float() - expected
    assert ours.norm() <= 1.5 * (alone(model).float() - expected).norm()
