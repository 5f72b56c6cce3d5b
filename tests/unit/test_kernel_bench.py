"""The kernel and attention benchmarks: cases, bytes, what is refused or not timed, what is printed."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import benchmarks.bench_kernels as bench
import benchmarks.kernels.case as case_module
import benchmarks.kernels.paged_cases as paged_cases
from benchmarks.hardware import Ceilings, device_of, measure_ceilings
from benchmarks.kernels.case import Case, Peer, compare, measure_case, results_of, widened
from benchmarks.kernels.paged_cases import DEMO_SHAPES, SHAPES, PagedSequences
from benchmarks.kernels.view import view
from benchmarks.timing import cache_bytes, num_input_sets
from benchmarks.view import markdown
from shared.cli import app
from shared.kernels.products import gemv
from shared.ops.attention import naive_attention

CPU, BF16 = torch.device("cpu"), torch.bfloat16
CEILINGS = Ceilings(4e9, 5e9, 1e11, None, 1e-6, "float32")


def cited_keys(pattern: str) -> set[str]:
    """Keys of a report's rows that a page cites."""
    root = Path(bench.__file__).parents[1]
    text = "".join(page.read_text("utf-8") for page in (*root.glob("docs/*.md"), *root.glob("tutorial/*.md")))
    found = set(re.findall(pattern, text))
    assert len(found) > 3
    return found


def bf16_cases(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], Case]:
    """A model's cases as a GPU would have them."""
    monkeypatch.setattr(bench, "dtype_of", lambda device: BF16)
    return {(case.kernel, case.size): case for case in bench.cases_of(name, CPU, bench.KERNELS, (rows,))}


@pytest.fixture(scope="module", autouse=True)
def patch() -> Iterator[pytest.MonkeyPatch]:
    """For the whole module: ceilings that are not measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(case_module, "measure_ceilings", lambda device: CEILINGS)
        yield patch


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


def test_a_demo_report_and_its_view_have_every_kernel():
    demo = bench.measure_kernels("gemma-3-1b", device="cpu")  # the family that has every kind
    assert (demo.flags["is_demo_size"], demo.model["name"]) == (True, "tiny-gemma3")
    found, ceilings = demo.results["kernels"], demo.results["ceilings"]
    assert tuple(found) == tuple(demo.flags["kernels"]) == bench.KERNELS
    for kernel, sizes in found.items():
        expected = bench.DEMO_CONTEXTS if "attention" in kernel else bench.DEMO_ROWS
        assert list(sizes) == list(map(str, expected))
        for size, row in sizes.items():
            assert (row["error"], min(row["time_us"], row["eager_us"]) > 0) == (None, True)
            limit = ceilings[f"{row['ceiling']}_gb_per_second"]
            assert row["floor_us"] == pytest.approx(row["bytes"] / limit / 1e3, rel=1e-3)
            assert f"| {kernel} {size} | {row['shape']} |" in markdown(view(demo))
    assert cited_keys(r"kernels-[\w.-]+\.json#results\.kernels\.\w+\.\d+\.(\w+)") <= found["down"]["1"].keys()


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


def test_a_demo_report_is_complete_and_has_the_cited_keys():
    attention = bench.measure_attention(device="cpu")
    for key in cited_keys(r"attention-[\w.-]+\.json#results\.shapes\.[\w-]+\.([\w.]+)"):
        reduce(dict.__getitem__, key.split("."), attention.results["shapes"]["1x256"])
    assert list(attention.results["shapes"]) == [shape.name for shape in DEMO_SHAPES]
    variants = attention.results["shapes"]["1x256"]["variants"]
    assert [variants[name]["settings"]["num_items"] for name in ("planned", "unsplit")] == [2, 1]
    for row in attention.results["shapes"].values():
        peers = row["peers"]
        assert peers.keys() == set(paged_cases.PEERS)
        for variant in row["variants"].values():
            assert variant["error"] is None
            assert variant["share_of_ceiling"] == pytest.approx(row["floor_us"] / variant["time_us"], rel=1e-2)
        for peer in peers.values():
            assert peer["error"] is None
            assert (peer["time_us"] is None) == (peer["missing"] is not None)
        ratio = row["variants"]["planned"]["time_us"] / peers["sdpa_gathered"]["time_us"]
        assert peers["sdpa_gathered"]["ours_over_peer"] == pytest.approx(ratio, rel=1e-2)
    assert "different lengths" in attention.results["shapes"]["mixed"]["peers"]["sdpa_contiguous"]["missing"]
    assert "no flex gathered: ConfigError: FlexAttention is compiled" in markdown(view(attention))


@pytest.mark.parametrize("is_wrong", [False, True])
@pytest.mark.parametrize(
    ("command", "options", "told"),
    [
        ("kernels", "-m qwen3-1.7b -k down --rows 2", "wrong: down 2 ours: differs"),
        ("attention", "--shape 4x64 --peer flashinfer", "wrong: 4x64 planned: differs"),
    ],
    ids=["kernels", "attention"],
)
def test_a_command_ends_with_1_if_a_result_of_ours_is_wrong(command, options, told, is_wrong, tmp_path, monkeypatch):
    if is_wrong:
        right = gemv.linear
        monkeypatch.setattr(gemv, "linear", lambda *args: right(*args) + 1)
        monkeypatch.setattr(paged_cases, "planned_decode", lambda q, *_, **__: torch.full_like(q, float("nan")))
    arguments = [*options.split(), "--device", "cpu", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["bench", command, *arguments])
    assert result.exit_code == is_wrong, result.output
    (written,) = tmp_path.glob(f"{command}-*.json")
    assert json.loads(written.read_text())["results"] == json.loads(result.stdout.splitlines()[-1])["results"]
    assert (told in result.stdout) == is_wrong
    if command == "attention":
        assert "no flashinfer: ConfigError: FlashInfer cannot be imported" in written.with_suffix(".md").read_text()


def test_mistakes_are_a_report_of_their_own(tmp_path):
    result = CliRunner().invoke(app, ["bench", "attention", "--mistakes", "--device", "cpu", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    (written,) = tmp_path.glob("graph-mistakes-*.json")
    shapes = json.loads(written.read_text())["results"]["shapes"]
    assert {name: list(row["variants"]) for name, row in shapes.items()} == {
        "widest-4x64": ["planned", "unsplit", "widest_table"],
        "tuned-2x64": ["planned", "tuned_outside", "tuned_inside"],
        "padded-3-of-4": ["planned", "all_compute"],
    }
    assert all(not row["peers"] for row in shapes.values())
    row = bench.compared_row(
        shapes["widest-4x64"]
        | {"variants": {"planned": {"time_us": 2.0, "launches": 1}, "widest_table": {"time_us": 7.0, "launches": 1}}}
    )  # as on a GPU
    assert row["times_widest_table"] == 3.5


@pytest.mark.measured
@pytest.mark.gpu
def test_a_loop_over_the_widest_table_is_slow_and_right():
    report = bench.measure_attention(device="cuda", mistakes=True, shapes=["widest-32x256", "padded-33-of-64"])
    shapes = report.results["shapes"]
    assert not [name for row in shapes.values() for name, call in row["variants"].items() if call["error"]]
    assert shapes["widest-32x256"]["times_widest_table"] > 2


@pytest.mark.measured
@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["gate_up", "decode_attention", "sampler_drawn"])
def test_a_kernel_in_a_graph_stays_below_its_ceiling(kernel):
    case = bench.cases_of("llama-3.2-1b", device_of("cuda"), (kernel,), (1,))[0]
    row = measure_case(case, device_of("cuda"), measure_ceilings("cuda"), ("eager",))
    ours = row["variants"]["ours"]
    assert (ours["error"], ours["launches"] >= 1, row["peers"]["eager"]["missing"]) == (None, True, None)
    assert 0 < ours["share_of_ceiling"] <= 1.05
