"""``infer trace``, once as a process of its own, and its page in a real Chromium, opened as a file.

The browser is not let onto the network, and any request but the one for the page fails the test. Where there is no
Chromium the tests of the page say so.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shared.cli import app
from shared.engine.config import EngineConfig
from shared.lessons import find_lesson
from shared.sampling.params import SamplingParams
from shared.tracing.recorder import Recorder
from shared.tracing.timeline_page import page as html_page
from tests.integration.infer_process import INFER

ROOT = Path(__file__).parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync --host-resolver-rules='MAP * ~NOTFOUND'"
)
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
TEXT_CONTRAST, SHAPE_CONTRAST = 4.5, 3.0
"""What WCAG 2.2 asks at level AA of text, and of shapes that carry meaning."""
WORK = ("--requests", "7", "--max-tokens", "24", "--max-batch-size", "2", "--rate", "0.5", "--seed", "4")
DATA = "() => JSON.parse(document.getElementById('data').textContent).traces"
WIDE = """() => [...document.querySelectorAll('body *')]
    .filter(element => element.getBoundingClientRect().right > innerWidth + 1
        && !element.closest('.scroller > *, .wide > *'))
    .map(element => element.outerHTML.slice(0, 100))"""
# The lowest contrast of the elements with what is painted behind them, by a property that has their colour.
FAINTEST = """([selector, property]) => {
    const channels = color => color.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => [r, g, b].map(value => value / 255)
        .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
        .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
    const behind = element => {
        const painted = channels(getComputedStyle(element).backgroundColor);
        return painted.length === 4 && painted[3] === 0 ? behind(element.parentElement) : painted;
    };
    const found = [...document.querySelectorAll(selector)].map(element => {
        const own = light(channels(getComputedStyle(element)[property]));
        const other = light(behind(element.closest('svg') ?? element));
        return [(Math.max(own, other) + 0.05) / (Math.min(own, other) + 0.05), element.outerHTML.slice(0, 80)];
    });
    return [found.length, ...found.reduce((least, one) => one[0] < least[0] ? one : least, [21, 'nothing'])];
}"""
# Of the ink on a colour of the palette.
ON_COLOUR = """colour => {
    const probe = document.querySelector('.pool').appendChild(document.createElement('i'));
    probe.className = `pool-swatch colour-${colour}`;
    const style = getComputedStyle(probe);
    const light = color => color.match(/[\\d.]+/g).slice(0, 3).map(value => value / 255)
        .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
        .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
    const [own, other] = [light(style.color), light(style.backgroundColor)];
    probe.remove();
    return (Math.max(own, other) + 0.05) / (Math.min(own, other) + 0.05);
}"""
TWO_FRAMES = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 50))))"
TEXTS = "h1, h2, p, legend, label, li, th, td, caption, summary, .names div, output, output b, button, .mark"


def traced(*arguments: str | Path) -> str:
    """What ``infer trace`` prints, run in this process."""
    result = CliRunner().invoke(app, ["trace", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def model(tiny_checkpoints: dict[str, Path]) -> str:
    return str(tiny_checkpoints["llama"])


@pytest.fixture(scope="module")
def written(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the two files of a run under two schedulers."""
    folder = tmp_path_factory.mktemp("traced")
    command = [*INFER, "trace", "--model", model, *WORK, "--compare", "static,continuous", "--out", "a/b"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (folder / "told.txt").write_text(done.stdout)
    return folder


@pytest.fixture(scope="module")
def traces(written: Path) -> list[dict[str, Any]]:
    """The data of the page."""
    return page_data(written / "a/b/trace.html")


def page_data(path: Path) -> list[dict[str, Any]]:
    (data,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', path.read_text(), re.DOTALL)
    return json.loads(data)["traces"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        pytest.skip("there is no Chromium here; on Debian: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="the browser is driven by the package playwright")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=executable, args=shlex.split(FLAGS))
        yield running
        running.close()


def opened(browser: Any, path: Path, **settings: Any) -> Iterator[Any]:
    """The page in a window of its own; complaints of the browser and requests for anything else fail the test."""
    context = browser.new_context(**{"viewport": DESKTOP, "color_scheme": "light", **settings})
    tab = context.new_page()
    complaints: list[str] = []
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("request", lambda r: complaints.append(r.url) if not r.url.startswith((path.as_uri(), "data:")) else None)
    tab.goto(path.as_uri())
    yield tab
    context.close()
    assert complaints == []


@pytest.fixture
def tab(browser: Any, written: Path) -> Iterator[Any]:
    yield from opened(browser, written / "a/b/trace.html")


def shapes(tab: Any, place: int) -> list[list[Any]]:
    """Request, kind, first step, step after the last and width of every cell or run of cells in a timeline."""
    return (
        tab.locator("section")
        .nth(place)
        .evaluate("""section => [...section.querySelectorAll('[data-request]')]
        .map(shape => [shape.dataset.request, shape.getAttribute('class'), +shape.dataset.first, +shape.dataset.after,
                       shape.getBBox().width])""")
    )


def test_what_the_command_says(written: Path, traces: list[dict[str, Any]]) -> None:
    told = (written / "told.txt").read_text()
    assert re.search(r"static +continuous", told)
    for trace, column in zip(traces, (1, 2), strict=True):
        assert trace["settings"]["batching mode"] == trace["title"]
        busy = [s for s in trace["steps"] if s["num_running"] or s["num_waiting"] or s["prefilled"] or s["decoded"]]
        served = sum(len(step["prefilled"]) + len(step["decoded"]) for step in busy)
        rows = [re.split(r"  +", line.strip()) for line in told.splitlines()]
        assert [row[column] for row in rows if row[0] == "batch utilisation"] == [f"{served / (2 * len(busy)):.1%}"]
    assert told.splitlines()[-2:] == ["wrote a/b/trace.html", "wrote a/b/trace.json"]
    assert str(ROOT) not in (written / "a/b/trace.html").read_text()


def test_both_schedulers_had_the_same_requests_and_gave_the_same_answers(traces: list[dict[str, Any]]) -> None:
    static, continuous = (
        [
            (r["request_id"], r["arrival_step"], r["num_prompt_tokens"], [token[1:] for token in r["tokens"]])
            for r in trace["requests"]
        ]
        for trace in traces
    )
    assert static == continuous
    assert [request[0] for request in static] == list("1234567")
    assert all(tokens for *_, tokens in static)
    assert len(traces[0]["steps"]) > len(traces[1]["steps"])


def test_a_seed_gives_the_same_files_but_for_the_clock(model: str, written: Path, tmp_path: Path) -> None:
    traced("--model", model, *WORK, "--compare", "static,continuous", "--out", tmp_path)

    def timeless(path: Path) -> tuple[object, object]:
        def without(value: Any) -> Any:
            if isinstance(value, dict):
                return {k: without(v) for k, v in value.items() if not k.endswith("_ns") and k not in ("ts", "dur")}
            return [without(each) for each in value] if isinstance(value, list) else value

        return without(page_data(path / "trace.html")), without(json.loads((path / "trace.json").read_text()))

    assert timeless(written / "a/b") == timeless(tmp_path)


def test_prompts_from_a_file_are_answered_as_generate_does(model: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("The capital\n\n</script><b>bold</b>\nx\n")
    options = ("--max-tokens", "6", "--every", "2", "--scheduler-policy", "prefill_first", "--out", tmp_path / "out")
    traced("--model", model, "--prompts", tmp_path / "prompts.txt", *options)
    (trace,) = page_data(tmp_path / "out/trace.html")
    assert trace["title"] == "continuous, prefill_first"
    assert [(r["request_id"], r["prompt"], r["arrival_step"]) for r in trace["requests"]] == [
        ("1", "The capital", 0),
        ("3", "</script><b>bold</b>", 2),
        ("4", "x", 4),
    ]
    engine = find_lesson("05").engine(EngineConfig(model=model, seed=0))
    for request in trace["requests"]:
        alone = list(engine.generate(request["prompt"], SamplingParams(temperature=0.0, max_new_tokens=6)))
        assert [token[1] for token in request["tokens"]] == [output.token_id for output in alone]
        assert request["finish_reason"] == alone[-1].finish_reason
    events = json.loads((tmp_path / "out/trace.json").read_text())["traceEvents"]
    named = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert named == ["steps", "request 1", "request 3", "request 4"]


def test_the_phase_before_has_its_own_way_to_batch(model: str, tmp_path: Path) -> None:
    traced("--model", model, "--phase", "04", *WORK, "--out", tmp_path)
    (trace,) = page_data(tmp_path / "trace.html")
    assert (trace["title"], trace["settings"]["phase"]) == ("static", "04")
    assert "policy" not in trace["settings"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--requests", "0"], "--requests is 0"),
        (["--requests", "257"], "shows 1 to 256"),
        (["--max-tokens", "0"], "max_new_tokens is 0"),
        (["--max-batch-size", "0"], "max_batch_size is 0"),
        (["--every", "-1"], "-1"),
        (["--rate", "0"], "The rate is 0.0"),
        (["--rate", "1", "--every", "1"], "give one of them"),
        (["--rate", "1e-9"], "room for 10000 steps"),
        (["--seed", "-1"], "seed is -1"),
        (["--phase", "03"], "runs one request at a time"),
        (["--phase", "99"], "'99'"),
        (["--phase", "04", "--compare", "static,continuous"], "arrives in phase 05"),
        (["--batching-mode", "dynamic"], "batching_mode is 'dynamic'"),
        (["--scheduler-policy", "lifo"], "scheduler_policy is 'lifo'"),
        (["--batching-mode", "static", "--scheduler-policy", "prefill_first"], "a static batch admits no request"),
        (["--compare", "static"], "two or more different"),
        (["--compare", "static,static"], "two or more different"),
        (["--compare", "static,lifo"], "must be two or more different ones of static, continuous, fcfs"),
        (["--compare", "static,continuous", "--batching-mode", "static"], "leave the others out"),
        (["--compare", "contiguous,paged", "--kv-cache-backend", "paged"], "leave the others out"),
        (["--phase", "05", "--num-gpu-blocks", "8"], "arrives in phase 06"),
        (["--num-gpu-blocks", "0"], "num_gpu_blocks is 0"),
        (["--num-gpu-blocks", "3", "--block-size", "8", "--max-seq-len", "32"], "is 4 blocks"),
        (["--prompts", "nowhere.txt"], "No such file"),
        (["--prompts", "."], "Is a directory"),
        (["--prompts", "empty.txt"], "contains no text"),
        (["--prompts", "latin.txt"], "no UTF-8 text (byte 1)"),
        (["--prompts", "good.txt", "--requests", "3"], "leave --requests out"),
        (["--prompts", "good.txt", "--shared-prefix", "8"], "leave --shared-prefix out"),
        (["--shared-prefix", "-1"], "The shared prefix has -1 tokens; it must have 0 to 510"),
        (["--shared-prefix", "63", "--max-seq-len", "64"], "must have 0 to 62"),
        (["--prompts", "many.txt"], "--prompts holds 257 prompts"),
        (["--prompts", "good.txt", "--max-seq-len", "4"], "Line 2: The prompt has"),
        (["--out", "good.txt"], "cannot be a folder"),
        (["--out", "good.txt/below"], "cannot be a folder"),
        (["--model", "nowhere/at-all/it"], "nowhere/at-all/it"),
    ],
)
def test_what_cannot_be_traced_is_refused_in_one_paragraph(
    model: str, arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ran(*_: object) -> None:
        raise AssertionError("a step was run")

    monkeypatch.setattr("shared.tracing.recorder.Recorder.step", ran)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.txt").write_text("\na good prompt\n")
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "latin.txt").write_bytes(b"g\xe4\xff")
    (tmp_path / "many.txt").write_text("x\n" * 257)
    before = sorted(tmp_path.iterdir())
    result = CliRunner().invoke(app, ["trace", "--model", model, *arguments])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert told in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert set(tmp_path.iterdir()) - set(before) <= {tmp_path / "trace"}


# The page.


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
        assert section.locator("[data-lane]").count() == 5


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
def test_no_panel_covers_content(browser: Any, crowded: Path, width: int) -> None:
    """The panel that tells a cell is a row of its own; every other element can be scrolled above it."""
    for tab in opened(browser, crowded, viewport={"width": width, "height": 800}):
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
    for tab in opened(browser, written / "a/b/trace.html", viewport=PHONE, has_touch=True, is_mobile=True):
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


# Few blocks: the memory after each step.

CROWDED = ("--num-gpu-blocks", "8", "--block-size", "4", "--max-seq-len", "32", "--requests", "6", "--max-tokens", "20")


@pytest.fixture(scope="module")
def crowded(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with preemptions, and the same requests on regions."""
    folder = tmp_path_factory.mktemp("crowded")
    told = traced("--model", model, *CROWDED, "--compare", "contiguous,paged", "--out", folder)
    (folder / "told.txt").write_text(told)
    return folder / "trace.html"


def owners(tab: Any, place: int) -> dict[str, int]:
    """Squares that each request holds in the picture of a trace, counted from its outline."""
    return (
        tab.locator("section")
        .nth(place)
        .evaluate("""section => Object.fromEntries([...section.querySelectorAll('g[data-holder]')].map(holder => [
            holder.dataset.holder, holder.querySelector('.pool-edge').getAttribute('d').split('M').length - 1]))""")
    )


def held_after(trace: dict[str, Any], step: int) -> dict[str, list[int]]:
    """The block tables after a step, as the page's data has them."""
    tables = {
        request["request_id"]: [block for block, first, after in told["blocks"] if first <= step < after]
        for request, told in zip(trace["requests"], trace["memory"]["holdings"], strict=True)
    }
    return {name: blocks for name, blocks in tables.items() if blocks}


def test_preemptions_are_told_and_give_the_same_answers(crowded: Path) -> None:
    regions, blocks = page_data(crowded)
    rows = [re.split(r"  +", line.strip()) for line in (crowded.parent / "told.txt").read_text().splitlines()]
    preempted = [len(step["preempted"]) for step in blocks["steps"]]
    assert sum(preempted) > 0
    assert [row[1:] for row in rows if row[0] == "preemptions"] == [["0", str(sum(preempted))]]
    answers = [[[token[1:] for token in r["tokens"]] for r in trace["requests"]] for trace in (regions, blocks)]
    assert answers[0] == answers[1]
    assert (regions["settings"]["KV cache"], blocks["settings"]["KV cache"]) == (
        "1 region of 32 tokens, 0.03686 MB",
        "8 blocks of 4 tokens, 0.03686 MB",
    ), "equal bytes"
    assert next(row[1] for row in rows if row[0] == "most requests in a step") == "1"
    for step in range(len(blocks["steps"])):
        tables = held_after(blocks, step)
        held = [block for table in tables.values() for block in table]
        assert len(set(held)) == len(held) == blocks["lanes"][4]["values"][step]


def test_the_slider_shows_the_memory_after_each_step(browser: Any, crowded: Path) -> None:
    trace = page_data(crowded)[1]
    for tab in opened(browser, crowded):
        section = tab.locator("section").nth(1)
        slider = section.locator("input[type=range]")
        step = next(step["step"] for step in trace["steps"] if step["preempted"])
        assert slider.input_value() == str(step), "it begins where something happens"
        assert re.search(rf"^Where to look: in step {step} ", section.locator(".caption").first.inner_text())
        for step in range(0, len(trace["steps"]), 3):
            slider.fill(str(step))
            tables = held_after(trace, step)
            assert owners(tab, 1) == {name: len(blocks) for name, blocks in tables.items()}
            held = sum(map(len, tables.values()))
            assert section.locator(".pool-figures dd").first.inner_text() == f"{held} of 8"
            label = section.locator(".pool-frame").get_attribute("aria-label")
            cached = sum(first <= step < after for _, first, after in trace["memory"]["cached"])
            free = rf"{f'{cached} cached, ' if cached else ''}{8 - held - cached} free"
            assert re.search(rf"\b{held} blocks? of 8 held by {len(tables)} requests?, {free}", label)
            assert tab.inner_text("#details").startswith(f"paged, step {step} · ")
        tab.locator(".scroller").nth(1).focus()
        tab.keyboard.press("Home")
        assert slider.input_value() == "0", "the cursor of the timeline moves it too"


def test_preemption_and_recompute_are_drawn_and_told(browser: Any, crowded: Path) -> None:
    trace = page_data(crowded)[1]
    for tab in opened(browser, crowded):
        section = tab.locator("section").nth(1)
        drawn = {(shape[0], shape[1]) for shape in shapes(tab, 1)}
        name, step = next((step["preempted"][0], step["step"]) for step in trace["steps"] if step["preempted"])
        assert {(name, "preempted"), (name, "recompute")} <= drawn
        marks = section.locator("path[data-preempted]")
        assert marks.count() == sum(len(step["preempted"]) for step in trace["steps"])
        section.locator("input[type=range]").fill(str(step))
        gone = section.locator(f".pool-list li[data-holder='{name}']")
        assert gone.get_attribute("data-state") == "preempted"
        assert re.search(r"preempted, waits to be recomputed \(\d+ tokens\)", gone.inner_text())
        again = next(
            run for r in trace["requests"] for run in r["runs"] if r["request_id"] == name and run[0] == "recompute"
        )
        section.locator("input[type=range]").fill(str(again[1]))
        holder = section.locator(f".pool-holder[data-holder='{name}']")
        assert holder.get_attribute("data-state") == "recompute"
        assert "url(#" in holder.locator(".pool-over").get_attribute("fill")
        box = section.locator(f"rect.recompute[data-request='{name}']").first.bounding_box()
        tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + 3)
        assert re.search(
            rf"^Request {name} · recompute of \d+ tokens, prompt and answer so far", tab.inner_text("#details")
        )


CHUNKED = ("--prefill-chunk-size", "8", "--max-prefill-chunks-per-step", "1", "--every", "3", "--requests", "6")


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


def test_a_square_tells_whose_it_is_by_pointer_and_by_keys(browser: Any, crowded: Path) -> None:
    regions, trace = page_data(crowded)
    for tab in opened(browser, crowded):
        section = tab.locator("section").nth(1)
        section.locator("input[type=range]").fill("0")
        name, table = next(iter(held_after(trace, 0).items()))
        box = section.locator(".pool-frame").bounding_box()
        edge = section.locator(f".pool-holder[data-holder='{name}'] .pool-edge").evaluate(
            "path => path.getBBox().height"
        )
        tab.mouse.move(box["x"] + 5, box["y"] + 5)
        told = section.locator(".pool-told").inner_text()
        assert re.match(rf"Block 0: request {name}, place 0 of its block table, tokens 0 to 3; 4 of 4 written\.", told)
        assert section.locator(".pool-name").first.text_content() == "[0]"
        assert edge > 20
        section.locator(".pool-frame").focus()
        for _ in range(7):
            tab.keyboard.press("ArrowRight")
        last = section.locator(".pool-told").inner_text()
        assert last == "Block 7 is free." if 7 not in table else last.startswith("Block 7: ")
        assert (
            "A region has room for the longest request there may be, 32 tokens."
            in tab.locator(".pool-note").first.inner_text()
        )
        assert owners(tab, 0) == dict.fromkeys(held_after(regions, regions["focus"]["step"]), 1)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_memory_can_be_read_in_both_colours_and_on_a_phone(browser: Any, crowded: Path, scheme: str) -> None:
    step = next(step["step"] for step in page_data(crowded)[1]["steps"] if step["preempted"])
    for tab in opened(browser, crowded, color_scheme=scheme):
        tab.locator("section input[type=range]").nth(1).fill(str(step))
        for selector, property, least in (
            (".pool dt, .pool dd, .pool li, .pool-note, .pool-told, .slider", "color", TEXT_CONTRAST),
            ("line.preempted, path.preemption", "stroke", SHAPE_CONTRAST),
            ("rect.recompute", "fill", SHAPE_CONTRAST),
        ):
            count, contrast, element = tab.evaluate(FAINTEST, [selector, property])
            assert count >= 1
            assert contrast >= least, (selector, element)
        # A name stands on the colour of its request, and a letter of Okabe and Ito's colours is told from its ground.
        for colour in range(8):
            contrast = tab.evaluate(ON_COLOUR, colour)
            assert contrast >= TEXT_CONTRAST, colour
        tab.set_viewport_size(PHONE)
        tab.evaluate(TWO_FRAMES)
        assert tab.evaluate(WIDE) == []


def test_without_its_script_the_page_has_the_tables(browser: Any, written: Path) -> None:
    for tab in opened(browser, written / "a/b/trace.html", java_script_enabled=False):
        assert tab.locator("noscript p").is_visible()
        tab.locator("summary").nth(1).click()
        assert tab.locator("details").nth(1).locator("tbody tr").nth(6).is_visible()


# A prefix that is computed once.

OUTLINED = "kind => document.querySelector(`g.${kind} .pool-edge`)?.getAttribute('d').split('M').length - 1 || 0"


@pytest.fixture(scope="module")
def sharing(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five prompts that begin with the same 20 tokens, in blocks of 4."""
    folder = tmp_path_factory.mktemp("sharing")
    sizes = ("--block-size", "4", "--num-gpu-blocks", "64", "--max-seq-len", "64", "--max-batch-size", "3")
    options = ("--requests", "5", "--shared-prefix", "20", "--max-tokens", "8", *sizes)
    told = traced("--model", model, *options, "--out", folder)
    (trace,) = page_data(folder / "trace.html")
    length = sum(request["num_prompt_tokens"] for request in trace["requests"])
    assert re.search(rf"prompt tokens from the cache +80 of {length} *\n", told)
    assert f"in step 1 request 2 begins: 20 of its {trace['requests'][1]['num_prompt_tokens']} tokens come from" in told
    return folder / "trace.html"


def test_shared_and_cached_blocks_are_drawn_and_told(browser: Any, sharing: Path) -> None:
    (trace,) = page_data(sharing)
    for tab in opened(browser, sharing):
        assert "20 cached of" not in tab.locator(".names div").nth(6).inner_text()
        assert re.match(r"2 · 20 cached of \d+ \+ ", tab.locator(".names div").nth(7).inner_text())
        assert "is shared by so many requests" in tab.locator(".caption").all_inner_texts()[-1]
        num_users = []
        for step in range(len(trace["steps"])):
            tab.locator("input[type=range]").fill(str(step))
            tables = held_after(trace, step)
            users = Counter(block for table in tables.values() for block in table)
            cached = [block for block, first, after in trace["memory"]["cached"] if first <= step < after]
            assert not users.keys() & set(cached)
            drawn = [tab.evaluate(OUTLINED, kind) for kind in ("shared", "cached")]
            shared = [block for block, count in users.items() if count > 1]
            assert drawn == [len(shared), len(cached)]
            own = {name: sum(block not in shared for block in table) for name, table in tables.items()}
            assert owners(tab, 0) == {name: count for name, count in own.items() if count}
            names = tab.locator(".pool-name.shared").all_text_contents()
            assert names == [f"×{users[block]}" for block in sorted(shared)]
            num_users += [users[block] for block in shared]
        assert max(num_users) == 3
        assert len(cached) > 5, "at the end all is cached"
        assert tab.locator(".pool-legend li:visible").count() == 6

        tab.locator("input[type=range]").fill("1")
        box = tab.locator(".pool-frame").bounding_box()
        tab.mouse.move(box["x"] + 5, box["y"] + 5)
        told = tab.locator(".pool-told").inner_text()
        assert told == "Block 0: shared by 3 requests (1, 2, 3), place 0 of each block table, tokens 0 to 3."
        assert "20 of them from the cache" in tab.locator(".pool-list li[data-holder='2']").inner_text()
        assert "from the cache" not in tab.locator(".pool-list li[data-holder='1']").inner_text()
        prefill = tab.locator("rect.prefill[data-request='2']").bounding_box()
        tab.mouse.move(prefill["x"] + 3, prefill["y"] + 3)
        assert ", 20 of which came from the cache" in tab.inner_text("#details")
        bars = tab.locator(".step-tokens .track").nth(1).locator("i").all()
        assert [bar.get_attribute("class") for bar in bars] == ["cached", "now"]
