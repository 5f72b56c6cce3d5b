"""On a GPU requests made of segments get what an explicit mask gives, in captured steps too."""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from phases.phase_09_1.engine import Engine
from shared.attention.descriptor import Grid
from shared.attention.states import merge
from shared.models.config import RopeConfig
from shared.ops.rope import inverse_frequencies
from shared.sampling.params import SamplingParams
from shared.tracks.segments.attention import range_state
from shared.tracks.segments.kernels.range_attention import RangeWorkspace, range_attention, range_tiling, turn_rows
from shared.tracks.segments.range_plan import RangePlan, plan_ranges
from shared.tracks.segments.range_tiles import Ranges, Tiles
from shared.tracks.segments.relocation import relocate
from tests.block_diagonal import reference_logits
from tests.kernels.engines import DEVICE, INTERPRETED, make_engine
from tests.mixed_requests import GREEDY

pytestmark = pytest.mark.usefixtures("only_the_caches_kernels")
ROOM: dict[str, Any] = {"max_seq_len": 160, "num_gpu_blocks": 90, "prefill_chunk_size": 14, "max_batch_size": 2}
SEGMENTS = [[(7 * n) % 250 for n in range(37)], [(5 * n + 3) % 250 for n in range(16)], [9], [3, 1, 4, 1, 5] * 9]
SEGMENTS.append([(3 * n + 1) % 250 for n in range(16)])


ON_GPU = [
    pytest.param(dtype, *heads, *limits, marks=pytest.mark.gpu)
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    for heads in ((16, 6, 2), (64, 8, 2), (128, 8, 1), (256, 4, 1))
    for limits in ((None, None), (40, None), (None, 5.0))
]


@pytest.mark.parametrize(
    ("dtype", "D", "Hq", "Hkv", "window", "softcap"),
    [
        (torch.float32, 16, 6, 2, None, None),
        (torch.float32, 16, 6, 2, 40, None),
        (torch.float16, 64, 8, 2, None, 5.0),
        (torch.float32, 128, 8, 1, None, None),
        (torch.float32, 256, 4, 1, None, None),
        *ON_GPU,
    ],
)
@pytest.mark.parametrize("is_shared", [True, False])
def test_ranges_that_some_share_at_other_offsets(randn, dtype, D, Hq, Hkv, window, softcap, is_shared):
    """Four sequences with one to six new tokens; a segment of 300 tokens in two of them, twice in one; unread is NaN.

    Or each with one new token, and each reads its segments by itself.
    """
    size, block_size = [300, 20, 1], 4
    contexts, own, num_new = [[1, 0], [0, 2, 0], [], [2, 0]], np.array([6, 9, 30, 1]), np.array([1, 6, 2, 1])
    num_new = num_new if is_shared else np.ones_like(num_new)
    tables = np.random.default_rng(0).permutation(160).astype(np.int32)
    cuts = np.cumsum([0] + [-(-n // block_size) for n in [*size, *own]])
    blocks = [tables[a:b] for a, b in itertools.pairwise(cuts)]
    keys, values = (torch.full((160, block_size, Hkv, D), float("nan"), device=DEVICE, dtype=dtype) for _ in "kv")
    for table, count in zip(blocks, [*size, *own], strict=True):
        for memory in (keys, values):
            slots = torch.from_numpy(table.astype(np.int64).repeat(block_size) * block_size)[:count]
            slots = (slots + torch.arange(count) % block_size).to(DEVICE)
            memory.flatten(0, 1)[slots] = randn(count, Hkv, D).to(dtype)
    found, lengths = [], []
    for sequence, segments in enumerate(contexts):
        lengths.append(0)
        for segment in segments:
            options = {"sequence": sequence, "offset": lengths[-1], "length": size[segment], "blocks": blocks[segment]}
            found.append(SimpleNamespace(**options))
            lengths[-1] += size[segment]
    ranges, T = Ranges.of(found), int(num_new.sum())
    sequences = np.arange(4).repeat(num_new)
    before = np.concatenate([np.arange(n - new, n) for n, new in zip(own, num_new, strict=True)])
    positions = np.array(lengths)[sequences] + before
    tiling = range_tiling(is_shared, Hq // Hkv, D, dtype.itemsize)
    grid = tiling.grid(Hkv, DEVICE)
    grid = Grid(max(8, grid.resident), grid.unit, grid.unit)  # so that sequences have several splits
    tiles = Tiles.of(ranges, num_new, tiling.tokens(Hq // Hkv), 99 if is_shared else 0)
    plan = plan_ranges(tiles, positions - before % 5, positions + 7, grid, num_rows=T + 2, window=window)
    assert plan.num_states > T
    assert (plan.item_counts > num_new.max()).any() == is_shared, "one tile is shared"
    on_device = RangePlan(*(torch.from_numpy(array).to(DEVICE) for array in plan.arrays().values()))
    frequencies = inverse_frequencies(RopeConfig(theta=10_000.0), D).to(DEVICE)
    q, out = randn(T + 2, Hq, D).to(dtype), torch.full((T + 2, Hq, D), 7.0, device=DEVICE, dtype=dtype)
    starts = np.append(0, np.cumsum([len(table) for table in blocks[3:]]))[:-1]
    int32: dict[str, Any] = {"dtype": torch.int32, "device": DEVICE}
    options = {"scale": D**-0.5, "window": window, "softcap": softcap}
    range_attention(
        q,
        keys,
        values,
        torch.from_numpy(np.append(positions, [0, 0])).to(DEVICE),
        torch.tensor(np.concatenate(blocks[3:]), **int32),
        torch.tensor(starts, **int32),
        torch.tensor(ranges.tables, **int32),
        frequencies.double() / (2 * np.pi),
        turn_rows(on_device.piece_turns, frequencies.double() / (2 * np.pi)),
        on_device,
        **options,
        tiling=tiling,
        workspace=RangeWorkspace.of(plan.num_states, Hq, D, DEVICE),
        out=out,
    )
    expected = torch.empty(T, Hq, D, device=DEVICE)
    for row, (sequence, position) in enumerate(zip(sequences, positions, strict=True)):
        state, query = None, q[row : row + 1]
        pieces = [(one.blocks, one.length, one.offset, one.offset) for one in found if one.sequence == sequence]
        pieces.append((blocks[3 + sequence], int(own[sequence]), lengths[sequence], 0))
        for table, count, base, turn in pieces:
            at = torch.from_numpy(table.astype(np.int64)).to(DEVICE)
            k, v = (memory[at].flatten(0, 1)[:count].transpose(0, 1) for memory in (keys, values))
            moved = relocate(query, torch.tensor([-turn], device=DEVICE), frequencies)
            new = range_state(moved, k, v, torch.tensor([position - base], device=DEVICE), **options)
            state = new if state is None else merge(state, new)
        assert state is not None
        expected[row] = state[0][0]
    # A turned query is rounded to its dtype, so a score is off by that, and weights by as much.
    error = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(out[:T].float(), expected, atol=error, rtol=error)
    assert (out[T:] == 7).all(), "padding is not written"


def check_answers(engine: Any, contexts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """The greedy tokens of requests that are made of these segments, after a token that tells them apart, which an
    explicit mask gives too, as likely."""
    names = [engine.register(segment) for segment in SEGMENTS]
    while engine.has_work():
        engine.step()
    params = SamplingParams(**GREEDY, max_new_tokens=num_tokens, logprobs=0)
    requests = [
        engine.add_request([11, 12, n], params, segment_ids=[names[segment] for segment in segments])
        for n, segments in enumerate(contexts)
    ]
    found: dict[str, list[Any]] = {name: [] for name in requests}
    while engine.has_work():
        for output in engine.step():
            found[output.request_id].append(output)
    assert engine.pool.audit() == []
    ids = [[output.token_id for output in found[name]] for name in requests]
    for n, (segments, name) in enumerate(zip(contexts, requests, strict=True)):
        own = [11, 12, n, *ids[n][:-1]]
        expected = reference_logits(engine.model, [SEGMENTS[each] for each in segments], own)[2:].log_softmax(-1)
        assert ids[n] == expected.argmax(-1).tolist(), f"segments {segments}"
        likely = torch.tensor([output.logprobs.logprob for output in found[name]])
        torch.testing.assert_close(likely, expected.amax(-1).cpu(), atol=1e-4, rtol=0)
    return ids


@pytest.mark.parametrize(
    "family", [*(pytest.param(name, marks=pytest.mark.gpu) for name in ("llama", "qwen3")), "gemma3_text"]
)
def test_replayed_steps_give_what_an_explicit_mask_gives(tiny_checkpoints, family, monkeypatch):
    """Requests with shared and own segments beside one without; a plan that fits no captured arrays runs eagerly."""
    monkeypatch.setattr("shared.tracks.segments.range_tiles.LEAST_SAVED", 30)
    contexts = [[0, 1], [3, 0], [], [0, 2, 0]]
    for captures in (True,) if INTERPRETED else (True, False):
        engine = make_engine(tiny_checkpoints[family], Engine, **ROOM, overlap_scheduling=True)
        if not captures:
            engine.view.attention.limits = type(engine.view.attention.limits)(0, 0, 0, 0, 0)
        buckets, compute = set(), engine.runner.executor

        def watched(*options: Any, compute: Any = compute, view: Any = engine.view, found: Any = buckets) -> Any:
            found.add(view.bucket is not None and view.bucket.tile_rows > 0)
            return compute(*options)

        engine.runner.executor = watched
        check_answers(engine, contexts, 4 if INTERPRETED else 12)
        assert buckets == ({True, False} if captures else {False}), "steps with segments have buckets of their own"


def test_a_long_answer_keeps_its_plan_until_it_needs_another(tiny_checkpoints):
    """An answer that crosses intervals of SLACK positions; plans are uploaded a few times only."""
    room = ROOM | {"max_seq_len": 640, "num_gpu_blocks": 200}
    engine = make_engine(tiny_checkpoints["llama"], Engine, **room, overlap_scheduling=True, use_cuda_graphs=False)
    sent: list[int] = []
    send = engine.view.attention._send
    engine.view.attention._send = lambda plans: (sent.append(1), send(plans))
    num_tokens = 12 if INTERPRETED else 300
    engine.view.attention.planned_for = None
    check_answers(engine, [[1, 2]], num_tokens)
    assert len(sent) <= 4, "once for the question, once for each interval"


def test_requests_in_a_row_read_their_own_segments(tiny_checkpoints):
    """Each in one step, which has as many new tokens as the one before; the first two have equal lengths."""
    engine = make_engine(tiny_checkpoints["llama"], Engine, **ROOM | {"max_batch_size": 1}, use_cuda_graphs=False)
    (first,), (second,), _ = check_answers(engine, [[1], [4], [0]], 1)
    assert first != second
