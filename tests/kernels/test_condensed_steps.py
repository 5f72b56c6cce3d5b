"""On a GPU a compressed KV cache gives the attention that PyTorch's operations give, in captured steps too."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phases.phase_09_2.engine import Engine
from shared.cache.condensed_layout import Cells, Holding, Packed
from shared.compression.calibration import pack
from shared.compression.compressors import window_attention
from shared.compression.masked import masked_attention
from shared.kernels.condensed_attention import KeptTokens, condensed_attention
from shared.kernels.decode_attention import DecodeWorkspace
from shared.kernels.window_mass import window_mass
from tests.kernels.test_captured_steps import (
    DEVICE,
    INTERPRETED,
    make_engine,
    only_the_cache_s_kernels,  # noqa: F401 - used by every test
)
from tests.mixed_requests import serve

LAYERS, BLOCK_SIZE, HKV = 2, 4, 2
SMALL: dict[str, Any] = {
    "max_seq_len": 96,
    "num_gpu_blocks": 60,
    "prefill_chunk_size": 32,
    "compress_method": "snapkv",
    "layer_budget": 36,
    "layer_upper_budget": 42,
    "p_attn": 0.35,
    "query_window_size": 6,
    "steps_between_compressions": 8,
}
REQUESTS: list[tuple[str | list[int], dict[str, Any]]] = [
    (
        [(31 * n + 7 * m) % 250 for n in range(44 + 9 * m)],
        {"temperature": 0.0, "max_new_tokens": 14, "ignore_eos": True},
    )
    for m in range(2)
]


def test_the_mass_of_the_window_is_that_of_its_attention(randn) -> None:
    """Heads of different lengths, in cells at random places; what stands before a head's keys is not read."""
    layers, w, group, D, sizes = 2, 5, 2, 16, [[7, 130], [64, 5]]
    n = 130
    keys, queries = randn(400, D), randn(layers, w, 2 * group, D)
    cells = torch.randperm(400)[: layers * n].view(layers, 1, n).repeat(1, 2, 1).to(DEVICE)
    mass = window_mass(queries, keys, cells, torch.tensor(sizes, dtype=torch.int32, device=DEVICE), 0.25)
    for layer, head in itertools.product(range(layers), range(2)):
        first, mine = n - sizes[layer][head], slice(head * group, (head + 1) * group)
        of_head = keys[cells[layer, head, first:]][:, None]
        expected = window_attention(queries[layer, :, mine], of_head, 0.25).sum(2)[0]
        torch.testing.assert_close(mass[layer, head, :, first:], expected, atol=1e-5, rtol=1e-4)
        assert (mass[layer, head, :, :first] == 0).all()


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("is_masked", [False, True])
def test_each_head_attends_to_its_own_tokens(randn, assert_near, is_masked, window) -> None:
    """Three sequences: a short and a long packed part, and none; unread cells are NaN."""
    D, group, num_blocks = 16, 3, 100
    cells = Cells(LAYERS, num_blocks, BLOCK_SIZE, HKV)
    memory = [torch.full((LAYERS, num_blocks, BLOCK_SIZE, HKV, D), float("nan"), device=DEVICE) for _ in range(2)]
    random = np.random.default_rng(0)
    blocks = random.permutation(num_blocks).astype(np.int32)
    heads = LAYERS * HKV
    ends = torch.zeros(4, heads + 2, dtype=torch.int32, device=DEVICE)
    masks = torch.zeros(4, LAYERS, HKV, 32, dtype=torch.uint8, device=DEVICE)
    sequences, tables, starts, lengths, at = [], [], [], [], 0
    for counts, num_tail, row in (([3, 11, 1, 6], 2, 2), ([70, 5, 90, 140], 40, 0), ([0] * 4, 150, 3)):
        packed_slots = 0 if is_masked else cells.slots_for(np.array(counts))
        covered = max(counts) + 3 if is_masked and any(counts) else 0
        length = packed_slots + covered + num_tail
        table = blocks[at : at + -(-length // BLOCK_SIZE)]
        at += len(table)
        kept = torch.from_numpy(random.random((LAYERS, HKV, covered)) < 0.5).to(DEVICE)
        if covered:
            masks[row, ..., : -(-covered // 8)] = pack(kept)
        ends[row, 1:-1] = 0 if is_masked else torch.tensor(np.cumsum(counts))
        ends[row, -1] = covered or packed_slots
        packed = (
            Packed(np.array(counts).reshape(LAYERS, HKV), 0, packed_slots) if any(counts) and not is_masked else None
        )
        sequences.append((Holding(row, table, length, packed), kept))
        starts.append(sum(map(len, tables)))
        tables.append(table)
        lengths.append(length)
    B = len(sequences)
    q = randn(B, HKV * group, D)
    workspace = DecodeWorkspace.of(B, HKV * group, HKV, D, 200, DEVICE)
    number = lambda values: torch.tensor(np.array(values, np.int32), device=DEVICE)  # noqa: E731
    for layer in range(LAYERS):
        expected = []
        for b, (holding, kept) in enumerate(sequences):
            of_head = []
            for head in range(HKV):
                end = int(ends[holding.row, layer * HKV + head + 1]) if not is_masked else 0
                begin = int(ends[holding.row, layer * HKV + head]) if not is_masked else 0
                first = cells.packed(np.arange(begin, end), holding.table)
                tail = cells.plain(layer, np.arange(holding.num_packed_slots, holding.length), holding.table)[head]
                of_head.append(torch.from_numpy(np.concatenate([first, tail])).to(DEVICE))
            found = torch.zeros(HKV * group, D, device=DEVICE)
            for head, mine in enumerate(of_head):
                is_kept = torch.ones(1, len(mine), dtype=torch.bool, device=DEVICE)
                is_kept[0, : kept.shape[-1]] = kept[layer, head]
                k, v = (x.view(-1, D) for x in memory)
                k[mine[is_kept[0]]], v[mine[is_kept[0]]] = randn(int(is_kept.sum()), D), randn(int(is_kept.sum()), D)
                one = slice(head * group, (head + 1) * group)
                about = (k[mine].nan_to_num()[None], v[mine].nan_to_num()[None], is_kept)
                found[one] = masked_attention(q[b : b + 1, one], *about, scale=0.25, window=window)[0]
            expected.append(found)
        out = condensed_attention(
            q,
            *memory,
            number(np.concatenate(tables)),
            number(starts),
            number(lengths),
            number([holding.row for holding, _ in sequences]),
            KeptTokens(ends, masks if is_masked else None),
            layer,
            scale=0.25,
            window=window,
            workspace=workspace,
            out=torch.empty_like(q),
        )
        torch.testing.assert_close(out, torch.stack(expected), atol=1e-5, rtol=1e-4)
    assert (workspace.counters == 0).all()


@pytest.mark.parametrize(("family", "fake"), [("llama", False), ("llama", True), ("gemma3_text", False)])
def test_captured_steps_give_the_tokens_of_pytorch_s_operations(
    tiny_checkpoints: dict[str, Path], family: str, fake: bool
) -> None:
    about = SMALL | {"if_fake_compress": fake}
    plain = make_engine(tiny_checkpoints[family], Engine, **about, use_cuda_graphs=False, attention_backend="sdpa")
    expected, _ = serve(plain, REQUESTS)
    engine = make_engine(tiny_checkpoints[family], Engine, **about, overlap_scheduling=True)
    got, _ = serve(engine, REQUESTS)
    assert [[o.token_id for o in answer] for answer in got] == [[o.token_id for o in answer] for answer in expected]
    assert engine.num_compressions == plain.num_compressions >= 3
    assert engine.runner.num_replays > 8
    assert (engine.num_freed_blocks > 0) != fake


def test_a_row_s_next_request_keeps_all_its_tokens(tiny_checkpoints: dict[str, Path]) -> None:
    engine = make_engine(tiny_checkpoints["llama"], Engine, **SMALL | {"max_batch_size": 1})
    alone = make_engine(tiny_checkpoints["llama"], Engine, **SMALL | {"max_batch_size": 1})
    short = ([5, 9, 3], {"temperature": 0.0, "max_new_tokens": 9, "ignore_eos": True})
    (_, second), _ = serve(engine, [REQUESTS[1], short])
    (only,), _ = serve(alone, [short])
    assert engine.num_compressions > 0
    assert [o.token_id for o in second] == [o.token_id for o in only]
    assert INTERPRETED or engine.runner.num_replays > 0
