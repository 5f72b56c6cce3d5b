"""What the benchmarks refuse, before anything is measured: settings that make no sense, and too little memory."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from typer.testing import CliRunner

from benchmarks.bench_serving import measure_serving
from benchmarks.ladder import measure_ladder
from benchmarks.setup import Setup
from benchmarks.timing import Steps
from benchmarks.workloads.serving import DEMO
from shared.cli import app
from shared.errors import ConfigError, RequestError


@pytest.fixture(autouse=True)
def no_work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step begins, and no ceiling is measured."""
    monkeypatch.setenv("INFER_MODEL", str(folder))
    monkeypatch.setattr(Steps, "step", lambda *_: pytest.fail("work began"))
    for module in ("hardware", "kernels.case", "bench_generation"):
        monkeypatch.setattr(f"benchmarks.{module}.measure_ceilings", lambda device: pytest.fail("measured"))


def assert_refused(command: str, told: str) -> None:
    """The command exits with 2 and prints one paragraph that says ``told``."""
    result = CliRunner().invoke(app, command.split())
    assert (result.exit_code, "Traceback" in result.output) == (2, False), result.output
    assert told in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("bench contexts --prompt-tokens 0", "prompt_tokens is 0"),
        ("bench contexts --prompt-tokens 2040 --new-tokens 9", "2048 tokens"),
        ("bench contexts --contexts 16,2048", "context length is 2048"),
        ("bench contexts --contexts 64,many", "64,many"),
        ("ladder --phase 02", "no row for phase 02"),
        ("ladder --phase 01a", "generates no text"),
        ("bench generation --peer transformers_compiled", "needs a GPU"),
        ("bench generation --peer vllm", "an installed vLLM"),
        ("bench generation --pack-weights --phase 02", "arrives in phase 03"),
        ("bench profile --trace nowhere/at/all.json.gz", "nowhere"),
        ("bench serving -e speed", "no experiment 'speed'"),
        ("bench serving --phase 04", "has no continuous batching"),
        ("bench serving --phase 05 -e capacity", "no experiment 'capacity'"),
        ("bench serving --trials 0", "trials is 0"),
        ("bench kernels --model gpt-2", "--model is 'gpt-2'; it must be one of llama-3.2-1b, qwen3-1.7b, gemma-3-1b"),
        ("bench kernels --kernel softmax", "--kernel is 'softmax'; it must be one of qkv, o"),
        ("bench kernels --kernel rms_norm", "A decode step of tiny-llama launches none of rms_norm"),
        ("bench hardware --device cuda:99", "no such GPU"),
        ("bench speculation --no-lookup", "--no-lookup leaves nothing to measure"),
        *((f"bench speculation --no-lookup {name} no/where", "no/where") for name in ("--draft", "--adapter")),
        ("bench attention --shape 32x4096", "--shape is '32x4096'; it must be one of 4x64"),
        ("bench attention --peer vllm", "--peer is 'vllm'; it must be one of flashinfer"),
        ("roofline no-such-model", "neither a folder nor a known model"),
        ("roofline tiny-llama --context 2049", "--context is 2049"),
        ("roofline tiny-llama --batch 4,x", "--batch is '4,x'"),
        ("roofline tiny-llama --gpu abacus", "'abacus'"),
        ("roofline tiny-llama --gpu h100 --weight-bits 0", "--weight-bits is 0"),
        ("roofline tiny-llama --bandwidth 1 --flops nan", "--flops is nan"),
        ("roofline tiny-llama --gpu h100 --dtype float32", "16-bit"),
    ],
)
def test_bad_options_are_refused(command: str, told: str) -> None:
    assert_refused(command, told)


def test_engines_too_large_for_the_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000, total=1000))
    assert_refused("ladder", "2 engines")
    assert_refused("bench contexts", "The engine needs")
    assert_refused("bench generation --phase 02 --phase 03", "--no-peers")
    assert_refused("bench serving -e tail", "2 engines")


def test_what_no_option_can_ask_for_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="No phase"):
        measure_ladder(str(folder), phases=[])
    for size in (replace(DEMO, wide_slots=(2, 4096)), replace(DEMO, w2=replace(DEMO.w2, prompt_tokens=(4, 4072)))):
        with pytest.raises(RequestError, match="4096"):
            measure_serving(Setup(str(folder)), size=size)
