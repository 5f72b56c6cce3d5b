"""The page of ``infer trace`` in a real Chromium, opened as a file: cells, keys, pointer, lanes, memory."""

import itertools
import re
from collections import Counter
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
from shared.tracing.trace import Span, Trace
from tests.integration.tabs import opened
from tests.integration.trace_pages import WORK, cached_after, held_after, page_data, traced

CHUNKED = ("--prefill-chunk-size", "8", "--max-prefill-chunks-per-step", "1", "--every", "3", "--requests", "6")
SPECULATING = ("--speculative-decoding", "--drafter", "ngram", "--no-adapt-spec-length", "--spec-length", "3")
CROWDED = ("--num-gpu-blocks", "8", "--block-size", "4", "--max-seq-len", "32", "--requests", "6", "--max-tokens", "20")
WAITING = ["schedule", "batch", "launch", "sample", "wait", "commit"]
OVERLAPPED = ["schedule", "batch", "launch", "wait", "commit", "sample"]
# Of a section: request, kind, first step, step after the last and width of every cell or run of cells.
SHAPES = """section => [...section.querySelectorAll('[data-request]')].map(shape => {
    const { request, first, after } = shape.dataset;
    return [request, shape.getAttribute('class'), +first, +after, shape.getBBox().width];
})"""
# Of each part of a lane: its name, and the left and right end of each of its boxes.
BOXES = """(section, lane) => Object.fromEntries([...section.querySelectorAll(`path[data-lane=${lane}]`)].map(path => [
    path.dataset.part,
    [...path.getAttribute('d').matchAll(/M([\\d.]+) [\\d.]+H([\\d.]+)V/g)].map(([, left, right]) => [+left, +right]),
]))"""
# Of a section: how many squares each request holds in the picture of the memory, counted from its outline.
OWNERS = """section => Object.fromEntries([...section.querySelectorAll('g[data-holder]')].map(holder => [
    holder.dataset.holder, holder.querySelector('.pool-edge').getAttribute('d').split('M').length - 1]))"""
OUTLINED = "kind => document.querySelector(`g.${kind} .pool-edge`)?.getAttribute('d').split('M').length - 1 || 0"


@pytest.fixture(scope="module")
def written(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run under two schedulers."""
    folder = tmp_path_factory.mktemp("traced")
    traced("--model", model, *WORK, "--compare", "static,continuous", "--out", folder)
    return folder / "trace.html"


@pytest.fixture(scope="module")
def traces(written: Path) -> list[dict[str, Any]]:
    """The data of the page."""
    return page_data(written)


@pytest.fixture
def tab(browser: Any, written: Path) -> Iterator[Any]:
    with opened(browser, written.as_uri()) as tab:
        yield tab


def write(trace: Trace, folder: Path) -> Path:
    path = folder / "trace.html"
    path.write_text(html_page([trace], "infer trace"), encoding="utf-8")
    return path


def point_at(tab: Any, selector: str) -> None:
    tab.locator(selector).first.scroll_into_view_if_needed()
    box = tab.locator(selector).first.bounding_box()
    tab.mouse.move(box["x"] + min(4, box["width"] / 2), box["y"] + min(4, box["height"] / 2))


def turn_to(section: Any, step: int) -> None:
    section.locator("input[type=range]").fill(str(step))


def choose(tab: Any, row: int) -> str:
    """What the page says of a request that is selected by keys, at the step to which the slider was turned."""
    tab.locator(".scroller").focus()
    for _ in range(row + 1):
        tab.keyboard.press("ArrowDown")
    return tab.inner_text("#details")


def test_the_page_draws_every_run_of_cells(tab: Any, traces: list[dict[str, Any]]) -> None:
    assert tab.locator("h2").all_inner_texts() == ["static", "continuous"]
    for section, trace in zip(tab.locator("section").all(), traces, strict=True):
        wanted = [[r["request_id"], *run] for r in trace["requests"] for run in r["runs"]]
        assert [shape[:4] for shape in section.evaluate(SHAPES)] == wanted
        ends = [end.get_attribute("class") for end in section.locator("path[data-end]").all()]
        assert ends == ["finished"] * len(trace["requests"])
        assert section.locator("path.lane").count() == len(trace["lanes"])


def test_by_time_a_cell_is_as_wide_as_it_took_and_zoom_widens_all(tab: Any, traces: list[dict[str, Any]]) -> None:
    sections = tab.locator("section").all()
    tab.check("[name=scale][value=time]")
    for section, trace in zip(sections, traces, strict=True):
        steps, arrived = trace["steps"], {r["request_id"]: r["arrived_ns"] for r in trace["requests"]}
        drawn = []
        for name, kind, first, after, width in section.evaluate(SHAPES):
            start = arrived[name] if kind == "queue" else steps[first]["started_ns"]
            drawn.append((steps[after - 1]["ended_ns"] - start, width))
        longest, widest = max(drawn)
        expected = [max(1, time * widest / longest) for time, _ in drawn]
        assert [width for _, width in drawn] == pytest.approx(expected, rel=0.02, abs=0.3)
    tab.check("[name=scale][value=step]")

    def width_of_a_step() -> float:
        widths = [shape[4] / (shape[3] - shape[2]) for section in sections for shape in section.evaluate(SHAPES)]
        assert max(widths) - min(widths) < 0.02, "every step of both traces is as wide as any other"
        return widths[0]

    fit = width_of_a_step()
    for _ in range(3):
        tab.click("[data-zoom=in]")
    assert width_of_a_step() == pytest.approx(fit * 1.5**3, rel=0.01)
    tab.click("[data-zoom=fit]")
    assert width_of_a_step() == pytest.approx(fit)


def test_keys_go_through_the_cells(tab: Any, traces: list[dict[str, Any]]) -> None:
    trace = traces[1]
    request = trace["requests"][0]
    scroller = tab.locator(".scroller").nth(1)
    details = tab.locator("#details")
    scroller.focus()
    tab.keyboard.press("ArrowRight")
    text = details.inner_text()
    assert text.startswith(f"Request 1 · prefill of {request['num_prompt_tokens']} prompt tokens · token 1 of ")
    assert f"(id {request['tokens'][0][1]})" in text
    assert "continuous, step 0 · " in text
    tab.keyboard.press("ArrowRight")
    assert f"decode · token 2 of {len(request['tokens'])}" in details.inner_text()
    tab.keyboard.press("End")
    assert f"step {len(trace['steps']) - 1} ·" in details.inner_text()
    assert details.inner_text().startswith("Request 1 · finished before this step")
    tab.keyboard.press("Home")
    for _ in range(9):
        tab.keyboard.press("ArrowDown")
    assert details.inner_text().startswith("Request 7 · not yet arrived")
    for _ in range(9):
        tab.keyboard.press("ArrowUp")
    assert details.inner_text().startswith("continuous, step 0"), "above the requests there is the step alone"


def test_the_pointer_tells_a_cell_and_a_lane(tab: Any, traces: list[dict[str, Any]]) -> None:
    request = next(r for r in traces[0]["requests"] if r["runs"][0][0] == "queue")
    _, first, after = request["runs"][0]
    queue = tab.locator("section").nth(0).locator(f"line[data-request='{request['request_id']}']")
    queue.scroll_into_view_if_needed()
    line = queue.bounding_box()
    tab.mouse.move(line["x"] + line["width"] - 1, line["y"] + 1)
    assert f"Request {request['request_id']} · queue, step {after - first} of its wait" in tab.inner_text("#details")
    svg = tab.locator("section svg").nth(0).bounding_box()
    tab.mouse.move(svg["x"] + 1, svg["y"] + 30)
    assert tab.inner_text("#details").startswith("static, step 0")
    assert all(f"{lane['name']} {lane['values'][0]}" in tab.inner_text("#details") for lane in traces[0]["lanes"])


def test_without_its_script_the_page_has_the_tables(browser: Any, written: Path) -> None:
    with opened(browser, written.as_uri(), java_script_enabled=False) as tab:
        assert tab.locator("noscript p").is_visible()
        tab.locator("summary").nth(1).click()
        assert tab.locator("details").nth(1).locator("tbody tr").nth(6).is_visible()


@pytest.mark.failing_forwards
def test_what_went_wrong_is_marked_and_told(browser: Any, model: str, tmp_path: Path) -> None:
    config = EngineConfig(model=model, max_seq_len=64, seed=0, max_batch_size=3, scheduler_policy="prefill_first")
    engine = find_lesson("05").engine(config)
    forward = engine.model.forward

    def failing(tokens: Any, *memory: Any) -> Any:
        if 400 in tokens.ids.tolist():
            raise RuntimeError("injected")
        return forward(tokens, *memory)

    engine.model.forward = failing
    recorder = Recorder(engine)
    params = SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True)
    for name, prompt in (("good", [1, 2]), ("bad", [400]), ("unwanted", [3]), ("late", [4])):
        recorder.add_request(prompt, params, name)
        recorder.step()
    recorder.abort("unwanted")
    while engine.has_work():
        recorder.step()
    with opened(browser, write(recorder.trace("eventful"), tmp_path).as_uri()) as tab:
        ends = tab.locator("path[data-end]").all()
        assert [(end.get_attribute("data-end"), end.get_attribute("class")) for end in ends] == [
            ("good", "finished"),
            ("bad", "failed"),
            ("unwanted", "aborted"),
            ("late", "finished"),
        ]
        kinds = {shape[1] for shape in tab.locator("section").evaluate(SHAPES)}
        assert {"prefill", "decode", "stall", "failed"} <= kinds
        point_at(tab, "rect.failed")
        assert "Request bad · The engine could not compute this request (RuntimeError)" in tab.inner_text("#details")
        point_at(tab, "path[data-end=unwanted]")
        assert tab.inner_text("#details").startswith("Request unwanted · aborted before this step")


def test_a_chunked_step_is_drawn_and_told(browser: Any, model: str, tmp_path: Path) -> None:
    traced("--model", model, "--phase", "07", *CHUNKED, "--max-seq-len", "128", "--out", tmp_path)
    (trace,) = page_data(tmp_path / "trace.html")
    step = trace["focus"]["step"]
    ((name, count),) = trace["steps"][step]["prefilled"]
    decoded, request = trace["steps"][step]["decoded"], trace["requests"][int(name) - 1]
    ((first, _),) = [chunk for at, *chunk in request["chunks"] if at == step]
    total = request["num_prompt_tokens"]
    chunk = f"tokens {first} to {first + count - 1} of {total}"
    with opened(browser, (tmp_path / "trace.html").as_uri()) as tab:
        # A cut in the timeline between two chunks of a prompt; the keys tell the chunk.
        assert tab.locator("path.chunk").count() == sum(len(one["chunks"]) - 1 for one in trace["requests"])
        turn_to(tab, step)
        assert f"prefill {name} ({chunk}) · decode {', '.join(decoded)}" in tab.inner_text("#details")
        assert choose(tab, int(name) - 1).startswith(f"Request {name} · prefill of {chunk}")


def test_the_drafts_of_a_step_are_told(browser: Any, model: str, tmp_path: Path) -> None:
    traced("--model", model, "--phase", "11", *SPECULATING, "--max-seq-len", "128", "-n", "40", "--out", tmp_path)
    (trace,) = page_data(tmp_path / "trace.html")
    record = trace["steps"][trace["focus"]["step"]]
    verified = {name: (accepted, rejected) for name, accepted, rejected in record["verified"]}
    assert verified
    drafts = {
        name: f"{accepted} of {accepted + rejected} draft{'' if accepted + rejected == 1 else 's'} accepted"
        for name, (accepted, rejected) in verified.items()
    }
    with opened(browser, (tmp_path / "trace.html").as_uri()) as tab:
        turn_to(tab, trace["focus"]["step"])
        decoded = ", ".join(f"{name}: {drafts[name]}" if name in drafts else name for name in record["decoded"])
        assert f"decode {decoded} ·" in tab.inner_text("#details")
        name = next(iter(verified))
        details = choose(tab, int(name) - 1)
        assert details.startswith(f"Request {name} · decode · {drafts[name]}")
        assert details.split("\n")[0].count(" is “") == 1 + verified[name][0], "tokens of the step"


def test_the_grammar_of_a_step_is_told(browser: Any, model: str, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"enum": ["a", "bc"]}, "minItems": 2, "maxItems": 4}')
    traced("--model", model, "--requests", "3", "--json-schema", schema, "--out", tmp_path)
    (trace,) = page_data(tmp_path / "trace.html")
    step = trace["focus"]["step"]
    sampled = {
        request["request_id"]: position
        for request in trace["requests"]
        for at, _, _, position in request["tokens"]
        if at == step
    }
    assert '["' in [stack for _, stack, _ in sampled.values()]
    with opened(browser, (tmp_path / "trace.html").as_uri()) as tab:
        turn_to(tab, step)
        tab.locator(".scroller").focus()
        for name, (state, stack, number) in sampled.items():
            opened_frames = f"{len(stack)} open ({stack})" if stack else "nothing open"
            place = f"in state {state}, {opened_frames}, from {number} allowed token{'' if number == 1 else 's'}"
            while not tab.inner_text("#details").startswith(f"Request {name} "):
                tab.keyboard.press("ArrowDown")
            assert f"sampled {place}" in tab.inner_text("#details")


def test_the_host_has_a_lane_with_the_parts_of_each_loop(browser: Any, model: str, tmp_path: Path) -> None:
    traced("--model", model, "--compare", "waiting,overlapped", "--requests", "3", "--out", tmp_path)
    data = page_data(tmp_path / "trace.html")
    with opened(browser, (tmp_path / "trace.html").as_uri()) as tab:
        sections = tab.locator("section").all()
        for section, trace, order in zip(sections, data, (WAITING, OVERLAPPED), strict=True):
            assert [part["name"] for part in trace["steps"][3]["host"]] == order
            drawn = section.evaluate(BOXES, "host")
            counts = Counter(part["name"] for step in trace["steps"] for part in step["host"])
            assert {name: len(parts) for name, parts in drawn.items()} == counts
            flat = sorted(box for parts in drawn.values() for box in parts)
            assert all(after[0] >= before[1] - 0.02 for before, after in itertools.pairwise(flat)), "none overlap"
        sections[1].locator(".scroller").focus()
        tab.keyboard.press("ArrowRight")
        tab.keyboard.press("ArrowRight")
        parts = tab.inner_text("#details").split("host: ")[1].split(", ")
        assert [part.split()[0] for part in parts] == OVERLAPPED
        # The token in flight at the end is pending and no stall.
        kinds = [{run[0] for request in trace["requests"] for run in request["runs"]} for trace in data]
        assert ["pending" in seen for seen in kinds] == [False, True]
        assert not any("stall" in seen for seen in kinds)
        point_at(tab, "section:nth-of-type(2) line.pending")
        assert "pending: the token that the step before sampled arrives · token " in tab.inner_text("#details")


def test_the_gpu_has_a_lane_and_runs_into_the_next_step(browser: Any, model: str, tmp_path: Path) -> None:
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
    path = write(replace(trace, steps=(*steps, trace.steps[-1])), tmp_path)
    with opened(browser, path.as_uri()) as tab:
        section = tab.locator("section")
        assert tab.locator(".names div").all_inner_texts()[6:8] == ["host", "GPU"]
        for scale in ("time", "step"):
            tab.check(f"[name=scale][value={scale}]")
            host, gpu = section.evaluate(BOXES, "host"), section.evaluate(BOXES, "gpu")
            assert len(gpu["forward"]) == len(trace.steps) - 1
            for (_, launched), (begun, ended), (_, next_launched) in zip(
                host["launch"], gpu["forward"], host["launch"][1:], strict=False
            ):
                assert begun == pytest.approx(launched, abs=0.02)
                assert begun < ended
                assert next_launched > begun
        width = host["schedule"][1][0]  # where step 1 begins
        assert gpu["forward"][0][1] == pytest.approx(1.5 * width, rel=0.01), "half of step 1"


def test_the_memory_after_each_step_is_drawn_and_told(browser: Any, model: str, tmp_path: Path) -> None:
    """Few blocks, so that requests are preempted, and the same requests on regions of equal bytes."""
    told = traced("--model", model, *CROWDED, "--compare", "contiguous,paged", "--out", tmp_path)
    regions, trace = page_data(tmp_path / "trace.html")
    rows = {line[0]: line[1:] for line in (re.split(r"  +", line.strip()) for line in told.splitlines())}
    name, step = next((step["preempted"][0], step["step"]) for step in trace["steps"] if step["preempted"])
    num_preempted = sum(len(step["preempted"]) for step in trace["steps"])
    assert (rows["preemptions"], rows["most requests in a step"][0]) == (["0", str(num_preempted)], "1")
    sizes = [each["settings"]["KV cache"].partition(", ") for each in (regions, trace)]
    assert [size[0] for size in sizes] == ["1 region of 32 tokens", "8 blocks of 4 tokens"]
    assert sizes[0][2] == sizes[1][2], "equal bytes"
    with opened(browser, (tmp_path / "trace.html").as_uri()) as tab:
        section = tab.locator("section").nth(1)
        slider = section.locator("input[type=range]")
        assert slider.input_value() == str(step), "it begins where something happens"
        holders = held_after(regions, regions["focus"]["step"])
        assert tab.locator("section").nth(0).evaluate(OWNERS) == dict.fromkeys(holders, 1)

        for index in range(0, len(trace["steps"]), 3):
            turn_to(section, index)
            tables = held_after(trace, index)
            assert section.evaluate(OWNERS) == {name: len(blocks) for name, blocks in tables.items()}
            blocks = [block for table in tables.values() for block in table]
            assert len(set(blocks)) == len(blocks) == trace["lanes"][4]["values"][index]
            assert section.locator(".pool-figures dd").first.inner_text() == f"{len(blocks)} of 8"

        assert section.locator("path[data-preempted]").count() == num_preempted
        turn_to(section, step)
        gone = section.locator(f".pool-list li[data-holder='{name}']")
        assert gone.get_attribute("data-state") == "preempted"
        runs = next(request["runs"] for request in trace["requests"] if request["request_id"] == name)
        turn_to(section, next(first for kind, first, _ in runs if kind == "recompute"))
        holder = section.locator(f".pool-holder[data-holder='{name}']")
        assert holder.get_attribute("data-state") == "recompute"
        point_at(tab, f"section:nth-of-type(2) rect.recompute[data-request='{name}']")
        again = rf"^Request {name} · recompute of \d+ tokens: the prompt and the answer so far"
        assert re.search(again, tab.inner_text("#details"))

        tab.locator(".scroller").nth(1).focus()
        tab.keyboard.press("Home")
        assert slider.input_value() == "0", "the cursor of the timeline moves it too"
        point_at(tab, "section:nth-of-type(2) .pool-frame")
        name = next(iter(held_after(trace, 0)))
        square = rf"Block 0: request {name}, entry 0 of its block table, tokens 0 to 3; 4 of 4 written\."
        assert re.match(square, section.locator(".pool-told").inner_text())


def test_shared_and_cached_blocks_are_drawn_and_told(browser: Any, model: str, tmp_path: Path) -> None:
    """Five prompts that begin with the same 20 tokens, in blocks of 4."""
    sizes = ("--block-size", "4", "--num-gpu-blocks", "64", "--max-seq-len", "64", "--max-batch-size", "3")
    options = ("--requests", "5", "--shared-prefix", "20", "--max-tokens", "8", *sizes)
    traced("--model", model, *options, "--out", tmp_path)
    (trace,) = page_data(tmp_path / "trace.html")
    with opened(browser, (tmp_path / "trace.html").as_uri()) as tab:
        section = tab.locator("section")
        num_users = []
        for step in range(len(trace["steps"])):
            turn_to(tab, step)
            tables, cached = held_after(trace, step), cached_after(trace, step)
            users = Counter(block for table in tables.values() for block in table)
            shared = [block for block, count in users.items() if count > 1]
            assert [tab.evaluate(OUTLINED, kind) for kind in ("shared", "cached")] == [len(shared), len(cached)]
            own = {name: sum(block not in shared for block in table) for name, table in tables.items()}
            assert section.evaluate(OWNERS) == {name: count for name, count in own.items() if count}
            num_users += [users[block] for block in shared]
        assert max(num_users) == 3
        assert len(cached) > 5, "at the end all is cached"

        turn_to(tab, 1)
        point_at(tab, "rect.prefill[data-request='2']")
        assert " · 20 prompt tokens came from the cache" in tab.inner_text("#details")
