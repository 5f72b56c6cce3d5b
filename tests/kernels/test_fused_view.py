"""The fused view gives what the plain one gives, on every backend, for every family, and on the CPU to the last bit."""

from dataclasses import replace

import pytest
import torch

import shared.cache.view.fused_contiguous as module
from shared.cache.view.contiguous import ContiguousCache, ContiguousView
from shared.cache.view.fused_contiguous import FusedContiguousView
from shared.checkpoints.shapes import SHAPES
from shared.errors import ConfigError
from shared.kernels.attention.decode_attention import TILINGS, decode_attention_kernel
from shared.kernels.attention.kv_write import kv_write_kernel
from shared.kernels.launch import HEAD_SIZES
from shared.loading.config_json import parse_config
from shared.models.fused import fuse
from shared.models.tokens import Tokens
from tests.kernels.sequences import DEVICE, LAYERS, load, poisoned

STEPS = (13, 1, 2, 1, 1, 1)  # tokens of each step: a prompt, decoding, two at once; past tiny-gemma3's window of 16
IDS = torch.arange(19) * 113 % 512


@pytest.fixture(scope="module")
def models(tiny_checkpoints):
    return {family: load(folder, family) for family, folder in tiny_checkpoints.items()}


def run(model, cache, view):
    """Hidden states of all steps laid end to end, through the view's cache."""
    outputs, start = [], 0
    for num_new in STEPS:
        cache.reserve("r", num_new)
        view.prepare(num_new)
        ids = IDS[start : start + num_new].to(DEVICE)
        outputs.append(model(Tokens(ids, torch.arange(start, start + num_new, device=DEVICE)), view))
        cache.advance(num_new)
        start += num_new
    return torch.cat(outputs)


def make_cache(config, dtype=torch.float32, capacity=70):
    return poisoned(ContiguousCache(config, capacity, dtype, DEVICE))


@pytest.mark.parametrize(
    ("family", "backend"),
    [("qwen3", "flash"), ("gemma3_text", "flash"), ("gemma3_text", "sdpa")],
)
def test_a_model_behind_either_view(models, num_launches, family, backend):
    model = models[family]
    plain, fused = make_cache(model.config), make_cache(model.config)
    expected = run(model, plain, ContiguousView(plain, "naive"))
    view = FusedContiguousView(fused, model.config.num_heads, backend)
    actual = run(model, fused, view)
    torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-5)
    layers, filled = list(LAYERS[family]), sum(STEPS)
    for ours, theirs in ((fused.keys, plain.keys), (fused.values, plain.values)):
        torch.testing.assert_close(ours[layers, :, :filled], theirs[layers, :, :filled], rtol=2e-4, atol=2e-5)
        assert ours[layers, :, filled:].isnan().all()
    assert num_launches(kv_write_kernel) == len(STEPS) * len(layers)
    decode_steps = STEPS.count(1) if backend == "flash" else 0
    assert num_launches(decode_attention_kernel) == decode_steps * len(layers)
    view.prepare(1)
    heads = torch.zeros(1, model.config.num_heads, model.config.head_dim, device=DEVICE)
    kv, qk = heads[:, : model.config.num_kv_heads], model.blocks[0].attention.qk
    queries = [view.write(0, heads, kv, kv, torch.tensor([filled], device=DEVICE), qk) for _ in range(2)]
    assert queries[0].data_ptr() == queries[1].data_ptr(), "a buffer of the view"


@pytest.mark.parametrize("family", ["qwen3", pytest.param("gemma3_text", marks=pytest.mark.gpu)])
def test_key_norms_near_one_hundred_lose_no_more_than_the_plain_model_does(tiny_checkpoints, family):
    """Qwen 3 has such weights: what is rounded before them is a hundred times as large after them."""

    def logits(dtype, is_fused):
        model = load(tiny_checkpoints[family], family, torch.float16)
        for block in model.blocks:
            block.attention.qk.k_norm.weight.add_(99)
        model = (fuse(model) if is_fused else model).to(dtype)
        cache = make_cache(model.config, dtype)
        view = FusedContiguousView(cache, model.config.num_heads) if is_fused else ContiguousView(cache, "naive")
        return model.logits(run(model, cache, view)).float()

    truth, plain, fused = logits(torch.float32, False), logits(torch.float16, False), logits(torch.float16, True)
    assert (fused - truth).norm() <= 1.2 * (plain - truth).norm()
    assert (fused - truth).norm() <= 0.05 * truth.norm()


@pytest.mark.parametrize("backend", ["naive", "sdpa", "flash"])
def test_on_the_cpu_it_is_the_plain_view(models, monkeypatch, num_launches, backend):
    model = models["gemma3_text"]
    monkeypatch.setattr(module, "launches", lambda tensor: False)
    plain, fused = make_cache(model.config), make_cache(model.config)
    expected = run(model, plain, ContiguousView(plain, "naive" if backend == "naive" else "sdpa"))
    assert torch.equal(run(model, fused, FusedContiguousView(fused, model.config.num_heads, backend)), expected)
    assert num_launches() == 0


CONFIG = replace(parse_config(SHAPES["tiny-llama"]), num_layers=1, head_dim=80, windows=(None,))


def test_a_head_size_without_a_kernel():
    assert tuple(TILINGS) == HEAD_SIZES
    cache = ContiguousCache(CONFIG, 16, torch.float32, DEVICE)
    with pytest.raises(ConfigError, match=r"head size is 80; the kernels take 16, 32, 64, 128, 256\."):
        FusedContiguousView(cache, 1, "flash")
    FusedContiguousView(cache, 1, "sdpa")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_sixteen_bits(tiny_checkpoints, family, dtype):
    model = load(tiny_checkpoints[family], family, dtype)
    exact = load(tiny_checkpoints[family], family)
    caches = [make_cache(model.config, dtype), make_cache(model.config, dtype), make_cache(model.config)]
    expected = run(exact, caches[2], ContiguousView(caches[2], "naive"))
    theirs = run(model, caches[1], ContiguousView(caches[1], "naive")).float() - expected
    ours = run(model, caches[0], FusedContiguousView(caches[0], model.config.num_heads)).float() - expected
    assert ours.norm() <= 1.5 * theirs.norm()
