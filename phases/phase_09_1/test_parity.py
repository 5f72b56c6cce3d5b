"""Phase 9.1: segments equal a block-diagonal prefill with full attention after it; without segments it is phase 9."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phases.phase_09.engine import Engine as Plain
from phases.phase_09_1.engine import Engine
from shared.engine.config import EngineConfig
from shared.engine.output import StepOutput
from shared.errors import ConfigError, RequestError
from shared.loading.loader import load_model
from shared.models.causal_lm import CausalLM
from shared.sampling.params import SamplingParams
from tests.block_diagonal import reference_logits
from tests.comparison import assert_close
from tests.mixed_requests import ALIKE, ARRIVALS, ARRIVE, GREEDY, MIXED, SMALL, seen, serve

ROOM: dict[str, Any] = {"max_seq_len": 256, "max_batch_size": 4}
SEGMENTS = [
    [(7 * n) % 250 for n in range(37)],
    [(5 * n + 3) % 250 for n in range(16)],
    [9],
    [(3 * n) % 250 for n in range(50)],
]
QUESTION = [11, 12, 13, 14, 200, 201, 7]


def make(folder: Path, phase: Any = Engine, **config: Any) -> Any:
    return phase(EngineConfig(model=str(folder), **ROOM | config))


def answer(
    engine: Any, segments: list[list[int]], own: list[int], num_tokens: int = 12
) -> tuple[list[int], torch.Tensor]:
    """The greedy tokens after the segments, and the logits that each was sampled from."""
    logits: list[torch.Tensor] = []
    sample = engine.runner.sample
    names = [engine.register(segment) for segment in segments]
    name = engine.add_request(own, SamplingParams(**GREEDY, max_new_tokens=num_tokens), segment_ids=names)

    def recorded(launched: Any, rows: Any) -> Any:
        sampled = [launched.batch.request_ids[n] for n in launched.batch.logit_sequences]
        logits.extend(row for row, of in zip(launched.logits, sampled, strict=True) if of == name)
        return sample(launched, rows)

    engine.runner.sample = recorded
    ids = [output.token_id for output in outputs(engine) if output.request_id == name]
    engine.runner.sample = sample
    assert engine.pool.audit() == []
    return ids, torch.stack(logits)


def assert_answers_as_reference(
    engine: Any,
    model: CausalLM,
    segments: list[list[int]],
    own: list[int] = QUESTION,
    num_tokens: int = 12,
    tolerance: float = 1e-4,
) -> None:
    """The logits of each token after the segments are those of one forward with a block-diagonal mask."""
    ids, logits = answer(engine, segments, own, num_tokens)
    expected = reference_logits(model, segments, own + ids[:-1])[len(own) - 1 :]
    lengths = [*map(len, segments)]
    assert_close(logits, expected, f"logits after {lengths}", ("token", "id"), rtol=tolerance, atol=tolerance)
    chosen = expected[range(len(ids)), ids]
    assert (expected.amax(-1) - chosen).max() <= 2 * tolerance * (1 + expected.abs().max()), "the most likely tokens"


def outputs(engine: Any) -> list[StepOutput]:
    found = []
    while engine.has_work():
        found += engine.step()
    return found


def test_segments_are_a_block_diagonal_prefill_and_full_attention_after_it(model_folder: Path) -> None:
    """In blocks of several sizes; of one size for families without windows."""
    model = load_model(model_folder)
    for block_size in {"tiny-llama": [1], "tiny-qwen3": [7]}.get(model_folder.name, [1, 7, 16]):
        engine = make(model_folder, block_size=block_size)
        for chosen in ([0, 1, 2, 3], [3, 0], [1, 1, 0, 1], [2]):
            assert_answers_as_reference(engine, model, [SEGMENTS[n] for n in chosen])
        assert len(engine.segments.resident) == 4, "each is computed once"


@pytest.mark.parametrize("rotation", ["queries", "keys", "unrotated keys"])
def test_keys_that_are_rotated_when_they_are_read_give_the_same(model_folder: Path, rotation: str) -> None:
    """At several offsets of one segment, also in another request, in a step with a request without segments; and so do
    the queries, which are rotated otherwise."""
    engine, model = make(model_folder), load_model(model_folder)
    engine.view.rotation = rotation
    for others in ((), (1, 3)):
        names = [engine.register(SEGMENTS[n]) for n in others]
        engine.add_request([5, 6, 7], SamplingParams(**GREEDY, max_new_tokens=60), segment_ids=names)
    for chosen in ([0, 3], [3, 1, 0, 1]):
        assert_answers_as_reference(engine, model, [SEGMENTS[n] for n in chosen], num_tokens=4)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_with_key_norms_near_one_hundred_too(tiny_checkpoints: dict[str, Path], family: str) -> None:
    """As in Qwen 3: a key that is normed or rotated once too often, or in the wrong order, would be far off. Scores are
    a hundred times as large, and so are their errors.
    """
    engine, model = make(tiny_checkpoints[family]), load_model(tiny_checkpoints[family])
    for name, module in (*engine.model.named_modules(), *model.named_modules()):
        if name.endswith("k_norm"):
            module.weight.add_(99)
    assert_answers_as_reference(engine, model, SEGMENTS, tolerance=1e-2)


def keys_of(engine: Any, name: str) -> torch.Tensor:
    """A segment's keys and values in all layers, ``[2, layers, tokens, Hkv, D]``."""
    segment = engine.segments.find(name)
    blocks = torch.from_numpy(segment.blocks).long()
    return torch.stack([x[:, blocks].flatten(1, 2)[:, : len(segment)] for x in (engine.view.keys, engine.view.values)])


def test_a_segment_is_kept_as_a_prompt_alone_has_it_wherever_it_stands(model_folder: Path) -> None:
    """In all layers, so a request's first segment equals the beginning of a plain prompt."""
    engine, plain = make(model_folder), make(model_folder, Plain, use_prefix_caching=False)
    names = [engine.register(segment) for segment in SEGMENTS]
    outputs(engine)
    before = [keys_of(engine, name) for name in names]
    for segment, name in zip(SEGMENTS, names, strict=True):
        request_id = plain.add_request(segment, SamplingParams(**GREEDY, max_new_tokens=2))
        plain.step()
        table = torch.from_numpy(plain.pool.table(plain.scheduler.running[request_id])).long()
        for ours, theirs in zip(keys_of(engine, name), (plain.view.keys, plain.view.values), strict=True):
            expected = theirs[:, table].flatten(1, 2)[:, : len(segment)]
            assert_close(ours, expected, "keys or values", ("layer", "token", "head", "dim"), rtol=1e-5, atol=1e-5)
        plain.abort(request_id)
    for order in ([0, 1], [1, 0], [2, 2, 3]):
        engine.add_request(QUESTION, SamplingParams(**GREEDY, max_new_tokens=3), segment_ids=[names[n] for n in order])
    outputs(engine)
    assert all(torch.equal(keys_of(engine, name), keys) for name, keys in zip(names, before, strict=True))


def test_without_segments_outputs_are_those_of_phase_9(tiny_checkpoints: dict[str, Path]) -> None:
    requests, arrivals = [*ALIKE, *MIXED], [*ARRIVE, *ARRIVALS]
    for config in (
        {},
        SMALL,
        {"use_prefix_caching": False},
        {"kv_cache_backend": "contiguous"},
        {"batching_mode": "static"},
    ):
        folder = tiny_checkpoints["gemma3_text"]
        expected, steps = serve(make(folder, Plain, **config), requests, arrivals)
        found, records = serve(make(folder, **config), requests, arrivals)
        assert seen(found) == seen(expected), config
        assert records == steps, config


SHARED: list[tuple[list[int], list[int], int]] = [  # segments, question, tokens of the answer
    ([0, 1], [1, 2, 3], 9),
    ([1, 0], [1, 2, 3], 14),
    ([], [7] * 30, 12),
    ([3, 3, 2], [8], 7),
    ([1], QUESTION, 40),
    ([1], [8, 7], 44),
    ([1], [9], 45),
    ([2, 1, 0, 3], QUESTION, 5),
]


@cache
def answers_alone(folder: Path) -> list[list[int]]:
    """The tokens of each of SHARED in an engine of its own."""
    return [answer(make(folder), [SEGMENTS[n] for n in chosen], own, count)[0] for chosen, own, count in SHARED]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("overlaps", [False, True])
def test_requests_that_share_segments_answer_as_each_alone(
    tiny_checkpoints: dict[str, Path], family: str, overlaps: bool
) -> None:
    """In a pool where segments are evicted, computed again, and requests preempted."""
    folder = tiny_checkpoints[family]
    expected = answers_alone(folder)
    for num_blocks in (200, 44):
        engine = make(folder, block_size=3, num_gpu_blocks=num_blocks, max_seq_len=132, overlap_scheduling=overlaps)
        names = [engine.register(segment) for segment in SEGMENTS]
        asked = [
            engine.add_request(
                own, SamplingParams(**GREEDY, max_new_tokens=count), segment_ids=[names[n] for n in chosen]
            )
            for chosen, own, count in SHARED
        ]
        heard: dict[str, list[int]] = {name: [] for name in asked}
        for output in outputs(engine):
            heard[output.request_id].append(output.token_id)
        assert [heard[name] for name in asked] == expected
        assert engine.pool.audit() == []
        num_own = sum(len(own) + count - 1 for _, own, count in SHARED)
        if num_blocks == 200:
            assert engine.runner.num_tokens_computed <= sum(map(len, SEGMENTS)) + num_own + len(SHARED), "segments once"
        else:
            assert engine.load().num_preemptions > 0
            assert engine.runner.num_tokens_computed > sum(map(len, SEGMENTS)) + num_own, "some again"


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_segments_in_blocks_of_any_size(tiny_checkpoints: dict[str, Path], data: st.DataObject) -> None:
    folder = tiny_checkpoints[data.draw(st.sampled_from(sorted(tiny_checkpoints)))]
    chance = random.Random(data.draw(st.integers(0, 99)))
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    segments = [[chance.randrange(250) for _ in range(length)] for length in lengths]
    own = [chance.randrange(250) for _ in range(data.draw(st.integers(1, 20)))]
    options = {"block_size": data.draw(st.integers(1, 20)), "prefill_chunk_size": data.draw(st.sampled_from([3, 512]))}
    assert_answers_as_reference(make(folder, **options), load_model(folder), segments, own, num_tokens=3)


def test_what_cannot_be_is_refused(folder: Path) -> None:
    engine = make(folder, num_gpu_blocks=16, block_size=16)
    name = engine.register([1, 2, 3])
    for segment_ids, params, message in (
        (["ab"], {}, "no segment 'ab'"),
        ([name], {"prompt_logprobs": 0}, "segments were computed without logits"),
        ([engine.register([n] * 100) for n in range(2)], {"max_new_tokens": 40}, "needs 17 blocks"),
        ([name] * 100, {}, "length is 256 tokens. However, you requested 301 tokens"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.add_request([1], SamplingParams(**{"max_new_tokens": 9} | params), segment_ids=segment_ids)
    with pytest.raises(RequestError, match="The prompt is empty"):
        engine.register([])
    with pytest.raises(RequestError, match=r"length is 256 tokens. However, you requested 257"):
        engine.register([1] * 257)
    assert engine.register([1, 2, 3], "system") != name, "a segment has a role"
    asked = engine.add_request([9], SamplingParams(max_new_tokens=2), segment_ids=[engine.register([4]), name])
    assert next(iter(engine.segments.contexts)).prompt_ids == [4, 1, 2, 3, 9], (
        "segments stand before the prompt, in order"
    )
    assert engine.abort(asked)
    assert [output.token_id for output in outputs(engine)] == []
    for config, said in (
        ({"kv_cache_backend": "contiguous"}, "segments are kept in blocks"),
        ({"batching_mode": "static"}, "segments need continuous batching"),
    ):
        with pytest.raises(RequestError, match=said):
            make(folder, **config).register([1])
    with pytest.raises(ConfigError, match="CUDA graphs need a GPU"):
        make(folder, use_cuda_graphs=True)
