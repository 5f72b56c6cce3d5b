"""Keys and values in 8 bits: rounding to the bit, and attention equal to the formula over the dequantized numbers."""

import math

import pytest
import torch

from shared.attention.descriptor import Grid
from shared.attention.plan import plan_decode, plan_prefill
from shared.cache.layout.paged import PagedSizes
from shared.cache.pool.paged import PagedKVCachePool
from shared.cache.view import fp8_storage
from shared.cache.view.contiguous import ContiguousView
from shared.cache.view.fp8_storage import Fp8Storage
from shared.kernels.attention.decode_attention import DecodeWorkspace
from shared.kernels.attention.kv_write import kv_write, kv_write_kernel
from shared.kernels.attention.paged_attention import paged_attention, paged_attention_kernel
from shared.kernels.attention.paged_prefill import paged_prefill, paged_prefill_kernel
from shared.kernels.attention.planned_attention import planned_decode, planned_decode_kernel
from shared.kernels.attention.planned_prefill import planned_prefill, planned_prefill_kernel
from shared.kernels.e4m3 import dequantized, quantized
from shared.kernels.launch import GENERATIONS
from tests.kernels.attention import DEVICE, PagedMemory, assert_attended, draw_tokens, planned_workspace, sent
from tests.kernels.sequences import CAPACITY, LAYERS, alone, load, run
from tests.kernels.test_kv_write import make_transform
from tests.kernels.test_kv_write import reference as rotated
from tests.kernels.test_planned_attention import SMALL, SMALL_PREFILL
from tests.kernels.test_planned_view import LEAVES_AFTER, NUM_DECODE, NUM_PREFILL, STEPS
from tests.views import planned_view

BYTES = [torch.uint8, torch.float8_e4m3fn]  # as a GPU without FP8 reads them, and one with it
UNREAD = 0x7E  # 448, which no masked key may contribute


def test_numbers_are_stored_as_the_nearest_e4m3(randn):
    """Ties to even, subnormal numbers, what is too large, NaN; every e4m3 number is stored as itself."""
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (every[:126] + every[1:127]) / 2
    wide = randn(1000).cpu() * 10 ** (7 * torch.rand(1000, generator=torch.Generator().manual_seed(1)) - 4)
    special = torch.tensor([449.0, 464.0, 465.0, 1e30, -1e30, math.inf, -math.inf, math.nan, 2**-11, -0.0])
    x = torch.cat([every, ties, -ties, ties * (1 + 1e-6), ties * (1 - 1e-6), wide, special])
    x = torch.cat([x, torch.zeros(-len(x) % 16)]).view(-1, 1, 16).to(DEVICE)
    one, T = torch.ones(1, device=DEVICE), len(x)
    qk = make_transform(randn, 16, norms="", num_positions=1)  # position 0: not rotated
    for dtype in BYTES:
        keys, values = (torch.full((T, 1, 16), UNREAD, dtype=torch.uint8, device=DEVICE).view(dtype) for _ in range(2))
        places = torch.arange(T, device=DEVICE)
        kv_write(x, x, x, 0 * places, qk, keys, values, 16 * places, 16, k_scales=one, v_scales=one)
        expected = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        assert torch.equal(one_nan(values.view(torch.uint8)), one_nan(expected))
        is_number = x.isfinite().all(-1)  # what is next to an infinity or a NaN, is rotated with it
        actual, wanted = (x.view(torch.float8_e4m3fn).float()[is_number] for x in (keys, expected))
        assert torch.equal(actual, wanted)  # by value: a rotation by 0 makes -0 to 0
        assert torch.equal(one_nan(quantized(x, one)), one_nan(expected))


def one_nan(bits: torch.Tensor) -> torch.Tensor:
    """The bits of e4m3 numbers, with a NaN of either sign as the same: devices differ."""
    return torch.where(bits & 0x7F == 0x7F, 0x7F, bits)


@pytest.mark.parametrize("dtype", BYTES, ids=str)
@pytest.mark.parametrize(("D", "Hkv", "norms"), [(16, 2, "qk"), (64, 3, ""), (80, 1, "qk"), (128, 8, "qk")])
def test_each_head_is_written_by_its_scale(randn, num_launches, dtype, D, Hkv, norms):
    T, Hq = 5, 2 * Hkv
    qk = make_transform(randn, D, norms=norms)
    q, k, v = randn(T, (Hq + 2 * Hkv) * D, scale=3.0).view(T, -1, D).split((Hq, Hkv, Hkv), 1)
    positions = (torch.arange(T) * 7 % 64).to(DEVICE)
    k_scales, v_scales = (0.05 * 1.3 ** torch.arange(2 * Hkv)).to(DEVICE).split(Hkv)
    memory = torch.full((6, 4, Hkv, D), UNREAD, dtype=torch.uint8, device=DEVICE)
    keys, values = memory.clone(), memory.clone()
    places = torch.tensor([7, 0, 23, 11, 5], device=DEVICE)
    offsets = places * Hkv * D
    offsets[1] = -1  # padding
    where = (positions, qk, keys.view(dtype), values.view(dtype), offsets, D)
    out = kv_write(q, k, v, *where, k_scales=k_scales, v_scales=v_scales)
    assert num_launches(kv_write_kernel) == num_launches() == 1
    assert out.dtype == q.dtype
    written = [0, 2, 3, 4]
    at = places[written]
    assert torch.equal(values.flatten(0, 1)[at], quantized(v, v_scales)[written])
    expected, size = rotated(k, qk.k_norm, qk.table, positions)
    actual = dequantized(keys.flatten(0, 1)[at], k_scales, torch.float64)
    least = 2**-10 * k_scales.double()[:, None]  # half a step of subnormal numbers
    bound = (expected.abs() * 2**-4).maximum(least) + 1e-5 * size  # half a step of the fraction, and the arithmetic
    assert ((actual - expected[written]).abs() <= bound[written]).all()
    for cache in (keys, values):
        untouched = torch.ones(24, dtype=torch.bool, device=DEVICE)
        untouched[at] = False
        assert (cache.flatten(0, 1)[untouched] == UNREAD).all()


class Memory8Bits:
    """Blocks as bytes, each head with scales of its own, around them the largest number; ``tokens``: dequantized."""

    def __init__(self, randn, lengths, seen, Hkv, D, dtype):
        memory = PagedMemory(draw_tokens(randn, lengths, Hkv, D, torch.float32), 4, seen)
        keys, values, *where = memory.arrays
        scales = (0.02 * 1.3 ** torch.arange(2 * Hkv)).to(DEVICE).split(Hkv)
        cached = [
            torch.where(x.isnan(), UNREAD, quantized(x.flatten(0, 1), scale).view(x.shape)).to(torch.uint8).view(dtype)
            for x, scale in zip((keys, values), scales, strict=True)
        ]
        self.arrays, self.scales = (*cached, *where), dict(zip(("k_scales", "v_scales"), scales, strict=True))
        self.tokens = [
            [
                dequantized(quantized(x.transpose(0, 1), scale), scale, torch.float64).transpose(0, 1)
                for x, scale in zip(kv, scales, strict=True)
            ]
            for kv in memory.tokens
        ]


SHAPES = [  # Hq, Hkv, D, window, softcap
    (4, 2, 16, None, None),
    (8, 2, 64, 20, None),
    (3, 3, 128, None, 30.0),
]
DTYPES = torch.float32, torch.float16, torch.bfloat16
CASES = [(torch.float32, *SHAPES[0]), (torch.float16, *SHAPES[1]), (torch.float32, *SHAPES[2])]
CASES += [pytest.param(dtype, *shape, marks=pytest.mark.gpu) for dtype in DTYPES for shape in SHAPES]


@pytest.mark.parametrize("cached", BYTES, ids=str)
@pytest.mark.parametrize(("dtype", "Hq", "Hkv", "D", "window", "softcap"), CASES)
def test_decode_attention(randn, assert_near, num_launches, dtype, cached, Hq, Hkv, D, window, softcap):
    """Planned, with and without splits, and not planned."""
    lengths, limits = [70, 0, 1, 37], {"scale": 0.5 * D**-0.5, "window": window, "softcap": softcap}
    q = randn(len(lengths), Hq + 2, D, dtype=dtype)[:, :Hq]
    memory = Memory8Bits(randn, lengths, [min(n, window or n) for n in lengths], Hkv, D, cached)
    plan = sent(plan_decode(lengths, Grid(6, 16, 16), window=window))
    workspace = planned_workspace(plan.num_states, len(lengths), Hq, Hkv, D)
    planned = planned_decode(q, *memory.arrays, plan, **limits, **memory.scales, tiling=SMALL, workspace=workspace)
    workspace = DecodeWorkspace.of(len(lengths), Hq, Hkv, D, 70, DEVICE)
    paged = paged_attention(q, *memory.arrays, **limits, **memory.scales, workspace=workspace)
    assert num_launches(planned_decode_kernel) == num_launches(paged_attention_kernel) == 1
    for out in (planned, paged):
        assert_attended(assert_near, out, q, memory.tokens, [1] * len(lengths), **limits)


@pytest.mark.parametrize("cached", BYTES, ids=str)
@pytest.mark.parametrize(("dtype", "Hq", "Hkv", "D", "window", "softcap"), CASES)
def test_prefill_attention(randn, assert_near, num_launches, dtype, cached, Hq, Hkv, D, window, softcap):
    """Whole prompts and chunks, planned and not."""
    batch = [(19, 0), (3, 44), (1, 5)]  # new tokens, and those before
    new, lengths = [n for n, _ in batch], [sum(tokens) for tokens in batch]
    limits = {"scale": 0.5 * D**-0.5, "window": window, "softcap": softcap}
    q = randn(sum(new), Hq + 2, D, dtype=dtype)[:, :Hq]
    seen = [min(length, n + (window or length) - 1) for n, length in zip(new, lengths, strict=True)]
    memory = Memory8Bits(randn, lengths, seen, Hkv, D, cached)
    per_tile = SMALL_PREFILL.tokens(Hq // Hkv)
    plan = sent(plan_prefill(new, lengths, Grid(12, 16, 16), tokens_per_tile=per_tile, window=window))
    workspace = planned_workspace(plan.num_states, 0, Hq, Hkv, D)
    options = {"tiling": SMALL_PREFILL, "workspace": workspace}
    planned = planned_prefill(q, *memory.arrays, plan, **limits, **memory.scales, **options)
    starts = torch.tensor([0, *new], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(DEVICE)
    paged = paged_prefill(q, *memory.arrays, starts, **limits, **memory.scales)
    assert num_launches(planned_prefill_kernel) == num_launches(paged_prefill_kernel) == 1
    for out in (planned, paged):
        assert_attended(assert_near, out, q, memory.tokens, new, **limits)


class RoundedCache(ContiguousView):
    """A cache for each sequence, whose keys and values are rounded to e4m3 and dequantized when they are written."""

    scales: torch.Tensor

    def write(self, layer, q, k, v, positions, qk):
        q, k = qk(q, k, positions)
        k, v = (dequantized(quantized(x, s), s, x.dtype) for x, s in zip((k, v), self.scales[:, layer], strict=True))
        return super().write(layer, q, k, v, positions, lambda q, k, positions: (q, k))


@pytest.mark.parametrize(("family", "backend", "has_fp8"), [("qwen3", None, True), ("gemma3_text", "flash", False)])
def test_every_sequence_is_answered_as_if_alone(tiny_checkpoints, monkeypatch, num_launches, family, backend, has_fp8):
    """On a GPU that converts FP8, and on one that does not; the launches are those of 16 bits."""
    capability = (8, 9) if has_fp8 else (8, 0)
    monkeypatch.setattr(fp8_storage, "generation", lambda device: GENERATIONS[capability])
    model = load(tiny_checkpoints[family], family)
    config, sizes = model.config, PagedSizes(40, 3, 4, 60, CAPACITY)
    generator = torch.Generator().manual_seed(0)
    scales = (0.01 + 0.02 * torch.rand(2, config.num_layers, config.num_kv_heads, generator=generator)).to(DEVICE)
    storage = Fp8Storage(config, sizes, torch.float32, DEVICE, scales)
    view = planned_view(config, sizes, torch.float32, DEVICE, backend, storage)
    assert view.num_bytes == view.keys.nbytes + view.values.nbytes
    assert storage.layer_keys[0].dtype == (torch.float8_e4m3fn if has_fp8 else torch.uint8)
    view.keys.fill_(UNREAD)
    view.values.fill_(UNREAD)
    actual = run(model, PagedKVCachePool.of(sizes, lay_out=view.attention.lay_out), view, STEPS, LEAVES_AFTER)
    monkeypatch.setattr(RoundedCache, "scales", scales, raising=False)
    expected = alone(model, STEPS, LEAVES_AFTER, RoundedCache)
    torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-4)
    layers = len(LAYERS[family])
    decode, prefill = (
        (paged_attention_kernel, paged_prefill_kernel)
        if backend == "flash"
        else (planned_decode_kernel, planned_prefill_kernel)
    )
    assert num_launches(kv_write_kernel) == len(STEPS) * layers
    assert num_launches(decode) == NUM_DECODE * layers
    assert num_launches(prefill) == NUM_PREFILL * layers
