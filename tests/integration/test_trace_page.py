"""The page of ``infer trace`` in a real Chromium, opened as a file: cells, zoom, keys, pointer, colours and phones."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.engine.config import EngineConfig
from shared.lessons import find_lesson
from shared.sampling.params import SamplingParams
from shared.tracing.recorder import Recorder
from shared.tracing.timeline_page import page as html_page
from tests.integration.trace_pages import (
    FAINTEST,
    PHONE,
    SHAPE_CONTRAST,
    TEXT_CONTRAST,
    TWO_FRAMES,
    WIDE,
    WORK,
    opened,
    page_data,
    shapes,
    traced,
)

TEXTS = "h1, h2, p, legend, label, li, th, td, caption, summary, .names div, output, output b, button, .mark"
CHUNKED = ("--prefill-chunk-size", "8", "--max-prefill-chunks-per-step", "1", "--every", "3", "--requests", "6")


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
    yield from opened(browser, written)


def test_the_page_draws_every_run_of_cells(tab: Any, traces: list[dict[str, Any]]) -> None:
    assert tab.locator("h2").all_inner_texts() == ["static", "continuous"]
    for place, trace in enumerate(traces):
        wanted = [[r["request_id"], *run] for r in trace["requests"] for run in r["runs"]]
        drawn = shapes(tab, place)
        assert [shape[:4] for shape in drawn] == wanted
        widths = {shape[4] / (shape[3] - shape[2]) for shape in drawn}
        assert max(widths) - min(widths) < 0.02, "every step is as wide as any other"
        section = tab.locator("section").nth(place)
        ends = section.locator("path[data-end]")
        assert [ends.nth(n).get_attribute("class") for n in range(ends.count())] == ["finished"] * len(
            trace["requests"]
        )
        names = section.locator(".names div").all_inner_texts()
        assert names[-1] == f"7 · {trace['requests'][6]['num_prompt_tokens']} + {len(trace['requests'][6]['tokens'])}"
        assert names[1] == f"served · peak {max(trace['lanes'][0]['values'])} of 2"
        assert section.locator("path.lane").count() == 5


def test_by_time_a_cell_is_as_wide_as_it_took(tab: Any, traces: list[dict[str, Any]]) -> None:
    tab.check("[name=scale][value=time]")
    for place, trace in enumerate(traces):
        steps = trace["steps"]
        drawn = []
        for name, kind, first, after, width in shapes(tab, place):
            request = next(r for r in trace["requests"] if r["request_id"] == name)
            start = request["arrived_ns"] if kind == "queue" else steps[first]["started_ns"]
            drawn.append((steps[after - 1]["ended_ns"] - start, width))
        longest, widest = max(drawn)
        expected = [max(1, time * widest / longest) for time, _ in drawn]
        assert [width for _, width in drawn] == pytest.approx(expected, rel=0.02, abs=0.3)
    tab.check("[name=scale][value=step]")
    widths = [shape[4] / (shape[3] - shape[2]) for place in (0, 1) for shape in shapes(tab, place)]
    assert max(widths) - min(widths) < 0.02, "by step again, and both traces on one scale"


def test_zoom_widens_the_timeline_and_not_the_page(tab: Any) -> None:
    width = "svg => svg.getBoundingClientRect().width"
    fit = tab.locator("svg").first.evaluate(width)
    for _ in range(3):
        tab.click("[data-zoom=in]")
    assert tab.locator("svg").first.evaluate(width) == pytest.approx(16 + (fit - 16) * 1.5**3, rel=0.01)
    assert tab.evaluate(WIDE) == []
    tab.click("[data-zoom=fit]")
    assert tab.locator("svg").first.evaluate(width) == fit


def test_keys_go_through_the_cells(tab: Any, traces: list[dict[str, Any]]) -> None:
    trace = traces[1]
    request = trace["requests"][0]
    first = request["tokens"][0]
    scroller = tab.locator(".scroller").nth(1)
    details = tab.locator("#details")
    scroller.focus()
    tab.keyboard.press("ArrowRight")
    text = details.inner_text()
    assert text.startswith(f"Request 1 · prefill of {request['num_prompt_tokens']} prompt tokens · token 1 of ")
    assert f"(id {first[1]})" in text
    assert "continuous, step 0 · " in text
    assert f"prefill 1 ({request['num_prompt_tokens']} tokens)" in text
    tab.keyboard.press("ArrowRight")
    assert f"decode · token 2 of {len(request['tokens'])}" in details.inner_text()
    assert f"(id {request['tokens'][1][1]})" in details.inner_text()
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
    assert scroller.locator(".cursor").count() == 1


def test_the_pointer_tells_a_cell_and_a_lane(tab: Any, traces: list[dict[str, Any]]) -> None:
    request = next(r for r in traces[0]["requests"] if r["runs"][0][0] == "queue")
    _, first, after = request["runs"][0]
    place = tab.locator("section").nth(0).locator(f"line[data-request='{request['request_id']}']")
    place.scroll_into_view_if_needed()
    line = place.bounding_box()
    tab.mouse.move(line["x"] + line["width"] - 1, line["y"] + 1)
    assert f"Request {request['request_id']} · queue, step {after - first} of its wait" in tab.inner_text("#details")
    svg = tab.locator("section svg").nth(0).bounding_box()
    tab.mouse.move(svg["x"] + 1, svg["y"] + 30)
    lanes = [f"{lane['name']} {lane['values'][0]}" for lane in traces[0]["lanes"]]
    assert tab.inner_text("#details").startswith("static, step 0")
    assert all(lane in tab.inner_text("#details") for lane in lanes)


@pytest.mark.parametrize("width", [1400, 768, 360])
def test_no_panel_covers_content(browser: Any, eventful: Path, width: int) -> None:
    """The panel that tells a cell is a row of its own; every other element can be scrolled above it."""
    for tab in opened(browser, eventful, viewport={"width": width, "height": 800}):
        panel = tab.locator("#details").bounding_box()
        assert panel["y"] + panel["height"] == pytest.approx(800, abs=1)
        main = tab.locator("main").bounding_box()
        assert main["y"] + main["height"] <= panel["y"] + 1
        for selector in ("main > .wide", "section .slider", "summary"):
            last = tab.locator(selector).last
            last.scroll_into_view_if_needed()
            box = last.bounding_box()
            assert box["height"] > 10
            on_top = "([x, y]) => document.elementFromPoint(x, y).closest('#details') === null"
            assert tab.evaluate(on_top, [box["x"] + 5, box["y"] + box["height"] / 2])
        assert tab.evaluate(WIDE) == []


def test_a_phone_reads_and_taps_it(browser: Any, written: Path, traces: list[dict[str, Any]]) -> None:
    for tab in opened(browser, written, viewport=PHONE, has_touch=True, is_mobile=True):
        tab.evaluate("document.querySelectorAll('details').forEach(details => { details.open = true })")
        assert tab.evaluate(WIDE) == []
        assert tab.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        prefill = tab.locator("section").nth(1).locator("rect.prefill").first
        prefill.scroll_into_view_if_needed()
        box = prefill.bounding_box()
        assert box["width"] >= 3
        tab.touchscreen.tap(box["x"] + 1, box["y"] + box["height"] / 2)
        assert tab.inner_text("#details").startswith("Request 1 · prefill")


@pytest.fixture(scope="module")
def eventful(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with every kind of cell and every end: stalls, a failure, an abort."""
    config = EngineConfig(model=model, max_seq_len=64, seed=0, max_batch_size=3, scheduler_policy="prefill_first")
    engine = find_lesson("05").engine(config)
    forward = engine.model.forward

    def failing(tokens: Any, kv: Any) -> Any:
        if 400 in tokens.ids.tolist():
            raise RuntimeError("injected")
        return forward(tokens, kv)

    engine.model.forward = failing
    recorder = Recorder(engine)
    params = SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True)
    for name, prompt in (("good", [1, 2]), ("bad", [400]), ("unwanted", [3]), ("late", [4])):
        recorder.add_request(prompt, params, name)
        recorder.step()
    recorder.abort("unwanted")
    while engine.has_work():
        recorder.step()
    path = tmp_path_factory.mktemp("eventful") / "trace.html"
    path.write_text(html_page([recorder.trace("eventful")], "infer trace"), encoding="utf-8")
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_and_shapes_stand_out_in_both_colours(browser: Any, eventful: Path, scheme: str) -> None:
    for tab in opened(browser, eventful, color_scheme=scheme):
        tab.locator("summary").click()
        tab.locator(".scroller").focus()
        tab.keyboard.press("ArrowRight")
        background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        for _ in range(2):
            for selector, property, least in (
                (TEXTS, "color", TEXT_CONTRAST),
                (".timeline svg text", "fill", TEXT_CONTRAST),
                ("rect.prefill, rect.decode, rect.failed, .lane, path.finished, path.aborted", "fill", SHAPE_CONTRAST),
                ("line.queue, line.stall, path.failed", "stroke", SHAPE_CONTRAST),
            ):
                count, contrast, element = tab.evaluate(FAINTEST, [selector, property])
                assert count >= 3
                assert contrast >= least, (selector, element)
            tab.click("#theme")  # the other colours, whatever the system's are
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == background


def test_what_went_wrong_is_marked_and_told(browser: Any, eventful: Path) -> None:
    for tab in opened(browser, eventful):
        ends = tab.locator("path[data-end]")
        assert [(ends.nth(n).get_attribute("data-end"), ends.nth(n).get_attribute("class")) for n in range(4)] == [
            ("good", "finished"),
            ("bad", "failed"),
            ("unwanted", "aborted"),
            ("late", "finished"),
        ]
        kinds = {shape[1] for shape in shapes(tab, 0)}
        assert {"prefill", "decode", "stall", "failed"} <= kinds
        tab.locator("rect.failed").scroll_into_view_if_needed()
        box = tab.locator("rect.failed").bounding_box()
        tab.mouse.move(box["x"] + 3, box["y"] + 3)
        assert "Request bad · The engine could not compute this request (RuntimeError)" in tab.inner_text("#details")
        assert "failed bad" in tab.inner_text("#details")
        box = tab.locator("path[data-end=unwanted]").bounding_box()
        tab.mouse.move(box["x"] + 4, box["y"] + 4)
        assert tab.inner_text("#details").startswith("Request unwanted · aborted before this step")


def test_a_chunked_step_is_drawn_and_told(browser: Any, model: str, tmp_path: Path) -> None:
    traced("--model", model, "--phase", "07", *CHUNKED, "--max-seq-len", "128", "--out", tmp_path)
    (trace,) = page_data(tmp_path / "trace.html")
    step = trace["focus"]["step"]
    ((name, count),) = trace["steps"][step]["prefilled"]
    decoded, request = trace["steps"][step]["decoded"], trace["requests"][int(name) - 1]
    (place,) = [n for n, (at, _, _) in enumerate(request["chunks"]) if at == step]
    first, total = request["chunks"][place][1], request["num_prompt_tokens"]
    assert [[start, size] for _, start, size in request["chunks"]] == [
        [start, min(8, total - start)] for start in range(0, total, 8)
    ]
    chunk = f"tokens {first} to {first + count - 1} of {total}"
    for tab in opened(browser, tmp_path / "trace.html"):
        assert f"computes a chunk, tokens {first} to " in tab.locator("section .caption").first.inner_text()
        told = tab.locator(".step-tokens span").all_inner_texts()
        assert told == [f"decode {', '.join(decoded)}: 1 token each", f"prompt of {name}: {chunk}"]
        tracks = tab.locator(".track")
        assert tracks.first.locator("i.decode").count() == len(decoded) >= 2
        parts = tracks.last.evaluate("track => [...track.children].map(part => [part.className, +part.style.flexGrow])")
        before, left = [["before", 8]] * place, total - first - count
        assert parts == [*before, ["now", count], *([["left", left]] if left else [])]
        widths = tracks.last.evaluate("track => [...track.children].map(part => part.getBoundingClientRect().width)")
        assert widths[0] / widths[place] == pytest.approx(8 / count, rel=0.1)
        # A cut in the timeline between two chunks of a prompt; the pointer tells the chunk below it.
        prompts = [len(one["chunks"]) for one in trace["requests"]]
        assert tab.locator("path.chunk").count() == sum(number - 1 for number in prompts)
        tab.locator("section input[type=range]").fill(str(step))
        assert f"prefill {name} ({chunk}) · decode {', '.join(decoded)}" in tab.inner_text("#details")
        tab.locator(".scroller").focus()
        for _ in range(int(name)):
            tab.keyboard.press("ArrowDown")
        assert tab.inner_text("#details").startswith(f"Request {name} · prefill of {chunk}")
        for selector, property in ((".step-tokens span, .step-tokens b", "color"), (".track i.now", "backgroundColor")):
            assert tab.evaluate(FAINTEST, [selector, property])[1] >= (TEXT_CONTRAST if property == "color" else 1)
        tab.set_viewport_size(PHONE)
        tab.evaluate(TWO_FRAMES)
        assert tab.evaluate(WIDE) == []


def test_the_drafts_of_a_step_are_drawn_and_told(browser: Any, model: str, tmp_path: Path) -> None:
    speculating = ("--speculative-decoding", "--drafter", "ngram", "--no-adapt-spec-length", "--spec-length", "3")
    traced("--model", model, "--phase", "11", *speculating, "--max-seq-len", "128", "-n", "40", "--out", tmp_path)
    (trace,) = page_data(tmp_path / "trace.html")
    record = trace["steps"][trace["focus"]["step"]]
    verified = {name: (accepted, rejected) for name, accepted, rejected in record["verified"]}
    drafts = {name: f"{accepted} of {accepted + rejected} draft" for name, (accepted, rejected) in verified.items()}
    drafts = {name: f"{text}{'' if sum(verified[name]) == 1 else 's'} accepted" for name, text in drafts.items()}
    assert drafts
    for tab in opened(browser, tmp_path / "trace.html"):
        told = tab.locator(".step-tokens span").all_inner_texts()
        tracks = {text: tab.locator(".track").nth(n) for n, text in enumerate(told)}
        for name, (accepted, rejected) in verified.items():
            track = tracks[f"decode {name}: {drafts[name]}"]
            assert track.locator("i.decode").count() == 1 + accepted
            assert track.locator("i.rejected").count() == rejected
        tab.locator("section input[type=range]").fill(str(trace["focus"]["step"]))
        decoded = ", ".join(f"{name}: {drafts[name]}" if name in drafts else name for name in record["decoded"])
        assert f"decode {decoded} ·" in tab.inner_text("#details")
        tab.locator(".scroller").focus()
        name = next(iter(verified))
        for _ in range(int(name)):
            tab.keyboard.press("ArrowDown")
        assert tab.inner_text("#details").startswith(f"Request {name} · decode · {drafts[name]}")
        assert tab.inner_text("#details").split("\n")[0].count(" is “") == 1 + verified[name][0], "tokens of the step"


def test_the_grammar_of_a_step_is_drawn_and_told(browser: Any, model: str, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"enum": ["a", "bc"]}, "minItems": 2, "maxItems": 4}')
    traced("--model", model, "--requests", "3", "--json-schema", schema, "--out", tmp_path)
    (trace,) = page_data(tmp_path / "trace.html")
    step = trace["focus"]["step"]
    drawn = {
        request["request_id"]: (text, position)
        for request in trace["requests"]
        for at, _, text, position in request["tokens"]
        if at == step
    }
    assert '["' in [stack for _, (_, stack, _) in drawn.values()]
    for tab in opened(browser, tmp_path / "trace.html"):
        assert "of its grammar, from " in tab.locator("section .caption").first.inner_text()
        told = tab.locator(".step-tokens span").all_inner_texts()
        tab.locator("section input[type=range]").fill(str(step))
        tab.locator(".scroller").focus()
        for name, (text, (state, stack, number)) in drawn.items():
            opened_frames = f"{len(stack)} open ({stack})" if stack else "nothing open"
            place = f"in state {state}, {opened_frames}, from {number} allowed token{'' if number == 1 else 's'}"
            row = told.index(f"grammar of {name}: “{text}” {place}")
            assert "".join(tab.locator(".track").nth(row).locator("i.frame").all_inner_texts()) == stack
            while not tab.inner_text("#details").startswith(f"Request {name} "):
                tab.keyboard.press("ArrowDown")
            assert f"drawn {place}" in tab.inner_text("#details")
        assert tab.evaluate(FAINTEST, [".track i.frame", "color"])[1] >= TEXT_CONTRAST
        tab.set_viewport_size(PHONE)
        tab.evaluate(TWO_FRAMES)
        assert tab.evaluate(WIDE) == []


def test_what_heads_keep_is_drawn_and_told(browser: Any, model: str, tmp_path: Path) -> None:
    bounds = ("--layer-budget", "37", "--layer-upper-budget", "48", "--p-attn", "0.35", "--query-window-size", "8")
    about = ("--compress-method", "snapkv", *bounds, "--steps-between-compressions", "8", "--block-size", "2")
    traced("--model", model, "--phase", "09.2", *about, "--requests", "3", "-n", "60", "--out", tmp_path)
    (trace,) = page_data(tmp_path / "trace.html")
    step = trace["focus"]["step"]
    (first, *_) = trace["steps"][step]["compressed"]
    for tab in opened(browser, tmp_path / "trace.html"):
        grid = tab.locator(".kept figure").first
        assert re.match(rf"request {first[0]}: of {first[1]}, heads keep \d+ \(pale\) to \d+", grid.inner_text())
        kept = grid.evaluate("figure => [...figure.querySelectorAll('rect')].map(cell => +cell.dataset.kept)")
        assert kept == [count for heads in first[2] for count in heads]
        opacity = grid.locator("rect").evaluate_all("cells => cells.map(cell => +cell.getAttribute('fill-opacity'))")
        assert opacity == pytest.approx([count / max(kept) for count in kept], abs=0.01)
        tab.locator("section input[type=range]").fill(str(step - 1))
        assert "no request is compressed" in tab.inner_text(".kept")
        tab.locator("section input[type=range]").fill(str(len(trace["steps"]) - 1))
        last = {one[0]: one for each in trace["steps"] for one in each["compressed"]}
        ended = {name for each in trace["steps"][:-1] for name in (*each["finished"], *each["failed"])}
        told = [f"request {name}: of {one[1]}," for name, one in last.items() if name not in ended]
        assert told
        captions = tab.locator(".kept figcaption").all_inner_texts()
        assert sorted(caption.partition(", ")[0] + "," for caption in captions) == sorted(told)
        assert tab.evaluate(FAINTEST, [".kept figcaption, .kept b", "color"])[1] >= TEXT_CONTRAST
        tab.set_viewport_size(PHONE)
        tab.evaluate(TWO_FRAMES)
        assert tab.evaluate(WIDE) == []


def test_without_its_script_the_page_has_the_tables(browser: Any, written: Path) -> None:
    for tab in opened(browser, written, java_script_enabled=False):
        assert tab.locator("noscript p").is_visible()
        tab.locator("summary").nth(1).click()
        assert tab.locator("details").nth(1).locator("tbody tr").nth(6).is_visible()
