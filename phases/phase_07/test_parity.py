"""Phase 7 gives the outputs of phase 6.1 at every chunk size, in one forward a step."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from phases.phase_06_1.engine import Engine as Planned
from phases.phase_07.engine import Engine
from shared.engine.config import EngineConfig
from shared.engine.output import StepOutput
from shared.sampling.params import SamplingParams
from tests.launches import launched
from tests.mixed_requests import ARRIVALS, GREEDY, LONG, MIXED, SMALL, seen, serve, tokens
from tests.random_loads import interrupt

CHUNKS: list[dict[str, Any]] = [
    {"prefill_chunk_size": 1},
    {"prefill_chunk_size": 7, "max_prefill_chunks_per_step": 1},
    {"prefill_chunk_size": 17, "max_num_batched_tokens": 20},  # past the window of tiny-gemma3, which is 16
    {"max_num_batched_tokens": 1},
    {},
    {"use_chunked_prefill": False},
]


def make(folder: Path, phase: Any = Engine, **config: Any) -> Any:
    return phase(EngineConfig(model=str(folder), **config))


def test_outputs_are_those_of_phase_6_1_at_every_chunk_size(model_folder: Path) -> None:
    """In a pool that is too small for all requests, so some are preempted, even between two chunks. With the families
    that have no windows, at two sizes of chunks."""
    expected = seen(serve(make(model_folder, Planned, **SMALL), MIXED, ARRIVALS)[0])
    num_preempted = 0
    for chunks in CHUNKS[1:3] if model_folder.name in ("tiny-llama", "tiny-qwen3") else CHUNKS:
        engine = make(model_folder, **SMALL, **chunks)
        answers, records = serve(engine, MIXED, ARRIVALS)
        assert seen(answers) == expected, chunks
        assert engine.runner.num_forwards == sum(bool(r.prefilled or r.decoded) for r in records), "one forward a step"
        num_preempted += engine.load().num_preemptions
    assert num_preempted > 0


@cache
def planned(folder: Path) -> list[list[StepOutput]]:
    """What phase 6.1 answers."""
    return seen(serve(make(folder, Planned, max_seq_len=128, max_batch_size=3), MIXED, ARRIVALS)[0])


@pytest.mark.parametrize("chunks", [{"prefill_chunk_size": 5}, {"use_chunked_prefill": False}], ids=["chunks", "whole"])
@pytest.mark.parametrize(
    "memory",
    [{"kv_cache_backend": "contiguous"}, {"attention_backend": "naive"}, {"attention_backend": "flash"}],
    ids=["contiguous", "naive", "flash"],
)
def test_every_memory_and_backend_gives_the_same_outputs(
    tiny_checkpoints: dict[str, Path], memory: dict[str, Any], chunks: dict[str, Any]
) -> None:
    folder, options = tiny_checkpoints["gemma3_text"], {"max_seq_len": 128, "max_batch_size": 3}
    engine = make(folder, **options, **memory, **chunks)
    assert seen(serve(engine, MIXED, ARRIVALS)[0]) == planned(folder)
    num_forwards = engine.runner.num_forwards
    assert (engine.step(), engine.runner.num_forwards) == ([], num_forwards), "without requests nothing is launched"


@pytest.mark.parametrize("broken", ["runner.forward", "scheduler.commit", "output_processor.process"])
def test_an_interrupted_step_is_repeated_and_loses_nothing(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    folder, options = tiny_checkpoints["qwen3"], {"max_seq_len": 128, "max_batch_size": 3, "prefill_chunk_size": 5}
    expected = seen(serve(make(folder, **options), MIXED, ARRIVALS)[0])
    engine = make(folder, **options)
    interrupts = interrupt(engine, broken, monkeypatch)
    assert seen(serve(engine, MIXED, ARRIVALS)[0]) == expected
    assert len(interrupts) > 5


def test_static_batches_prefill_whole_prompts(tiny_checkpoints: dict[str, Path]) -> None:
    options: dict[str, Any] = {"max_seq_len": 128, "max_batch_size": 3, "batching_mode": "static"}
    folder = tiny_checkpoints["qwen3"]
    expected, steps = serve(make(folder, Planned, **options), MIXED)
    answers, records = serve(make(folder, **options), MIXED)
    assert (seen(answers), records) == (seen(expected), steps)


@pytest.mark.failing_forwards
def test_a_failure_in_the_middle_of_a_prompt_takes_that_request_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token outside the vocabulary, in the third chunk."""
    engine = make(folder, max_seq_len=128, prefill_chunk_size=8)
    monkeypatch.setattr("shared.engine.serving.check_prompt", lambda ids, *options: list(ids))
    expected = tokens(serve(make(folder, Planned, max_seq_len=128), MIXED[:1])[0][0])
    good, (failed,) = serve(engine, [MIXED[0], ([7] * 20 + [10**6] + [7] * 20, {"max_new_tokens": 4})])[0]
    assert tokens(good) == expected
    assert failed.error is not None


def test_prompt_log_probabilities_do_not_depend_on_chunks(tiny_checkpoints: dict[str, Path]) -> None:
    """Each chunk computes those of the tokens that follow its own, including the first token of the next chunk."""
    folder, ask = tiny_checkpoints["qwen3"], {"prompt_logprobs": 2, "max_new_tokens": 0}
    requests: list[tuple[str | list[int], dict[str, Any]]] = [([(7 * n) % 250 for n in range(40)], ask), ([3], ask)]
    expected, found = (
        [answer[0].prompt_logprobs for answer in serve(engine, requests)[0]]
        for engine in (make(folder, Planned, max_seq_len=64), make(folder, max_seq_len=64, prefill_chunk_size=7))
    )
    assert [one and len(one) for one in found] == [40, 1]
    for ours, theirs in zip(found, expected, strict=True):
        for mine, other in zip(ours or (), theirs or (), strict=True):
            assert (mine is None) == (other is None)
            if mine and other:
                assert [n for n, _ in mine.top] == [n for n, _ in other.top]
                assert mine.logprob == pytest.approx(other.logprob, abs=1e-5)


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("memory", [{}, {"attention_backend": "flash"}, {"kv_cache_backend": "contiguous"}], ids=str)
@pytest.mark.parametrize("size", [16, 100, 512])
def test_tokens_on_the_gpu_equal_those_of_the_cpu(model_folder: Path, size: int, memory: dict[str, Any]) -> None:
    options: dict[str, Any] = {"max_seq_len": 640, "max_batch_size": 8, "prefill_chunk_size": size}
    arrivals = [0, *ARRIVALS, 10]
    on_cpu, on_gpu = (
        serve(make(model_folder, device=device, dtype="float32", **options, **memory), LONG, arrivals)
        for device in ("cpu", "cuda")
    )
    assert [tokens(answer) for answer in on_gpu[0]] == [tokens(answer) for answer in on_cpu[0]]
    assert [(r.prefilled, r.decoded) for r in on_gpu[1]] == [(r.prefilled, r.decoded) for r in on_cpu[1]]


@pytest.mark.gpu
def test_a_mixed_step_launches_attention_twice_a_layer(model_folder: Path) -> None:
    """Decoding requests by the decode kernel, chunks by the prefill kernel; every product once for all tokens."""
    engine = make(model_folder, device="cuda", max_seq_len=1024, prefill_chunk_size=64)
    num_layers = len(engine.model.config.windows)
    engine.add_request([7] * 20, SamplingParams(**GREEDY, max_new_tokens=20))
    launched(engine)
    alone = launched(engine)
    engine.add_request([7] * 200, SamplingParams(**GREEDY, max_new_tokens=8))
    mixed = launched(engine)
    assert (alone["planned_decode_kernel"], alone["planned_prefill_kernel"]) == (num_layers, 0)
    assert (mixed["planned_decode_kernel"], mixed["planned_prefill_kernel"]) == (num_layers, num_layers)
    assert mixed["kv_write_kernel"] == num_layers
