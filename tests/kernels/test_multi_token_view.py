"""Mask tokens in the planned kernel: what the formula gives with the mask of the page."""

import pytest
import torch

from shared.attention.descriptor import Grid
from shared.attention.plan import plan_prefill
from shared.kernels.attention.planned_prefill import planned_prefill
from shared.kernels.attention.planned_tiling import PrefillTiling
from shared.tracks.multi_token.ops import masked_attention, visible_with_masks
from tests.kernels.attention import DEVICE, PagedMemory, draw_tokens, ints, planned_workspace, sent

HQ, HKV, D, BLOCK = 4, 2, 16, 4
SEQUENCES = [(0, 1, 3), (37, 4, 3), (21, 3, 0), (18, 2, 1), (5, 4, 2)]  # cached, real tokens, masks for each
TILING = PrefillTiling(16, 16, 4, 1)


@pytest.mark.parametrize("window", [None, 16, 7])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_mask_token_sees_its_group_and_the_real_tokens_before_it(randn, window, softcap):
    num_new = [real * (1 + masks) for _, real, masks in SEQUENCES]
    lengths = [cached + new for (cached, _, _), new in zip(SEQUENCES, num_new, strict=True)]
    memory = PagedMemory(draw_tokens(randn, lengths, HKV, D, torch.float32), BLOCK)
    q, expected = randn(sum(num_new), HQ, D), []
    for queries, (k, v), (cached, real, masks) in zip(q.split(num_new), memory.tokens, SEQUENCES, strict=True):
        mask = visible_with_masks(cached, real, masks, window).to(DEVICE)
        expected.append(masked_attention(queries, k, v, mask, scale=0.3, softcap=softcap))
    options = {"tokens_per_tile": TILING.tokens(HQ // HKV), "window": window, "has_masks": True, "split_size": 16}
    plan = sent(plan_prefill(num_new, lengths, Grid(resident=60, unit=16, least_split=16), **options))
    assert plan.is_split
    found = planned_prefill(
        q,
        *memory.arrays,
        plan,
        scale=0.3,
        window=window,
        softcap=softcap,
        num_masks=ints([masks for *_, masks in SEQUENCES]),
        tiling=TILING,
        workspace=planned_workspace(plan.num_states, len(SEQUENCES), HQ, HKV, D),
    )
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-5)
