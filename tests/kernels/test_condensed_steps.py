"""On a GPU a compressed KV cache gives the attention that PyTorch's operations give, in captured steps too."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from phases.phase_09_2.engine import Engine
from shared.cache.layout.paged import PagedSizes
from shared.cache.pool.extension import NoExtension
from shared.cache.pool.paged import PagedKVCachePool
from shared.cache.pool.prefix import PrefixSharing
from shared.cache.view import paged as paged_view
from shared.cache.view.block_storage import PlainStorage
from shared.cache.view.operations_attention import OperationsAttention
from shared.cache.view.paged import PagedView
from shared.checkpoints.shapes import SHAPES
from shared.engine.batch import Batch
from shared.engine.executor.buckets import Buckets
from shared.loading.config_json import parse_config
from shared.models.attention import NormAndRotate
from shared.sampling.params import SamplingParams
from shared.tracks.compression import head_selection
from shared.tracks.compression.compressors import COMPRESSORS, window_attention
from shared.tracks.compression.head_selection import HeadSelector
from shared.tracks.compression.interface import select
from shared.tracks.compression.kept_cells import KeptCells, masked_attention, pack
from shared.tracks.compression.kernel_attention import CondensedKernels, decode_padding
from shared.tracks.compression.kernels.condensed_attention import KeptTokens, condensed_attention
from shared.tracks.compression.kernels.kept_moves import move_kept
from shared.tracks.compression.kernels.key_selection import select_keys
from shared.tracks.compression.kernels.window_mass import CachedSequences, window_mass
from shared.tracks.compression.layout import Cells, Holding, Packed
from shared.tracks.compression.operations_attention import CondensedOperations
from shared.tracks.compression.pool import CompressedRequests
from shared.tracks.compression.selection import Budget, top_n, top_p_count
from shared.tracks.compression.selection import select as select_alone
from tests.kernels.attention import decode_workspace
from tests.kernels.engines import DEVICE, INTERPRETED, make_engine
from tests.kernels.sequences import poisoned
from tests.mixed_requests import serve
from tests.steps import commit, make_request, put_in_flight, step_of

pytestmark = pytest.mark.usefixtures("only_the_caches_kernels")
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
    "steps_between_compressions": 5,
}
REQUESTS: list[tuple[str | list[int], dict[str, Any]]] = [
    (
        [(31 * n + 7 * m) % 250 for n in range(44 + 9 * m)],
        {"temperature": 0.0, "max_new_tokens": 14, "ignore_eos": True},
    )
    for m in range(2)
]


@pytest.mark.parametrize(
    ("method", "window", "w"), [("snapkv", None, 12), ("topp", 20, 12), ("rkv", None, 12), ("rkv", None, 5)]
)
def test_all_heads_at_once_keep_what_each_keeps_alone(randn, method, window, w):
    """Two sequences in one set of launches, with heads that have packed parts of other lengths, a common tail, and more
    queries before the window's in the ring.
    """
    D, num_blocks = 16, 300
    cells, random = Cells(LAYERS, num_blocks, BLOCK_SIZE, HKV), np.random.default_rng(0)
    memory = torch.full((2, LAYERS, num_blocks, BLOCK_SIZE, HKV, D), float("nan"), device=DEVICE)
    ring, free = randn(LAYERS, 3, 16, 2 * HKV, D), random.permutation(num_blocks).astype(np.int32)
    ends = torch.zeros(3, LAYERS * HKV + 2, dtype=torch.int32, device=DEVICE)
    holdings, of_heads = list[Holding](), list[list[torch.Tensor]]()
    for row, counts, tail, num_tokens in ((1, [[7, 130], [64, 300]], 21, 777), (0, [[40, 101], [90, 222]], 33, 400)):
        packed = Packed(np.array(counts), num_tokens - tail, cells.slots_for(np.array(counts)))
        table, free = np.split(free, [-(-(packed.num_slots + tail) // BLOCK_SIZE)])
        after = np.append(0, packed.counts.cumsum())
        ends[row] = torch.tensor([*after, packed.num_slots])
        holdings.append(Holding(row, table, packed.num_slots + tail, packed))
        of_heads.append([])
        for layer, head in itertools.product(range(LAYERS), range(HKV)):
            one = layer * HKV + head
            first = cells.packed(np.arange(after[one], after[one + 1]), table)
            last = cells.plain(layer, np.arange(packed.num_slots, packed.num_slots + tail), table)[head]
            of_heads[-1].append(torch.from_numpy(np.concatenate([first, last])).to(DEVICE))
            memory.view(2, -1, D)[:, of_heads[-1][-1]] = randn(2, len(of_heads[-1][-1]), D)
    before = memory.clone().view(2, -1, D)
    budget, compressor = Budget(40, 90, 0.6, num_recent=4), COMPRESSORS[method](0.25)
    windows = torch.tensor([0, window or 0], dtype=torch.int32, device=DEVICE)
    selector = HeadSelector(ring, memory[0], ends, windows, compressor, budget, 0.25)
    selected = selector.select(holdings, w)
    selected.precede()
    cached, chosen, found = selected.workspace.sequences, selected.workspace.chosen, selected.workspace.counts
    mass = window_mass(ring, memory[0], cached, w, 0.25)
    assert [selected.index(replace(one)) for one in holdings] == [0, 1]
    assert selected.index(replace(holdings[0], length=holdings[0].length + 1)) is None, "it has new tokens"
    assert selected.index(replace(holdings[0], packed=replace(holdings[0].packed))) is None, "it was compressed since"
    for i, (holding, of_head) in enumerate(zip(holdings, of_heads, strict=True)):
        newest = torch.arange(holding.num_tokens - w, holding.num_tokens, device=DEVICE) % 16
        queries, kept = ring[:, holding.row, newest], []
        for one, mine in enumerate(of_head):
            layer, head = divmod(one, HKV)
            of_queries, keys = queries[layer, :, 2 * head : 2 * head + 2], before[0, mine][:, None]
            expected = window_attention(of_queries, keys, 0.25).sum(2)[0]
            torch.testing.assert_close(mass[i, layer, head, :, : len(mine)], expected, atol=1e-5, rtol=1e-4)
            assert (mass[i, layer, head, :, len(mine) :] == 0).all()
            alone = select_alone(of_queries, keys, compressor, budget, 0.25)[0].nonzero().flatten()
            if window and layer == 1:
                alone = torch.arange(len(mine) - window, len(mine), device=DEVICE)
            assert chosen[i, layer, head, : found[i, layer, head]].tolist() == alone.tolist()
            kept.append(mine[alone])
        assert (selected.wait(i) == found[i].cpu().numpy()).all()
        total, most, elsewhere = int(found[i].sum()), int(found[i].max()), holding.table[::-1].copy()
        assert len({int(count) for count in found[i].flatten()}) > 2, "heads differ"
        target = torch.from_numpy(elsewhere).to(DEVICE) if i else None
        move_kept(*memory, cached, i, chosen, found, most, total, target)
        at = torch.from_numpy(cells.packed(np.arange(total), elsewhere if i else holding.table)).to(DEVICE)
        assert torch.equal(memory.view(2, -1, D)[:, at], before[:, torch.cat(kept)])
        now = [0, *found[i].flatten().cumsum(0).tolist(), cells.slots_for(found[i].cpu().numpy())]
        assert ends[holding.row].tolist() == now, "the next step reads what was kept"
    selected.workspace.leave()
    assert selected.index(holdings[0]) is None, "its workspace serves a later choice"


@pytest.mark.parametrize("size", [3, 36, 37, 5000])
def test_a_selection_that_can_be_counted_by_hand(size):
    """Of equal scores, with a sign or without, the older are kept. A head with less than sinks and recent tokens keeps
    all.
    """
    numbers = torch.tensor([[0, size, size, 0, 0]], dtype=torch.int32, device=DEVICE)
    cached = CachedSequences(numbers, torch.zeros(1, 3, dtype=torch.int32, device=DEVICE), size)
    scores = torch.zeros(1, 1, 1, size, device=DEVICE)
    scores[..., 6::2] = 1.0
    scores[..., 9::4] = -0.0
    attention = (scores + 1e-20) / (scores + 1e-20).sum()
    p, windows = (
        torch.tensor([0.5], dtype=torch.float64, device=DEVICE),
        torch.zeros(1, dtype=torch.int32, device=DEVICE),
    )
    for least, most in ((1, 10**6), (50, 50), (4000, 5000)):
        budget = Budget(least, most, 0.5)
        chosen, counts = select_keys(scores, attention, cached, windows, budget, p)
        place = torch.arange(size, device=DEVICE)
        always = (place < 4) | (place >= size - 32)
        needed = top_n(scores[0, 0], top_p_count(attention[0, 0], 0.5))
        count = (needed | always).sum(-1).clamp(least, most).maximum(always.sum())
        expected = top_n(scores[0, 0].masked_fill(always, torch.inf), count)[0].nonzero().flatten()
        assert chosen[0, 0, 0, : counts[0, 0, 0]].tolist() == expected.tolist()


def test_kept_tokens_that_fill_their_blocks_take_no_other_one(randn):
    memory, ends = randn(2, 1, 9, 4, 1, 16), torch.zeros(1, 3, dtype=torch.int32, device=DEVICE)
    numbers = torch.tensor([[0, 36, 36, 0, *range(9)]], dtype=torch.int32, device=DEVICE)
    chosen, before = torch.arange(2, 34, dtype=torch.int32, device=DEVICE).view(1, 1, 1, 32), memory.clone()
    counts = torch.full((1, 1, 1), 32, dtype=torch.int32, device=DEVICE)
    move_kept(*memory, CachedSequences(numbers, ends, 36), 0, chosen, counts, 32, 32)
    assert ends.tolist() == [[0, 32, 32]], "eight blocks of four"
    assert torch.equal(memory.view(2, 36, 16)[:, :32], before.view(2, 36, 16)[:, 2:34])


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("is_masked", [False, True])
def test_each_head_attends_to_its_own_tokens(randn, assert_near, is_masked, window):
    """Three sequences: a short and a long packed part, and none, in up to two splits; unread cells are NaN."""
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
    workspace = decode_workspace(B, HKV * group, HKV, D, num_splits=2)
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
                options = (k[mine].nan_to_num()[None], v[mine].nan_to_num()[None], is_kept)
                found[one] = masked_attention(q[b : b + 1, one], *options, scale=0.25, window=window)[0]
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


STEPS: list[tuple[dict[str, int], str, str, str]] = [  # new tokens; of which is chosen; which are compressed, and end
    ({"a": 22, "b": 22}, "ab", "ba", ""),  # the same tokens: b gets the blocks that a has in the tree
    ({"a": 1, "b": 1}, "a", "", ""),
    ({"b": 1, "a": 1, "c": 14}, "ac", "c", ""),  # tails of two and of fourteen tokens
    ({"b": 1, "a": 7, "c": 2}, "a", "a", ""),
    ({"a": 1, "b": 1, "c": 1}, "", "", "a"),
    ({"b": 1, "c": 2, "d": 9}, "", "d", ""),  # in the row of a, which keeps all again: less than a block would go
    ({"b": 1, "d": 1}, "", "", "c"),
    ({"b": 1, "d": 14}, "d", "d", ""),
    ({"b": 1, "d": 1}, "", "", ""),
]


@pytest.mark.parametrize("moves", [True, False])
def test_after_each_step_both_views_attend_to_the_same(randn, monkeypatch, moves):
    config = replace(parse_config(SHAPES["tiny-llama"]), num_layers=2, num_heads=4, num_kv_heads=2, windows=(None, 9))
    sizes, D = PagedSizes(30, BLOCK_SIZE, 4, 44, 48), config.head_dim
    options = COMPRESSORS["snapkv"](0.25), Budget(6, 12, 0.5, num_sinks=1, num_recent=3), 4, moves
    storages = [PlainStorage(config, sizes, torch.float32, DEVICE) for _ in range(2)]
    ours, theirs = (KeptCells(config, sizes, torch.float32, storage, *options) for storage in storages)
    attention = CondensedKernels(config, sizes, storages[0], ours, is_recording=True)
    padding = decode_padding(config, sizes, Buckets.of(4, 44), ours)
    view = poisoned(PagedView(config, sizes, torch.float32, storages[0], attention, padding))
    monkeypatch.setattr(paged_view, "launches", lambda tensor: False)
    expected_attention = CondensedOperations(OperationsAttention(storages[1], "sdpa"), theirs)
    plain = PagedView(config, sizes, torch.float32, storages[1], expected_attention)
    sharing = NoExtension()
    if moves:
        sharing = PrefixSharing(BLOCK_SIZE, lambda request: request.num_prompt_tokens - 4)
    pool = PagedKVCachePool.of(sizes, CompressedRequests(ours.cells, sharing))
    own = pool.extension
    qk = NormAndRotate(torch.tensor([1.0, 0.0], device=DEVICE).view(2, 1, 1).expand(48, 2, 1, D).contiguous())
    requests = {name: make_request(name, range(n)) for name, n in (("a", 22), ("b", 22), ("c", 26))}
    requests["d"] = make_request("d", range(40, 70))
    of_ids = [[randn(80, heads, D) for heads in (4, 2, 2)] for _ in config.windows]  # equal tokens have equal keys
    tables, dropped = list[Any](), []

    def place(packed: Packed) -> Any:
        tables.append(None if own.compress(pool, request, packed) is None else own.holding(pool, request).table)
        return tables[-1]

    for new, chosen, compressed, ended in STEPS:
        for name, num_new in new.items():
            request = requests[name]
            if request not in pool.rows:
                request.num_computed_tokens = request.num_scheduled_tokens = pool.admit(request)
            while request.num_tokens < request.num_computed_tokens + num_new:
                request.append(request.num_tokens)
            assert pool.reserve(request, request.num_computed_tokens + num_new)
        schedule, T = step_of({requests[name]: num_new for name, num_new in new.items()}), sum(new.values())
        batch = Batch.of(schedule, pool)
        positions, padded = plain.load(batch).tokens.positions, view.load(batch).tokens
        for layer, window in enumerate(config.windows):
            q, k, v = (rows[padded.ids] for rows in of_ids[layer])
            expected = plain.write(layer, q[:T], k[:T], v[:T], positions, qk)
            expected = plain.attend(layer, expected, scale=0.25, window=window)
            found = view.attend(layer, view.write(layer, q, k, v, padded.positions, qk), scale=0.25, window=window)
            torch.testing.assert_close(found[:T], expected, atol=1e-5, rtol=1e-4)
        assert torch.equal(ours.ring.queries[:, :-1], theirs.ring.queries[:, :-1]), "the last queries of each sequence"
        put_in_flight(schedule)
        select(pool, view, [requests[name] for name in chosen])
        commit(pool, schedule)
        for request in (requests[name] for name in compressed):
            holding, tables[:] = own.holding(pool, request), []
            kept = attention.compress(holding, place)
            again = expected_attention.compress(holding, lambda packed: tables[0] if tables else None)
            assert (kept is None) == (again is None)
            assert kept is None or (kept.counts == again.counts).all()
            dropped += [request.request_id] * (kept is not None)
        for name in ended:
            pool.release(requests[name])
        assert pool.audit_blocks() == []
    assert dropped == [*"bacad"]


@pytest.mark.parametrize(
    ("family", "fake"), [pytest.param("llama", False, marks=pytest.mark.gpu), ("llama", True), ("gemma3_text", False)]
)
def test_captured_steps_give_the_tokens_of_pytorch_s_operations(tiny_checkpoints, family, fake):
    options = SMALL | {"if_fake_compress": fake}
    plain = make_engine(tiny_checkpoints[family], Engine, **options, use_cuda_graphs=False, attention_backend="sdpa")
    expected, _ = serve(plain, REQUESTS)
    engine = make_engine(tiny_checkpoints[family], Engine, **options, overlap_scheduling=True)
    got, _ = serve(engine, REQUESTS)
    assert [[o.token_id for o in answer] for answer in got] == [[o.token_id for o in answer] for answer in expected]
    assert engine.num_compressions == plain.num_compressions >= 3
    assert engine.runner.num_replays > 8
    assert (engine.num_freed_blocks > 0) != fake


def test_recorded_choices_are_those_that_are_launched(tiny_checkpoints, monkeypatch):
    """Of two requests that are due together."""
    if INTERPRETED:
        monkeypatch.setattr(head_selection, "recorded", lambda launch, *_: (SimpleNamespace(replay=launch), None))
    monkeypatch.setattr(head_selection, "NUM_BEFORE", 1)
    options = SMALL | {"layer_budget": 38, "layer_upper_budget": 38, "steps_between_compressions": 4}
    prompts = [[(n * m) % 250 for n in range(42)] for m in (31, 37)]
    requests = [(prompt, {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}) for prompt in prompts]
    plain = make_engine(tiny_checkpoints["llama"], Engine, **options, use_cuda_graphs=False, attention_backend="sdpa")
    expected, _ = serve(plain, requests)
    engine = make_engine(tiny_checkpoints["llama"], Engine, **options, overlap_scheduling=True)
    engine.view.attention.selector.is_recording = True
    got, _ = serve(engine, requests)
    assert [[o.token_id for o in answer] for answer in got] == [[o.token_id for o in answer] for answer in expected]
    assert engine.num_compressions == plain.num_compressions == 6
    ((num, _, capacity), workspace), *others = engine.view.attention.selector.workspaces.items()
    assert (num, capacity, others) == (2, 128, [])
    assert workspace.graph is not None
    assert workspace.num_choices == 2


def test_an_abort_and_a_shared_prefix_change_no_token(tiny_checkpoints):
    """One request is aborted after it was chosen from, in the step after which it is due; another's blocks are changed
    for the tree's. What was chosen while a step was in flight is found where it is, or dropped.
    """
    prompt = REQUESTS[0][0]
    assert isinstance(prompt, list)
    requests = [([*prompt, n], {**REQUESTS[0][1], "max_new_tokens": 10}) for n in (1, 1, 2)]
    plain = make_engine(tiny_checkpoints["llama"], Engine, **SMALL, use_cuda_graphs=False, attention_backend="sdpa")
    (expected, *_), _ = serve(plain, requests[:1])
    engine = make_engine(
        tiny_checkpoints["llama"], Engine, **SMALL | {"use_prefix_caching": True}, overlap_scheduling=True
    )
    begin, chosen = engine.view.attention.select, list[int]()

    def noted(sequences: Sequence[Holding]) -> None:
        begin(sequences)
        chosen.extend(one.row for one in sequences)

    engine.view.attention.select = noted
    engine.add_request(requests[2][0], SamplingParams(**requests[2][1]), "aborted")
    while not chosen:
        engine.step()
    assert engine.abort("aborted")
    got, _ = serve(engine, requests[:2])
    assert [[o.token_id for o in answer] for answer in got] == [[o.token_id for o in expected]] * 2
    assert engine.load().num_prefix_hits > 0
    assert engine.num_compressions >= 2
