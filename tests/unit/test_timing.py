"""Timing: of one answer, on engines whose speed is known, and of calls whose inputs the cache does not hold."""

import json
import time
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks.device import graph_timing
from benchmarks.device.graph_timing import cache_bytes, num_input_sets, rotated_tensors, time_calls
from benchmarks.hardware import measure_ceilings
from benchmarks.machine import machine_name
from benchmarks.timing import Run, Steps, SyntheticPrompts, answer_with, rotated, run, timed, torch_threads
from shared.cli import app


class SleepingEngine:
    """Takes ``first`` seconds for the first token and ``later`` for each one after it."""

    def __init__(self, first: float, later: float) -> None:
        self.first, self.later, self.computed, self.was_closed = first, later, 100, False
        self.stats = lambda: {"tokens computed": self.computed}

    def generate(self, prompt_ids, params):
        assert (params.is_greedy, params.ignore_eos) == (True, True)
        try:
            for index in range(params.max_new_tokens):
                time.sleep(self.later if index else self.first)
                self.computed += len(prompt_ids) if index == 0 else 1
                yield SimpleNamespace(token_id=index)
        finally:
            self.was_closed = True


def test_the_first_token_is_not_part_of_the_decode_speed():
    found = run(SleepingEngine(first=0.2, later=0.01), [1, 2, 3], 6)
    assert (found.token_ids, found.tokens_computed) == ([0, 1, 2, 3, 4, 5], 3 + 5)
    assert found.times[0] >= 0.2
    assert 1 / 0.2 < found.decode_tokens_per_second <= 100
    by_hand = Run(token_ids=[7, 8, 9], times=[1.0, 1.5, 3.0], tokens_computed=5)
    assert (by_hand.decode_tokens_per_second, by_hand.intervals) == (1.0, [0.5, 1.5])


@pytest.mark.parametrize(("seconds", "most"), [(0.0, 2), (0.12, 3)])
def test_a_slow_engine_is_cut_off_but_gives_the_least_number(seconds, most):
    engine = SleepingEngine(first=0.0, later=0.05)
    found = timed(partial(answer_with, engine), [1], 1000, min_decoded=2, max_seconds=seconds)
    assert 2 <= len(found.intervals) <= most
    assert engine.was_closed


def test_turns_rotate_and_prompts_repeat_with_the_seed_alone():
    assert [rotated("abc", turn) for turn in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]
    first, second, third = SyntheticPrompts(50, 3), SyntheticPrompts(50, 3), SyntheticPrompts(50, 4)
    drawn = [first.draw(20), first.draw(20)]
    assert drawn == [second.draw(20), second.draw(20)]
    assert drawn[1] != drawn[0] != third.draw(20)
    assert all(type(token_id) is int and 0 <= token_id < 50 for token_id in drawn[0])


def test_threads_are_given_back_even_after_an_error_and_steps_count_up():
    before = torch.get_num_threads()
    with pytest.raises(KeyError, match=str(before + 1)), torch_threads(before + 1):
        raise KeyError(torch.get_num_threads())
    assert torch.get_num_threads() == before
    seen: list[tuple[str, int, int]] = []
    steps = Steps(lambda *step: seen.append(step), 2)
    for what in ("load", "measure"):
        with steps.step(what):
            pass
    assert seen == [("load", 0, 2), ("load", 1, 2), ("measure", 1, 2), ("measure", 2, 2)]


def test_the_command_reports_bandwidth_and_on_a_cpu_no_launches(tmp_path):
    result = CliRunner().invoke(app, ["bench", "hardware", "--device", "cpu", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])["results"]
    assert min(found["copy_gb_per_second"], found["read_gb_per_second"], 1e3 * found["matmul_tflop_per_second"]) > 0.1
    assert found["launch_eager_us"] is found["launch_graph_us"] is None
    written = tmp_path / f"hardware-{machine_name('cpu')}.json"
    assert json.loads(written.read_text())["results"] == found


@given(set_bytes=st.integers(1, 1 << 31), cache=st.integers(1, 1 << 28))
def test_the_sets_fill_the_cache_four_times_with_none_to_spare(set_bytes, cache):
    sets = num_input_sets(set_bytes, cache)
    assert 2 <= sets <= graph_timing.MOST_INPUT_SETS
    assert sets == graph_timing.MOST_INPUT_SETS or sets * set_bytes >= 4 * cache
    assert sets == 2 or (sets - 1) * set_bytes < 4 * cache


@given(shape=st.lists(st.integers(1, 40), min_size=1, max_size=3), sets=st.integers(2, 5))
def test_no_two_sets_share_a_cache_line(shape, sets):
    tensors = rotated_tensors(sets, tuple(shape), torch.bfloat16, torch.device("cpu"), lambda rows: rows.fill_(3))
    for before, after in pairwise(tensor.data_ptr() for tensor in tensors):
        assert (after - before) % graph_timing.ALIGNMENT == 0
        assert after - before >= tensors[0].numel() * 2
    assert all(tensor.shape == tuple(shape) and (tensor == 3).all() for tensor in tensors)


def test_every_set_is_called_in_turn_and_equally_often():
    called: list[int] = []
    seconds = time_calls(lambda x: called.append(int(x)), [(torch.tensor(float(i)),) for i in range(5)])
    assert called == 4 * [0, 1, 2, 3, 4]  # a warm-up and three trials
    assert seconds > 0


@pytest.mark.gpu
def test_a_gpu_reads_as_fast_as_it_copies_a_graph_launches_cheaper_and_the_cache_is_faster():
    measured = measure_ceilings("cuda")
    assert 0.7 < measured.read_bytes_per_second / measured.copy_bytes_per_second < 1.5
    assert 0 < (measured.launch_seconds_graph or 0) < (measured.launch_seconds_eager or 0) < 1e-3
    cache = cache_bytes(torch.device("cuda"))
    x = torch.randn(cache // 16, device="cuda")  # of fp32: a quarter of the cache
    many = [(x.clone(),) for _ in range(num_input_sets(x.nbytes, cache))]
    assert time_calls(torch.sum, many) > time_calls(torch.sum, [(x,)])
