"""Products, and norms and activations around them, compile for GPUs."""

import itertools
from types import SimpleNamespace

import torch

from tests.kernels.compilation import compiling


def compile_products():
    from shared.kernels.products import gated, gemv, rmsnorm
    from shared.ops.gated import geglu, swiglu
    from shared.tracks.multi_token.kernels import low_rank

    for capability, dtype, N, K in [
        ((8, 6), torch.bfloat16, 3072, 2048),
        ((8, 6), torch.float32, 1152, 6912),
        ((9, 0), torch.bfloat16, 3072, 2048),
    ]:
        gemv.generation = compiling(gated, gemv, low_rank, rmsnorm, capability=capability)
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


def compile_gated_gemm():
    from shared.kernels.products import gated_gemm

    compiling(gated_gemm)
    gated_gemm.num_multiprocessors = lambda device: 132
    for dtype, activation in ((torch.bfloat16, "silu"), (torch.float16, "gelu_tanh")):
        x, weight = torch.zeros(512, 2048, dtype=dtype), torch.zeros(4096, 2048, dtype=dtype)
        gated_gemm.gated_gemm(x, weight, activation)


def compile_quantized_products():
    from shared.kernels.products import (
        fp8_rows,
        gated,
        quantized_gemm,
        quantized_gemv,
        quantized_prompts,
        quantized_rows,
        rmsnorm,
    )
    from shared.ops.gated import geglu, swiglu
    from shared.quantization.weight import QuantizedWeight

    modules = (fp8_rows, gated, quantized_gemm, quantized_gemv, quantized_prompts, quantized_rows, rmsnorm)
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
        for T, weight in itertools.product((1, 8, 16, 128) if capability == (9, 0) else (1, 128), weights):
            x, residual = torch.zeros(T, K, dtype=torch.bfloat16), torch.zeros(T, N, dtype=torch.bfloat16)
            quantized_gemv.linear(x, weight, None, None, residual)
            if T <= 16 and capability == (9, 0):
                quantized_gemv.linear(x, weight, None, norm, None, swiglu)
    quantized_gemv.gated_linear(torch.zeros(128, 2 * K, dtype=torch.bfloat16), every_format[0], None, None, geglu)
    for weight in every_format[1:]:
        part = weight.tile(0, 128)
        quantized_prompts.multiply_by_tiles(x, part, part.values, None, None)
