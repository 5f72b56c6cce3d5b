"""Attention, and what writes the keys and values that it reads, compiles for GPUs."""

import dataclasses
from types import SimpleNamespace

import torch

from tests.kernels.compilation import compiling


def compile_kv_write():
    from shared.kernels.attention import kv_write as module

    compiling(module)
    one = torch.zeros(1, dtype=torch.int64)
    for dtype, Hq, Hkv, D, has_norm in [
        (torch.bfloat16, 32, 8, 64, False),
        (torch.bfloat16, 16, 8, 128, True),
        (torch.float32, 4, 1, 256, True),
        (torch.float16, 5, 5, 80, False),
    ]:
        norm = SimpleNamespace(weight=torch.ones(D, dtype=dtype), eps=1e-6, offset=1.0) if has_norm else None
        qk = SimpleNamespace(table=torch.zeros(8, 2, 1, D), q_norm=norm, k_norm=norm)
        q, k, v = torch.zeros(1, Hq + 2 * Hkv, D, dtype=dtype).split((Hq, Hkv, Hkv), 1)
        memory = torch.zeros(1, Hkv, 8, D, dtype=dtype)
        module.kv_write(q, k, v, one, qk, memory, memory, one, 8 * D)


def compile_decode_attention():
    from shared.kernels.attention import decode_attention as module

    compiling(module)
    one = torch.zeros(1, dtype=torch.int32)
    for dtype, Hq, Hkv, D, softcap in [
        (torch.bfloat16, 16, 8, 128, 50.0),
        (torch.float32, 9, 3, 64, None),
    ]:
        workspace = module.DecodeWorkspace.of(1, Hq, Hkv, D, 4096, one.device)
        memory = torch.zeros(1, Hkv, 32, D, dtype=dtype)
        q = torch.zeros(1, Hq, D, dtype=dtype)
        module.decode_attention(q, memory, memory, one, one, scale=0.125, softcap=softcap, workspace=workspace)


def compile_paged_attention():
    from shared.kernels.attention import paged_attention, paged_prefill
    from shared.kernels.attention.decode_attention import DecodeWorkspace
    from shared.tracks.compression.kernels import condensed_attention

    for module in (condensed_attention, paged_attention, paged_prefill):
        compiling(module)
    one = torch.zeros(1, dtype=torch.int32)
    masks = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    for dtype, Hq, Hkv, D, softcap, block_size, T, of_heads in [
        (torch.bfloat16, 16, 8, 128, None, 16, 64, masks),
        (torch.bfloat16, 4, 1, 256, 50.0, 1, 1, None),
        (torch.float32, 9, 3, 64, None, 3, 8, None),
    ]:
        workspace = DecodeWorkspace.of(1, Hq, Hkv, D, 4096, one.device)
        memory = torch.zeros(2, block_size, Hkv, D, dtype=dtype)
        tensors = (memory, memory, one, one, one)
        q = torch.zeros(T, Hq, D, dtype=dtype)
        paged_attention.paged_attention(q[:1], *tensors, scale=0.125, softcap=softcap, workspace=workspace)
        kept = condensed_attention.KeptTokens(torch.zeros(1, 3 * Hkv + 2, dtype=torch.int32), of_heads)
        where = (memory.expand(3, *memory.shape), memory, one, one, one, one, kept, 2)
        condensed_attention.condensed_attention(
            q[:1], *where, scale=0.125, softcap=softcap, workspace=workspace, out=q[:1]
        )
        starts = torch.zeros(2, dtype=torch.int32)
        paged_prefill.paged_prefill(q, *tensors, starts, scale=0.125, softcap=softcap)


def compile_fp8_kv_cache():
    """Keys and values in 8 bits, for a GPU that converts FP8 and for one that does not."""
    from shared.attention.plan import plan_decode, plan_prefill
    from shared.kernels.attention import kv_write, planned_attention, planned_prefill, planned_tiling
    from shared.kernels.attention.planned_workspace import PlannedWorkspace

    planned_tiling.num_multiprocessors = lambda device: 132
    one = torch.ones(1, dtype=torch.int32)
    for capability, cached, dtype, Hq, Hkv, D, num_masks in [
        ((8, 0), torch.uint8, torch.bfloat16, 32, 8, 128, None),
        ((9, 0), torch.float8_e4m3fn, torch.bfloat16, 32, 8, 64, one),
        ((9, 0), torch.float8_e4m3fn, torch.float32, 3, 3, 16, None),
    ]:
        compiling(kv_write, planned_attention, planned_prefill, capability=capability)
        scales = {"k_scales": torch.ones(Hkv), "v_scales": torch.ones(Hkv)}
        memory = torch.zeros(2, 16, Hkv, D, dtype=torch.uint8).view(cached)
        q, k, v = torch.zeros(1, Hq + 2 * Hkv, D, dtype=dtype).split((Hq, Hkv, Hkv), 1)
        qk = SimpleNamespace(table=torch.zeros(8, 2, 1, D), q_norm=None, k_norm=None)
        kv_write.kv_write(q, k, v, one.long(), qk, memory, memory, one.long(), D, **scales)
        workspace = PlannedWorkspace.for_batches(1, Hq, Hkv, D, dtype.itemsize, one.device)
        settings = {"scale": 0.1, "workspace": workspace, **scales}
        tiling = planned_tiling.decode_tiling(1, Hkv, D, dtype.itemsize)
        plan = plan_decode([1], tiling.grid(Hkv, one.device), window=None)
        planned_attention.planned_decode(q, memory, memory, one, one, one, on_device(plan), tiling=tiling, **settings)
        tiling = planned_tiling.prefill_tiling(1, 1, Hq, Hkv, D, dtype.itemsize)
        grid, tokens = tiling.grid(Hkv, one.device), tiling.tokens(Hq // Hkv)
        plan = plan_prefill([1], [1], grid, tokens_per_tile=tokens, window=None)
        settings |= {"num_masks": num_masks, "tiling": tiling}
        planned_prefill.planned_prefill(q, memory, memory, one, one, one, on_device(plan), **settings)


def on_device(plan):
    from shared.attention.descriptor import DevicePlan

    return DevicePlan.of(plan, [torch.as_tensor(array).int() for array in plan.arrays()])


def compile_planned_attention():
    from shared.attention.descriptor import Grid
    from shared.attention.plan import plan_decode
    from shared.kernels.attention import merge_states, planned_attention
    from shared.kernels.attention.planned_tiling import decode_tiling
    from shared.kernels.attention.planned_workspace import PlannedWorkspace

    compiling(planned_attention, merge_states)
    lengths, tables = torch.tensor([700, 1], dtype=torch.int32), torch.zeros(128, dtype=torch.int32)

    for dtype, Hq, Hkv, D, block_size, softcap, buckets in [
        (torch.bfloat16, 32, 8, 64, 16, None, ((True, 1), (False, 64))),
        (torch.bfloat16, 4, 1, 256, 1, 50.0, ((True, 1),)),
        (torch.float32, 9, 3, 16, 24, None, ((True, 64),)),
    ]:
        memory = torch.zeros(50, block_size, Hkv, D, dtype=dtype)
        paged, settings = (memory, memory, tables, lengths, lengths), {"scale": 0.125, "softcap": softcap}
        for is_arrival, bucket in buckets:
            tiling = dataclasses.replace(decode_tiling(bucket, Hkv, D, dtype.itemsize), is_arrival=is_arrival)
            grid = Grid(10, tiling.tile, tiling.tile)
            plan = on_device(plan_decode(lengths.tolist(), grid))
            workspace = PlannedWorkspace.of(grid.max_states(), 2, Hq, Hkv, D, lengths.device)
            q = torch.zeros(2, Hq, D, dtype=dtype)
            planned_attention.planned_decode(q, *paged, plan, **settings, tiling=tiling, workspace=workspace)


def compile_planned_prefill():
    from shared.attention.descriptor import Grid
    from shared.attention.plan import plan_prefill
    from shared.kernels.attention import merge_states, planned_prefill, prompt_keys, specialized_prefill
    from shared.kernels.attention.planned_tiling import prefill_tiling
    from shared.kernels.attention.planned_workspace import PlannedWorkspace
    from shared.kernels.attention.prompt_keys import PromptKeys

    compiling(merge_states, planned_prefill, prompt_keys, specialized_prefill)
    lengths, tables = torch.tensor([4000, 1], dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    for dtype, Hq, Hkv, D, block_size, softcap, steps in [
        (torch.bfloat16, 32, 8, 64, 16, None, ([1, 1], [40, 1], [300, 1], [4000, 1])),
        (torch.bfloat16, 32, 8, 128, 16, None, ([300, 1],)),
        (torch.float16, 4, 1, 256, 1, None, ([300, 1],)),
        (torch.bfloat16, 4, 1, 256, 1, 50.0, ([4, 1],)),
        (torch.float32, 9, 3, 16, 24, None, ([4, 1],)),
    ]:
        memory = torch.zeros(50, block_size, Hkv, D, dtype=dtype)
        for new in steps:
            can = {"can_copy": True, "can_specialize": softcap is None}
            tiling = prefill_tiling(sum(new), len(new), Hq, Hkv, D, dtype.itemsize, **can)
            grid, per_tile = Grid(10, tiling.tile, tiling.tile), tiling.tokens(Hq // Hkv)
            plan = on_device(plan_prefill(new, lengths.tolist(), grid, tokens_per_tile=per_tile))
            workspace = PlannedWorkspace.of(grid.max_states(per_tile), 0, Hq, Hkv, D, lengths.device)
            copied = PromptKeys.of(1024, 2, Hkv * D, dtype, lengths.device, has_windows=False)
            options = {"tiling": tiling, "workspace": dataclasses.replace(workspace, copied=copied), "softcap": softcap}
            q = torch.zeros(sum(new), Hq, D, dtype=dtype)
            planned_prefill.planned_prefill(q, memory, memory, tables, lengths, lengths, plan, scale=0.125, **options)


def compile_ranges():
    from shared.kernels.attention import merge_states, planned_tiling
    from shared.tracks.segments.kernels import range_attention
    from shared.tracks.segments.range_plan import RangePlan

    planned_tiling.num_multiprocessors = lambda device: 132
    one = torch.ones(1, dtype=torch.int32)
    plan = RangePlan(*[one] * 13, torch.zeros(2, dtype=torch.int32))
    merge_states.launches = lambda tensor: True
    merge_states.launch = lambda *settings, **options: None
    for capability, dtype, Hq, Hkv, D, softcap in [
        ((8, 6), torch.float32, 4, 1, 256, 50.0),  # the largest tiles of the GPU with the least memory
        ((9, 0), torch.bfloat16, 32, 8, 64, None),
    ]:
        compiling(range_attention, capability=capability)
        q, memory = torch.zeros(1, Hq, D, dtype=dtype), torch.zeros(2, 16, Hkv, D, dtype=dtype)
        settings = {"workspace": range_attention.RangeWorkspace.of(1, Hq, D, one.device), "out": torch.empty_like(q)}
        settings |= {"scale": 0.1, "softcap": softcap}
        where = (one.long(), one, one, one, torch.ones(D // 2, dtype=torch.float64), torch.ones(1, 2, D // 2))
        for is_shared in (False, True):
            settings["tiling"] = range_attention.range_tiling(is_shared, Hq // Hkv, D, dtype.itemsize)
            range_attention.range_attention(q, memory, memory, *where, plan, **settings)
