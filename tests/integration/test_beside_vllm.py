"""The comparison with vLLM, with a stand-in for vLLM: which prompts both get, and what is made of their times."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.beside_vllm import WORK, Answered, Decoded, Figure, First, Prompts, measure, row, view
from benchmarks.report import write_report
from benchmarks.timing import SyntheticPrompts
from shared.checkpoints.shapes import SHAPES
from shared.errors import ConfigError
from shared.loading.config_json import parse_config

pytestmark = pytest.mark.slow
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
        self.write({**given, "alone": os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]})

    def write(self, what):
        self.seen.write(json.dumps(what) + chr(10))

    def generate(self, prompts, params, use_tqdm):
        self.write([[one["prompt_token_ids"] for one in prompts], params.asked])
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


def test_both_engines_get_the_same_work_in_turns(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text(STAND_IN, encoding="utf-8")
    report = measure(("tiny-llama",), trials=2, vllm_path=str(tmp_path), device="cpu")
    given, *calls = map(json.loads, (tmp_path / "seen.jsonl").read_text(encoding="utf-8").splitlines())
    work = WORK["tiny-llama"]
    assert (given["max_num_seqs"], given["max_model_len"], given["alone"]) == (
        work.max_batch_size,
        work.max_seq_len,
        "0",
    )
    assert (given["load_format"], given["quantization"], given["enable_prefix_caching"]) == ("dummy", None, True)
    config = parse_config(SHAPES[work.shape])
    assert (
        given["kv_cache_memory_bytes"]
        == work.kv_tokens * config.num_layers * 2 * config.num_kv_heads * config.head_dim * 2
    )
    expected: list[tuple[Sequence[list[int]], int]] = []

    def generate(prompts: Sequence[list[int]], num_new: int) -> float:
        expected.append((prompts, num_new))
        return float(num_new)

    draw = SyntheticPrompts(SHAPES[work.shape]["vocab_size"], 0).draw
    for figure in work.figures.values():
        for _ in range(3):  # one does not count
            figure.trial(generate, draw)
    assert [(prompts, params["max_tokens"]) for prompts, params in calls] == expected
    assert all(params["temperature"] == 0 and params["ignore_eos"] for _, params in calls)
    assert set(report.results["tiny-llama"]) == set(work.figures)
    assert all(
        len(found[f"{name}_trials"]) == 2
        for found in report.results["tiny-llama"].values()
        for name in ("ours", "vllm")
    )
    assert report.flags["vllm"] == "0.26.0"
    assert str(tmp_path) not in json.dumps(report.to_dict())
    page = write_report(report, tmp_path, view=view(report))[1].read_text(encoding="utf-8")
    assert "| prompts_2x8 | tokens/s |" in page


def test_without_vllm_or_with_unknown_work_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no work 'llama'; there are llama-3\.2-1b, "):
        measure(("llama",))
    (tmp_path / "vllm.py").write_text("raise ImportError('not here')", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"'vllm' does not start \(ImportError: not here\).*--vllm-path"):
        measure(("tiny-llama",), vllm_path=str(tmp_path), device="cpu")
