"""What an engine is made ready with: it fits, and it leaves nothing behind."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phases.phase_04.engine import Engine as Static
from phases.phase_08.engine import Engine as Prefixes
from phases.phase_12.engine import Engine as Structured
from shared.engine.config import EngineConfig
from shared.engine.executor.buckets import Buckets
from shared.engine.warm_up import rounds, warm_up
from shared.grammar.grammar import Grammar
from shared.kernels.attention.planned_tiling import LEAST_SPECIALIZED
from shared.sampling.params import SamplingParams
from shared.scheduling.chunks import Chunks


def test_a_batch_shrinks_by_one_a_step_after_prompts_of_every_power_of_two() -> None:
    *alone, batch = rounds(16, 1280, is_gpu=True)
    assert [request for (request,) in alone] == [(1 << n, 2) for n in range(10)]
    assert [new for _, new in batch] == list(range(2, 18))
    assert rounds(16, 1280, is_gpu=True, capacity_tokens=16 * 1280)[-1] == batch
    assert [request for (request,) in rounds(3, 64, is_gpu=True)[:-1]] == [(1 << n, 2) for n in range(6)]


def test_the_longest_prompt_uses_every_kernel_of_prompts() -> None:
    (*_, [(longest, _)], _) = rounds(16, 1 << 15, is_gpu=True)
    assert longest >= max(LEAST_SPECIALIZED.values())


@pytest.mark.parametrize(("max_seq_len", "number"), [(2048, 5), (4096, 3), (8192, 2), (1 << 15, 1)])
def test_a_step_too_large_for_a_graph_is_run_where_its_prompts_fit(max_seq_len: int, number: int) -> None:
    sizes: dict[str, Any] = {"is_gpu": True, "most_captured": 4096 + 512}
    *alone, large, batch = rounds(512, max_seq_len, **sizes, capacity_tokens=2 * 4611)
    tokens = [num_prompt for num_prompt, _ in large]
    assert len(tokens) == number
    assert 4609 <= sum(tokens) <= 4611, "the fewest tokens that no graph holds"
    config = EngineConfig(model="any", max_batch_size=512, max_seq_len=max_seq_len)
    assert Chunks(config).sizes(tokens, 0) == tokens, "one step computes them"
    assert rounds(512, max_seq_len, is_gpu=True, capacity_tokens=2 * 4611) == [*alone, batch], "there are no graphs"
    assert len(rounds(512, max_seq_len, **sizes, capacity_tokens=2 * 4609 - 1)) == len(alone) + 1, "half of the memory"
    assert len(rounds(number, max_seq_len, **sizes)) == len(alone) + 2
    if number > 1:
        assert len(rounds(number - 1, max_seq_len, **sizes)) == len(alone) + 1, "more prompts than a batch has"


def test_the_largest_graph_of_an_engine_decides_which_step_that_is(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import shared.engine.warm_up as module

    asked: list[int | None] = []

    def no_rounds(*sizes: int, most_captured: int | None, **options: Any) -> list[Any]:
        asked.append(most_captured)
        return []

    monkeypatch.setattr(module, "rounds", no_rounds)
    engine = Structured(EngineConfig(model=str(tiny_checkpoints["llama"]), max_seq_len=64, max_batch_size=2))
    warm_up(engine)
    buckets = Buckets.of(2, 100)
    engine.runner.executor = SimpleNamespace(graphs=dict.fromkeys(buckets.mixed + buckets.decode))
    warm_up(engine)
    warm_up(Static(EngineConfig(model=str(tiny_checkpoints["llama"]), max_seq_len=64)))
    assert asked == [None, 100, None]


def test_a_whole_batch_fits_into_the_memory_half_of_it_prompts() -> None:
    batch = rounds(238, 4096, is_gpu=True, capacity_tokens=81_920)[-1]
    assert sum(prompt for prompt, _ in batch) <= 81_920 / 2
    running = [sum(prompt + step for prompt, new in batch if new > step) for step in range(240)]
    assert max(running) <= 81_920, "no request is preempted"
    *alone, _ = rounds(2, 8192, is_gpu=True, capacity_tokens=3000)
    assert [prompt for ((prompt, _),) in alone] == [1 << n for n in range(11)]


def test_on_a_cpu_one_short_answer_will_do() -> None:
    assert rounds(16, 4096, is_gpu=False) == [[(8, 2)]]


@pytest.mark.parametrize("max_seq_len", [2, 3, 8, 100])
@pytest.mark.parametrize("is_gpu", [False, True], ids=["cpu", "gpu"])
def test_no_request_is_longer_than_a_sequence_may_be(max_seq_len: int, is_gpu: bool) -> None:
    for requests in rounds(4, max_seq_len, is_gpu=is_gpu):
        assert all(prompt >= 1 and new >= 1 and prompt + new <= max_seq_len for prompt, new in requests)


@pytest.mark.parametrize("make", [Static, Prefixes], ids=["static", "prefixes"])
@pytest.mark.parametrize("is_gpu", [False, True], ids=["as on a cpu", "as on a gpu"])
def test_nothing_is_left_behind(
    tiny_checkpoints: dict[str, Path], make: Any, is_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shared.engine.warm_up as module

    monkeypatch.setattr(module, "rounds", lambda *sizes, **options: rounds(*sizes, **options | {"is_gpu": is_gpu}))
    sizes = {"max_seq_len": 64, "max_batch_size": 3, "max_waiting_requests": 1}  # with a full queue requests wait
    sizes |= {"block_size": 4} if make is Prefixes else {}
    engine = make(EngineConfig(model=str(tiny_checkpoints["llama"]), **sizes))
    add, added = engine.add_request, []
    monkeypatch.setattr(
        engine, "add_request", lambda *options: (add(*options), added.append((len(options[0]), options[1])))
    )
    warm_up(engine)
    assert len(added) == (9 if is_gpu else 1), "six alone and three together, each when the queue has room"
    capacity = getattr(engine.pool, "capacity_tokens", None)
    expected = [one for together in rounds(3, 64, is_gpu=is_gpu, capacity_tokens=capacity) for one in together]
    assert [(num_prompt, params.max_new_tokens) for num_prompt, params in added] == expected
    assert engine.load().num_prefix_hits == 0, "every prompt is computed"
    assert list(engine.pool.cached_blocks()) == []
    assert not engine.has_work()
    assert engine.pool.used_tokens == 0
    assert engine.runner.num_tokens_computed > (50 if is_gpu else 8)


def test_the_first_request_with_a_grammar_finds_the_vocabulary_made(tiny_checkpoints: dict[str, Path]) -> None:
    engine = Structured(EngineConfig(model=str(tiny_checkpoints["llama"]), max_seq_len=64))
    assert engine.constraints.vocabulary is None, "a caller without grammars does not pay for it"
    warm_up(engine)
    vocabulary = engine.constraints.vocabulary
    assert vocabulary is not None
    engine.add_request([1], SamplingParams(structured_output=Grammar.regex("a")))
    assert engine.constraints.vocabulary is vocabulary
