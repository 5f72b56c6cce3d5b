"""Blocks after planned kernels: what a plain cache for each sequence gives, by one plan a step and window."""

import dataclasses

import pytest
import torch

import shared.cache.layout.planned as planned_layout
import shared.kernels.attention.planned_tiling as tilings
import shared.kernels.attention.prompt_keys as prompt_keys
from shared.attention.descriptor import DevicePlan, Grid
from shared.cache.layout.paged import PagedSizes
from shared.cache.pool.paged import PagedKVCachePool
from shared.engine.batch import Batch
from shared.engine.executor.staging import Staging
from shared.errors import ConfigError
from shared.kernels.attention.kv_write import kv_write_kernel
from shared.kernels.attention.merge_states import merge_states_kernel
from shared.kernels.attention.paged_attention import paged_attention_kernel
from shared.kernels.attention.paged_prefill import paged_prefill_kernel
from shared.kernels.attention.planned_attention import planned_decode_kernel
from shared.kernels.attention.planned_prefill import planned_prefill_kernel
from shared.kernels.attention.planned_tiling import CopiedTiling, DecodeTiling, PrefillTiling
from shared.kernels.launch import INTERPRETED, tl
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
from tests.views import planned_view

STEPS = [  # tokens of each; past tiny-gemma3's window of 16, and past a split of 16
    {"a": 20, "b": 2},
    {"b": 1, "a": 1},
    {"a": 1, "d": 4, "b": 2},  # a is preempted, and its blocks go to the requests that grow
    {"d": 1, "b": 1},
    {"b": 1, "d": 13, "a": 22},  # a piece of a prompt, after what is there; prompt and answer so far, computed anew
    {"b": 1, "d": 1, "a": 1},
    {"d": 1, "a": 2},  # a short piece after a long history is split
]
LEAVES_AFTER = {2: "a"}
ARRAYS = [field.name for field in dataclasses.fields(DevicePlan) if "Tensor" in str(field.type)]
NUM_DECODE = sum(next(iter(step.values())) == 1 for step in STEPS)  # steps with a decoding sequence, which is first
NUM_PREFILL = sum(set(step.values()) != {1} for step in STEPS)


@pytest.fixture
def is_arrival(request, monkeypatch):
    """Small splits, so that tiny sequences have several; merged by the last program to arrive, or by a launch."""
    merges_itself = getattr(request, "param", True)
    decode, prefill = DecodeTiling(16, is_arrival=merges_itself), PrefillTiling(16, 16, 4, 1)
    monkeypatch.setitem(tilings.DECODE_TILINGS, 16, (decode,) * 3)
    for one in (tilings, planned_layout):
        monkeypatch.setattr(one, "prefill_tiling", lambda *options: prefill)
    for tiling in (DecodeTiling, PrefillTiling):
        monkeypatch.setattr(tiling, "grid", lambda *options: Grid(resident=6, unit=16, least_split=16))
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
        def call(*options, **named):
            calls[kind].append(plan(*options, **named))
            return calls[kind][-1]

        return call

    monkeypatch.setattr(Staging, "send", counting_send)
    monkeypatch.setattr(planned_layout, "plan_decode", counting("decode", planned_layout.plan_decode))
    monkeypatch.setattr(planned_layout, "plan_prefill", counting("prefill", planned_layout.plan_prefill))
    return calls


def make_memory(config, block_size, dtype=torch.float32, backend=None):
    sizes = PagedSizes(-(-120 // block_size), block_size, 4, 60, CAPACITY)
    view = poisoned(planned_view(config, sizes, dtype, DEVICE, backend))
    return PagedKVCachePool.of(sizes, lay_out=view.attention.lay_out), view


@pytest.mark.parametrize(
    ("family", "block_size", "is_arrival"),
    [("llama", 16, True), ("qwen3", 1, False), ("gemma3_text", 3, True)],
    indirect=["is_arrival"],
)
def test_every_sequence_is_answered_as_if_alone(
    tiny_checkpoints, num_launches, counted, is_arrival, family, block_size
):
    model = load(tiny_checkpoints[family], family)
    pool, view = make_memory(model.config, block_size)
    actual = run(model, pool, view, STEPS, LEAVES_AFTER)
    assert pool.audit_blocks() == []
    torch.testing.assert_close(actual, alone(model, STEPS, LEAVES_AFTER), rtol=2e-4, atol=2e-5)
    layers, windows = len(LAYERS[family]), len(set(model.config.windows))
    decode, prefill = counted["decode"], counted["prefill"]
    assert len(decode) == NUM_DECODE * windows, "one plan a step and window, for all layers"
    assert len(prefill) == NUM_PREFILL * windows
    assert any(plan.is_split for plan in decode)
    assert any(plan.is_split for plan in prefill)
    assert num_launches(kv_write_kernel) == len(STEPS) * layers
    assert num_launches(planned_decode_kernel) == NUM_DECODE * layers, "one read a layer for all that decode"
    assert num_launches(planned_prefill_kernel) == NUM_PREFILL * layers
    merged = sum(plan.is_split for plan in (prefill if is_arrival else decode + prefill))
    assert num_launches(merge_states_kernel) == merged * layers // windows, "here there is a layer for each window"
    assert num_launches() == (len(STEPS) + NUM_DECODE + NUM_PREFILL) * layers + merged * layers // windows
    assert counted["copies"] == len(STEPS), "everything that a step needs travels together"
    assert (view.attention.workspace.counters == 0).all()


@pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel keeps the constant")
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_keys_in_one_piece_give_the_same(tiny_checkpoints, num_launches, monkeypatch, is_arrival, family):
    model, outputs = load(tiny_checkpoints[family], family), []
    tiling = PrefillTiling(16, 16, 4, 1, copied=CopiedTiling(16, 4, 1))
    monkeypatch.setattr(planned_layout, "prefill_tiling", lambda *options: tiling)
    monkeypatch.setattr(prompt_keys, "LEAST_NEW", tl.constexpr(4))
    for can_copy in (False, True):
        monkeypatch.setattr(planned_layout, "can_copy", lambda *options, can_copy=can_copy: can_copy)
        outputs.append(run(model, *make_memory(model.config, 16), STEPS, LEAVES_AFTER))
        assert (num_launches(prompt_keys.copy_keys_kernel) > 0) == can_copy
    torch.testing.assert_close(*outputs, rtol=2e-4, atol=2e-5)


def test_flash_turns_planning_off(tiny_checkpoints, num_launches, counted, is_arrival):
    """The same hidden states by the kernels of phase 6."""
    model = load(tiny_checkpoints["llama"], "llama")
    outputs = {}
    for backend in ("flash", "planned"):
        outputs[backend] = run(model, *make_memory(model.config, 4, backend=backend), STEPS, LEAVES_AFTER)
        assert bool(counted["decode"]) == bool(counted["prefill"]) == (backend == "planned")
    torch.testing.assert_close(outputs["planned"], outputs["flash"], rtol=2e-4, atol=2e-5)
    assert num_launches(paged_attention_kernel) == num_launches(planned_decode_kernel) == NUM_DECODE
    assert num_launches(paged_prefill_kernel) == num_launches(planned_prefill_kernel) == NUM_PREFILL


def test_batches_of_any_size_are_loaded_to_the_same_addresses(tiny_checkpoints, is_arrival):
    """What a CUDA graph would record, whatever the plan; a step with prompts has other addresses."""
    config = load(tiny_checkpoints["gemma3_text"], "gemma3_text").config
    pool, view = make_memory(config, 2)
    a, b, c = (make_request(name, token_ids(name)) for name in "abc")
    addresses, shapes, cuts = {}, {}, []

    def step(**new):
        step = {{"a": a, "b": b, "c": c}[name]: count for name, count in new.items()}
        for request, count in step.items():
            assert pool.reserve(request, request.num_computed_tokens + count)
        schedule = step_of(step)
        batch = Batch.of(schedule, pool)
        tokens, logit_rows, _ = view.load(batch)
        arrays = []
        for kind, plans in batch.layout.extra.plans._asdict().items():
            for window, plan in plans.items():
                sent = vars(view.attention.plans[kind, window])
                assert all(sent[name].tolist() == getattr(plan, name).tolist() for name in ARRAYS)
                arrays += [value for value in sent.values() if isinstance(value, torch.Tensor)]
        sent = (tokens.ids, tokens.positions, logit_rows, view.offsets, view.attention.decoding[0])
        kinds = "".join(kind[0] for kind, plans in batch.layout.extra.plans._asdict().items() if plans)
        addresses.setdefault(kinds, set()).add(tuple(tensor.data_ptr() for tensor in (*arrays, *sent)))
        if batch.is_decode:
            shapes.setdefault(len(batch), set()).add(tuple(tensor.shape for tensor in arrays))
            cuts.append(tuple(view.attention.plans["decode", window].num_items.item() for window in (16, None)))
        commit(pool, schedule)

    step(a=1, b=1)
    step(a=29, b=29)
    step(a=1, b=1)
    step(b=2, c=3, a=2)
    step(a=1, b=1)
    step(a=1, c=1, b=1)
    step(b=1)
    step(a=1, c=2)
    step(c=2)
    step(b=1, c=5)
    assert cuts[:3] == [(2, 2), (2, 4), (2, 6)]
    assert {count: len(found) for count, found in shapes.items()} == {1: 1, 2: 1, 3: 1}
    assert {kinds: len(found) for kinds, found in addresses.items()} == {"d": 1, "p": 1, "dp": 1}


def test_a_part_of_a_batch_is_loaded_as_a_batch(tiny_checkpoints, is_arrival, counted):
    """Of a step that is cut since a request raises, each part has a plan of its own, and gives what the whole gives."""
    model = load(tiny_checkpoints["gemma3_text"], "gemma3_text")
    pool, view = make_memory(model.config, 4)
    a, b = (make_request(name, token_ids(name)) for name in "ab")
    for step in ({a: 33, b: 2}, {a: 1, b: 1}):
        for request, new in step.items():
            assert pool.reserve(request, request.num_computed_tokens + new)
        schedule = step_of(step)
        batch = Batch.of(schedule, pool)
        whole = model(view.load(batch)[0], view).clone()
        parts = [model(view.load(batch.part(range(n, n + 1)))[0], view).clone() for n in range(2)]
        torch.testing.assert_close(torch.cat(parts), whole, rtol=2e-4, atol=2e-5)
        commit(pool, schedule)
    assert len(counted["prefill"]) == len(counted["decode"]) == 3 * 2, "the whole and two parts, for each window"


def test_a_decode_forward_allocates_nothing_for_attention(tiny_checkpoints, randn):
    """Its queries, its results and its scratch are the view's own."""
    config = load(tiny_checkpoints["llama"], "llama").config
    pool, view = make_memory(config, 16)
    a = make_request("a")
    pool.reserve(a, 1)
    view.load(Batch.of(step_of({a: 1}), pool))
    attended = view.attend(0, randn(1, config.num_heads, config.head_dim), scale=1.0)
    assert attended.data_ptr() == view.attended.data_ptr()
    assert len(view.attention.workspace.counters) == 4 * config.num_kv_heads


def test_a_head_size_without_a_kernel(tiny_checkpoints):
    config = dataclasses.replace(load(tiny_checkpoints["llama"], "llama").config, head_dim=80)
    for backend in (None, "planned", "flash"):
        with pytest.raises(ConfigError, match=r"head size is 80"):
            make_memory(config, 16, backend=backend)
    make_memory(config, 16, backend="sdpa")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_sixteen_bits(tiny_checkpoints, is_arrival, family, dtype):
    model, exact = load(tiny_checkpoints[family], family, dtype), load(tiny_checkpoints[family], family)
    ours = run(model, *make_memory(model.config, 16, dtype), STEPS, LEAVES_AFTER)
    assert_as_near_as_alone(ours, model, exact, STEPS, LEAVES_AFTER)
