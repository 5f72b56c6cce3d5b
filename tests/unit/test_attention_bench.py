"""The attention benchmark: its shapes and bytes, its peers, and what it prints."""

import json
import re
import sys
from dataclasses import replace
from functools import reduce
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import benchmarks.bench_attention as bench
import benchmarks.kernels.case as case_module
import benchmarks.kernels.paged_cases as paged_cases
from benchmarks.hardware import Ceilings
from benchmarks.kernels.paged_cases import BLOCK_SIZE, DEMO_SHAPES, SHAPES, PagedSequences
from benchmarks.kernels.view import view
from benchmarks.report import Report
from benchmarks.view import markdown
from shared.cli import app
from shared.ops.attention import naive_attention

CPU = torch.device("cpu")
CEILINGS = Ceilings(4e9, 5e9, 1e11, None, None, "float32")


class Wrapper:
    """A stand-in for FlashInfer's, which computes the same from what it is told."""

    def __init__(self, workspace, layout, *, use_cuda_graph, use_tensor_cores, **buffers):
        assert (layout, use_cuda_graph, len(buffers)) == ("NHD", True, 3)

    def plan(self, indptr, indices, last, *sizes, sm_scale, q_data_type, kv_data_type):
        assert (sizes, sm_scale) == ((4, 2, 16, BLOCK_SIZE), 0.25)
        assert q_data_type == kv_data_type == torch.float32
        lengths = (BLOCK_SIZE * (indptr.diff() - 1) + last).tolist()
        self.sequences = PagedSequences(replace(DEMO_SHAPES[0], lengths=tuple(lengths)), CPU, None)
        self.sequences.tables = indices

    def run(self, q, memory):
        return self.sequences.attend(q, *memory)


@pytest.fixture(scope="module")
def demo() -> Report:
    """Every shape and peer at demo size, FlashInfer by its stand-in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(case_module, "measure_ceilings", lambda device: CEILINGS)
        patch.setattr(paged_cases, "FLASHINFER_WORKSPACE", 16)
        package = type("flashinfer", (), {"BatchDecodeWithPagedKVCacheWrapper": Wrapper})
        patch.setitem(sys.modules, "flashinfer", package)
        return bench.measure_attention(device="cpu")


def test_bytes_and_block_tables_are_those_counted_by_hand():
    shapes = {shape.name: shape for shape in SHAPES}
    assert shapes["32x4096"].num_bytes(2) == 2 * (2 * 32 * 4096 * 8 * 64 + 2 * 32 * 32 * 64)
    assert shapes["mixed"].num_bytes(2) == 2 * (2 * (16384 + 31 * 256) * 8 * 64 + 2 * 32 * 32 * 64)
    sequences = PagedSequences(replace(DEMO_SHAPES[2], lengths=(1, 0, 17, 48)), CPU, 0)
    assert sorted(sequences.tables.tolist()) == list(range(6)) != sequences.tables.tolist()
    assert [len(row) for row in sequences.rows] == [1, 0, 2, 3]
    for row, start in zip(sequences.rows, sequences.table_starts.tolist(), strict=True):
        assert sequences.tables[start : start + len(row)].tolist() == row


@pytest.mark.parametrize("shape", DEMO_SHAPES, ids=lambda shape: shape.name)
def test_the_op_is_the_formula_over_the_gathered_blocks(shape):
    sequences = PagedSequences(shape, CPU, 3)
    ((q, keys, values),) = paged_cases.paged_case(sequences, torch.float32).draw(1, CPU)
    for b, (row, length) in enumerate(zip(sequences.rows, shape.lengths, strict=True)):
        k, v = (memory[row].flatten(0, 1)[:length].transpose(0, 1) for memory in (keys, values))
        expected = naive_attention(q[b, None], k, v, scale=shape.scale)[0]
        torch.testing.assert_close(sequences.attend(q, keys, values)[b], expected)


def test_a_demo_report_is_complete_and_has_the_cited_keys(demo):
    root = Path(bench.__file__).parents[1]
    pages = "".join(page.read_text("utf-8") for page in (*root.glob("docs/*.md"), *root.glob("tutorial/*.md")))
    cited = set(re.findall(r"attention-[\w.-]+\.json#results\.shapes\.[\w-]+\.([\w.]+)", pages))
    assert len(cited) > 10
    for key in cited:
        reduce(dict.__getitem__, key.split("."), demo.results["shapes"]["1x256"])
    assert demo.flags["is_demo_size"]
    assert set(demo.results["planning_us"]) == {"1", "32", "256"}
    assert list(demo.results["shapes"]) == [shape.name for shape in DEMO_SHAPES]
    assert demo.results["shapes"]["1x256"]["variants"]["planned"]["settings"]["num_items"] == 2
    assert demo.results["shapes"]["1x256"]["variants"]["unsplit"]["settings"]["num_items"] == 1
    for row in demo.results["shapes"].values():
        assert row["peers"].keys() == set(paged_cases.PEERS)
        assert row["times_unsplit"] is None, "nothing is launched, so nothing is split"
        for variant in row["variants"].values():
            assert variant["error"] is None
            assert variant["share_of_ceiling"] == pytest.approx(row["floor_us"] / variant["time_us"], rel=1e-2)
        for peer in row["peers"].values():
            assert peer["error"] is None
            assert (peer["time_us"] is None) == (peer["missing"] is not None)
        assert row["peers"]["flashinfer"]["time_us"] > 0, row["peers"]["flashinfer"]


def test_a_report_shows_ours_over_each_peer_and_why_one_is_missing(demo):
    shapes, text = demo.results["shapes"], markdown(view(demo))
    for row in shapes.values():
        peer = row["peers"]["flashinfer"]
        assert peer["ours_over_peer"] == pytest.approx(
            row["variants"]["planned"]["time_us"] / peer["time_us"], rel=1e-2
        )
    assert "different lengths" in shapes["mixed"]["peers"]["sdpa_contiguous"]["missing"]
    assert shapes["4x64"]["peers"]["sdpa_contiguous"]["ours_over_peer"] > 0
    shown = [f"| {shape.name}: 4 over 2 heads of 16 | planned |" for shape in DEMO_SHAPES]
    shown += ["demo size", "no flex gathered: ConfigError: FlexAttention is compiled"]
    assert all(said in text for said in shown), text


@pytest.mark.parametrize("is_wrong", [False, True])
def test_the_command_writes_its_report_and_ends_with_1_if_ours_is_wrong(is_wrong, monkeypatch, tmp_path):
    monkeypatch.setattr(case_module, "measure_ceilings", lambda device: CEILINGS)
    if is_wrong:
        monkeypatch.setattr(paged_cases, "planned_decode", lambda q, *_, **__: torch.full_like(q, float("nan")))
    options = ["--device", "cpu", "--shape", "4x64", "--peer", "flashinfer", "--peer", "sdpa_gathered"]
    result = CliRunner().invoke(app, ["bench", "attention", *options, "--out", str(tmp_path)])
    assert result.exit_code == is_wrong, result.output
    line = json.loads(result.stdout.splitlines()[-1])
    assert line["flags"]["peers"] == ["flashinfer", "sdpa_gathered"]
    (written,) = tmp_path.glob("attention-*.json")
    assert json.loads(written.read_text())["results"] == line["results"]
    assert "no flashinfer: ConfigError: FlashInfer cannot be imported" in written.with_suffix(".md").read_text()
    assert ("wrong: 4x64 planned: differs" in result.stdout) == is_wrong
