"""The lanes of host and GPU on the page of ``infer trace``: phase 8's step and phase 9's, below each other."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared.engine.config import EngineConfig
from shared.lessons import find_lesson
from shared.sampling.params import SamplingParams
from shared.tracing.recorder import Recorder
from shared.tracing.timeline_page import page as html_page
from shared.tracing.trace import Span
from tests.integration.trace_pages import FAINTEST, SHAPE_CONTRAST, opened, page_data, traced

WAITING = ["schedule", "batch", "launch", "sample", "wait", "commit"]
OVERLAPPED = ["schedule", "batch", "launch", "wait", "commit", "sample"]
# Of each part of a lane: its name, and the left and right end of each of its boxes.
BOXES = """(section, lane) => Object.fromEntries([...section.querySelectorAll(`path[data-lane=${lane}]`)].map(path => [
    path.dataset.part,
    [...path.getAttribute('d').matchAll(/M([\\d.]+) [\\d.]+H([\\d.]+)V/g)].map(([, left, right]) => [+left, +right]),
]))"""


@pytest.fixture(scope="module")
def loops(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of phase 9's two loops on a CPU."""
    folder = tmp_path_factory.mktemp("loops")
    told = traced("--model", model, "--compare", "waiting,overlapped", "--requests", "3", "--out", folder)
    assert re.search(r"waiting +overlapped", told)
    return folder / "trace.html"


@pytest.fixture(scope="module")
def on_gpu(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded run as on a machine with a GPU, which begins a step when it is launched and ends in the next."""
    config = EngineConfig(model=model, max_seq_len=64, seed=0, max_batch_size=2, overlap_scheduling=True)
    recorder = Recorder(find_lesson("09").engine(config))
    recorder.add_request([1, 2, 3], SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True), "a")
    while recorder.engine.has_work():
        recorder.step()
    trace = recorder.trace("on a GPU")
    steps = [
        replace(step, gpu=(Span("forward", step.host[2].ended_ns, (after.started_ns + after.ended_ns) // 2),))
        for step, after in itertools.pairwise(trace.steps)
    ]
    path = tmp_path_factory.mktemp("gpu") / "trace.html"
    path.write_text(html_page([replace(trace, steps=(*steps, trace.steps[-1]))], "infer trace"), encoding="utf-8")
    return path


@pytest.fixture
def tab(browser: Any, loops: Path) -> Iterator[Any]:
    yield from opened(browser, loops)


def boxes(tab: Any, place: int, lane: str) -> dict[str, list[list[float]]]:
    """Left and right ends of the boxes of each part, in pixels."""
    return dict(tab.locator("section").nth(place).evaluate(BOXES, lane))


def test_the_lane_of_the_host_has_the_parts_of_each_loop_in_their_order(tab: Any, loops: Path) -> None:
    for place, (trace, order) in enumerate(zip(page_data(loops), (WAITING, OVERLAPPED), strict=True)):
        assert [part["name"] for part in trace["steps"][3]["host"]] == order
        drawn = boxes(tab, place, "host")
        assert {name: len(parts) for name, parts in drawn.items()} == {
            name: sum(part["name"] == name for step in trace["steps"] for part in step["host"]) for name in order
        }
        flat = sorted(box for parts in drawn.values() for box in parts)
        assert all(after[0] >= before[1] - 0.02 for before, after in itertools.pairwise(flat)), "no part covers another"
        names = tab.locator("section").nth(place).locator(".names div").all_inner_texts()
        assert names[6] == "host"
        assert "GPU" not in names
        assert "forward is computed inside “launch”" in tab.locator("section").nth(place).inner_text()


def test_a_step_tells_its_parts(tab: Any, loops: Path) -> None:
    trace = page_data(loops)[1]
    tab.locator(".scroller").nth(1).focus()
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowRight")
    told = tab.inner_text("#details").split("host: ")[1]
    assert [part.split()[0] for part in told.split(", ")] == OVERLAPPED
    launch = next(part for part in trace["steps"][1]["host"] if part["name"] == "launch")
    ms = (launch["ended_ns"] - launch["started_ns"]) / 1e6
    assert f"launch {ms:.{2 if ms < 10 else 1}f} ms" in told


def test_the_token_in_flight_at_the_end_is_pending_and_no_stall(tab: Any, loops: Path) -> None:
    kinds = [{run[0] for request in trace["requests"] for run in request["runs"]} for trace in page_data(loops)]
    assert ["pending" in seen for seen in kinds] == [False, True]
    assert not any("stall" in seen for seen in kinds)
    line = tab.locator("section").nth(1).locator("line.pending").first
    line.scroll_into_view_if_needed()
    box = line.bounding_box()
    tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + 1)
    assert "pending: a token of the step before arrives · token " in tab.inner_text("#details")


def test_the_gpu_runs_into_the_next_step(browser: Any, on_gpu: Path) -> None:
    (trace,) = page_data(on_gpu)
    for tab in opened(browser, on_gpu):
        assert tab.locator(".names div").all_inner_texts()[6:8] == ["host", "GPU"]
        assert "is computed inside" not in tab.locator("section").inner_text()
        for scale in ("step", "time"):
            tab.check(f"[name=scale][value={scale}]")
            launches, forwards = boxes(tab, 0, "host")["launch"], boxes(tab, 0, "gpu")["forward"]
            assert len(forwards) == len(trace["steps"]) - 1
            for (_, launched), (begun, ended), (_, next_launched) in zip(
                launches, forwards, launches[1:], strict=False
            ):
                assert begun == pytest.approx(launched, abs=0.02)
                assert begun < ended
                assert next_launched > begun
        tab.check("[name=scale][value=step]")
        pixels = boxes(tab, 0, "host")["schedule"][1][0]  # where step 1 begins
        assert boxes(tab, 0, "gpu")["forward"][0][1] == pytest.approx(1.5 * pixels, rel=0.01), "half of step 1"
        tab.locator(".scroller").focus()
        tab.keyboard.press("ArrowRight")
        assert "GPU: forward " in tab.inner_text("#details")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_parts_stand_out_in_both_colours(browser: Any, on_gpu: Path, scheme: str) -> None:
    for tab in opened(browser, on_gpu, color_scheme=scheme):
        assert tab.locator(".key.part").count() == len(WAITING) + 1
        count, contrast, element = tab.evaluate(FAINTEST, ["path.part", "fill"])
        assert count == len(WAITING) + 1
        assert contrast >= SHAPE_CONTRAST, element
