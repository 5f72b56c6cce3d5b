"""Selective recomputation: which tokens, and what becomes of keys and values."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.segment_questions import PAGES, QUESTIONS
from shared.errors import RequestError
from shared.sampling.params import SamplingParams
from shared.tracks.segments.blend import most_changed
from shared.tracks.segments.llm import SegmentLLM
from tests.comparison import assert_close, assert_equal

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_new_tokens=6)
SEGMENTS = [[(k * n + k) % 250 for n in range(length)] for k, length in ((7, 37), (5, 16), (3, 50), (11, 1))]
AXES = ("layer", "token", "head", "dim")


def test_each_segment_has_its_share_of_the_tokens_that_change_most() -> None:
    change = torch.tensor([1.0, 9, 2, 8, 0.5, 0.1, 0.3, 0.2])
    assert_equal(most_changed(change, [4, 4], 0.5).tolist(), [1, 3, 4, 6], "tokens", ("index",))
    assert_equal(most_changed(change, [8], 0.5).tolist(), [0, 1, 2, 3], "tokens of one segment", ("index",))
    assert_equal(most_changed(change, [8], 0.5).dtype, torch.int64, "dtype of the tokens")
    assert_equal(len(most_changed(torch.ones(6), [6], 0.5)), 3, "how many of six tokens that change alike")


def test_none_and_all() -> None:
    change = torch.tensor([3.0, 1, 2, 5, 4])
    assert_equal(most_changed(change, [2, 3], 0).tolist(), [], "tokens", ("index",))
    assert_equal(most_changed(change, [2, 3], 1).tolist(), [0, 1, 2, 3, 4], "tokens", ("index",))


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5), percent=st.integers(0, 100))
@example(lengths=[25], percent=28)  # 0.28 * 25 is a little more than 7
def test_the_share_is_rounded_up_and_ascending(lengths: list[int], percent: int) -> None:
    fraction = percent / 100
    change = torch.rand(sum(lengths))
    found, start = most_changed(change, lengths, fraction).tolist(), 0
    assert_equal(found, sorted(set(found)), "tokens, which ascend", ("index",))
    for length in lengths:
        mine = [place for place in found if start <= place < start + length]
        share = math.ceil(fraction * length)
        assert len(mine) == share, f"{len(mine)} of {length} tokens for {fraction}: it is rounded up"
        left = set(range(start, start + length)) - set(mine)
        is_ordered = not (left and mine) or max(change[list(left)]) <= min(change[mine])
        assert is_ordered, "a token that is left out changed more than one that is computed again"
        start += length


def kept(llm: SegmentLLM, name: str) -> list[torch.Tensor]:
    """A segment's keys and values, ``[layers, tokens, Hkv, D]``."""
    segment, view = llm.engine.segments.find(name), llm.engine.view
    blocks = torch.from_numpy(segment.blocks).long()
    return [x[:, blocks].flatten(1, 2)[:, : len(segment)] for x in (view.keys, view.values)]


@pytest.fixture(params=[False, True], ids=["fused", "packed"])
def llm(model_folder: Path, request: pytest.FixtureRequest) -> SegmentLLM:
    return SegmentLLM(str(model_folder), max_seq_len=256, max_batch_size=2, block_size=7, pack_weights=request.param)


def test_a_fraction_of_one_is_the_concatenated_prompt_in_all_layers(llm: SegmentLLM) -> None:
    names = [llm.register(segment) for segment in SEGMENTS]
    whole = llm.register([token_id for segment in SEGMENTS for token_id in segment])
    blended = llm.blend(names, 1)
    for ours, expected in zip(kept(llm, blended), kept(llm, whole), strict=True):
        assert_close(ours, expected, "keys or values", AXES, rtol=1e-4, atol=1e-4)
    answers = [llm.generate_from_segments([name], [1, 2, 3], GREEDY) for name in (blended, whole)]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].prompt_ids == answers[1].prompt_ids
    assert llm.engine.pool.audit() == []


def test_a_fraction_changes_so_many_tokens_and_no_others(llm: SegmentLLM) -> None:
    """With 0 the answer is that of the segments; each segment after the first has its share from layer 1 on."""
    names = [llm.register(segment) for segment in SEGMENTS]
    before = [kept(llm, name) for name in names]
    blended = []
    for fraction in (0, 0.25, 1):
        blended.append(llm.blend(names, fraction))
        assert llm.blend(names, fraction) == blended[-1]
        assert llm.engine.pool.audit() == [], "a blend that is there is not made again"
    none, some, every = blended
    (k0, v0), (k1, v1), (_, v2) = (kept(llm, name) for name in (none, some, every))
    assert_close(v0, torch.cat([v for _, v in before], 1), "values", AXES, rtol=0, atol=0)
    answers = [llm.generate_from_segments(ids, [1, 2, 3], GREEDY).token_ids for ids in ([none], names)]
    assert answers[0] == answers[1]
    changed = ((v1 - v0) != 0).any(-1).any(-1)  # [layers, tokens]
    starts = [0, 37, 53, 103, 104]
    counts = [[int(layer[a:b].sum()) for a, b in pairwise(starts)] for layer in changed]
    assert counts[1:] == [[0, 4, 13, 1]] * (len(counts) - 1)
    change = (v2 - v0)[1, 37:].square().sum((1, 2))
    assert changed[1, 37:].nonzero().flatten().tolist() == most_changed(change, [16, 50, 1], 0.25).tolist()
    assert torch.equal(k1[:, :37], k0[:, :37])
    assert_close(v1[1][changed[1]], v2[1][changed[1]], "layer 1 of those computed", AXES[1:], rtol=1e-4, atol=1e-4)
    for (keys, values), name in zip(before, names, strict=True):
        assert all(torch.equal(a, b) for a, b in zip((keys, values), kept(llm, name), strict=True)), "segments stay"


def test_a_blend_is_a_segment(tiny_checkpoints: dict[str, Path]) -> None:
    llm = SegmentLLM(str(tiny_checkpoints["llama"]), max_seq_len=256, max_batch_size=2, num_gpu_blocks=20)
    names = [llm.register(segment) for segment in SEGMENTS]
    blended = llm.blend(names[:2], 0.5)
    computed = llm.engine.runner.num_tokens_computed
    assert llm.blend(names[:2], 0.5) == blended
    assert len({blended, llm.blend(names[:2], 0.25), llm.blend([names[1], names[0]], 0.5)}) == 3
    assert llm.engine.runner.num_tokens_computed == computed
    assert llm.evict(blended)
    whole = llm.register([*SEGMENTS[0], *SEGMENTS[1]])
    answers = [llm.generate_from_segments([name], [1], GREEDY).token_ids for name in (blended, whole)]
    assert answers[0] == answers[1], "an evicted one is computed as a whole"
    parts = [llm.register(part) for part in (SEGMENTS[0][:20], [*SEGMENTS[0][20:], *SEGMENTS[1]])]
    assert llm.blend(parts, 0.5) != blended, "the same tokens, cut elsewhere"
    assert llm.engine.pool.audit() == []


def test_what_cannot_be_blended_is_refused(tiny_checkpoints: dict[str, Path]) -> None:
    llm = SegmentLLM(str(tiny_checkpoints["llama"]), max_seq_len=256, max_batch_size=2, num_gpu_blocks=20)
    names = [llm.register(segment) for segment in SEGMENTS]
    refused: list[tuple[Any, float, str]] = [
        (names, 1.5, "fraction to recompute is 1.5; it must be from 0 to 1"),
        (["ab"], 0.5, "no segment 'ab'"),
        ([], 0.5, "The prompt is empty"),
        (names[2:3] * 6, 0.5, "you requested 300 tokens"),
        ([llm.register([9, *segment] * 3) for segment in SEGMENTS[:2]], 0.5, "blocks, for 2 segments"),
    ]
    for segment_ids, fraction, message in refused:
        with pytest.raises(RequestError, match=message):
            llm.blend(segment_ids, fraction)
    llm.evict(names[0])
    with pytest.raises(RequestError, match="is not in the KV cache; have it computed first"):
        llm.engine.blend(names, 0.5)
    assert llm.engine.pool.audit() == []


def test_the_questions_of_the_benchmark_have_their_answers_in_the_pages() -> None:
    for question in QUESTIONS:
        text = (PAGES / question.page).read_text(encoding="utf-8")
        assert text.count(question.anchor) == 1, question
        assert question.is_answered(question.anchor.replace("\n", " "))
        assert not question.is_answered("unknown\n" + question.anchor), "only the first line counts"
