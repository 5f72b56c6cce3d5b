"""The second product of a low-rank addition in one launch, against the formula in fp64."""

import pytest
import torch

from shared.cache.view.uncached import UncachedView
from shared.kernels.launch import INTERPRETED
from shared.loading.loader import load_model
from shared.models.fused import fuse
from shared.models.tokens import Tokens
from shared.ops.gated import geglu, swiglu
from shared.tracks.multi_token import low_rank as op
from shared.tracks.multi_token.kernels.low_rank import add_low_rank, low_rank_kernel
from shared.tracks.multi_token.lora import AdaptedProjection, adapt
from tests.adapters import random_adapter

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


@pytest.mark.parametrize("activation", [None, swiglu, geglu])
@pytest.mark.parametrize(
    ("T", "N", "rank", "has_residual"),
    [(1, 64, 16, True), (5, 100, 4, False), (16, 128, 16, False), (33, 200, 24, True)],
)
def test_the_sum_of_both_products(T, N, rank, has_residual, activation, dtype, randn, num_launches):
    y, b = randn(T, N + rank, dtype=dtype), randn(N, rank, dtype=dtype)
    gate = (torch.arange(T, device=y.device) % 3 > 0).float()
    width = N if activation is None else N // 2
    residual = randn(T, width + 3, dtype=dtype)[:, :width] if has_residual else None  # rows of a wider tensor
    found = add_low_rank(y, b, gate, 2.0, residual, activation)
    doubled = None if residual is None else residual.double()
    expected = op.add_low_rank(y.double(), b.double(), gate, 2.0, doubled, activation)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    assert (num_launches(low_rank_kernel), num_launches()) == (1, 1)
    closed = add_low_rank(y, b, torch.zeros_like(gate), 2.0)
    assert torch.equal(closed, y[:, :N])


@torch.inference_mode()
def test_a_block_whose_matrices_hold_the_rows_of_a_computes_the_same(tiny_checkpoints):
    """Plain and adapted steps, with norms after the products and without."""
    for family in ("llama", "gemma3_text"):
        hidden = []
        for is_trained in (False, True):
            model = fuse(load_model(tiny_checkpoints[family], device=DEVICE, dtype=torch.float32))
            adapter = random_adapter(model).to(model.device).requires_grad_(not is_trained)
            adapt(model, adapter.additions(), adapter.masks)
            wholes = [part.whole is not None for part in model.modules() if isinstance(part, AdaptedProjection)]
            assert wholes == [is_trained] * 4 * len(model.blocks)
            ids = torch.arange(9, device=model.device) * 7
            gate = (ids > 30).float()
            for opened in (None, gate):
                hidden.append(model(Tokens(ids, torch.arange(9, device=model.device), opened), UncachedView([9])))
        for plain, whole in zip(hidden[:2], hidden[2:], strict=True):
            torch.testing.assert_close(whole, plain, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(hidden[0], hidden[1])
