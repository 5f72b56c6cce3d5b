"""Phase 6.1 gives the same outputs as phase 6, in the same steps, whether attention is planned or not."""

from pathlib import Path
from typing import Any

import pytest

from phases.phase_06.engine import Engine as Paged
from phases.phase_06_1.engine import Engine
from shared.engine.config import EngineConfig
from shared.kernels.launch import LAUNCHES
from shared.sampling.params import SamplingParams
from tests.launches import launched
from tests.mixed_requests import ARRIVALS, GREEDY, LONG, MIXED, SMALL, seen, serve, tokens


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


def test_on_a_cpu_nothing_is_planned_and_nothing_launched(folder: Path) -> None:
    engine = make(folder, max_seq_len=128)
    before = LAUNCHES.copy()
    list(engine.generate("x", SamplingParams(**GREEDY, max_new_tokens=3)))
    assert before == LAUNCHES
    assert engine.view.planner is None
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
    """And a merge in each layer whose plan splits a prompt; a decode step's splits are merged by the last arrival."""
    engine = make(model_folder, device="cuda", dtype=dtype, max_seq_len=1024)
    windows = engine.model.config.windows
    engine.add_request([7] * 600, SamplingParams(**GREEDY, max_new_tokens=8))
    engine.add_request([7] * 20, SamplingParams(**GREEDY, max_new_tokens=8))
    sends: list[int] = []
    for staging in engine.view.staging.values():
        staging.send = lambda arrays, send=staging.send: (sends.append(1), send(arrays))[1]

    made = launched(engine)
    merges = sum(engine.view.plans["prefill", window].is_split for window in windows)
    assert merges == windows.count(None), "all layers but those of a window of 16"
    assert (made["planned_prefill_kernel"], made["merge_states_kernel"]) == (len(windows), merges)
    assert made["planned_decode_kernel"] == 0
    assert len(sends) == 1

    made = launched(engine)
    assert engine.view.plans["decode", None].is_split
    assert (made["planned_decode_kernel"], made["merge_states_kernel"]) == (len(windows), 0)
    assert made["planned_prefill_kernel"] == 0
    assert len(sends) == 2
    assert made["paged_attention_kernel"] == made["decode_attention_kernel"] == 0
