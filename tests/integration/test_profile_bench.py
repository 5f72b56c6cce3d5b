"""The profile of a decode step on tiny models: counts that the model's shape dictates, and names that can be read."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.generation.step_trace import Activity, StepTrace
from benchmarks.kernels.names import LONGEST, short_name
from benchmarks.profile_generation import measure_profile, merged, results
from benchmarks.report import Report
from benchmarks.timing import Run
from benchmarks.views.profile import markdown, print_profile
from shared.cli import app
from shared.errors import ConfigError, RequestError
from shared.lessons import find_lesson, newest_lesson
from shared.loading.config_json import read_config


@pytest.fixture(scope="module")
def folder(tiny_checkpoints: dict[str, Path]) -> Path:
    return tiny_checkpoints["qwen3"]


@pytest.fixture(scope="module")
def report(folder: Path) -> Report:
    return measure_profile(str(folder), phase="03", prompt_tokens=9, steps=2, threads=1)


def test_counts_are_those_of_one_token(report: Report, folder: Path) -> None:
    layers = read_config(folder).num_layers
    rows = {row["name"]: row for row in report.results["03"]["rows"]}
    assert rows["aten::linear"]["count_per_token"] == 7 * layers + 1
    assert rows["aten::scaled_dot_product_attention"]["count_per_token"] == layers
    assert rows["aten::embedding"]["count_per_token"] == 1


def test_rows_are_in_order_and_shares_sum_to_one_on_a_cpu(report: Report) -> None:
    result = report.results["03"]
    spent = [row["us_per_token"] for row in result["rows"]]
    assert spent == sorted(spent, reverse=True)
    assert sum(row["share"] for row in result["rows"]) == pytest.approx(1, abs=0.01)
    for row in result["rows"]:
        assert row["us_per_token"] == pytest.approx(row["us_each"] * row["count_per_token"], rel=1e-2)
    assert 0 < result["host_us_per_token"] <= sum(spent) * 1.01
    assert result["us_per_token"] > 0
    assert result["kernel_us_per_token"] is result["idle_us_per_token"] is None


def gpu_result(kernel_us: float = 250.0) -> dict[str, Any]:
    """Four steps of one millisecond each, of which two kernels run for a quarter."""
    plain = Run([1] * 8, [0.5 + 0.001 * i for i in range(8)], 10)
    kernels = (Activity("gemv", 40, 4 * kernel_us * 0.8), Activity("norm", 8, 4 * kernel_us * 0.2))
    copies = (Activity("Memcpy HtoD (Pageable -> Device)", 4, 8.0),)
    operations = (Activity("cudaStreamSynchronize", 4, 3000.0), Activity("aten::mm", 40, 800.0))
    trace = StepTrace(4, 0.008, kernels, copies, operations, host_launches=48, own_launches=40)
    return results(find_lesson("03"), plain, trace, is_gpu=True)


def test_on_a_gpu_shares_are_of_the_whole_token() -> None:
    found = gpu_result()
    assert found["us_per_token"] == pytest.approx(1000)
    assert found["kernel_us_per_token"] == 250
    assert found["idle_us_per_token"] == pytest.approx(750)
    assert found["host_us_per_token"] == 200  # waiting is no work
    assert found["profiled_us_per_token"] == 2000
    assert (found["kernels_per_token"], found["host_launches_per_token"], found["own_launches_per_token"]) == (
        12,
        12,
        10,
    )
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["gemv"] == {
        "name": "gemv",
        "count_per_token": 10,
        "us_per_token": 200,
        "us_each": 20,
        "share": pytest.approx(0.2),
    }
    assert rows["Memcpy HtoD (Pageable -> Device)"]["count_per_token"] == 1
    assert gpu_result(kernel_us=1200.0)["idle_us_per_token"] == 0


def test_kernels_of_one_short_name_are_one_row() -> None:
    head = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<{0}>, 3>(int, {0})"
    both = [Activity(head.format("float"), 2, 3.0), Activity("gemv", 1, 4.0), Activity(head.format("double"), 3, 2.0)]
    name = "vectorized_elementwise_kernel [CUDAFunctor_add]"
    assert merged(both) == [Activity(name, 5, 5.0), Activity("gemv", 1, 4.0)]


@pytest.mark.parametrize(
    ("signature", "name"),
    [
        ("gemv_rows_kernel", "gemv_rows_kernel"),
        ("aten::mm", "aten::mm"),
        ("Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pageable -> Device)"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0"),
        (
            "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, __nv_bfloat16, float, false, 7, "
            "cublasGemvParamsEx<int, cublasGemvTensor<__nv_bfloat16 const>, float> >(cublasGemvParamsEx<int>)",
            "gemvx::kernel",
        ),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>, unsigned "
            "int, long, 4, 4> >(at::native::ReduceOp<float, at::native::ArgMaxOps<float>, unsigned int, long, 4, 4>)",
            "reduce_kernel [ArgMaxOps]",
        ),
        (
            "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::"
            "direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda(c10::BFloat16)"
            "#1}>(at::TensorIteratorBase&)::{lambda(int)#1}>(int)",
            "elementwise_kernel [direct_copy_kernel_cuda]",
        ),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, 11>(float*, int)", "softmax_warp_forward"),
        (
            "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>(cutlass_80_wmma_tensorop_bf16::Params)",
            "cutlass::Kernel2 [cutlass_80_wmma_tensorop_bf16_s161616gemm]",
        ),
        ("pytorch_flash::flash_fwd_splitkv_kernel<Traits<64>, false>(Params)", "flash_fwd_splitkv_kernel"),
    ],
)
def test_names_can_be_read(signature: str, name: str) -> None:
    assert short_name(signature) == name


def test_a_long_name_is_cut() -> None:
    assert len(short_name("sm90_xmma_gemm_" + "x" * 200)) == LONGEST


def test_the_screen_shows_the_top_and_counts_the_rest(report: Report) -> None:
    console = Console(width=110, record=True)
    print_profile(report, console, top=3)
    shown, rows = console.export_text(), report.results["03"]["rows"]
    assert all(row["name"] in shown for row in rows[:3])
    assert f"{len(rows) - 3} more rows, " in shown
    assert "demo size (no GPU)" in shown
    assert f"| {rows[0]['name']} |" in markdown(report)


def test_a_gpus_profile_says_who_waits(report: Report) -> None:
    shown = Report("profile-03", report.model, report.engines, 0, report.flags, {"03": gpu_result()})
    text = markdown(shown)
    assert "no kernel runs for: 750 µs" in text
    assert "12 launches, 10 of them of kernels in shared/kernels; 1 copies" in text
    assert "| gemv | 10 | 200.0 | 20.0 | 20 % |" in text


def test_the_command_writes_trace_and_report(folder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json.gz"
    arguments = ["--model", folder, "--prompt-tokens", 3, "--steps", 1, "--trace", trace, "--out", tmp_path / "out"]
    command = ["bench", "profile", "--threads", "1", "--device", "cpu"]
    result = CliRunner().invoke(app, [*command, *map(str, arguments)])
    assert result.exit_code == 0, result.output
    line = json.loads(result.stdout.splitlines()[-1])
    newest = newest_lesson().number
    assert list(line["results"]) == [newest]
    assert line["benchmark"] == f"profile-{newest}"
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    assert any(event.get("name") == "aten::embedding" for event in events)
    stem = f"profile-{newest}-tiny-qwen3-{line['machine']}"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {f"{stem}.json", f"{stem}.md"}


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        ({"phase": "01a"}, ConfigError, "generates no text"),
        ({"phase": "42"}, ConfigError, "42"),
        ({"steps": 0}, ConfigError, "steps is 0"),
        ({"prompt_tokens": 0}, ConfigError, "prompt_tokens is 0"),
        ({"prompt_tokens": 2040, "steps": 8}, RequestError, "2048 tokens"),
        ({"trace": Path("nowhere/at/all.json.gz")}, ConfigError, "nowhere"),
        ({"trace": Path("trace.txt")}, ConfigError, "trace.txt"),
        ({"threads": 0}, ConfigError, "threads is 0"),
        ({"device": "abacus"}, ConfigError, "abacus"),
    ],
)
def test_bad_settings_are_refused_before_any_work(
    folder: Path, settings: dict[str, Any], error: Any, told: str
) -> None:
    def progress(*_: object) -> None:
        raise AssertionError("work began")

    with pytest.raises(error) as caught:
        measure_profile(str(folder), **settings, progress=progress)
    assert told in str(caught.value)


@pytest.mark.gpu
def test_on_a_gpu_the_table_is_of_kernels(folder: Path, tmp_path: Path) -> None:
    found = measure_profile(str(folder), device="cuda", prompt_tokens=16, steps=4, trace=tmp_path / "t.json.gz")
    result = found.results[newest_lesson().number]
    assert result["kernels_per_token"] > 10
    assert result["own_launches_per_token"] > 10
    assert result["host_launches_per_token"] >= result["own_launches_per_token"]
    assert not any(row["name"].startswith("aten::") for row in result["rows"])
