"""The attention benchmark: its shapes and bytes, what it refuses to time, its peers, and what it prints."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import benchmarks.attention.peers as peers_module
import benchmarks.attention.sweep as sweep
import benchmarks.bench_attention as bench
from benchmarks.attention.cases import (
    BLOCK_SIZE,
    DEMO_SHAPES,
    SHAPES,
    PagedSequences,
    attention_case,
    planned_call,
    variant_calls,
)
from benchmarks.attention.peers import PEERS, peer_call
from benchmarks.device.precompile import LAUNCHING_MODULES
from benchmarks.hardware import Ceilings
from benchmarks.kernels.check import check_case
from benchmarks.report import Report
from benchmarks.views.attention import errors, markdown, print_attention
from shared.cli.bench import app
from shared.errors import CapacityError, ConfigError
from shared.kernels import planned_attention
from shared.kernels.planned_tiling import decode_tiling
from shared.ops.attention import naive_attention

CPU = torch.device("cpu")
CEILINGS = Ceilings(4e9, 5e9, 1e11, None, None, "float32", 1 << 28)
BY_NAME = {shape.name: shape for shape in SHAPES}


@pytest.fixture(scope="module")
def demo() -> Report:
    """Every shape and peer at demo size."""
    patch = pytest.MonkeyPatch()
    patch.setattr(bench, "measure_ceilings", lambda device: CEILINGS)
    with patch.context():
        report = bench.measure_attention(device="cpu", trials=1)
    patch.undo()
    return report


def test_the_bytes_are_those_counted_by_hand():
    heads_of_64 = BY_NAME["32x4096"]
    assert heads_of_64.num_bytes(2) == 2 * (2 * 32 * 4096 * 8 * 64 + 2 * 32 * 32 * 64)
    assert BY_NAME["32x4096-d128"].num_bytes(2) == 2 * heads_of_64.num_bytes(2)
    assert sum(BY_NAME["mixed"].lengths) == 16384 + 31 * 256
    assert BY_NAME["1x16384"].num_blocks == 1024


def test_every_block_of_the_pool_belongs_to_one_sequence():
    shape = replace(DEMO_SHAPES[2], lengths=(1, 0, 17, 48))
    for seed in (0, None):
        sequences = PagedSequences(shape, CPU, seed)
        assert (
            sorted(block for row in sequences.rows for block in row) == list(range(shape.num_blocks)) == list(range(6))
        )
        assert [len(row) for row in sequences.rows] == [1, 0, 2, 3]
        for row, start in zip(sequences.rows, sequences.table_starts.tolist(), strict=True):
            assert sequences.tables[start : start + len(row)].tolist() == row
    assert PagedSequences(shape, CPU, None).tables.tolist() == list(range(6))


@pytest.mark.parametrize("shape", DEMO_SHAPES, ids=lambda shape: shape.name)
def test_every_variant_gives_what_the_formula_does(shape):
    sequences = PagedSequences(shape, CPU, 3)
    for name, (call, settings) in variant_calls(shape, sequences, torch.float32).items():
        case = attention_case(name, shape, sequences, call, torch.float32)
        ((q, keys, values),) = case.draw(1, CPU)
        error, _, launches = check_case(case, (q, keys, values))
        assert (error, launches) == (None, 0)
        assert settings
    for b, (row, length) in enumerate(zip(sequences.rows, shape.lengths, strict=True)):
        k, v = (memory[row].flatten(0, 1)[:length].transpose(0, 1) for memory in (keys, values))
        expected = naive_attention(q[b, None], k, v, scale=shape.scale)[0]
        torch.testing.assert_close(case.eager(q, keys, values)[b], expected)


def test_unsplit_takes_a_sequence_whole():
    shape = DEMO_SHAPES[1]
    tiling = decode_tiling(1, 2, 16, 4)
    sequences = PagedSequences(shape, CPU, 0)
    assert planned_call(shape, sequences, tiling)[1]["num_items"] == 2
    assert planned_call(shape, sequences, tiling, is_split=False)[1]["num_items"] == 1


def test_settings_have_the_names_of_committed_reports():
    path = Path(__file__).parents[2] / "benchmarks" / "reports" / "attention-nvidia-h100-80gb-hbm3.json"
    committed = json.loads(path.read_text())["results"]["shapes"]["32x4096"]["variants"]["planned"]["settings"]
    shape, tiling = DEMO_SHAPES[0], decode_tiling(1, 2, 16, 4)
    assert planned_call(shape, PagedSequences(shape, CPU, 0), tiling)[1].keys() == committed.keys()


def test_a_demo_report_is_complete(demo):
    assert demo.flags["is_demo_size"]
    assert set(demo.results["planning_us"]) == {"1", "32", "256"}
    assert list(demo.results["shapes"]) == [shape.name for shape in DEMO_SHAPES]
    for row in demo.results["shapes"].values():
        assert set(row["variants"]) == {"planned", "merge_launch", "unsplit", "paged"}
        assert set(row["peers"]) == set(PEERS)
        for variant in row["variants"].values():
            assert variant["error"] is None
            assert variant["time_us"] > 0
            assert variant["share_of_ceiling"] == pytest.approx(row["floor_us"] / variant["time_us"], rel=1e-2)
        assert row["peers"]["sdpa_gathered"]["time_us"] > 0
        assert row["times_unsplit"] is None, "nothing is launched, so nothing is split"
        assert row["is_reached"] is None
    json.loads(demo.line())


def test_peers_that_cannot_be_had_say_why(demo):
    shapes = demo.results["shapes"]
    assert "different lengths" in shapes["mixed"]["peers"]["sdpa_contiguous"]["missing"]
    assert shapes["4x64"]["peers"]["sdpa_contiguous"]["missing"] is None
    text = markdown(demo)
    assert "demo size" in text
    assert "no flex gathered: ConfigError: FlexAttention is compiled" in text
    for shape in DEMO_SHAPES:
        assert f"| {shape.name} |" in text


def test_a_peer_that_is_wrong_has_no_time(monkeypatch):
    monkeypatch.setattr(bench, "peer_call", lambda *args: lambda q, keys, values: q)
    row = bench.measure_shape(DEMO_SHAPES[1], CPU, torch.float32, CEILINGS, ["sdpa_gathered"], 1, 0)
    peer = row["peers"]["sdpa_gathered"]
    assert peer["time_us"] is None
    assert "differs from the op" in peer["error"]


def test_ours_when_wrong_has_no_time_and_ends_with_1(monkeypatch):
    monkeypatch.setattr(bench, "measure_ceilings", lambda device: CEILINGS)
    import benchmarks.attention.cases as cases

    monkeypatch.setattr(cases, "planned_decode", lambda q, *args, **kwargs: torch.full_like(q, float("nan")))
    result = CliRunner().invoke(app, ["attention", "--device", "cpu", "--shape", "1x256", "--no-peers"])
    assert result.exit_code == 1
    assert "wrong: 1x256 planned: differs" in result.output
    assert json.loads(result.stdout.splitlines()[-1])["results"]["shapes"]["1x256"]["variants"]["planned"]["error"]


@pytest.mark.parametrize(
    ("asked", "measured", "reached"),
    [
        ({"target_gb_per_second": 2400}, {"time_us": 100.0, "gb_per_second": 2400.0}, True),
        ({"target_gb_per_second": 2400}, {"time_us": 100.0, "gb_per_second": 2399.0}, False),
        ({"target_us": 8}, {"time_us": 8.1, "gb_per_second": 1.0}, False),
        ({"target_times_unsplit": 3}, {"time_us": 8.1, "gb_per_second": 1.0}, True),
        ({}, {"time_us": 8.1, "gb_per_second": 1.0}, None),
        ({}, {"time_us": None}, False),
    ],
)
def test_whether_a_target_is_reached(asked, measured, reached):
    targets = dict.fromkeys(("target_gb_per_second", "target_us", "target_times_unsplit"))
    row = targets | {"times_unsplit": 3.5, "variants": {"planned": measured}} | asked
    assert bench.is_reached(row) is reached


def test_a_report_with_targets_says_which_are_reached(demo, capsys):
    from rich.console import Console

    shapes = json.loads(json.dumps(demo.results["shapes"]))
    shapes["4x64"] |= {"target_us": 1e9, "is_reached": True}
    shapes["1x256"] |= {"target_gb_per_second": 1e9, "is_reached": False}
    shapes["mixed"] |= {"target_times_unsplit": 3, "times_unsplit": 4.5, "is_reached": True}
    report = replace(demo, results=demo.results | {"shapes": shapes})
    text = markdown(report)
    assert "µs: reached" in text
    assert "GB/s: missed" in text
    assert "≥ 3× unsplit, 4.5×: reached" in text
    assert errors(report) == []
    print_attention(report, Console(width=200))
    assert "unsplit, 4.5×: reached" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shapes": ["32x4096"]}, "--shape is '32x4096'; it must be one of 4x64"),
        ({"peers": ["vllm"]}, "--peer is 'vllm'; it must be one of sdpa_gathered"),
        ({"trials": 0}, "--trials is 0"),
        ({"seed": -1}, "--seed is -1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        bench.measure_attention(device="cpu", **options)


def test_a_gpu_that_is_too_small_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 8 << 30))
    monkeypatch.setattr(bench, "cache_bytes", lambda device: 50 << 20)
    with pytest.raises(CapacityError, match=r"32x4096 .* takes 2\.5 GiB to measure and 1\.0 GiB"):
        bench.check_memory([BY_NAME["32x4096"]], torch.device("cuda"), torch.bfloat16)


def test_the_command_writes_its_report(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "measure_ceilings", lambda device: CEILINGS)
    options = ["--device", "cpu", "--shape", "4x64", "--peer", "sdpa_gathered", "--trials", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["attention", *options])
    assert result.exit_code == 0, result.output
    line = json.loads(result.stdout.splitlines()[-1])
    assert line["flags"]["peers"] == ["sdpa_gathered"]
    (written,) = tmp_path.glob("attention-*.json")
    assert json.loads(written.read_text())["results"] == line["results"]
    assert written.with_suffix(".md").exists()


def test_flashinfer_is_told_what_we_are_told(monkeypatch):
    """A stand-in for the package records how it is called."""
    calls = {}

    class Wrapper:
        def __init__(self, workspace, layout, **buffers):
            calls["layout"], calls["buffers"] = layout, buffers

        def plan(self, indptr, indices, last, *sizes, **options):
            calls["plan"] = indptr.tolist(), indices.tolist(), last.tolist(), sizes, options

        def run(self, q, memory):
            return q

    package = type("flashinfer", (), {"BatchDecodeWithPagedKVCacheWrapper": Wrapper})
    monkeypatch.setitem(__import__("sys").modules, "flashinfer", package)
    monkeypatch.setattr(peers_module, "FLASHINFER_WORKSPACE", 16)
    shape = replace(DEMO_SHAPES[0], lengths=(16, 17, 47))
    sequences = PagedSequences(shape, CPU, 0)
    call = peer_call("flashinfer_tensor_cores", shape, sequences, torch.float32)
    q = torch.ones(3, 4, 16)
    assert call(q, q, q) is q
    assert calls["layout"] == "NHD"
    assert calls["buffers"]["use_tensor_cores"]
    assert calls["buffers"]["use_cuda_graph"]
    indptr, indices, last, sizes, options = calls["plan"]
    assert (indptr, indices, last) == ([0, 1, 3, 6], sequences.tables.tolist(), [16, 1, 15])
    assert sizes == (4, 2, 16, BLOCK_SIZE)
    assert options == {"sm_scale": 0.25, "q_data_type": torch.float32, "kv_data_type": torch.float32}


# The sweep.


def test_a_sweep_needs_a_gpu():
    with pytest.raises(ConfigError, match="this is a CPU"):
        list(sweep.sweep_attention(device="cpu"))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_tilings_of_a_sweep_begin_with_the_table_and_fit(shape):
    tilings = sweep.tilings_of(shape, 2)
    assert tilings[0] == decode_tiling(shape.num_sequences, shape.num_kv_heads, shape.head_dim, 2)
    assert len(tilings) == len(set(tilings))
    for tiling in tilings[1:]:
        tile_bytes = 4 * tiling.tile * shape.head_dim
        assert tiling.programs_per_multiprocessor * (tiling.num_stages - 1) * tile_bytes <= sweep.SHARED_MEMORY
    assert len(tilings) < 200


def test_every_kernel_of_a_sweep_is_compiled_once(monkeypatch):
    """With the launch recorded, and nothing launched."""
    monkeypatch.setattr(planned_attention, "launches", lambda tensor: True)
    shape = SHAPES[0]
    tilings = sweep.tilings_of(shape, 2)[:6]
    compilations = sweep.compilations_of({shape: tilings}, CPU, torch.bfloat16)
    kernels = {(one.tile, one.num_warps, one.num_stages) for one in tilings}
    assert len([one for one in compilations if one.func.__self__ is planned_attention.planned_decode_kernel]) == (
        2 * len(kernels)
    )
    assert planned_attention in LAUNCHING_MODULES


@pytest.mark.gpu
def test_a_sweep_of_a_short_sequence_finds_something(monkeypatch):
    monkeypatch.setattr(sweep, "tilings_of", lambda shape, itemsize: [decode_tiling(1, 8, 64, 2)])
    (report,) = sweep.sweep_attention(["1x1024"], device="cuda")
    found = report.results["shapes"]["1x1024"]
    assert found["failures"] == []
    assert found["table"]["time_us"] > 0
    assert len(found["best"]) == 2
