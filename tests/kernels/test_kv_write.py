"""One launch norms, rotates and stores: right in every layout, for views, long positions and extreme norms."""

import pytest
import torch

import shared.kernels.attention.kv_write as module
from shared.kernels.attention.kv_write import kv_write, kv_write_kernel
from shared.models.attention import NormAndRotate
from shared.models.config import RopeConfig
from shared.models.norm import RMSNorm
from shared.ops.rope import rope_table

NAN = float("nan")


def make_norm(weight, offset, eps=1e-6):
    norm = RMSNorm(len(weight), eps, offset)
    norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    return norm


def make_transform(randn, D, *, num_positions=64, norms="qk", offset=0.0, dtype=torch.float32, scale=1.0):
    table = rope_table(RopeConfig(theta=10000.0), D, num_positions, randn(0).device)
    weights = {name: make_norm(randn(D, dtype=dtype, scale=scale), offset) for name in norms}
    return NormAndRotate(table, weights.get("q"), weights.get("k"))


def reference(x, norm, table, positions):
    """Norm and rotation in fp64, and the magnitudes that a rotation sums up."""
    x = x.double()
    if norm is not None:
        x = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * (norm.weight.double() + norm.offset)
    cos, sin = table[positions].double().unbind(1)  # [T, 1, D]
    turned = x.roll(x.shape[-1] // 2, -1) * sin
    return x * cos + turned, (x * cos).abs() + turned.abs()


def make_memory(layout, Hkv, D, T, dtype, device):
    """Memory of 8 NaN places or more, T of them as offsets in any order, the head stride, and a view [place, head]."""
    generator = torch.Generator().manual_seed(T)
    num_places = {"contiguous": T + 3, "regions": 3 * 8, "paged": 6 * 4}[layout]
    places = torch.randperm(num_places, generator=generator)[:T].to(device)
    if layout == "contiguous":  # [Hkv, capacity, D]
        memory = torch.full((Hkv, num_places, D), NAN, dtype=dtype, device=device)
        return memory, places * D, num_places * D, lambda m: m.transpose(0, 1)[places]
    if layout == "regions":  # [regions, Hkv, capacity, D]
        memory = torch.full((3, Hkv, 8, D), NAN, dtype=dtype, device=device)
        region, place = places // 8, places % 8
        return memory, (region * Hkv * 8 + place) * D, 8 * D, lambda m: m[region, :, place]
    memory = torch.full((6, 4, Hkv, D), NAN, dtype=dtype, device=device)  # [blocks, block size, Hkv, D]
    return memory, places * Hkv * D, D, lambda m: m.flatten(0, 1)[places]


def check(randn, assert_near, *, T, Hq, Hkv, D, layout="contiguous", dtype=torch.float32, positions=None, **options):
    qk = make_transform(randn, D, dtype=dtype, **options)
    merged = randn(T, (Hq + 2 * Hkv) * D, dtype=dtype)
    q, k, v = merged.view(T, -1, D).split((Hq, Hkv, Hkv), 1)
    before = merged.clone()
    if positions is None:
        positions = torch.arange(T) * 7 % 64
    positions = positions.to(merged.device)
    keys, offsets, head_stride, written = make_memory(layout, Hkv, D, T, dtype, merged.device)
    values = keys.clone()
    out = kv_write(q, k, v, positions, qk, keys, values, offsets, head_stride)

    expected, scale = reference(q, qk.q_norm, qk.table, positions)
    ulps = 12 if dtype == torch.float32 else 1
    assert out.dtype == dtype
    assert_near(out, expected, ulps, scale)
    expected, scale = reference(k, qk.k_norm, qk.table, positions)
    assert_near(written(keys), expected, ulps, scale)
    assert torch.equal(written(values), v)
    assert torch.equal(merged, before)
    for memory in (keys, values):  # and nothing else
        assert memory.isfinite().sum() == T * Hkv * D
    return out


@pytest.mark.parametrize("layout", ["contiguous", "regions", "paged"])
def test_every_layout_of_memory(randn, assert_near, num_launches, layout):
    check(randn, assert_near, T=5, Hq=4, Hkv=2, D=64, layout=layout)
    assert num_launches(kv_write_kernel) == num_launches() == 1


@pytest.mark.parametrize("D", [2, 6, 16, 64, 80, 128, 256])
@pytest.mark.parametrize("norms", ["", "qk"])
def test_head_sizes(randn, assert_near, D, norms):
    check(randn, assert_near, T=1, Hq=3, Hkv=1, D=D, norms=norms)


def test_dtypes(randn, assert_near, stored_dtype):
    check(randn, assert_near, T=3, Hq=9, Hkv=3, D=64, dtype=stored_dtype)


@pytest.mark.parametrize(("Hq", "Hkv", "D"), [(32, 8, 64), (5, 5, 128), (4, 1, 256), (1, 1, 8)])
def test_heads_that_do_not_fill_their_programs(randn, assert_near, Hq, Hkv, D):
    check(randn, assert_near, T=1, Hq=Hq, Hkv=Hkv, D=D, norms="")


@pytest.mark.parametrize("norms", ["q", "k"])
def test_one_norm_alone(randn, assert_near, norms):
    check(randn, assert_near, T=2, Hq=2, Hkv=2, D=16, norms=norms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_large_norm_weights_with_an_offset(randn, assert_near, dtype):
    check(randn, assert_near, T=4, Hq=2, Hkv=1, D=64, norms="qk", offset=1.0, scale=100.0, dtype=dtype)


def test_positions_past_one_hundred_thousand(randn, assert_near):
    positions = torch.tensor([100_003, 0, 131_071, 131_071, 99_999])
    check(randn, assert_near, T=5, Hq=2, Hkv=1, D=16, num_positions=131_072, positions=positions)


@pytest.mark.parametrize(("Hq", "Hkv", "D"), [(32, 8, 64), (5, 5, 128), (2, 1, 256)])
def test_a_program_has_more_to_do_if_there_are_many_tokens(randn, assert_near, monkeypatch, Hq, Hkv, D):
    monkeypatch.setattr(module, "PROGRAMS", ((8, 128, 4), (2**62, 1024, 2)))
    check(randn, assert_near, T=9, Hq=Hq, Hkv=Hkv, D=D)


@pytest.mark.gpu
@pytest.mark.parametrize(("Hq", "Hkv", "D", "norms"), [(32, 8, 64, ""), (16, 8, 128, "qk"), (4, 1, 256, "qk")])
def test_a_long_prompt_at_real_shapes(randn, assert_near, stored_dtype, Hq, Hkv, D, norms):
    check(randn, assert_near, T=4099, Hq=Hq, Hkv=Hkv, D=D, norms=norms, dtype=stored_dtype)


def test_no_token(randn):
    qk = make_transform(randn, 16)
    q, k, keys = randn(0, 4, 16), randn(0, 2, 16), randn(2, 8, 16)
    before = keys.clone()
    none = torch.empty(0, dtype=torch.int64, device=keys.device)
    assert kv_write(q, k, k, none, qk, keys, keys, none, 8 * 16).shape == (0, 4, 16)
    assert torch.equal(keys, before)


def test_numbers_of_a_head_that_lie_apart(randn):
    qk = make_transform(randn, 16)
    q, k, v = (randn(3, 16, heads).transpose(1, 2) for heads in (4, 2, 2))
    positions = torch.arange(3, device=q.device)
    results = []
    for views in ((q, k, v), (q.contiguous(), k.contiguous(), v.contiguous())):
        keys, values = randn(2, 8, 16).zero_(), randn(2, 8, 16).zero_()
        out = kv_write(*views, positions, qk, keys, values, positions * 16, 8 * 16)
        results.append(torch.cat((out.flatten(), keys.flatten(), values.flatten())))
    assert torch.equal(*results)


def test_the_result_goes_where_it_is_asked(randn):
    qk = make_transform(randn, 16)
    q, k = randn(1, 4, 16), randn(1, 2, 16)
    keys, out = randn(2, 8, 16), torch.full_like(q, NAN)
    zero = torch.zeros(1, dtype=torch.int64, device=q.device)
    result = kv_write(q, k, k, zero, qk, keys, keys.clone(), zero, 8 * 16, out=out)
    assert result.data_ptr() == out.data_ptr()
    assert out.isfinite().all()


@pytest.mark.parametrize("layout", ["contiguous", "regions", "paged"])
def test_without_a_gpu_the_ops_do_the_same(randn, monkeypatch, layout):
    qk = make_transform(randn, 16)
    q, k, v = randn(5, 8, 16).split((4, 2, 2), 1)
    positions = torch.tensor([3, 60, 1, 1, 7], device=q.device)
    keys, offsets, head_stride, written = make_memory(layout, 2, 16, 5, torch.float32, q.device)
    values = keys.clone()
    monkeypatch.setattr(module, "launches", lambda tensor: False)
    out = kv_write(q, k, v, positions, qk, keys, values, offsets, head_stride)
    expected_q, expected_k = qk(q, k, positions)
    assert torch.equal(out, expected_q)
    assert torch.equal(written(keys), expected_k)
    assert torch.equal(written(values), v)
    assert keys.isfinite().sum() == values.isfinite().sum() == 5 * 2 * 16
