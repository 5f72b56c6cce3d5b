"""Traces of a static and a continuous scheduler, and of an engine with too few blocks."""

from dataclasses import replace
from pathlib import Path

import pytest

from shared.engine.config import EngineConfig
from shared.lessons import find_lesson
from shared.sampling.params import SamplingParams
from shared.tracing.recorder import Recorder
from shared.tracing.trace import Trace
from shared.tracing.workload import Arrival, run
from tests.unit.tracing.recording import Clock, arrivals, make_engine, recorded

pytest.register_assert_rewrite("tests.unit.tracing.written")


@pytest.fixture(scope="module")
def traces(folder: Path) -> list[Trace]:
    """The same requests under two schedulers; one prompt is text that would like to be markup."""
    both = []
    for title in ("static", "continuous"):
        recorder = Recorder(make_engine(folder, max_batch_size=2, batching_mode=title), clock=Clock())
        workload = arrivals(3, 1, 4, 2, steps=(0, 0, 1, 9))
        workload[1] = replace(workload[1], text="</script><!-- {{title}} & <b>x</b>")
        run(recorder, workload)
        both.append(recorder.trace(title, **{"batching mode": title, "seed": 0}))
    return both


@pytest.fixture(scope="module")
def crowded(folder: Path) -> Trace:
    """8 blocks of 4 tokens; a (10 tokens and 15 of answer) and b (10 and 10) cannot both come to their ends."""
    engine = find_lesson("06").engine(
        EngineConfig(model=str(folder), max_seq_len=32, seed=0, block_size=4, num_gpu_blocks=8, max_batch_size=2)
    )
    params = [SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True) for count in (15, 10)]
    return recorded(engine, [Arrival(0, "ab"[n], tuple(range(1, 11)), params[n]) for n in (0, 1)])
