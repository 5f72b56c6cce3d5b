"""Blocks behind planned kernels: what a plain cache for each sequence gives, by one plan a step and window."""

import dataclasses

import pytest
import torch

import shared.cache.paged_view as paged_view
import shared.cache.planned as module
import shared.kernels.planned_tiling as tilings
from shared.attention.descriptor import Grid
from shared.cache.contiguous import ContiguousCache, ContiguousView
from shared.cache.paged import PagedKVCachePool
from shared.cache.planned import PlannedKVCachePool
from shared.engine.batch import Batch
from shared.engine.request import Request
from shared.engine.staging import Staging
from shared.errors import ConfigError
from shared.kernels.kv_write import kv_write_kernel
from shared.kernels.launch import INTERPRETED
from shared.kernels.merge_states import merge_states_kernel
from shared.kernels.paged_attention import paged_attention_kernel
from shared.kernels.paged_prefill import paged_prefill_kernel
from shared.kernels.planned_attention import planned_decode_kernel
from shared.kernels.planned_prefill import planned_prefill_kernel
from shared.kernels.planned_tiling import DecodeTiling, PrefillTiling
from shared.loading.loader import load_model
from shared.models.tokens import Tokens
from shared.sampling.params import SamplingParams

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
LAYERS = {"llama": (2,), "qwen3": (1,), "gemma3_text": (4, 5)}  # Gemma's: the last with a window, the first without
CAPACITY = 40
STEPS = [  # tokens of each; past tiny-gemma3's window of 16, and past a split of 16
    {"a": 20, "b": 2},
    {"b": 1, "a": 1},
    {"a": 1, "d": 4, "b": 2},  # a is preempted, and its blocks go to whoever grows
    {"d": 1, "b": 1},
    {"d": 13, "a": 22},  # a piece of a prompt, behind what is there; prompt and answer so far, computed anew
    {"b": 1, "d": 1, "a": 1},
]
LEAVES_AFTER = {2: "a"}
NUM_DECODE = sum(set(step.values()) == {1} for step in STEPS)


@pytest.fixture
def is_arrival(request, monkeypatch):
    """Small splits, so that tiny sequences have several; merged by whoever arrives last, or by a launch."""
    merges_itself = getattr(request, "param", True)
    decode, prefill = DecodeTiling(16, is_arrival=merges_itself), PrefillTiling(16, 16, 4, 1)
    monkeypatch.setitem(tilings.DECODE_TILINGS, 16, (decode, decode))
    for one in (tilings, module):
        monkeypatch.setattr(one, "prefill_tiling", lambda *about: prefill)
    for tiling in (DecodeTiling, PrefillTiling):
        monkeypatch.setattr(tiling, "grid", lambda *about: Grid(resident=6, unit=16, least_split=16))
    return merges_itself


@pytest.fixture
def counted(monkeypatch):
    """How often a plan is made, a step sent, and which plans were split."""
    calls = {"copies": 0, "decode": [], "prefill": []}
    send = Staging.send

    def counting_send(self, arrays):
        calls["copies"] += 1
        return send(self, arrays)

    def counting(kind, plan):
        def call(*about, **named):
            calls[kind].append(plan(*about, **named))
            return calls[kind][-1]

        return call

    monkeypatch.setattr(Staging, "send", counting_send)
    monkeypatch.setattr(module, "plan_decode", counting("decode", module.plan_decode))
    monkeypatch.setattr(module, "plan_prefill", counting("prefill", module.plan_prefill))
    return calls


def load(folder, family, dtype=torch.float32):
    """A model, of large ones a layer or two: each costs the interpreter seconds."""
    model = load_model(folder, dtype=dtype, device=DEVICE)
    model.blocks = torch.nn.ModuleList(model.blocks[layer] for layer in LAYERS[family])
    return model


def token_ids(name):
    return [(ord(name) * 31 + 113 * n) % 512 for n in range(CAPACITY)]


def batch(lengths, step):
    requests = [
        Request(name, token_ids(name)[: lengths[name] + new], SamplingParams(), 0, num_computed_tokens=lengths[name])
        for name, new in step.items()
    ]
    return Batch.of(requests)


def make_pool(kind, config, block_size, dtype=torch.float32):
    pool = kind(config, -(-120 // block_size), block_size, 4, dtype, DEVICE)
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
            lengths[LEAVES_AFTER[number]] = 0
    assert pool.audit_blocks() == []
    return torch.cat(outputs)


def alone(model):
    """The same hidden states, from a cache of its own for each sequence."""
    caches, outputs = {}, []
    for number, step in enumerate(STEPS):
        for name, new in step.items():
            if name not in caches:
                caches[name] = ContiguousCache(model.config, CAPACITY, model.dtype, DEVICE)
            start, view = caches[name].length, ContiguousView(caches[name], "naive")
            view.prepare(new)
            ids = torch.tensor(token_ids(name)[start : start + new], device=DEVICE)
            outputs.append(model(Tokens(ids, torch.arange(start, start + new, device=DEVICE)), view))
            caches[name].advance(new)
        caches.pop(LEAVES_AFTER.get(number), None)
    return torch.cat(outputs)


@pytest.mark.parametrize(
    ("family", "block_size", "is_arrival"),
    [("llama", 16, True), ("qwen3", 1, False), ("gemma3_text", 3, True)],
    indirect=["is_arrival"],
)
def test_every_sequence_is_answered_as_if_alone(
    tiny_checkpoints, num_launches, counted, is_arrival, family, block_size
):
    model = load(tiny_checkpoints[family], family)
    pool = make_pool(PlannedKVCachePool, model.config, block_size)
    view = pool.view(model.config.num_heads)
    actual = run(model, pool, view)
    torch.testing.assert_close(actual, alone(model), rtol=2e-4, atol=2e-5)
    layers, windows = len(LAYERS[family]), len(set(model.config.windows))
    decode, prefill = counted["decode"], counted["prefill"]
    assert len(decode) == NUM_DECODE * windows, "one plan a step and window, for all layers"
    assert len(prefill) == (len(STEPS) - NUM_DECODE) * windows
    assert any(plan.is_split for plan in decode)
    assert any(plan.is_split for plan in prefill)
    assert num_launches(kv_write_kernel) == len(STEPS) * layers
    assert num_launches(planned_decode_kernel) == NUM_DECODE * layers, "one read a layer for all sequences"
    assert num_launches(planned_prefill_kernel) == (len(STEPS) - NUM_DECODE) * layers
    merged = sum(plan.is_split for plan in (prefill if is_arrival else decode + prefill))
    assert num_launches(merge_states_kernel) == merged * layers // windows, "here there is a layer for each window"
    assert num_launches() == 2 * len(STEPS) * layers + merged * layers // windows
    assert counted["copies"] == len(STEPS), "everything that a step needs travels together"
    assert (view.workspace.counters == 0).all()


def test_flash_turns_planning_off(tiny_checkpoints, num_launches, counted, is_arrival):
    """The same hidden states by the kernels of phase 6."""
    model = load(tiny_checkpoints["llama"], "llama")
    outputs = {}
    for backend in ("flash", "planned"):
        pool = make_pool(PlannedKVCachePool, model.config, 4)
        outputs[backend] = run(model, pool, pool.view(model.config.num_heads, backend))
        assert bool(counted["decode"]) == bool(counted["prefill"]) == (backend == "planned")
    torch.testing.assert_close(outputs["planned"], outputs["flash"], rtol=2e-4, atol=2e-5)
    assert num_launches(paged_attention_kernel) == num_launches(planned_decode_kernel) == NUM_DECODE
    assert num_launches(paged_prefill_kernel) == num_launches(planned_prefill_kernel) == len(STEPS) - NUM_DECODE


@pytest.mark.parametrize("backend", [None, "planned", "flash", "sdpa", "naive"])
def test_where_nothing_is_launched_it_is_the_view_of_phase_6(tiny_checkpoints, monkeypatch, num_launches, backend):
    model = load(tiny_checkpoints["gemma3_text"], "gemma3_text")
    for one in (module, paged_view):
        monkeypatch.setattr(one, "launches", lambda tensor: False)
    outputs = []
    for kind, chosen in ((PlannedKVCachePool, backend), (PagedKVCachePool, None if backend == "planned" else backend)):
        pool = make_pool(kind, model.config, 4)
        outputs.append(run(model, pool, pool.view(model.config.num_heads, chosen)))
    assert torch.equal(*outputs)
    assert num_launches() == 0


def test_the_same_number_of_sequences_uses_the_same_addresses(tiny_checkpoints, is_arrival):
    """What a CUDA graph would record, whatever the plan."""
    config = load(tiny_checkpoints["gemma3_text"], "gemma3_text").config
    pool = make_pool(PlannedKVCachePool, config, 2)
    view = pool.view(config.num_heads)
    lengths, addresses, shapes, cuts = dict.fromkeys("ab", 0), set(), set(), set()
    for new in (1, 30, 7):
        for name in lengths:
            pool.reserve(name, lengths[name] + new)
            pool.advance(name, new - 1)
            lengths[name] += new - 1
        view.prepare(batch(lengths, {"a": 1, "b": 1}))
        plans = [view.plans[window] for window in (16, None)]
        arrays = [value for plan in plans for value in vars(plan).values() if isinstance(value, torch.Tensor)]
        cuts.add(tuple(plan.num_items.item() for plan in plans))
        shapes.add(tuple(tensor.shape for tensor in arrays))
        if not INTERPRETED:  # on a CPU each plan is numpy's own memory
            addresses.add(tuple(tensor.data_ptr() for tensor in (*arrays, view.lengths, view.tables)))
        for name in lengths:
            pool.advance(name, 1)
            lengths[name] += 1
    assert cuts == {(2, 2), (2, 4), (2, 6)}
    assert len(shapes) == 1
    assert len(addresses) <= 1


def test_a_decode_forward_allocates_nothing_for_attention(tiny_checkpoints, randn):
    """Its queries, its results and its scratch are the view's own."""
    config = load(tiny_checkpoints["llama"], "llama").config
    pool = make_pool(PlannedKVCachePool, config, 16)
    view = pool.view(config.num_heads)
    pool.reserve("a", 1)
    view.prepare(batch({"a": 0}, {"a": 1}))
    attended = view.attend(0, randn(1, config.num_heads, config.head_dim), scale=1.0)
    assert attended.data_ptr() == view.attended.data_ptr()
    assert len(view.workspace.counters) == 4 * config.num_kv_heads
    assert not hasattr(view, "workspaces"), "those of phase 6 are not made"


def test_a_head_size_without_a_kernel(tiny_checkpoints):
    config = dataclasses.replace(load(tiny_checkpoints["llama"], "llama").config, head_dim=80)
    pool = make_pool(PlannedKVCachePool, config, 16)
    for backend in (None, "planned", "flash"):
        with pytest.raises(ConfigError, match=r"head size is 80"):
            pool.view(config.num_heads, backend)
    pool.view(config.num_heads, "sdpa")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_sixteen_bits(tiny_checkpoints, is_arrival, family, dtype):
    model, exact = load(tiny_checkpoints[family], family, dtype), load(tiny_checkpoints[family], family)
    pool = make_pool(PlannedKVCachePool, model.config, 16, dtype)
    expected = alone(exact)
    ours = run(model, pool, pool.view(model.config.num_heads)).float() - expected
    assert ours.norm() <= 1.5 * (alone(model).float() - expected).norm()
