"""The ceilings of a machine, and timing with inputs that the cache does not hold."""

import dataclasses
import json
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks.device.graph_timing import (
    ALIGNMENT,
    MOST_INPUT_SETS,
    Timing,
    num_input_sets,
    rotated_tensors,
    time_calls,
)
from benchmarks.hardware import Ceilings, hardware_report, measure_ceilings, table_rows
from benchmarks.machine import machine_name
from shared.cli import app

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def ceilings() -> Ceilings:
    return measure_ceilings("cpu")


def test_the_first_fields_are_those_that_other_benchmarks_read():
    assert [field.name for field in dataclasses.fields(Ceilings)][:5] == [
        "copy_bytes_per_second",
        "read_bytes_per_second",
        "matmul_flops_per_second",
        "launch_seconds_eager",
        "launch_seconds_graph",
    ]


def test_a_cpu_has_bandwidth_and_no_launches(ceilings):
    assert ceilings.copy_bytes_per_second > 1e8
    assert ceilings.read_bytes_per_second > 1e8
    assert ceilings.matmul_flops_per_second > 1e8
    assert ceilings.launch_seconds_eager is None
    assert ceilings.launch_seconds_graph is None
    assert ceilings.matmul_dtype == "float32"
    assert ceilings.bytes_per_second("copy") == ceilings.copy_bytes_per_second
    assert [name for name, _ in table_rows(ceilings)] == [
        "copy, read and written",
        "read only",
        "matrix product, float32",
    ]


def test_the_report_is_of_the_machine_alone(ceilings):
    report = hardware_report(ceilings, "cpu")
    assert report.file_stem == f"hardware-{machine_name('cpu')}"
    line = json.loads(report.line())
    assert line["model"] is None
    assert line["results"] == ceilings.results()
    assert line["results"]["read_gb_per_second"] == pytest.approx(ceilings.read_bytes_per_second / 1e9, rel=1e-3)


def test_the_command_ends_with_one_json_line_and_writes_what_it_printed(tmp_path):
    result = CliRunner().invoke(app, ["bench", "hardware", "--device", "cpu", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    line = json.loads(result.stdout.splitlines()[-1])
    content = json.loads((tmp_path / f"hardware-{machine_name('cpu')}.json").read_text())
    assert content["results"] == line["results"]
    assert "read only" in (tmp_path / f"hardware-{machine_name('cpu')}.md").read_text()


def test_a_gpu_that_is_not_there_is_refused():
    result = CliRunner().invoke(app, ["bench", "hardware", "--device", "cuda:99"])
    assert result.exit_code == 2
    assert "no such GPU" in result.stderr


@given(set_bytes=st.integers(1, 1 << 31), cache=st.integers(1, 1 << 28))
def test_the_sets_fill_the_cache_four_times_with_none_to_spare(set_bytes, cache):
    sets = num_input_sets(set_bytes, cache)
    assert 2 <= sets <= MOST_INPUT_SETS
    assert sets == MOST_INPUT_SETS or sets * set_bytes >= 4 * cache
    assert sets == 2 or (sets - 1) * set_bytes < 4 * cache


@given(shape=st.lists(st.integers(1, 40), min_size=1, max_size=3), sets=st.integers(2, 5))
def test_no_two_sets_share_a_cache_line(shape, sets):
    tensors = rotated_tensors(sets, tuple(shape), torch.bfloat16, CPU, lambda rows: rows.fill_(3))
    starts = [tensor.data_ptr() for tensor in tensors]
    for before, after in pairwise(starts):
        assert (after - before) % ALIGNMENT == 0
        assert after - before >= tensors[0].numel() * 2
    for tensor in tensors:
        assert tensor.shape == tuple(shape)
        assert tensor.is_contiguous()
        assert (tensor == 3).all()


def test_every_set_is_called_in_turn_and_equally_often():
    sets = [(torch.tensor(float(i)),) for i in range(5)]
    called: list[int] = []
    timing = time_calls(lambda x: called.append(int(x)), sets, trials=3, min_calls=12)
    assert called == [0] + 3 * 3 * [0, 1, 2, 3, 4]  # a warm-up; three trials of three rounds
    assert len(timing.trials) == 3
    assert timing.seconds > 0


def test_a_timing_is_its_median():
    timing = Timing((3.0, 1.0, 2.0))
    assert timing.seconds == 2.0
    assert timing.spread == 1.0


@pytest.mark.gpu
def test_a_gpu_reads_as_fast_as_it_copies_and_a_graph_launches_cheaper():
    measured = measure_ceilings("cuda")
    assert 0.7 < measured.read_bytes_per_second / measured.copy_bytes_per_second < 1.5
    assert measured.launch_seconds_eager is not None
    assert measured.launch_seconds_graph is not None
    assert 0 < measured.launch_seconds_graph < measured.launch_seconds_eager < 1e-3
