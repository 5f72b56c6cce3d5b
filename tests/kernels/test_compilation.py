"""The kernels compile for GPUs of several generations on a machine without a GPU.

The interpreter runs a kernel as Python, so it accepts what the compiler refuses: a name whose type changes inside a
branch, a branch that is dead for some arguments. Triton carries its own assembler, so a process of its own, without
``TRITON_INTERPRET``, can compile every variant of a launch that an engine makes.
"""

import dataclasses
import functools
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shared.kernels.launch import INTERPRETED

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="on a GPU every kernel test compiles")
def test_every_variant_compiles(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [sys.executable, __file__], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr[-3000:]
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "shared" / "kernels").glob("*.py")]
    kernels = {name for text in texts for name in re.findall(r"^def (\w+_kernel)\(", text, re.MULTILINE)}
    assert set(process.stdout.split()) == kernels - {"dequantize_kernel", "fill_pending_kernel"}, (
        "and two that are a few lines"
    )


def compile_launch(kernel, grid, *args, capability=(9, 0), num_warps=4, num_stages=3, maxnreg=None, **constants):
    """The PTX of what :func:`shared.kernels.launch.launch` would compile on an H100, or another GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.runtime.jit import mangle_type

    from shared.kernels.launch import GENERATIONS, overlap

    gpu = GENERATIONS[capability]
    options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg}
    for name, value in overlap(kernel, gpu).items():
        (options if name == "launch_pdl" else constants)[name] = value
    values = dict(zip(kernel.arg_names, args, strict=False)) | constants
    signature, constexprs, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        value = values[name]
        if name in constants or value is None or (type(value) is int and value == 1):
            signature[name], constexprs[name] = "constexpr", value
            continue
        signature[name] = mangle_type(value)
        number = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if isinstance(number, int) and number % 16 == 0:
            attributes[(i,)] = [["tt.divisibility", 16]]
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    compiled = compile(ASTSource(kernel, signature, constexprs, attributes), target=target, options=options)
    assert compiled.metadata.shared <= gpu.shared_bytes, (kernel.__name__, compiled.metadata.shared, capability)
    assert compiled.metadata.launch_pdl == constants.get("PDL", False), "what Triton's launcher reads"
    ptx = compiled.asm["ptx"]
    for instruction in ("griddepcontrol.launch_dependents", "griddepcontrol.wait"):
        assert (instruction in ptx) == compiled.metadata.launch_pdl, instruction
    print(kernel.__name__)
    return ptx


def compiling(*modules, capability=(9, 0)):
    """The launchers of these modules compile for a GPU instead of launching; returns its generation's getter."""
    from shared.kernels.launch import GENERATIONS

    for module in modules:
        module.launches = lambda tensor: True
        module.launch = functools.partial(compile_launch, capability=capability)
    return lambda device: GENERATIONS[capability]


def compile_products():
    from shared.kernels import gated, gemv, low_rank, rmsnorm
    from shared.ops.gated import geglu, swiglu

    for capability in ((8, 0), (8, 6), (9, 0)):
        gemv.generation = compiling(gated, gemv, low_rank, rmsnorm, capability=capability)
        for dtype, N, K in [(torch.bfloat16, 3072, 2048), (torch.float32, 1152, 6912)]:
            norm = SimpleNamespace(weight=torch.ones(K, dtype=dtype), eps=1e-6, offset=1.0)
            for T in (1, 8):
                x, weight = torch.zeros(T, K, dtype=dtype), torch.zeros(N, K, dtype=dtype)
                residual, bias = torch.zeros(T, N, dtype=dtype), torch.zeros(N, dtype=dtype)
                gemv.linear(x, weight, None, norm)
                gemv.linear(x, weight, bias, None, residual)
                gemv.linear(x, weight, bias, norm, None, swiglu if T == 1 else geglu)
            rmsnorm.add_rms_norm(x, x, norm.weight, norm.eps, norm.offset, norm)
            gated.swiglu(residual, residual)
            y, b, gate = torch.zeros(8, N + 16, dtype=dtype), torch.zeros(N, 16, dtype=dtype), torch.zeros(8)
            low_rank.add_low_rank(y, b, gate, 2.0, residual)
            for activation in (swiglu, geglu):
                low_rank.add_low_rank(y, b, gate, 2.0, None, activation)


def compile_quantized_products():
    from shared.kernels import gated, quantized_gemm, quantized_gemv, quantized_rows, rmsnorm
    from shared.ops.gated import swiglu
    from shared.quantization.weight import QuantizedWeight

    modules = (gated, quantized_gemm, quantized_gemv, quantized_rows, rmsnorm)
    N, K = 6144, 4096
    fp8 = torch.zeros(N, K, dtype=torch.float8_e4m3fn), torch.ones(N // 128, K // 128), None, 128, 128
    int8 = torch.zeros(N, K, dtype=torch.int8), torch.ones(N, 1), None, K
    four, groups = torch.zeros(N, K // 2, dtype=torch.uint8), torch.ones(N, K // 128, dtype=torch.bfloat16)
    int4 = four, groups, torch.zeros(N, K // 128, dtype=torch.uint8), 128
    every_format = [QuantizedWeight(*parts) for parts in (fp8, int8, int4)]
    norm = SimpleNamespace(weight=torch.ones(K, dtype=torch.bfloat16), eps=1e-6, offset=0.0)
    for capability, weights in (
        ((8, 0), every_format[:1]),
        ((8, 6), every_format[2:]),
        ((8, 9), every_format[:1]),
        ((9, 0), every_format),
    ):
        quantized_gemv.generation = compiling(*modules, capability=capability)
        for T, weight in itertools.product((1, 8, 128) if capability == (9, 0) else (1, 128), weights):
            x, residual = torch.zeros(T, K, dtype=torch.bfloat16), torch.zeros(T, N, dtype=torch.bfloat16)
            quantized_gemv.linear(x, weight, None, None, residual)
            if T <= 8 and capability == (9, 0):
                quantized_gemv.linear(x, weight, None, norm, None, swiglu)


def compile_kv_write():
    from shared.kernels import kv_write as module

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
    from shared.kernels import decode_attention as module

    compiling(module)
    one = torch.zeros(1, dtype=torch.int32)
    for dtype, Hq, Hkv, D, softcap in [
        (torch.bfloat16, 32, 8, 64, None),
        (torch.bfloat16, 16, 8, 128, 50.0),
        (torch.bfloat16, 4, 1, 256, None),
        (torch.float32, 9, 3, 64, None),
    ]:
        workspace = module.DecodeWorkspace.of(1, Hq, Hkv, D, 4096, one.device)
        memory = torch.zeros(1, Hkv, 32, D, dtype=dtype)
        q = torch.zeros(1, Hq, D, dtype=dtype)
        module.decode_attention(q, memory, memory, one, one, scale=0.125, softcap=softcap, workspace=workspace)


def compile_paged_attention():
    from shared.kernels import condensed_attention, paged_attention, paged_prefill
    from shared.kernels.decode_attention import DecodeWorkspace

    for module in (condensed_attention, paged_attention, paged_prefill):
        compiling(module)
    one = torch.zeros(1, dtype=torch.int32)
    for dtype, Hq, Hkv, D, softcap, block_size, T in [
        (torch.bfloat16, 32, 8, 64, None, 16, 64),
        (torch.bfloat16, 16, 8, 128, None, 16, 64),
        (torch.bfloat16, 4, 1, 256, 50.0, 1, 1),
        (torch.float32, 9, 3, 64, None, 3, 8),
    ]:
        workspace = DecodeWorkspace.of(1, Hq, Hkv, D, 4096, one.device)
        memory = torch.zeros(2, block_size, Hkv, D, dtype=dtype)
        about = (memory, memory, one, one, one)
        q = torch.zeros(T, Hq, D, dtype=dtype)
        paged_attention.paged_attention(q[:1], *about, scale=0.125, softcap=softcap, workspace=workspace)
        for masks in (None, torch.zeros(1, 3, Hkv, 8, dtype=torch.uint8)):
            kept = condensed_attention.KeptTokens(torch.zeros(1, 3 * Hkv + 2, dtype=torch.int32), masks)
            where = (memory.expand(3, *memory.shape), memory, one, one, one, one, kept, 2)
            condensed_attention.condensed_attention(
                q[:1], *where, scale=0.125, softcap=softcap, workspace=workspace, out=q[:1]
            )
        starts = torch.zeros(2, dtype=torch.int32)
        paged_prefill.paged_prefill(q, *about, starts, scale=0.125, softcap=softcap)


def compile_compression():
    from shared.compression.selection import Budget
    from shared.kernels import kept_moves, key_redundancy, key_selection, window_mass

    compiling(kept_moves, key_redundancy, key_selection, window_mass)
    for dtype, Hq, Hkv, D, length in [
        (torch.bfloat16, 32, 8, 64, 128),
        (torch.bfloat16, 4, 1, 256, 32),
        (torch.float32, 4, 1, 64, 32),
    ]:
        numbers = torch.zeros(2, 64, dtype=torch.int32)
        sequences = window_mass.CachedSequences(numbers, numbers, 2176)
        memory, ring = torch.zeros(2, 3, 16, Hkv, D, dtype=dtype), torch.zeros(2, 3, length, Hq, D, dtype=dtype)
        mass = window_mass.window_mass(ring, memory, sequences, length, 0.125)[:, :, :, 0]
        key_redundancy.key_redundancy(memory, sequences, 0.5)
        p = torch.ones(1, dtype=torch.float64)
        kept = key_selection.select_keys(mass, mass, sequences, numbers[0, :2], Budget(1024, 2048), p)
        kept_moves.move_kept(memory, memory, sequences, 1, *kept, 2048, 2049)


def compile_fp8_kv_cache():
    """Keys and values in 8 bits, for a GPU that converts FP8 and for one that does not."""
    from shared.attention.descriptor import DevicePlan
    from shared.attention.plan import plan_decode, plan_prefill
    from shared.kernels import kv_write, planned_attention, planned_prefill, planned_tiling
    from shared.kernels.planned_workspace import PlannedWorkspace

    planned_tiling.num_multiprocessors = lambda device: 132
    one = torch.ones(1, dtype=torch.int32)
    for capability, cached in [((8, 0), torch.uint8), ((9, 0), torch.float8_e4m3fn)]:
        compiling(kv_write, planned_attention, planned_prefill, capability=capability)
        for dtype, Hq, Hkv, D in [(torch.bfloat16, 32, 8, 64), (torch.bfloat16, 32, 8, 128), (torch.float32, 3, 3, 16)]:
            scales = {"k_scales": torch.ones(Hkv), "v_scales": torch.ones(Hkv)}
            memory = torch.zeros(2, 16, Hkv, D, dtype=torch.uint8).view(cached)
            q, k, v = torch.zeros(1, Hq + 2 * Hkv, D, dtype=dtype).split((Hq, Hkv, Hkv), 1)
            qk = SimpleNamespace(table=torch.zeros(8, 2, 1, D), q_norm=None, k_norm=None)
            kv_write.kv_write(q, k, v, one.long(), qk, memory, memory, one.long(), D, **scales)
            workspace = PlannedWorkspace.for_batches(1, Hq, Hkv, D, dtype.itemsize, one.device)
            about = {"scale": 0.1, "workspace": workspace, **scales}
            tiling = planned_tiling.decode_tiling(1, Hkv, D, dtype.itemsize)
            plan = plan_decode([1], tiling.grid(Hkv, one.device), window=None)
            plan = DevicePlan.of(plan, [torch.as_tensor(array).int() for array in plan.arrays()])
            planned_attention.planned_decode(q, memory, memory, one, one, one, plan, tiling=tiling, **about)
            tiling = planned_tiling.prefill_tiling(1, 1, Hq, Hkv, D, dtype.itemsize)
            grid, tokens = tiling.grid(Hkv, one.device), tiling.tokens(Hq // Hkv)
            plan = plan_prefill([1], [1], grid, tokens_per_tile=tokens, window=None)
            plan = DevicePlan.of(plan, [torch.as_tensor(array).int() for array in plan.arrays()])
            for num_masks in (None, one):  # with mask tokens too
                about["num_masks"] = num_masks
                planned_prefill.planned_prefill(q, memory, memory, one, one, one, plan, tiling=tiling, **about)


def compile_planned_attention():
    from shared.attention.descriptor import DevicePlan, Grid
    from shared.attention.plan import plan_decode, plan_prefill
    from shared.kernels import merge_states, planned_attention, planned_prefill
    from shared.kernels.planned_tiling import decode_tiling, prefill_tiling
    from shared.kernels.planned_workspace import PlannedWorkspace

    compiling(planned_attention, planned_prefill, merge_states)
    lengths, tables = torch.tensor([700, 1], dtype=torch.int32), torch.zeros(128, dtype=torch.int32)

    def arrays_of(plan):
        return DevicePlan.of(plan, [torch.from_numpy(array) for array in plan.arrays()])

    for dtype, Hq, Hkv, D, block_size, softcap, buckets in [
        (torch.bfloat16, 32, 8, 64, 16, None, ((True, 1), (False, 64))),
        (torch.bfloat16, 4, 1, 256, 1, 50.0, ((True, 1),)),
        (torch.float32, 9, 3, 16, 24, None, ((True, 64),)),
    ]:
        memory = torch.zeros(50, block_size, Hkv, D, dtype=dtype)
        paged, about = (memory, memory, tables, lengths, lengths), {"scale": 0.125, "softcap": softcap}
        for is_arrival, bucket in buckets:
            tiling = dataclasses.replace(decode_tiling(bucket, Hkv, D, dtype.itemsize), is_arrival=is_arrival)
            grid = Grid(10, tiling.tile, tiling.tile)
            plan = arrays_of(plan_decode(lengths.tolist(), grid))
            workspace = PlannedWorkspace.of(grid.max_states(), 2, Hq, Hkv, D, lengths.device)
            q = torch.zeros(2, Hq, D, dtype=dtype)
            planned_attention.planned_decode(q, *paged, plan, **about, tiling=tiling, workspace=workspace)
        for new in ([1, 1], [40, 1]) if D == 64 else ([4, 1],):
            tiling = prefill_tiling(sum(new), len(new), Hq, Hkv, D, dtype.itemsize)
            grid, per_tile = Grid(10, tiling.tile, tiling.tile), tiling.tokens(Hq // Hkv)
            plan = arrays_of(plan_prefill(new, lengths.tolist(), grid, tokens_per_tile=per_tile))
            workspace = PlannedWorkspace.of(grid.max_states(per_tile), 0, Hq, Hkv, D, lengths.device)
            q = torch.zeros(sum(new), Hq, D, dtype=dtype)
            planned_prefill.planned_prefill(q, *paged, plan, **about, tiling=tiling, workspace=workspace)


def compile_ranges():
    from shared.attention.range_plan import RangePlan
    from shared.kernels import merge_states, planned_tiling, range_attention

    planned_tiling.num_multiprocessors = lambda device: 132
    one = torch.ones(1, dtype=torch.int32)
    plan = RangePlan(*[one] * 13, torch.zeros(2, dtype=torch.int32))
    merge_states.launches = lambda tensor: True
    merge_states.launch = lambda *about, **options: None
    for capability in ((8, 6), (9, 0)):
        compiling(range_attention, capability=capability)
        wide = torch.float32 if capability == (8, 6) else torch.bfloat16  # in fp32, seconds each, for the least memory
        for dtype, Hq, Hkv, D in [(torch.bfloat16, 32, 8, 64), (torch.bfloat16, 8, 4, 128), (wide, 4, 1, 256)]:
            q, memory = torch.zeros(1, Hq, D, dtype=dtype), torch.zeros(2, 16, Hkv, D, dtype=dtype)
            about = {"workspace": range_attention.RangeWorkspace.of(1, Hq, D, one.device), "out": torch.empty_like(q)}
            about |= {"scale": 0.1, "softcap": 50.0 if D == 256 else None}
            where = (one.long(), one, one, one, torch.ones(D // 2, dtype=torch.float64), torch.ones(1, 2, D // 2))
            for is_shared in (False, True):
                about["tiling"] = range_attention.range_tiling(is_shared, Hq // Hkv, D, dtype.itemsize)
                range_attention.range_attention(q, memory, memory, *where, plan, **about)


def compile_sampler():
    from shared.kernels import sampler as module
    from shared.sampling.params import SamplingParams
    from shared.sampling.sampler import SamplingBatch, SamplingRow

    compiling(module)
    cuts = ({}, {"top_k": 50}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.9})
    for settings in (*cuts, {"min_p": 0.1}, cuts[-1] | {"min_p": 0.1}):
        batch = SamplingBatch.of([SamplingRow(SamplingParams(**settings), 1, 2)])
        module.sample(torch.zeros(1, 128_256, dtype=torch.bfloat16), batch)


def compile_grammar():
    from shared.grammar.device import ROW, GrammarTokens
    from shared.grammar.vocabulary import GrammarVocabulary
    from shared.kernels import grammar_advance, grammar_mask

    compiling(grammar_advance, grammar_mask)
    tokens = GrammarTokens.of(GrammarVocabulary.of_tokens([b"a", b'"', b"</s>"], [2]), "cpu")
    tables, rows, slots = (torch.zeros(size, dtype=torch.int32) for size in (1024, (2, ROW), 2))
    words = torch.zeros(2, tokens.num_words, dtype=torch.int32)
    grammar_mask.grammar_mask(tables, tokens, rows, slots, words, {})
    for dtype in (torch.bfloat16, torch.float32):
        grammar_mask.remove_refused(words, slots, slots, tokens, torch.zeros(2, 3, dtype=dtype))
    for ids in (torch.zeros(2, dtype=torch.int64), torch.zeros(2, 5, dtype=torch.int64)):
        for chosen in (None, slots):
            grammar_advance.grammar_advance(tables, tokens, rows, slots, slots, ids, {}, chosen)


def compile_next_token():
    from shared.kernels import next_token as module

    compiling(module)
    longs, ints = [torch.zeros(4, dtype=torch.int64)] * 3, [torch.zeros(4, dtype=torch.int32)] * 3
    module.next_token(*longs, *ints, longs[0], block_size=16, stride=1024)


def compile_all_reduce():
    """Of one shot and of two; what is written to other GPUs, read from them and cleared is 16 bytes for each thread."""
    from shared.kernels import all_reduce as module

    def launch(kernel, grid, *args, **options):
        ptx = compile_launch(kernel, grid, *args, **options)
        num_others, num_shots = options["SIZE"] - 1, 1 + (options["PIECES"] > 1)
        num_vectors = num_shots * num_others * max(1, options["BLOCK"] // (128 * options["num_warps"]))
        assert ptx.count("ld.volatile.global.v4.b32") == num_vectors
        assert ptx.count("st.global.v4.b32") >= 2 * num_vectors

    module.launch = launch
    ints = [torch.zeros(size, dtype=torch.int32) for size in (256, 1)]
    for size, T, dtype, n in (
        (2, 1, torch.bfloat16, 8192),
        (2, 1, torch.float16, 1152),
        (4, 1, torch.float32, 4096),
        (4, 64, torch.bfloat16, 4096),
    ):
        addresses = torch.zeros(size, dtype=torch.int64)
        peers = SimpleNamespace(rank=1, size=size, addresses=addresses, counters=ints[0], stop=ints[1])
        x = torch.zeros(T, n, dtype=dtype)
        norm = SimpleNamespace(weight=torch.ones(n, dtype=dtype), eps=1e-6, offset=1.0)
        for more in ((), (x,), (x, norm)):
            module.all_reduce(x, peers, *more)


if __name__ == "__main__":
    for name, compile_kernels in list(globals().items()):
        if name.startswith("compile_") and name != "compile_launch":
            compile_kernels()
