"""Fused parts with their kernels launched, against the plain ones: the same model, in as many launches as said."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shared.cache.view.contiguous import ContiguousCache, ContiguousView
from shared.kernels.launch import INTERPRETED
from shared.kernels.products import gemv
from shared.kernels.products.gated import gated_kernel
from shared.kernels.products.gemv import gemv_kernel, skinny_kernel
from shared.kernels.products.rmsnorm import rms_norm_kernel
from shared.kernels.products.tiling import Tiling
from shared.loading.loader import load_model
from shared.models.causal_lm import CausalLM
from shared.models.compiled import Echo
from shared.models.fused import fuse
from shared.models.tokens import Tokens
from tests.comparison import assert_equal

STEPS = {"few rows": [5, 1], "both sides of the limit": [17, 16]}
ELEMENTWISE = {"add", "add_", "mul", "mul_", "silu", "gelu", "pow", "mean", "rsqrt", "rms_norm", "_fused_rms_norm"}
HALVES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the interpreter a program costs milliseconds, so few of them; any tiling gives the same results."""
    if INTERPRETED:
        monkeypatch.setattr(gemv, "tiling", lambda rows, *_: Tiling(256, 128, 4, dot=rows > 1))


def load(folder: Path, dtype: torch.dtype, device: torch.device, num_layers: int = 2) -> CausalLM:
    """The model, under the interpreter its first layers alone: the others are like them."""
    model = load_model(folder, dtype=dtype, device=device, max_positions=64)
    if INTERPRETED:
        model.blocks = model.blocks[:num_layers]
    return model


def steps(model: CausalLM, lengths: list[int]) -> torch.Tensor:
    """Logits of every token of one sequence, run in steps of these lengths."""
    cache = ContiguousCache(model.config, sum(lengths), model.dtype, model.device)
    view = ContiguousView(cache)
    logits = []
    for length in lengths:
        positions = torch.arange(cache.length, cache.length + length, device=model.device)
        view.prepare(length)
        hidden = model(Tokens(positions * 7 % model.config.vocab_size, positions), view)
        cache.advance(length)
        logits.append(model.logits(hidden))
    return torch.cat(logits)


@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS)
def test_a_fused_model_is_the_same_model(model_folder, lengths, device):
    model = load(model_folder, torch.float32, device)
    expected = steps(model, lengths)
    logits = steps(fuse(model), lengths)
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5 * expected.abs().max().item())
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_fused_model_is_as_near_to_fp32_as_the_plain_one(model_folder, dtype, device):
    lengths = [17, 1]
    model = load(model_folder, dtype, device)
    plain = steps(model, lengths).float()
    truth = steps(load(model_folder, dtype, device).float(), lengths)
    fused = steps(fuse(model), lengths).float()
    assert (fused - truth).norm() <= 1.2 * (plain - truth).norm()


def test_the_launches_of_a_step(model_folder, device, num_launches):
    model = fuse(load(model_folder, torch.float32, device, num_layers=1))
    layers, has_post_norms = len(model.blocks), hasattr(model.blocks[0], "post_mlp_norm")

    def made() -> dict[str, int]:
        products = num_launches(gemv_kernel) + num_launches(skinny_kernel)
        norms, activations = num_launches(rms_norm_kernel), num_launches(gated_kernel)
        assert products + norms + activations == num_launches(), (
            "launches of other kernels than products, norms and activations"
        )
        return {"products": products, "norms": norms, "activations": activations}

    steps(model, [1])
    few = made()
    assert_equal(
        few,
        {"products": 4 * layers + 1, "norms": 2 * layers * has_post_norms, "activations": 0},
        "launches of a step with one token",
    )

    steps(model, [16])
    several = {kind: count - few[kind] for kind, count in made().items()}
    # Before QKV, before gate and up (Gemma: with the addition), after down with the addition; and before the head.
    norms = (2 + has_post_norms) * layers + 1
    assert_equal(
        several,
        {"products": 4 * layers + 1, "norms": norms, "activations": 0},
        "launches of a step with 16 tokens",
    )

    steps(model, [17])
    many = {kind: count - few[kind] - several[kind] for kind, count in made().items()}
    assert_equal(
        many,
        {"products": 0, "norms": norms, "activations": layers},
        "launches of a step with 17 tokens",
    )


class Elementwise(TorchDispatchMode):
    """Counts PyTorch's operations that only turn vectors into vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = operation.__name__.split(".")[0]
        self.counts[name] += name in ELEMENTWISE
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [1, 17])
def test_between_the_launches_nothing_is_computed(model_folder, rows, device, randn):
    """Norms, activations and additions are in kernels; a prompt's last addition is in PyTorch's product."""
    model = load(model_folder, torch.float32, device, num_layers=1)
    x, ids = randn(rows, model.config.hidden_size), torch.arange(rows, device=device)
    made = []
    for make in (lambda plain: plain, fuse):
        block = make(model).blocks[0]
        with torch.inference_mode(), Elementwise() as elementwise:
            block(x.clone(), Tokens(ids, ids), Echo())
        made.append(elementwise.counts.total())
    plain, fused = made
    assert plain >= 6, "the plain block computes element-wise between its launches"
    assert_equal(fused, 0, "element-wise operations of the fused block")
