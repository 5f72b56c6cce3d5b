"""The ceilings of a machine, and timing with inputs that the cache does not hold."""

import json
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks.device import graph_timing
from benchmarks.device.graph_timing import cache_bytes, num_input_sets, rotated_tensors, time_calls
from benchmarks.hardware import measure_ceilings
from benchmarks.machine import machine_name
from shared.cli import app


def test_the_command_reports_bandwidth_and_on_a_cpu_no_launches(tmp_path):
    result = CliRunner().invoke(app, ["bench", "hardware", "--device", "cpu", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])["results"]
    assert min(found["copy_gb_per_second"], found["read_gb_per_second"], 1e3 * found["matmul_tflop_per_second"]) > 0.1
    assert found["launch_eager_us"] is found["launch_graph_us"] is None
    written = tmp_path / f"hardware-{machine_name('cpu')}.json"
    assert json.loads(written.read_text())["results"] == found
    assert "| read only, GB/s |" in written.with_suffix(".md").read_text()
    assert "matrix product, float32" in result.stdout


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
    for tensor in tensors:
        assert tensor.shape == tuple(shape)
        assert tensor.is_contiguous()
        assert (tensor == 3).all()


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
