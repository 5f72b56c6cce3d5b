"""Phase 8 gives the outputs of phase 7, whatever is cached, and computes common prefixes once."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from phases.phase_07.engine import Engine as Chunked
from phases.phase_08.engine import Engine
from shared.engine.config import EngineConfig
from tests.as_transformers import assert_served
from tests.mixed_requests import (
    ALIKE,
    ARRIVALS,
    ARRIVE,
    GREEDY,
    LONG,
    MIXED,
    SMALL,
    STEM,
    seen,
    serve,
    small_pools,
    tokens,
)
from tests.random_loads import Load, answers_alone, assert_as_alone, interrupt, loads, sizes
from tests.reference_tokens import ReferenceTokens


def make(folder: Path, phase: Any = Engine, **config: Any) -> Any:
    return phase(EngineConfig(model=str(folder), **config))


def test_outputs_are_those_of_phase_7_however_often_they_are_asked_for(model_folder: Path) -> None:
    """In a pool for little more than one long request, so that blocks are evicted and requests preempted."""
    requests, arrivals = [*ALIKE, *MIXED], [*ARRIVE, *ARRIVALS]
    expected = seen(serve(make(model_folder, Chunked, **SMALL), requests, arrivals)[0])
    for pool in small_pools(model_folder):
        engine = make(model_folder, **SMALL | pool)
        for _ in range(2):
            assert seen(serve(engine, requests, arrivals)[0]) == expected, pool
        assert engine.scheduler.num_prefix_hits > 0
        assert engine.load().num_preemptions > 0
        assert engine.load().kv_usage == 0


@pytest.mark.parametrize("backend", ["naive", "flash", "planned"])
def test_every_backend_gives_the_same_outputs(tiny_checkpoints: dict[str, Path], backend: str) -> None:
    """Gemma 3, whose sliding window of 16 ends inside the shared blocks."""
    folder, options = tiny_checkpoints["gemma3_text"], {"max_seq_len": 128, "max_batch_size": 4, "block_size": 8}
    expected = seen(serve(make(folder, Chunked, **options), ALIKE, ARRIVE)[0])
    engine = make(folder, **options, attention_backend=backend, prefill_chunk_size=13)
    for _ in range(2):
        assert seen(serve(engine, ALIKE, ARRIVE)[0]) == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"use_prefix_caching": False},
        {"use_chunked_prefill": False},
        {"kv_cache_backend": "contiguous"},
        {"batching_mode": "static"},
    ],
    ids=str,
)
def test_without_it_the_steps_are_those_of_phase_7(tiny_checkpoints: dict[str, Path], settings: dict[str, Any]) -> None:
    folder, options = tiny_checkpoints["qwen3"], {"max_seq_len": 128, "max_batch_size": 3}
    only = {} if "use_prefix_caching" in settings else settings
    expected, steps = serve(make(folder, Chunked, **options, **only), ALIKE)
    answers, records = serve(make(folder, **options, **settings), ALIKE)
    assert (seen(answers), records) == (seen(expected), steps)


@settings(max_examples=8, deadline=None)
@given(options=sizes(), load=loads())
def test_whatever_the_sizes_arrivals_and_aborts(
    tiny_checkpoints: dict[str, Path], options: dict[str, Any], load: Load
) -> None:
    folder = tiny_checkpoints["gemma3_text"]
    assert_as_alone(make(folder, **options), load, answers_alone(Chunked, folder))


@pytest.mark.parametrize("broken", ["runner.forward", "scheduler.commit"])
def test_an_interrupted_step_is_repeated_and_loses_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    options = {"max_seq_len": 128, "max_batch_size": 3}
    expected = seen(serve(make(folder, **options), ALIKE, ARRIVE)[0])
    engine = make(folder, **options)
    interrupts = interrupt(engine, broken, monkeypatch)
    assert seen(serve(engine, ALIKE, ARRIVE)[0]) == expected
    assert len(interrupts) > 5
    assert engine.stats().items() >= engine.scheduler.stats().items()


def test_the_turns_of_a_conversation_find_the_earlier_ones(
    model_folder: Path, reference_tokens: ReferenceTokens
) -> None:
    """Each turn computes its own words and the answer's last token; the answers are those of transformers."""
    engine = make(model_folder, max_seq_len=256, block_size=4)
    turn, history, computed = [1, 2, 3, 4, 5, 6, 7], list[int](), list[int]()
    for number in range(4):
        history += [*turn, number]
        before = engine.runner.num_tokens_computed
        ((answer,), _) = serve(engine, [(history, GREEDY | {"max_new_tokens": 6})])
        computed.append(engine.runner.num_tokens_computed - before)
        assert tokens(answer) == reference_tokens(model_folder, history, 6)
        history += [token for token in tokens(answer) if token is not None]
    assert max(computed[1:]) <= len(turn) + 1 + 6 + 4, f"tokens computed in each turn: {computed}"


@pytest.mark.failing_forwards
def test_a_failing_request_takes_none_of_those_that_share_its_prefix(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request computes the prefix of all, and then fails at a token outside the vocabulary, next to a full
    hit."""
    monkeypatch.setattr("shared.engine.serving.check_prompt", lambda ids, *options: list(ids))
    stem = STEM[:48]
    expected = tokens(serve(make(folder, Chunked, max_seq_len=128), [(stem, GREEDY | {"max_new_tokens": 7})])[0][0])
    engine = make(folder, max_seq_len=128, prefill_chunk_size=16)
    serve(engine, [(stem, GREEDY | {"max_new_tokens": 1})])
    whole = (stem, GREEDY | {"max_new_tokens": 7})
    *good, failed = serve(engine, [whole, whole, ([*stem, 10**6], {"max_new_tokens": 4})])[0]
    assert [tokens(answer) for answer in good] == [expected] * 2
    assert failed[0].error is not None


def test_prompt_log_probabilities_are_computed_and_not_cached(tiny_checkpoints: dict[str, Path]) -> None:
    folder, requests = tiny_checkpoints["qwen3"], [(STEM, {"prompt_logprobs": 2, "max_new_tokens": 1, "seed": 1})]
    engine = make(folder, max_seq_len=96)
    serve(engine, [(STEM, GREEDY | {"max_new_tokens": 1})])
    found, expected = (serve(one, requests)[0][0][0].prompt_logprobs for one in (engine, make(folder, Chunked)))
    assert found is not None
    assert len(found) == len(STEM)
    for mine, other in zip(found[1:], (expected or ())[1:], strict=True):
        assert mine is not None
        assert other is not None
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-5)
    assert engine.scheduler.num_prefix_hits == 0


def test_a_salt_keeps_tenants_apart(folder: Path) -> None:
    engine = make(folder, max_seq_len=96)
    hits = []
    for salt in ("one", "two", None, "one"):
        before = engine.scheduler.num_prefix_hits
        serve(engine, [(STEM, GREEDY | {"max_new_tokens": 1, "cache_salt": salt})])
        hits.append(engine.scheduler.num_prefix_hits - before)
    assert hits == [0, 0, 0, 48]


@pytest.mark.demo
def test_the_demo_model_continues_as_transformers_does(demo_folder: Path, reference_tokens: ReferenceTokens) -> None:
    engine = make(demo_folder, max_seq_len=256, max_batch_size=2, block_size=2)
    asked = [(prompt, 8) for prompt in ("The capital of France is", "The capital of France is not", "The capital of")]
    assert_served(engine, reference_tokens, asked)
    assert engine.scheduler.num_prefix_hits > 0


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("memory", [{}, {"attention_backend": "flash"}, {"block_size": 1}], ids=str)
def test_tokens_on_the_gpu_equal_those_of_the_cpu(model_folder: Path, memory: dict[str, Any]) -> None:
    """Twice, so that the second time most prompts are cached, some completely."""
    options: dict[str, Any] = {"max_seq_len": 640, "max_batch_size": 8, "prefill_chunk_size": 100}
    requests, arrivals = [*ALIKE, *LONG], [*ARRIVE, 9, *ARRIVALS, 10]
    found = []
    for device in ("cpu", "cuda"):
        engine = make(model_folder, device=device, dtype="float32", **options, **memory)
        found.append([seen(serve(engine, requests, arrivals)[0]) for _ in range(2)])
        assert engine.scheduler.num_prefix_hits > 1500
    assert [[tokens(a) for a in answers] for answers in found[1]] == [
        [tokens(a) for a in answers] for answers in found[0]
    ]
