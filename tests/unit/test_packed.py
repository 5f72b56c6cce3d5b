"""Packed weights: the same model at half the bytes, or not packed at all."""

import copy
from pathlib import Path

import pytest
import torch

from shared.cache.view.uncached import UncachedView
from shared.checkpoints.make import make_checkpoint
from shared.loading.loader import load_model
from shared.models.causal_lm import CausalLM
from shared.models.norm import RMSNorm
from shared.models.packed import SUPPORTED_ENGINES, PackedNorm, PackedProjection, pack
from shared.models.projection import Projection
from shared.models.tokens import Tokens
from shared.ops.gated import swiglu

pytestmark = pytest.mark.skipif("fbgemm" not in SUPPORTED_ENGINES, reason="FBGEMM is there on x86 alone")


@pytest.fixture(scope="module", params=["tiny-llama", "tiny-qwen3", "tiny-gemma3"])
def stored_in_16_bits(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp("packed") / request.param, dtype="float16")


def is_packed(model: CausalLM) -> bool:
    return any(isinstance(module, PackedProjection) for module in model.modules())


@torch.inference_mode()
def logits(model: CausalLM, num_tokens: int) -> torch.Tensor:
    ids = torch.arange(num_tokens) % model.config.vocab_size
    return model.logits(model(Tokens(ids, torch.arange(num_tokens)), UncachedView([num_tokens])))


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 40])
def test_a_packed_model_is_the_same_model(stored_in_16_bits: Path, num_tokens: int) -> None:
    model = load_model(stored_in_16_bits)
    expected = logits(model, num_tokens)
    packed = pack(model)
    assert not any(isinstance(module, Projection) for module in packed.modules())
    torch.testing.assert_close(logits(packed, num_tokens), expected, rtol=0, atol=3e-5 * expected.abs().max().item())


def test_weights_that_fp16_cannot_hold_are_left_as_they_are(model_folder: Path) -> None:
    model = load_model(model_folder)  # stored in fp32
    expected = logits(model, 5)
    assert not is_packed(pack(model))
    assert torch.equal(logits(model, 5), expected)


def test_one_weight_that_does_not_fit_keeps_its_block_and_no_other(stored_in_16_bits: Path) -> None:
    model = load_model(stored_in_16_bits)
    model.blocks[0].attention.qkv.k_proj.weight[0, 0] = 1.0 + 2.0**-20  # type: ignore[union-attr, index, operator]
    expected = logits(model, 5)
    pack(model)
    assert [isinstance(block.mlp.down_proj, PackedProjection) for block in model.blocks][:2] == [False, True]
    torch.testing.assert_close(logits(model, 5), expected, rtol=0, atol=3e-5 * expected.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_16_bits_computes_in_16_bits(stored_in_16_bits: Path, dtype: torch.dtype) -> None:
    model = pack(load_model(stored_in_16_bits, dtype=dtype))
    assert not is_packed(model)


def test_biases_norm_activation_and_residual_are_applied() -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).half().float()

    plain = Projection(24, 10, bias=True)
    plain.weight = torch.nn.Parameter(random(10, 24), requires_grad=False)
    plain.bias = torch.nn.Parameter(random(10), requires_grad=False)
    other = copy.deepcopy(plain)
    packed = PackedProjection([plain])
    x, residual = random(3, 24), random(3, 10)
    settings = {"residual": residual, "norm": lambda y: 2 * y}
    torch.testing.assert_close(packed(x, **settings), plain(x, **settings))
    both = PackedProjection([plain, other])
    torch.testing.assert_close(both(x), torch.cat((plain(x), other(x)), dim=-1))
    torch.testing.assert_close(both(x, activation=swiglu), swiglu(plain(x), other(x)))


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_a_packed_norm_is_the_norm(offset: float, size: float) -> None:
    generator = torch.Generator().manual_seed(1)
    norm = RMSNorm(48, 1e-6, offset)
    norm.weight = torch.nn.Parameter(torch.randn(48, generator=generator), requires_grad=False)
    x = size * torch.randn(5, 48, generator=generator)
    x[0] = 0
    torch.testing.assert_close(PackedNorm(norm)(x), norm(x), rtol=2e-6, atol=1e-9)
