"""The stepper on runs that the test makes: a GPU beside the host, other ranks, and a learner's wrong line."""

import json
from pathlib import Path
from typing import Any

import pytest

from shared.engine.config import EngineConfig
from shared.lessons import find_lesson
from shared.tracing.steps.page import write
from shared.tracing.steps.recording import StepRecorder
from shared.tracing.workload import run
from tests.integration.stepper import event_of, go_to, stepper
from tests.integration.tabs import PHONE, expect
from tests.integration.test_steps_command import by_learner
from tests.unit.tracing.recording import Clock, add_gpu, arrivals


@pytest.fixture
def beside_a_gpu(model: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The recording of a run whose launches take a GPU nine lines or so."""
    lesson = find_lesson("09")
    config = EngineConfig(model=model, max_seq_len=64, seed=0, max_batch_size=2, overlap_scheduling=True)
    recorder = StepRecorder(lesson.engine(config), lesson, clock=Clock())
    add_gpu(recorder, 900, monkeypatch)
    run(recorder, arrivals(4, 3))
    return recorder.recording() | {"device": "cuda"}


@pytest.fixture
def page(tmp_path: Path) -> Any:
    def written(data: dict[str, Any]) -> str:
        path = tmp_path / "steps.html"
        path.write_text(write(data), encoding="utf-8")
        return path.as_uri()

    return written


def test_what_a_gpu_runs_stands_beside_the_lines(beside_a_gpu: dict[str, Any], browser: Any, page: Any) -> None:
    data = beside_a_gpu
    spans = [(step, *span) for step, each in enumerate(data["steps"]) for span in each.get("gpu", ())]
    with stepper(browser, page(data)) as tab:
        shapes = "all => all.map(each => [each.getAttribute('class'), +each.getAttribute('x')])"
        drawn = tab.locator("#lanes [data-lane=GPU] rect").evaluate_all(shapes)
        assert drawn == [[name, first] for _, name, first, *_ in spans]
        assert tab.inner_text("#lanes p") == "GPU: idle"
        for step, name, first, last, _ in (spans[0], spans[-1]):
            for event, told in ((first, "begins"), (last, "finishes")):
                go_to(tab, data, event)
                assert f"{name} of step {step}, 0.00 ms" in tab.inner_text("#lanes p")
                assert f"he GPU {told} the {name} of step {step}" in tab.inner_text("#told")
        launch = next(n for n, (line, *_) in enumerate(data["events"]) if data["lines"][line][3] == "launch")
        go_to(tab, data, launch)
        assert tab.inner_text("#kind") == "launches work", "which the GPU does, and not the host"


def test_other_ranks_have_a_lane_each(beside_a_gpu: dict[str, Any], browser: Any, page: Any) -> None:
    data = beside_a_gpu
    for step in data["steps"]:
        step["ranks"] = [step.pop("gpu", [])[:1], []]
    with stepper(browser, page(data), viewport=PHONE) as tab:
        assert tab.locator("#lanes svg").evaluate_all("all => all.map(each => each.dataset.lane)") == ["rank 1"]
        ((name, first, *_),) = data["steps"][1]["ranks"][0]
        go_to(tab, data, first)
        assert f"Rank 1 begins the {name} of step 1" in tab.inner_text("#told") or "; rank 1 begins" in tab.inner_text(
            "#told"
        )


@pytest.fixture(scope="module")
def raising(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("raising")
    by_learner(model, folder, "budget = max(self.config.max_num_batched_token - num_decoding, 1)")
    return folder / "trace"


def test_a_page_opens_at_the_learners_line_that_raises(raising: Path, browser: Any) -> None:
    data = json.loads((raising / "steps.json").read_text(encoding="utf-8"))
    told = "The last step raised AttributeError: "
    with stepper(browser, (raising / "steps.html").as_uri()) as tab:
        marked = tab.locator(".lines [aria-current]")
        assert "self.config.max_num_batched_token - num_decoding" in marked.evaluate("row => row.textContent")
        assert "raise" in marked.get_attribute("class")
        expect(marked).to_be_in_viewport()  # no fold hides a learner's own lines
        assert tab.inner_text("#kind") == "raises the error that ends the run"
        assert tab.inner_text("#told").startswith(told)
        tab.keyboard.press("Home")
        assert "AttributeError" not in tab.inner_text("#told")
        tab.keyboard.press("End")
        assert event_of(tab) == len(data["events"]) - 1
        assert tab.inner_text("#told").startswith(told)
