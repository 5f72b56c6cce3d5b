"""How the cost of prompts grows: first tokens, decoding by batch, and the time between tokens during a long prompt.

Introduced in phase 7. The model has random weights of a real shape, made in memory. A prompt's floor is its operations
(two for each weight and token, and those of causal attention) over the rate of matrix products of the same run, even
for 8-bit weights. Attention of one layer is also timed by itself, and so is FlashAttention 3 if vLLM's package of it
can be imported. Gate and up of one layer with their activation are timed too, and the same as two launches. Invariant:
no prompt was cached earlier.

    python -m benchmarks.prompts --shape qwen3-8b --quantization fp8 --lengths 2048 8192 --out benchmarks/reports
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.command import run
from benchmarks.decoding import Decoding, decoding, first_token
from benchmarks.hardware import Ceilings, device_of, measure_ceilings
from benchmarks.host_parts import loop_ns
from benchmarks.random_weights import make_weights_when_read, random_model
from benchmarks.report import Report, describe_model, engine_settings, rounded
from benchmarks.roofline import DecodeWork, weight_bytes
from benchmarks.setup import free_memory, freeze_memory
from benchmarks.timing import SyntheticPrompts, cache_bytes, num_input_sets, time_calls
from benchmarks.view import View, percent, table_of
from shared.attention.descriptor import DevicePlan
from shared.attention.plan import plan_prefill
from shared.engine.config import EngineConfig
from shared.engine.executor.staging import Staging
from shared.engine.warm_up import warm_up
from shared.errors import ConfigError
from shared.kernels.attention.planned_prefill import planned_prefill
from shared.kernels.attention.planned_tiling import can_copy, can_specialize, prefill_tiling
from shared.kernels.attention.planned_workspace import PlannedWorkspace
from shared.kernels.attention.prompt_keys import PromptKeys
from shared.kernels.launch import launches
from shared.kernels.products import gated_gemm
from shared.kernels.products.gemv import ACTIVATIONS, linear
from shared.lessons import find_lesson
from shared.loading.config_json import read_config
from shared.models.config import ModelConfig
from shared.ops.gated import GATED_ACTIVATIONS

TRIALS, BLOCK_SIZE, STEPS = 3, 16, 20
MOST_NEW = 512  # tokens decoded while all requests of a batch start
GATED_ROWS, TINY_GATED_ROWS = (512, 2048, 8192), (64,)
ATTENTION = {"one of 8,192": (1, 8192), "one of 32,768": (1, 32768), "four of 2,048": (4, 2048)}
TINY_ATTENTION = {"two of 32": (2, 32)}


def measure(
    shape: str = "llama-3.2-1b",
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8224, 16384, 32768, 65536, 131000),
    batches: tuple[int, ...] = (1, 8, 64, 256, 512),
    sizes: tuple[int, ...] = (0, 512, 1024),
    context: int = 256,
    beside: int = 16,
    long: int = 8192,
    quantization: str | None = None,
    attention: bool = True,
    device: str = "cuda",
) -> Report:
    """Measure one model.

    Lengths beyond the model's positions are skipped. Steps decode with ``context`` tokens of context. ``beside``
    requests decode during prompts of ``long`` tokens, with chunks of each of ``sizes``; 0 lets the engine choose the
    size. ``attention``: also time attention, and gate and up, of one layer alone.
    """
    make_weights_when_read()
    ceilings = measure_ceilings(device)
    rate = ceilings.matmul_flops_per_second
    results: dict[str, Any] = {"loop_ns": rounded(loop_ns()), "ceilings": ceilings.results()}
    with tempfile.TemporaryDirectory() as temporary:
        folder = random_model(shape, Path(temporary), device)
        config = EngineConfig(model=str(folder), device=device, quantization=quantization, use_prefix_caching=False)
        model = read_config(folder)
        work = DecodeWork(model, torch.bfloat16)
        if attention:
            results["attention"] = {
                name: attention_row(model, *prompts, rate, device)
                for name, prompts in (ATTENTION if device == "cuda" else TINY_ATTENTION).items()
            }
            results["gated"] = {
                f"{rows:,}": gated_row(model, rows, rate, device)
                for rows in (GATED_ROWS if device == "cuda" else TINY_GATED_ROWS)
            }
        prompts = SyntheticPrompts(model.vocab_size, 0)
        fitting = [length for length in lengths if length < model.max_position_embeddings]
        if not fitting:
            raise ConfigError(
                f"{shape} has {model.max_position_embeddings} positions; all lengths are {min(lengths)} or more."
            )
        results["first_token"] = first_tokens(config, prompts, work, fitting, rate)
        results["decoding"] = decode_steps(config, prompts, work, batches, context, ceilings)
        results["beside"] = {
            f"{size:,}" if size else "by default": beside_row(config, prompts, (context, beside, long), size)
            for size in sizes
        }
        flags: dict[str, Any] = {"lengths": fitting, "batches": list(batches), "sizes": list(sizes)}
        flags |= {"quantization": quantization, "context": context, "beside": beside, "long": long}
        described = describe_model(str(folder)) | {"name": "-".join(filter(None, (shape, quantization)))}
        return Report("prompts", described, {"12": engine_settings(config, shape)}, 0, flags, results, device)


def engine_of(config: EngineConfig, **settings: Any) -> Any:
    """The newest engine with further settings, warmed up, in the memory that earlier engines have left free."""
    free_memory()
    engine = find_lesson("12").engine(replace(config, **settings))
    warm_up(engine)
    freeze_memory()
    return engine


def first_tokens(
    config: EngineConfig, prompts: SyntheticPrompts, work: DecodeWork, lengths: Sequence[int], rate: float
) -> dict[str, dict[str, Any]]:
    """For each length: milliseconds to the first token, in the fastest trial, with the floor by operations."""
    engine, rows = engine_of(config, max_batch_size=1, max_seq_len=max(lengths) + 1), {}
    for length in lengths:
        seconds = min(first_token(engine, prompts.draw(length)) for _ in range(TRIALS))
        floor = work.prompt_flops(length) / rate
        rows[f"{length:,}"] = {
            "ms": rounded(1e3 * seconds),
            "floor_ms": rounded(1e3 * floor),
            "of_floor": rounded(floor / seconds),
            "tokens_per_second": rounded(length / seconds),
        }
    return rows


def decode_steps(
    config: EngineConfig,
    prompts: SyntheticPrompts,
    work: DecodeWork,
    batches: Sequence[int],
    context: int,
    ceilings: Ceilings,
) -> dict[str, dict[str, Any]]:
    """For each batch: the median step at ``context`` tokens of context, with the floor of the loaded weights."""
    engine, rows = engine_of(config, max_batch_size=max(batches), max_seq_len=context + 2 * MOST_NEW), {}
    extra = weight_bytes(engine.model) - work.resident_bytes  # may be below 0 if weights have 8 bits
    for batch in batches:
        together = Decoding(engine, [(prompts.draw(context), decoding(MOST_NEW)) for _ in range(batch)])
        seconds = statistics.median(together.steps(STEPS)[0])
        together.end()
        num_bytes = extra + work.num_bytes(context + STEPS, batch)
        computing = work.flops(context + STEPS, batch) / ceilings.matmul_flops_per_second
        floor = max(num_bytes / ceilings.read_bytes_per_second, computing)
        rows[f"{batch:,}"] = {
            "step_ms": rounded(1e3 * seconds),
            "tokens_per_second": rounded(batch / seconds),
            "floor_ms": rounded(1e3 * floor),
            "of_floor": rounded(floor / seconds),
        }
    return rows


def beside_row(
    config: EngineConfig, prompts: SyntheticPrompts, load: tuple[int, int, int], size: int
) -> dict[str, Any]:
    """The time between tokens of decoding requests while TRIALS prompts are computed, one after the other.

    ``load``: the requests' context, their number, and the prompts' length. ``size``: tokens of a chunk; 0: the engine
    chooses.
    """
    context, beside, long = load
    settings = {"prefill_chunk_size": size or None, "max_batch_size": beside + 1, "max_seq_len": context + 2 * long}
    engine = engine_of(config, **settings)
    together = Decoding(engine, [(prompts.draw(context), decoding(long)) for _ in range(beside)])
    together.steps(STEPS)
    waits, firsts, num_chunks = [], [], 0
    for _ in range(TRIALS):
        name = engine.add_request(prompts.draw(long), decoding(1))
        started = last = time.perf_counter()
        is_done = False
        while not is_done:
            outputs = engine.step()
            now = time.perf_counter()
            waits.append(now - last)
            last, is_done = now, any(output.request_id == name for output in outputs)
            num_chunks += bool(engine.last_step.prefilled)
        firsts.append(last - started)
    together.end()
    p50, p99 = (rounded(1e3 * float(np.percentile(waits, share))) for share in (50, 99))
    figures = {"tokens_of_a_chunk": round(TRIALS * long / num_chunks), "p50_ms": p50, "p99_ms": p99}
    return figures | {"max_ms": rounded(1e3 * max(waits)), "first_token_ms": rounded(1e3 * statistics.median(firsts))}


def attention_row(model: ModelConfig, count: int, length: int, rate: float, device: str) -> dict[str, Any]:
    """Attention of ``count`` prompts of ``length`` tokens in one layer, as an eager step computes it, and by
    FlashAttention 3."""
    where = device_of(device)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    heads = Hq, Hkv, D = model.num_heads, model.num_kv_heads, model.head_dim
    num_blocks = -(-length // BLOCK_SIZE)
    pool = torch.randn(2, count * num_blocks, BLOCK_SIZE, Hkv, D, dtype=dtype, device=where)
    q = torch.randn(count * length, Hq, D, dtype=dtype, device=where)
    copies = can_copy(dtype.itemsize, where), can_specialize(Hq // Hkv, dtype.itemsize, model.attention_softcap, where)
    tiling = prefill_tiling(len(q), count, *heads, dtype.itemsize, *copies)
    grid, tokens = tiling.grid(Hkv, where), tiling.tokens(Hq // Hkv)
    plan = plan_prefill([length] * count, [length] * count, grid, tokens_per_tile=tokens)
    order = np.random.default_rng(0).permutation(count * num_blocks).astype(np.int32)
    arrays = {str(n): array for n, array in enumerate(plan.arrays())} | {
        "tables": order,
        "starts": np.arange(count, dtype=np.int32) * num_blocks,
        "lengths": np.full(count, length, np.int32),
    }
    *of_plan, tables, starts, lengths = Staging.for_arrays(where, arrays).send(arrays).values()
    workspace = PlannedWorkspace.of(plan.num_states, count, *heads, where)
    if tiling.copied is not None:
        has_windows = any(window is not None for window in model.windows)
        rows = count * (-(-length // tiling.copied.tile) + has_windows) * tiling.copied.tile
        workspace = replace(workspace, copied=PromptKeys.of(rows, count, Hkv * D, dtype, where, has_windows))
    sent, scale = DevicePlan.of(plan, of_plan), D**-0.5
    options: dict[str, Any] = {"scale": scale, "tiling": tiling, "copies": (True, False), "workspace": workspace}

    def ours(q: torch.Tensor) -> torch.Tensor:
        return planned_prefill(q, pool[0], pool[1], tables, starts, lengths, sent, **options)

    flops = 2 * count * length * (length + 1) * Hq * D
    row = {"tflop_per_second": rounded(flops / time_calls(ours, [(q,), (q.clone(),)]) / 1e12)}
    row["of_products"] = rounded(1e12 * row["tflop_per_second"] / rate)
    if flash := flash_attention():
        keys, values = (torch.randn(count * length, Hkv, D, dtype=dtype, device=where) for _ in range(2))
        ends = torch.arange(count + 1, dtype=torch.int32, device=where) * length
        varlen: dict[str, Any] = {
            "cu_seqlens_q": ends,
            "max_seqlen_q": length,
            "cu_seqlens_k": ends,
            "max_seqlen_k": length,
        }
        varlen |= {"causal": True, "softmax_scale": scale, "fa_version": 3}
        seconds = time_calls(lambda q: flash(q, keys, values, **varlen), [(q,), (q.clone(),)])
        row["flash_attention_3"] = rounded(flops / seconds / 1e12)
        row["of_flash_attention_3"] = rounded(row["tflop_per_second"] / row["flash_attention_3"])
    return row


def gated_row(model: ModelConfig, rows: int, rate: float, device: str) -> dict[str, Any]:
    """TFLOP/s of gate and up of ``rows`` tokens in one layer with their activation, as a step computes them, and by
    PyTorch's product and a launch for the activation. ``launches``: those of a step; on a CPU none is counted."""
    where = device_of(device)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    columns, depth = model.intermediate_size, model.hidden_size
    activation = GATED_ACTIVATIONS[model.hidden_act]
    x = torch.randn(rows, depth, dtype=dtype, device=where)
    num_sets = num_input_sets(2 * columns * depth * dtype.itemsize, cache_bytes(where))
    inputs = [(x, torch.randn(2 * columns, depth, dtype=dtype, device=where) / depth**0.5) for _ in range(num_sets)]

    def ours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear(x, weight, activation=activation)

    def in_two(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[activation][1](*F.linear(x, weight).chunk(2, dim=-1))

    one, two = (rounded(4 * rows * columns * depth / time_calls(call, inputs) / 1e12) for call in (ours, in_two))
    figures = {"tflop_per_second": one, "of_products": rounded(1e12 * one / rate)}
    figures |= {"in_two_launches": two, "over_two_launches": rounded(one / two)}
    return figures | {"launches": 1 if gated_gemm.is_for(*inputs[0]) else 2 * launches(x)}


def flash_attention() -> Any:
    """FlashAttention 3 from vLLM's package; None if there is none."""
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func


def view(report: Report) -> View:
    """A table for each part."""
    results, flags = report.results, report.flags
    headings = {
        "attention": ("Attention of one layer, the copy of its keys included", "prompts"),
        "gated": ("Gate and up of one layer with their activation", "tokens"),
        "first_token": ("First token of one prompt", "tokens"),
        "decoding": (f"A decode step at {flags['context']} tokens of context", "sequences"),
        "beside": (f"{flags['beside']} decoding requests beside prompts of {flags['long']:,}", "chunk"),
    }
    tables = [
        table_of(
            *heading, results[part], of_floor=percent, of_products=percent, of_flash_attention_3=percent, launches=str
        )
        for part, heading in headings.items()
        if part in results
    ]
    found = results["ceilings"]
    rate = f"products {found['matmul_tflop_per_second']} TFLOP/s, reading {found['read_gb_per_second']:,.0f} GB/s"
    subtitles = [
        f"{report.machine_title}; {report.date[:10]}",
        f"{rate}; an addition in Python {results['loop_ns']} ns",
    ]
    return View(f"Prompts: {report.model['name']}", subtitles, tables)


if __name__ == "__main__":
    run(measure, view, __doc__)
