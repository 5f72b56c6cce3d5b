"""The kernel benchmark: its cases, its bytes, what it refuses to time, and what it prints."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import benchmarks.bench_kernels as bench
import benchmarks.kernels.case as case_module
from benchmarks.device.graph_timing import cache_bytes, num_input_sets
from benchmarks.hardware import Ceilings, device_of, measure_ceilings
from benchmarks.kernels.case import Case, Peer, compare, measure_case, results_of, widened
from benchmarks.kernels.view import view
from benchmarks.report import Report
from benchmarks.view import markdown
from shared.cli import app
from shared.kernels import gemv

CPU, BF16 = torch.device("cpu"), torch.bfloat16
CEILINGS = Ceilings(4e9, 5e9, 1e11, None, 1e-6, "float32")


def bf16_cases(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], Case]:
    """A model's cases as a GPU would have them."""
    monkeypatch.setattr(bench, "dtype_of", lambda device: BF16)
    return {(case.kernel, case.size): case for case in bench.cases_of(name, CPU, bench.KERNELS, (rows,))}


@pytest.fixture(scope="module")
def demo() -> Report:
    """All kernels of the family that has every kind, at demo size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(case_module, "measure_ceilings", lambda device: CEILINGS)
        return bench.measure_kernels("gemma-3-1b", device="cpu")


def test_bytes_are_those_counted_by_hand(monkeypatch):
    """bf16: every number that goes in or out once, weights once for all rows, and of a window only its own keys."""
    monkeypatch.setattr(bench, "DEMO_CONTEXTS", (4096,))
    llama = {kernel: case.num_bytes for (kernel, _), case in bf16_cases("llama-3.2-1b", 1, monkeypatch).items()}
    assert llama == {
        "qkv": 2 * (3072 * 2048 + 2048 + 2048 + 3072),  # W, norm, x, result
        "o": 2 * (2048 * 2048 + 2048 + 2048 + 2048),  # W, x, residual, result
        "gate_up": 2 * (16384 * 2048 + 2048 + 2048 + 8192),
        "down": 2 * (2048 * 8192 + 8192 + 2048 + 2048),
        "head": 2 * (128256 * 2048 + 2048 + 2048 + 128256),
        "kv_write": 2 * 2 * (32 + 8 + 8) * 64 + 4 * 64 + 2 * 8,  # heads in and out, the angles, position and place
        "decode_attention": 2 * (2 * 4096 * 8 * 64 + 2 * 32 * 64),
        "sampler_greedy": 2 * 128256 + 8,
        "sampler_drawn": 2 * 128256 + 8,
    }
    norms = 2 * 2 * 128  # of queries and of keys
    qwen = bf16_cases("qwen3-1.7b", 1, monkeypatch)
    assert qwen["kv_write", "1"].num_bytes == 2 * 2 * (16 + 8 + 8) * 128 + 4 * 128 + 2 * 8 + norms
    gemma = bf16_cases("gemma-3-1b", 16, monkeypatch)
    assert gemma["o", "16"].num_bytes == 2 * (1152 * 1024 + 16 * (1024 + 1152))  # its residual comes with the norm
    assert gemma["gate_up", "16"].shape == "1152 → 13824, geglu"
    assert gemma["rms_norm", "16"].num_bytes == 2 * (3 * 16 * 1152 + 1152)
    assert gemma["add_rms_norm", "16"].num_bytes == 2 * (4 * 16 * 1152 + 2 * 1152)
    assert gemma["decode_attention_windowed", "4096"].num_bytes == 2 * (2 * 512 * 1 * 256 + 2 * 4 * 256)


@pytest.mark.parametrize("name", bench.DEMO_SHAPES.values())
def test_ours_and_the_op_give_the_same_over_inputs_four_times_the_cache(name):
    for case in bench.cases_of(name, CPU, bench.KERNELS, (1, 3)):
        sets = case.draw(num_input_sets(case.set_bytes, cache_bytes(CPU)), CPU)
        tensors = {tensor.data_ptr(): tensor for inputs in sets for tensor in inputs if tensor is not None}
        assert sum(tensor.nbytes for tensor in tensors.values()) >= 4 * cache_bytes(CPU)
        expected = results_of(case.op, tuple(map(widened, sets[1])))
        found = compare(case.ours["ours"], sets[1], expected, torch.float32)
        assert (found["error"], found["launches"]) == (None, 0), f"{case.kernel} {case.size}"


def test_a_demo_report_and_its_view_have_every_kernel(demo):
    assert demo.flags["is_demo_size"]
    assert demo.model["name"] == "tiny-gemma3"
    found, ceilings = demo.results["kernels"], demo.results["ceilings"]
    assert tuple(found) == tuple(demo.flags["kernels"]) == bench.KERNELS
    text = markdown(view(demo))
    for kernel, sizes in found.items():
        expected = bench.DEMO_CONTEXTS if "attention" in kernel else bench.DEMO_ROWS
        assert list(sizes) == list(map(str, expected))
        for size, row in sizes.items():
            assert row["error"] is None
            assert min(row["time_us"], row["eager_us"]) > 0
            assert (row["compiled_us"], row["compiled_missing"]) == (None, "not asked for")
            limit = ceilings[f"{row['ceiling']}_gb_per_second"]
            assert row["floor_us"] == pytest.approx(row["bytes"] / limit / 1e3, rel=1e-3)
            assert f"| {kernel} {size} | {row['shape']} |" in text
    assert "demo size" in text
    json.loads(demo.line())


def test_cited_keys_are_those_that_the_command_writes(demo):
    root = Path(bench.__file__).parents[1]
    text = "".join(page.read_text("utf-8") for page in (*root.glob("docs/*.md"), *root.glob("tutorial/*.md")))
    cited = set(re.findall(r"kernels-[\w.-]+\.json#results\.kernels\.\w+\.\d+\.(\w+)", text))
    assert len(cited) > 3
    assert cited <= demo.results["kernels"]["down"]["1"].keys()


def test_what_is_wrong_or_cannot_be_had_is_not_timed():
    case, greedy = (bench.cases_of("tiny-llama", CPU, (kernel,), (1,))[0] for kernel in ("down", "sampler_greedy"))
    right = case.ours["ours"]

    def broken(*inputs: Any) -> None:
        raise RuntimeError("\ncannot\nbe captured")

    ours = {"off": lambda *x: right(*x) + 0.5, "nan": lambda *x: right(*x) * float("nan"), "ours": right}
    peers = {"eager": Peer(lambda: case.op), "broken": Peer(lambda: broken), "off": Peer(lambda: ours["off"], case.op)}
    row = measure_case(replace(case, ours=ours, peers=peers), CPU, CEILINGS, list(peers))
    for found in (row["variants"]["off"], row["variants"]["nan"], row["peers"]["off"]):
        assert "differs from the op in fp32" in found["error"]
        assert found["time_us"] is None
    assert min(row["variants"]["ours"]["time_us"], row["peers"]["eager"]["time_us"]) > 0
    assert row["peers"]["broken"]["missing"] == "RuntimeError: cannot"
    json.dumps(row, allow_nan=False)
    greedy = replace(greedy, ours={"ours": lambda logits: greedy.op(logits) + 1})
    assert measure_case(greedy, CPU, CEILINGS, [])["variants"]["ours"]["error"].startswith("chose [")


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("kernels --model gpt-2", "--model is 'gpt-2'; it must be one of llama-3.2-1b, qwen3-1.7b, gemma-3-1b"),
        ("kernels --kernel softmax", "--kernel is 'softmax'; it must be one of qkv, o"),
        ("kernels --kernel rms_norm", "A decode step of tiny-llama launches none of rms_norm"),
        ("kernels --rows 17", "from 1 to 16 rows"),
        ("kernels --seed -1", "at least 0"),
        ("hardware --device cuda:99", "no such GPU"),
        ("attention --shape 32x4096", "--shape is '32x4096'; it must be one of 4x64"),
        ("attention --peer vllm", "--peer is 'vllm'; it must be one of flashinfer"),
        ("attention --seed -1", "at least 0"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_any_work(command, told, monkeypatch):
    monkeypatch.setattr(case_module, "measure_ceilings", lambda device: pytest.fail("measured"))
    result = CliRunner().invoke(app, ["bench", *command.split()] + ["--device", "cpu"] * ("cuda" not in command))
    assert result.exit_code == 2, result.output
    assert told in " ".join(result.stderr.split())


@pytest.mark.parametrize("offset", [0, 1], ids=["right", "wrong"])
def test_the_command_writes_what_it_found_and_ends_with_1_if_it_is_wrong(offset, tmp_path, monkeypatch):
    monkeypatch.setattr(case_module, "measure_ceilings", lambda device: CEILINGS)
    right = gemv.linear
    monkeypatch.setattr(gemv, "linear", lambda *args: right(*args) + offset)
    options = ["--device", "cpu", "-m", "qwen3-1.7b", "-k", "down", "--rows", "2", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["bench", "kernels", *options])
    assert result.exit_code == offset, result.output
    line = json.loads(result.stdout.splitlines()[-1])
    (written,) = tmp_path.glob("kernels-tiny-qwen3-*.json")
    assert json.loads(written.read_text())["results"] == line["results"]
    assert (line["results"]["kernels"]["down"]["2"]["time_us"] is None) == bool(offset)
    assert ("wrong: down 2 ours: differs" in result.stdout) == bool(offset)
    assert written.with_suffix(".md").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["gate_up", "decode_attention", "sampler_drawn"])
def test_a_kernel_in_a_graph_stays_below_its_ceiling(kernel):
    case = bench.cases_of("llama-3.2-1b", device_of("cuda"), (kernel,), (1,))[0]
    row = measure_case(case, device_of("cuda"), measure_ceilings("cuda"), ("eager",))
    ours = row["variants"]["ours"]
    assert (ours["error"], ours["launches"] >= 1, row["peers"]["eager"]["missing"]) == (None, True, None)
    assert 0 < ours["share_of_ceiling"] <= 1.05
