"""The kernel benchmark: its cases, its bytes, what it refuses to time, and what it prints."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import benchmarks.bench_kernels as bench
import benchmarks.kernels.sweep as sweep
from benchmarks.device.graph_timing import cache_bytes, num_input_sets, time_calls
from benchmarks.device.precompile import recorded_launches
from benchmarks.hardware import Ceilings, device_of, measure_ceilings
from benchmarks.kernels.cases import KernelCase, ModelShapes, gated_case, norm_cases, projection_case
from benchmarks.kernels.check import check_case
from benchmarks.kernels.decode_cases import attention_case, kv_write_case, sampler_cases
from benchmarks.kernels.variants import applied, constant_variants, gemv_cuts, projection_variants
from benchmarks.report import Report
from benchmarks.views.kernels import markdown
from benchmarks.views.kernels_figure import chosen_rows, save_figure
from shared.checkpoints.shapes import SHAPES
from shared.cli import app
from shared.errors import ConfigError
from shared.kernels import gemv, kv_write
from shared.kernels.launch import LAUNCHES, next_power_of_two
from shared.kernels.tiling import tiling
from shared.loading.config_json import parse_config

CPU = torch.device("cpu")
BF16 = torch.bfloat16
CEILINGS = Ceilings(4e9, 5e9, 1e11, None, None, "float32", 1 << 28)


def shapes_of(name: str) -> ModelShapes:
    return ModelShapes(parse_config(SHAPES[name], name))


def cases_by_name(name: str, rows: int) -> dict[str, KernelCase]:
    shapes = shapes_of(name)
    cases = [projection_case(shape, rows, BF16) for shape in shapes.projections()]
    cases += norm_cases(shapes, rows, BF16)
    cases += [gated_case(shapes, rows, BF16), kv_write_case(shapes, rows, BF16, CPU)]
    cases += sampler_cases(shapes, rows, BF16, CPU)
    return {case.kernel: case for case in cases}


@pytest.fixture(scope="module")
def demo() -> Report:
    """All kernels of the family that has every kind, at demo size."""
    patch = pytest.MonkeyPatch()
    patch.setattr(bench, "measure_ceilings", lambda device: CEILINGS)
    with patch.context():
        (report,) = bench.measure_kernels(["gemma-3-1b"], device="cpu", trials=1)
    patch.undo()
    return report


LLAMA_BYTES = {  # bf16, one row: every number that goes in or out once
    "qkv": 2 * (3072 * 2048 + 2048 + 2048 + 3072),  # W, norm, x, result
    "o": 2 * (2048 * 2048 + 2048 + 2048 + 2048),  # W, x, residual, result
    "gate_up": 2 * (16384 * 2048 + 2048 + 2048 + 8192),
    "down": 2 * (2048 * 8192 + 8192 + 2048 + 2048),
    "head": 2 * (128256 * 2048 + 2048 + 2048 + 128256),
    "rms_norm": 2 * 3 * 2048,
    "add_rms_norm": 2 * 5 * 2048,
    "gated": 2 * 3 * 8192,
    "kv_write": 2 * 2 * (32 + 8 + 8) * 64 + 4 * 64 + 2 * 8,  # heads in and out, the angles, position and place
    "sampler_greedy": 2 * 128256 + 8,
    "sampler_drawn": 2 * 128256 + 8,
}


def test_bytes_of_llama_at_one_row_are_those_counted_by_hand():
    assert {name: case.num_bytes for name, case in cases_by_name("llama-3.2-1b", 1).items()} == LLAMA_BYTES


def test_more_rows_read_the_weights_once():
    cases = cases_by_name("llama-3.2-1b", 16)
    assert cases["o"].num_bytes == 2 * (2048 * 2048 + 16 * 3 * 2048)
    assert cases["rms_norm"].num_bytes == 2 * (2 * 16 * 2048 + 2048)


def test_attention_reads_every_key_and_value_once_and_a_window_only_its_own():
    llama = attention_case(shapes_of("llama-3.2-1b"), 4096, None, BF16, CPU)
    assert llama.num_bytes == 2 * (2 * 4096 * 8 * 64 + 2 * 32 * 64)
    windowed = attention_case(shapes_of("gemma-3-1b"), 4096, 512, BF16, CPU)
    assert windowed.num_bytes == 2 * (2 * 512 * 1 * 256 + 2 * 4 * 256)


def test_the_matrices_of_all_layers_are_the_weights_of_a_token():
    shapes = shapes_of("llama-3.2-1b")
    matrices = {shape.kernel: 2 * shape.weight_rows * shape.K for shape in shapes.projections()}
    head = matrices.pop("head")
    assert shapes.config.num_layers * sum(matrices.values()) + head == pytest.approx(2.472e9, rel=1e-3)


@pytest.mark.parametrize(
    ("model", "described"),
    [
        ("llama-3.2-1b", ["norm, 2048 → 16384, swiglu", "8192 → 2048, + residual", "2048", "32 + 2 × 8 heads of 64"]),
        (
            "qwen3-1.7b",
            ["norm, 2048 → 12288, swiglu", "6144 → 2048, + residual", "2048", "norm, 16 + 2 × 8 heads of 128"],
        ),
        ("gemma-3-1b", ["1152 → 13824, geglu", "6912 → 1152", "1152, + residual", "norm, 4 + 2 × 1 heads of 256"]),
    ],
)
def test_each_family_is_called_as_its_fused_block_calls(model, described):
    cases = cases_by_name(model, 1)
    assert [cases[name].shape for name in ("gate_up", "down", "rms_norm", "kv_write")] == described


@pytest.mark.parametrize("name", bench.DEMO_SHAPES.values())
def test_ours_and_eager_give_the_same_from_the_same_inputs(name):
    for case in bench.cases_of(name, CPU, bench.KERNELS, (1, 3)):
        error, _, launches = check_case(case, case.draw(2, CPU)[1])
        assert error is None, f"{case.kernel} {case.size}: {error}"
        assert launches == 0


def test_the_rotated_inputs_of_a_case_are_four_times_the_cache():
    for case in bench.cases_of("tiny-qwen3", CPU, bench.KERNELS, (1,)):
        sets = case.draw(num_input_sets(case.set_bytes, cache_bytes(CPU)), CPU)
        tensors = {tensor.data_ptr(): tensor for inputs in sets for tensor in inputs if tensor is not None}
        assert sum(tensor.nbytes for tensor in tensors.values()) >= 4 * cache_bytes(CPU)


def test_a_demo_report_is_complete(demo):
    assert demo.flags["is_demo_size"]
    assert demo.model["name"] == "tiny-gemma3"
    found = demo.results["kernels"]
    assert set(found) == set(bench.KERNELS)
    for kernel, sizes in found.items():
        expected = map(str, bench.DEMO_CONTEXTS if kernel.startswith("decode_attention") else bench.DEMO_ROWS)
        assert list(sizes) == list(expected)
        for row in sizes.values():
            assert row["error"] is None
            assert row["time_us"] > 0
            assert row["eager_us"] > 0
            assert row["compiled_us"] is None
            assert row["compiled_missing"] == bench.NOT_AT_DEMO_SIZE
            limit = demo.results["ceilings"][f"{row['ceiling']}_gb_per_second"]
            assert row["floor_us"] == pytest.approx(row["bytes"] / limit / 1e3, rel=1e-3)
            assert row["predicted_us"] == row["floor_us"]  # nothing is launched
            assert row["share_of_ceiling"] == pytest.approx(row["gb_per_second"] / limit, rel=1e-2)
    json.loads(demo.line())


def test_markdown_and_picture_show_every_kernel(demo, tmp_path):
    table = markdown(demo)
    assert table.count("\n| ") == 1 + sum(map(len, demo.results["kernels"].values()))
    assert "demo size" in table
    assert len(chosen_rows(demo)) == len(bench.KERNELS) + 2  # attention has two contexts, with and without a window
    save_figure(demo, tmp_path / "kernels.png")
    assert (tmp_path / "kernels.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("wrong", [lambda y: y + 0.5, lambda y: y * float("nan")], ids=["off", "nan"])
def test_a_wrong_kernel_is_not_timed(wrong):
    case = projection_case(shapes_of("tiny-llama").projections()[0], 1, torch.float32)
    row = bench.measure_case(replace(case, ours=lambda *inputs: wrong(case.ours(*inputs))), CPU, CEILINGS, 1, False)
    assert "differs from the op in fp32" in row["error"]
    assert row["time_us"] is row["gb_per_second"] is row["share_of_ceiling"] is None
    assert row["eager_us"] > 0
    json.dumps(row, allow_nan=False)


def test_a_sampler_that_chooses_another_token_is_wrong():
    case = sampler_cases(shapes_of("tiny-llama"), 2, torch.float32, CPU)[0]
    error, _, _ = check_case(replace(case, ours=lambda logits: case.ours(logits) + 1), case.draw(1, CPU)[0])
    assert error is not None
    assert error.startswith("chose [")


def test_a_peer_that_cannot_is_a_finding():
    def broken(*inputs):
        raise RuntimeError("cannot\nbe captured")

    case = projection_case(shapes_of("tiny-llama").projections()[1], 1, torch.float32)
    assert bench.peer_time(lambda: broken, case.draw(2, CPU), 1) == (None, "RuntimeError: cannot")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--model", "gpt-2"], "must be one of llama-3.2-1b, qwen3-1.7b, gemma-3-1b"),
        (["--kernel", "softmax"], "must be one of qkv, o"),
        (["--rows", "17"], "from 1 to 16 rows"),
        (["--trials", "0"], "at least 1"),
        (["--seed", "-1"], "at least 0"),
        (["--sweep"], "this is a CPU"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_any_work(options, told, monkeypatch):
    monkeypatch.setattr(bench, "measure_ceilings", lambda device: pytest.fail("measured"))
    result = CliRunner().invoke(app, ["bench", "kernels", "--device", "cpu", *options])
    assert result.exit_code == 2
    assert told in " ".join(result.stderr.split())


def test_the_command_ends_with_one_json_line_and_writes_a_report_a_model(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "measure_ceilings", lambda device: CEILINGS)
    options = ["--device", "cpu", "-m", "llama-3.2-1b", "-m", "qwen3-1.7b", "-k", "o", "--rows", "2", "--trials", "1"]
    result = CliRunner().invoke(app, ["bench", "kernels", *options, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    line = json.loads(result.stdout.splitlines()[-1])
    assert line["benchmark"] == "kernels"
    assert list(line["models"]) == ["tiny-llama", "tiny-qwen3"]
    assert line["models"]["tiny-llama"]["kernels"]["o"]["2"]["time_us"] > 0
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".json", ".md", ".md", ".png", ".png"]
    assert "demo size" in result.stdout


def test_the_command_ends_with_1_if_a_kernel_is_wrong(monkeypatch):
    monkeypatch.setattr(bench, "measure_ceilings", lambda device: CEILINGS)
    right = gemv.linear
    monkeypatch.setattr(gemv, "linear", lambda *args: right(*args) + 1)
    options = ["--device", "cpu", "-m", "llama-3.2-1b", "-k", "down", "--rows", "1", "--trials", "1"]
    result = CliRunner().invoke(app, ["bench", "kernels", *options])
    assert result.exit_code == 1
    assert "wrong: down 1: differs" in result.stdout
    json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("model", bench.MODELS)
def test_a_sweep_tries_the_tables_cut_first_and_only_cuts_that_keep_the_rules(model, rows):
    for shape in shapes_of(model).projections():
        table = tiling(rows, shape.N, shape.K, shape.activation is not None, 2)
        variants = projection_variants(shape, rows, BF16)
        assert variants[0].settings == vars(table)
        assert len(variants) > 5
        for cut in gemv_cuts(shape, rows, 2):
            if not cut.dot:
                assert rows == 1 or cut.block_k >= shape.K
                assert cut.block_k <= next_power_of_two(shape.K)
            else:
                matrices = 2 if shape.activation else 1
                assert cut.num_stages * (matrices * cut.block_n + 16) * cut.block_k * 2 <= 99 * 1024


def test_a_variants_constants_hold_only_inside():
    before = kv_write.NUM_WARPS
    variants = constant_variants(kv_write, lambda: pytest.fail("made"), NUM_WARPS=(7, before))
    assert [variant.settings for variant in variants] == [{"num_warps": before}, {"num_warps": 7}]

    def broken() -> None:
        with applied(variants[1]):
            assert kv_write.NUM_WARPS == 7
            raise RuntimeError("while timing")

    with pytest.raises(RuntimeError, match="while timing"):
        broken()
    assert before == kv_write.NUM_WARPS


def test_recorded_launches_are_compiled_once_and_not_launched(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(gemv, "launches", lambda tensor: True)
    launched, launch = LAUNCHES.total(), gemv.launch
    x, weight = torch.ones(1, 32), torch.ones(48, 32)
    with recorded_launches() as compilations:
        gemv.linear(x, weight)
        gemv.linear(x, weight[:16])  # a multiple of 16 as well: the same kernel
        gemv.linear(x, weight[:15])
    assert len(compilations) == 2
    assert LAUNCHES.total() == launched
    assert gemv.launch is launch


def test_a_sweep_of_what_has_no_constants_is_refused(monkeypatch):
    monkeypatch.setattr(sweep, "measure_ceilings", lambda device: pytest.fail("measured"))
    with pytest.raises(ConfigError, match="no constants to sweep"):
        list(sweep.sweep_kernels(["qwen3-1.7b"], device="cuda", kernels=["rms_norm"]))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["gate_up", "decode_attention", "sampler_drawn"])
def test_a_kernel_in_a_graph_stays_below_its_ceiling(kernel):
    device = device_of("cuda")
    ceilings = measure_ceilings("cuda")
    case = bench.cases_of("llama-3.2-1b", device, (kernel,), (1,))[0]
    row = bench.measure_case(case, device, ceilings, 5, False)
    assert row["error"] is None
    assert row["time_us"] > 0
    assert 0 < row["share_of_ceiling"] <= 1.05
    assert row["launches"] >= 1


@pytest.mark.gpu
def test_a_graph_of_rotated_inputs_is_slower_than_the_same_from_the_cache():
    device = device_of("cuda")
    x = torch.randn(cache_bytes(device) // 16, device=device)  # of fp32: a quarter of the cache
    many = [(x.clone(),) for _ in range(num_input_sets(x.nbytes, cache_bytes(x.device)))]
    assert time_calls(torch.sum, many).seconds > time_calls(torch.sum, [(x,)]).seconds
