"""What an engine is made ready with: it fits, and it leaves nothing behind."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phases.phase_04.engine import Engine as Static
from phases.phase_08.engine import Engine as Prefixes
from phases.phase_12.engine import Engine as Structured
from shared.cache.view.bucket_padding import CAPTURED_CHUNK, NARROW_CAPTURED_CHUNK
from shared.engine.config import EngineConfig
from shared.engine.executor.buckets import Buckets
from shared.engine.warm_up import beyond_graphs, rounds, warm_up
from shared.grammar.grammar import Grammar
from shared.kernels.attention.planned_tiling import LEAST_SPECIALIZED
from shared.sampling.params import SamplingParams
from shared.scheduling.chunks import Chunks, chunk_size
from shared.scheduling.schedule import Schedule


def test_a_batch_shrinks_by_one_a_step_after_prompts_of_every_power_of_two() -> None:
    *alone, batch = rounds(16, 1280, is_gpu=True)
    assert [request for (request,) in alone] == [(1 << n, 2) for n in range(10)]
    assert [new for _, new in batch] == list(range(2, 18))
    assert rounds(16, 1280, is_gpu=True, capacity_tokens=16 * 1280)[-1] == batch
    assert [request for (request,) in rounds(3, 64, is_gpu=True)[:-1]] == [(1 << n, 2) for n in range(6)]


def test_the_longest_prompt_uses_every_kernel_of_prompts() -> None:
    (*_, [(longest, _)], _) = rounds(16, 1 << 15, is_gpu=True)
    assert longest >= max(LEAST_SPECIALIZED.values())


@pytest.mark.parametrize(
    "limits",
    [{}, {"prefill_chunk_size": 100}, {"chunk_beside_decoding": 300}, {"max_num_batched_tokens": 2000}],
    ids=str,
)
@pytest.mark.parametrize("max_batch_size", [16, 64, 512])
def test_a_step_too_large_for_a_graph_is_run_where_there_is_one(max_batch_size: int, limits: dict[str, int]) -> None:
    """By the sizes of the largest default graphs, and of smaller ones."""
    for captured in (NARROW_CAPTURED_CHUNK, CAPTURED_CHUNK, 700):
        most = captured + max_batch_size
        config = EngineConfig(model="any", max_batch_size=max_batch_size, **limits)  # type: ignore[arg-type]
        lengths = beyond_graphs(config, most, 1 << 15, 1 << 20)
        largest = min(config.max_num_batched_tokens, 1 + (max_batch_size - 1) * chunk_size(config, 4096, 1))
        assert bool(lengths) == (largest > most + 1), "if such a step exists"
        if lengths:
            assert Chunks(config).sizes(lengths, 1) == lengths, "one step computes them"
            assert most < sum(lengths) <= most + len(lengths), "the fewest tokens that no graph holds"
            assert beyond_graphs(config, most, 1 << 15, 2 * sum(lengths)) == lengths
            assert beyond_graphs(config, most, 1 << 15, 2 * sum(lengths) - 1) == [], "half of the memory"
            number = len(lengths)
            needed = {
                "max_batch_size": number + 1,
                "max_waiting_requests": number,
                "max_prefill_chunks_per_step": number,
            }
            for name, enough in needed.items():
                for most_prompts in (enough - 1, enough):
                    limited = replace(config, **{name: most_prompts})
                    expected = lengths if most_prompts == enough else []
                    assert beyond_graphs(limited, most, 1 << 15, 1 << 20) == expected, f"{name} is {most_prompts}"
            in_turn = replace(config, scheduler_policy="decode_round_robin")
            assert beyond_graphs(in_turn, most, 1 << 15, 1 << 20) == [], "one prompt a step"
    assert beyond_graphs(replace(config, max_batch_size=512), 699, 100, 1 << 20) == [50] * 14, "half a sequence"
    whole = EngineConfig(model="any", max_batch_size=max_batch_size, use_chunked_prefill=False)
    assert beyond_graphs(whole, 6160, 1 << 15, 1 << 20) == [6161]


@pytest.mark.parametrize("options", [{"prefill_chunk_size": 8}, {"use_chunked_prefill": False}], ids=str)
def test_an_engine_with_graphs_runs_a_step_that_is_too_large_for_them(
    tiny_checkpoints: dict[str, Path], options: dict[str, Any]
) -> None:
    settings: dict[str, Any] = {"max_seq_len": 64, "max_batch_size": 4, **options}
    engine = Structured(EngineConfig(model=str(tiny_checkpoints["llama"]), **settings))
    found: list[tuple[int, int]] = []
    schedule = engine.scheduler.schedule

    def recorded() -> Schedule:
        step = schedule()
        if step:
            found.append((step.num_decoding, int(step.num_tokens.sum())))
        return step

    engine.scheduler.schedule = recorded  # type: ignore[method-assign]
    warm_up(engine)
    assert found == [(0, 8), (1, 1)], "without graphs: one short answer"
    buckets = Buckets.of(4, 20)
    engine.runner.executor.graphs = dict.fromkeys(buckets.mixed + buckets.decode)  # type: ignore[attr-defined]
    found.clear()
    warm_up(engine)
    assert (1, 22) in found
    assert not engine.has_work()


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
