"""Mask tokens in the planned kernel: what the formula gives with the mask of the page."""

import numpy as np
import pytest
import torch

from shared.attention.descriptor import DevicePlan, Grid
from shared.attention.plan import plan_prefill
from shared.kernels.launch import INTERPRETED
from shared.kernels.planned_prefill import planned_prefill
from shared.kernels.planned_tiling import PrefillTiling
from shared.kernels.planned_workspace import PlannedWorkspace
from shared.ops.multi_token import masked_attention, visible_with_masks

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
HQ, HKV, D, BLOCK = 4, 2, 16, 4
SEQUENCES = [(0, 1, 3), (37, 4, 3), (21, 3, 0), (18, 2, 1), (5, 4, 2)]  # cached, real tokens, masks for each
TILING = PrefillTiling(16, 16, 4, 1)


@pytest.mark.parametrize("window", [None, 16, 7])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_mask_token_sees_its_group_and_the_real_tokens_before_it(window, softcap):
    generator = torch.Generator().manual_seed(0)
    num_new = [real * (1 + masks) for _, real, masks in SEQUENCES]
    lengths = [cached + new for (cached, _, _), new in zip(SEQUENCES, num_new, strict=True)]
    counts = [-(-length // BLOCK) for length in lengths]
    tables = torch.randperm(sum(counts), generator=generator).int()
    starts = np.append(0, np.cumsum(counts))
    keys, values = (torch.randn(sum(counts), BLOCK, HKV, D, generator=generator) for _ in range(2))
    q = torch.randn(sum(num_new), HQ, D, generator=generator)
    expected, row = [], 0
    for n, ((cached, real, masks), length) in enumerate(zip(SEQUENCES, lengths, strict=True)):
        own = tables[starts[n] : starts[n + 1]].long()
        k, v = (x[own].flatten(0, 1)[:length].transpose(0, 1) for x in (keys, values))
        mask = visible_with_masks(cached, real, masks, window)
        expected.append(masked_attention(q[row : row + num_new[n]], k, v, mask, scale=0.3, softcap=softcap))
        row += num_new[n]

    grid = Grid(resident=60, unit=16, least_split=16)
    tokens = TILING.tokens(HQ // HKV)
    plan = plan_prefill(num_new, lengths, grid, tokens_per_tile=tokens, window=window, has_masks=True, split_size=16)
    assert plan.is_split
    found = planned_prefill(
        q.to(DEVICE),
        keys.to(DEVICE),
        values.to(DEVICE),
        tables.to(DEVICE),
        torch.from_numpy(starts[:-1]).int().to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        DevicePlan.of(plan, [torch.from_numpy(array).to(DEVICE) for array in plan.arrays()]),
        scale=0.3,
        window=window,
        softcap=softcap,
        num_masks=torch.tensor([masks for *_, masks in SEQUENCES], dtype=torch.int32, device=DEVICE),
        tiling=TILING,
        workspace=PlannedWorkspace.of(plan.num_states, len(SEQUENCES), HQ, HKV, D, DEVICE),
    )
    torch.testing.assert_close(found.cpu(), torch.cat(expected), rtol=1e-4, atol=1e-5)
