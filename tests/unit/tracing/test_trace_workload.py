"""The workload of a trace: arrivals and mixed requests."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError
from shared.sampling.params import SamplingParams
from shared.tracing.recorder import Recorder
from shared.tracing.workload import MAX_STEPS, arrival_steps, mixed_requests, run
from tests.unit.tracing.recording import arrivals, make_engine


@given(number=st.integers(1, 60), rate=st.floats(0.2, 50), seed=st.integers(0, 2**64 - 1))
def test_poisson_arrivals_never_go_back_and_follow_the_seed(number: int, rate: float, seed: int) -> None:
    steps = arrival_steps(number, rate=rate, seed=seed)
    assert steps[0] == 0
    assert len(steps) == number
    assert steps == sorted(steps) == arrival_steps(number, rate=rate, seed=seed)


def test_poisson_arrivals_come_at_their_rate() -> None:
    """The moment of the last of 2001 is a sum of 2000 exponential gaps: at rate 2, 1000 steps, give or take 22."""
    ends = [arrival_steps(2001, rate=2.0, seed=seed)[-1] for seed in range(20)]
    assert sum(ends) / 20 == pytest.approx(1000, abs=5 * 22 / 20**0.5)
    assert len(set(ends)) > 10


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"rate": -2.0}, "rate is -2.0"),
        ({"rate": float("nan")}, "rate is nan"),
        ({"rate": float("inf")}, "rate is inf"),
        ({"every": 10**9}, "before step 3000000000"),
    ],
)
def test_arrivals_that_make_no_sense(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        arrival_steps(4, **settings)


@given(
    number=st.integers(1, 40),
    max_seq_len=st.integers(2, 200),
    max_new_tokens=st.integers(1, 100),
    seed=st.integers(0, 2**64 - 1),
)
def test_the_mixed_workload_stays_in_its_bounds(number: int, max_seq_len: int, max_new_tokens: int, seed: int) -> None:
    sizes = {"vocab_size": 99, "max_seq_len": max_seq_len, "max_new_tokens": max_new_tokens}
    requests = mixed_requests(number, **sizes, seed=seed)
    assert requests == mixed_requests(number, **sizes, seed=seed)
    for ids, params in requests:
        assert min(8, max_seq_len // 2) <= len(ids) <= min(64, max_seq_len // 2)
        assert set(ids) <= set(range(99))
        assert max(1, max_new_tokens // 8) <= params.max_new_tokens <= max_new_tokens
        assert (params.temperature, params.ignore_eos) == (0.0, True)


def test_answers_longer_than_a_timeline_are_refused_before_any_step(folder: Path) -> None:
    recorder = Recorder(make_engine(folder, max_batch_size=2))
    workload = arrivals(5)
    workload[0] = replace(workload[0], params=SamplingParams(max_new_tokens=2 * MAX_STEPS + 2))
    with pytest.raises(ConfigError, match=f"at least {MAX_STEPS + 1} steps with 2 at a time"):
        run(recorder, workload)
    assert recorder.steps == []
