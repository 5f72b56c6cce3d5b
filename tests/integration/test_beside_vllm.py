"""The comparison with vLLM, with a stand-in for vLLM: what both engines are asked, in which order, and what is made of
their times."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import beside_vllm
from benchmarks.beside_vllm import (
    WORK,
    Answered,
    Decoded,
    Figure,
    First,
    Generate,
    Prompts,
    Work,
    measure,
    measure_work,
    ours,
    row,
    serve,
    view,
)
from benchmarks.report import write_report
from shared.checkpoints.shapes import SHAPES
from shared.errors import ConfigError
from shared.loading.config_json import parse_config

pytestmark = pytest.mark.slow
TINY = WORK["tiny-llama"]
STAND_IN = """
import json, os
from pathlib import Path

__version__ = "0.26.0"


class SamplingParams:
    def __init__(self, **asked):
        self.asked = asked


class LLM:
    def __init__(self, **given):
        self.seen = Path(__file__).with_name("seen.jsonl").open("a", buffering=1)
        variables = ("VLLM_ENABLE_V1_MULTIPROCESSING", "PYTHONPATH")
        self.write([given, [os.environ[name] for name in variables]])

    def write(self, what):
        self.seen.write(json.dumps(what) + chr(10))

    def generate(self, prompts, params, use_tqdm):
        self.write([[len(one["prompt_token_ids"]) for one in prompts], params.asked])
"""


class Clock:
    """An engine that takes a second for each prompt and each token, and keeps what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.next_id = 0

    def draw(self, length: int) -> list[int]:
        self.next_id += length
        return list(range(self.next_id - length, self.next_id))

    def generate(self, prompts: Sequence[list[int]], num_new: int) -> float:
        ids = [id_ for prompt in prompts for id_ in prompt]
        assert len({*ids}) == len(ids), "no two prompts are the same"
        self.asked += [(len(prompt), num_new) for prompt in prompts]
        return float(len(prompts) * (1 + num_new))


def recorded(log: Path, name: str, factor: float, work: Work, folder: Path, device: str) -> Generate:
    """An engine that writes down what it is asked, and takes ``factor`` seconds for each prompt and each token."""

    def generate(prompts: Sequence[list[int]], num_new: int) -> float:
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps([name, prompts, num_new]) + "\n")
        return factor * len(prompts) * (1 + num_new)

    return generate


def dying(work: Work, folder: Path, device: str) -> Generate:
    return lambda prompts, num_new: os._exit(3)


@pytest.mark.parametrize(
    ("figure", "asked", "value"),
    [
        (First(9), [(9, 1)], 2000.0),
        (First(9, cached=8), [(9, 1), (9, 1)], 2000.0),
        (Prompts(3, 4), [(4, 1)] * 3, 12 / 6),
        (Decoded(2, 5, 8), [(5, 1)] * 2 + [(5, 8)] * 2, 14 / (18 - 4)),
        (Answered(2, 5, 8), [(5, 8)] * 2, 16 / 18),
    ],
)
def test_a_trial_asks_for_what_its_figure_says(figure: Figure, asked: list[tuple[int, int]], value: float) -> None:
    clock = Clock()
    assert figure.trial(clock.generate, clock.draw) == pytest.approx(value)
    assert clock.asked == asked


def test_fewer_milliseconds_and_more_tokens_are_ahead() -> None:
    found = row("ms", ours=[10.0, 30.0, 20.0], vllm=[30.0, 12.0, 90.0])
    assert [found[key] for key in ("ours", "vllm", "ahead")] == [20, 30, 1.5]
    assert [found[f"best_{key}"] for key in ("ours", "vllm", "ahead")] == [10, 12, 1.2]
    found = row("tokens/s", ours=[10.0, 30.0, 20.0], vllm=[30.0, 12.0, 90.0])
    assert [found[key] for key in ("ours", "vllm", "ahead")] == [20, 30, pytest.approx(0.6667)]
    assert [found[f"best_{key}"] for key in ("ours", "vllm", "ahead")] == [30, 90, pytest.approx(0.3333)]


def test_engines_take_turns_and_get_the_same_prompts(tmp_path: Path) -> None:
    figures: dict[str, Figure] = {"cached": First(9, cached=8), "decoding": Decoded(2, 8, 4)}
    work, log = replace(TINY, figures=figures), tmp_path / "log.jsonl"
    engines = {name: partial(recorded, log, name, factor) for name, factor in (("ours", 0.5), ("vllm", 1.0))}
    found, ready = measure_work(work, 2, "cpu", None, engines)
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    asked = {name: [rest for engine, *rest in lines if engine == name] for name in engines}
    assert asked["ours"] == asked["vllm"]
    prompts = [tuple(prompt) for together, _ in asked["ours"] for prompt in together]
    assert len({*prompts}) == len(prompts) == 3 * (2 + 4), "two trials of each figure and one that does not count"
    assert all(prefixed[:8] == again[:8] for prefixed, again in zip(prompts[:6:2], prompts[1:6:2], strict=True))
    turns = [(name, len([*calls])) for name, calls in groupby(name for name, *_ in lines)]
    assert {name for name, _ in turns} == {"ours", "vllm"}
    assert max(number for _, number in turns) <= 4, "a trial of two calls, the next one begins with the same engine"
    assert [found[name]["ahead"] for name in figures] == [2, 2]
    assert [len(found[name]["ours_trials"]) for name in figures] == [2, 2]
    assert all(host > 0 and version is None for host, version in ready.values())


def test_a_measurement_makes_vllm_for_its_work(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text(STAND_IN, encoding="utf-8")
    report = measure(("tiny-llama",), trials=2, vllm_path=str(tmp_path), device="cpu")
    made, *calls = map(json.loads, (tmp_path / "seen.jsonl").read_text(encoding="utf-8").splitlines())
    given, (in_process, path) = made
    config = parse_config(SHAPES[TINY.shape])
    kv_cache_bytes = TINY.kv_tokens * config.num_layers * 2 * config.num_kv_heads * config.head_dim * 2
    assert (given["max_num_seqs"], given["max_model_len"]) == (TINY.max_batch_size, TINY.max_seq_len)
    assert (given["kv_cache_memory_bytes"], given["dtype"]) == (kv_cache_bytes, "bfloat16")
    assert (given["load_format"], given["quantization"], given["enable_prefix_caching"]) == ("dummy", None, True)
    assert (in_process, path.split(os.pathsep)[0]) == ("0", str(tmp_path)), "also for processes of its own"
    assert [lengths for lengths, _ in calls] == [[49], [49]] * 3 + [[8, 8]] * 3 + [[8] * 4] * 3
    assert [params["max_tokens"] for _, params in calls] == [1] * 9 + [2] * 3
    assert all(params["temperature"] == 0 and params["ignore_eos"] for _, params in calls)
    assert set(report.results["tiny-llama"]) == set(TINY.figures)
    assert (report.flags["vllm"], report.flags["work"]["tiny-llama"]["trials"]) == ("0.26.0", 2)
    assert str(tmp_path) not in json.dumps(report.to_dict())
    del report.results["loop_ns"]["tiny-llama"]
    page = write_report(report, tmp_path, view=view(report))[1].read_text(encoding="utf-8")
    assert "## tiny-llama: 2 trials in turns\n" in page
    assert "| prompts_2x8 | tokens/s |" in page


def test_our_engine_is_made_for_the_work_and_warmed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    engine = SimpleNamespace(generate=lambda *asked, **options: seen.append((asked, options)), engine="the engine")
    monkeypatch.setattr(beside_vllm, "make_weights_when_read", lambda: seen.append("random"))
    monkeypatch.setattr("shared.engine.llm.LLM", lambda *asked, **options: seen.append((asked, options)) or engine)
    monkeypatch.setattr("shared.engine.warm_up.warm_up", seen.append)
    generate = ours(replace(TINY, quantization="fp8"), tmp_path, "cpu")
    assert generate([[5]], 7) < 60
    _, (_, options), warm, ((prompts, params), _) = seen
    assert options["num_gpu_blocks"] * 16 == TINY.kv_tokens
    assert (options["max_batch_size"], options["max_seq_len"]) == (TINY.max_batch_size, TINY.max_seq_len)
    assert (options["quantization"], options["use_prefix_caching"]) == ("fp8", True)
    assert warm == "the engine"
    assert (prompts, params.max_new_tokens, params.temperature, params.ignore_eos) == ([[5]], 7, 0, True)


def test_an_engine_is_ready_when_the_collector_skips_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Any] = []
    received = iter([([[1], [2]], 3), None])
    connection: Any = SimpleNamespace(send=order.append, recv=lambda: next(received))
    monkeypatch.setattr(beside_vllm, "freeze_memory", lambda: order.append("frozen"))
    monkeypatch.setattr(beside_vllm, "loop_ns", lambda: 50.0)
    serve(connection, partial(recorded, tmp_path / "log", "one", 1.0), TINY, tmp_path, "cpu")
    assert order == ["frozen", (50.0, None), 8.0]


def test_what_goes_wrong_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no work 'llama'; there are llama-3\.2-1b, "):
        measure(("llama",))
    (tmp_path / "vllm.py").write_text("raise ImportError('not here')", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"'vllm' does not start: .*cannot be imported \(not here\); install vllm"):
        measure(("tiny-llama",), vllm_path=str(tmp_path), device="cpu")
    with pytest.raises(RuntimeError, match="The process of the engine 'ours' ended with 3"):
        measure_work(TINY, 1, "cpu", None, {"ours": dying})
