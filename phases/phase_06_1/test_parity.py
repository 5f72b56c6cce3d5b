"""Phase 6.1 gives the same outputs as phase 6, in the same steps, whether attention is planned or not."""

from pathlib import Path
from typing import Any

import pytest

from phases.phase_06.engine import Engine as Paged
from phases.phase_06_1.engine import Engine
from shared.engine.config import EngineConfig
from shared.kernels.launch import LAUNCHES
from shared.sampling.params import SamplingParams
from tests.as_transformers import ASKED_OF_DEMO, assert_served
from tests.launches import launched
from tests.mixed_requests import ARRIVALS, GREEDY, LONG, MIXED, SMALL, seen, serve, tokens
from tests.reference_tokens import ReferenceTokens


def make(folder: Path, phase: Any = Engine, **config: Any) -> Any:
    return phase(EngineConfig(model=str(folder), **config))


def test_answers_and_steps_are_those_of_phase_6(model_folder: Path) -> None:
    """In a pool that is too small for all requests, so some are preempted and readmitted."""
    expected, steps = serve(make(model_folder, Paged, **SMALL), MIXED, ARRIVALS)
    engine = make(model_folder, **SMALL)
    answers, records = serve(engine, MIXED, ARRIVALS)
    assert seen(answers) == seen(expected)
    assert records == steps
    assert engine.load().num_preemptions > 0


def test_every_backend_gives_the_same_answers(tiny_checkpoints: dict[str, Path]) -> None:
    """Planning can be turned off, and so can blocks."""
    folder, options = tiny_checkpoints["gemma3_text"], {"max_seq_len": 128, "max_batch_size": 3}
    expected = seen(serve(make(folder, **options), MIXED, ARRIVALS)[0])
    for name in ("naive", "sdpa", "flash", "planned"):
        assert seen(serve(make(folder, **options, attention_backend=name), MIXED, ARRIVALS)[0]) == expected, name
    assert seen(serve(make(folder, **options, kv_cache_backend="contiguous"), MIXED, ARRIVALS)[0]) == expected


@pytest.mark.demo
def test_the_demo_model_answers_as_transformers_does(demo_folder: Path, reference_tokens: ReferenceTokens) -> None:
    engine = make(demo_folder, max_seq_len=256, max_batch_size=2)
    assert_served(engine, reference_tokens, ASKED_OF_DEMO, [0, 3])


def test_on_a_cpu_nothing_is_planned_and_nothing_launched(folder: Path) -> None:
    engine = make(folder, max_seq_len=128)
    before = LAUNCHES.copy()
    list(engine.generate("x", SamplingParams(**GREEDY, max_new_tokens=3)))
    assert before == LAUNCHES
    assert not hasattr(engine.view.attention, "planner")
    assert not hasattr(engine.view, "workspace")


# On a GPU. A prompt of 600 tokens is split, and so are the keys that each later token reads.


@pytest.mark.gpu
@pytest.mark.parametrize(("block_size", "room"), [(1, 640), (3, 640), (16, 2000)])
def test_tokens_on_the_gpu_equal_those_of_the_cpu(model_folder: Path, block_size: int, room: int) -> None:
    options: dict[str, Any] = {"max_seq_len": 640, "max_batch_size": 8, "block_size": block_size}
    options["num_gpu_blocks"] = -(-room // block_size)
    on_cpu, on_gpu = (
        serve(make(model_folder, device=device, dtype="float32", **options), LONG, [0, *ARRIVALS, 10])
        for device in ("cpu", "cuda")
    )
    assert [tokens(answer) for answer in on_gpu[0]] == [tokens(answer) for answer in on_cpu[0]]
    assert on_gpu[1] == on_cpu[1], "the same steps"
    assert (sum(len(record.preempted) for record in on_gpu[1]) > 0) is (room < 1000)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_planned_kernels_run_once_for_each_layer(model_folder: Path, dtype: str) -> None:
    """Also a merge in each layer whose plan splits a prompt; a decode step's splits are merged by the last program to
    arrive."""
    engine = make(model_folder, device="cuda", dtype=dtype, max_seq_len=1024)
    windows = engine.model.config.windows
    engine.add_request([7] * 600, SamplingParams(**GREEDY, max_new_tokens=8))
    engine.add_request([7] * 20, SamplingParams(**GREEDY, max_new_tokens=8))
    sends: list[int] = []
    for staging in engine.view.staging.values():
        staging.send = lambda arrays, send=staging.send: (sends.append(1), send(arrays))[1]

    made = launched(engine)
    merges = sum(engine.view.attention.plans["prefill", window].is_split for window in windows)
    assert merges == windows.count(None), "all layers but those of a window of 16"
    is_copied = engine.view.attention.workspace.copied is not None  # of the long prompt, on GPUs that copy tiles
    assert made["copy_keys_kernel"] == is_copied * len(windows)
    assert (made["planned_prefill_kernel"], made["merge_states_kernel"]) == ((1 + is_copied) * len(windows), merges)
    assert made["planned_decode_kernel"] == 0
    assert len(sends) == 1

    made = launched(engine)
    assert engine.view.attention.plans["decode", None].is_split
    assert (made["planned_decode_kernel"], made["merge_states_kernel"]) == (len(windows), 0)
    assert made["planned_prefill_kernel"] == 0
    assert len(sends) == 2
    assert made["paged_attention_kernel"] == made["decode_attention_kernel"] == 0


@pytest.mark.gpu
def test_on_a_gpu_flash_gives_the_same_tokens_without_a_plan(model_folder: Path) -> None:
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_seq_len": 640, "max_batch_size": 5}
    planned, flash = (make(model_folder, attention_backend=backend, **options) for backend in ("planned", "flash"))
    expected, _ = serve(planned, LONG)
    before = LAUNCHES.copy()
    answers, _ = serve(flash, LONG)
    made = LAUNCHES - before
    assert [tokens(answer) for answer in answers] == [tokens(answer) for answer in expected]
    assert made["paged_attention_kernel"] > 0
    assert made["planned_decode_kernel"] == made["planned_prefill_kernel"] == 0
