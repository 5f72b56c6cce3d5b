"""The instruments of the chapters in a real Chromium: their formulas beside those of the benchmarks, and their use.

Each instrument is in a page of its own here, opened as a file; tests of the whole site open the chapters.
"""

import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.hardware import DATA_SHEETS
from benchmarks.report import read_value
from benchmarks.roofline import DecodeWork
from benchmarks.speculation import GOLDEN, by_formula, expected_tokens, num_accepted_by
from shared.checkpoints.shapes import SHAPES
from shared.loading.config_json import parse_config
from shared.speculation.adaptive import DraftCosts
from tests.integration.tabs import PHONE, expect, opened

pytest.importorskip("sphinx", reason="the site needs the extra 'docs': pip install -e '.[docs]'")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs/site"))
from course_site import instruments  # noqa: E402

REPORT = ROOT / "benchmarks/reports/generation-smollm2-135m-cpu-2x-xeon.json"
CONFIGS = {name: parse_config(SHAPES[name], name) for name in ("llama-3.2-1b", "qwen3-8b")}
CONFIGS["smollm2-135m"] = parse_config(read_value(REPORT, "model.config"), "smollm2-135m")
WORKS = {name: instruments.work_of(name) for name in CONFIGS}
H100 = DATA_SHEETS["h100"].read_bytes_per_second, DATA_SHEETS["h100"].matmul_flops_per_second

models, bits = st.sampled_from(sorted(CONFIGS)), st.sampled_from([32, 16, 8, 4.125])
rates, counts = st.tuples(st.floats(1e9, 1e13), st.floats(1e10, 1e16)), st.integers(1, 600)
acceptances, lengths, prices = st.floats(0, 1), st.integers(1, 10), st.floats(0, 1)


@cache
def decode_work(model: str, bits: float) -> DecodeWork:
    """What `benchmarks.roofline` says of the model."""
    dtype = torch.float32 if bits == 32 else torch.bfloat16
    return DecodeWork(CONFIGS[model], dtype, bits if bits < 16 else None)


def gain(acceptance: float, length: int, cost: float, requests: int) -> float:
    """What drafts buy by `benchmarks.speculation`, if rows take what `benchmarks.roofline` says."""
    verification = stretch(length, requests)
    return by_formula(DraftCosts(1.0, verification, verification, cost, cost), length, acceptance, length)


def stretch(length: int, requests: int) -> float:
    """What a step takes for the rows of its drafts, in plain steps."""
    work = decode_work("qwen3-8b", 16)
    longer, plain = (work.floor(0, *H100, batch=rows).seconds for rows in (requests * (length + 1), requests))
    return longer / plain


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Write a page with one instrument, as the site shows it, and return its address."""
    folder = tmp_path_factory.mktemp("instruments")
    static = ROOT / "docs/site/static"

    def written(kind: str, **settings: str) -> str:
        names = [static / f"instruments/{name}.js" for name in ("formulas", "instrument", kind)]
        names = [ROOT / "shared/tracing/page/elements.js", *names]
        scripts = "".join(f'<script src="{name.as_uri()}"></script>' for name in names)
        styles = "".join(
            f'<link rel="stylesheet" href="{(static / name).as_uri()}">'
            for name in ("course.css", "instruments/instruments.css")
        )
        page = folder / f"{kind}-{'-'.join(settings.values())}.html"
        shown = instruments.figure(kind, settings, "How much?")
        page.write_text(
            f'<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">{styles}'
            f"<body><article>{shown}</article>{scripts}",
            encoding="utf-8",
        )
        return page.as_uri()

    return written


@pytest.fixture(scope="module")
def roofline(browser: Any, write: Any) -> Iterator[Any]:
    with opened(
        browser, write("roofline", model="qwen3-8b", machine="h100", bits="16", rows="6"), origin="file:"
    ) as tab:
        yield tab


@pytest.fixture(scope="module")
def guesses(write: Any) -> str:
    return write("guesses", model="qwen3-8b", acceptance="80", drafts="5", cost="0.02", requests="1")


def formula(tab: Any, name: str, *arguments: Any) -> Any:
    return tab.evaluate("([name, ...given]) => Formulas[name](...given)", [name, *arguments])


def told(tab: Any) -> str:
    return tab.inner_text("[role=status]")


def table(tab: Any) -> list[list[str]]:
    return [
        row.split("\t")
        for row in tab.locator("tr").evaluate_all(
            "rows => rows.map(row => [...row.cells].map(cell => cell.textContent).join('\\t'))"
        )
    ]


@given(model=models, bits=bits, rates=rates, context=st.integers(0, 100_000), rows=st.integers(1, 4096))
def test_a_floor_is_that_of_the_benchmarks(
    model: str, bits: float, rates: tuple[float, float], context: int, rows: int, roofline: Any
) -> None:
    work = decode_work(model, bits)
    floor = work.floor(context, *rates, batch=rows)
    machine, setting = {"bytes": rates[0], "operations": rates[1]}, {"bits": bits, "context": context}
    assert formula(roofline, "floor", WORKS[model], machine, setting, rows) == {
        "weights": work.weight_bytes,
        "bytes": floor.num_bytes,
        "operations": floor.flops,
        "reading": floor.memory_seconds,
        "multiplying": floor.compute_seconds,
        "seconds": floor.seconds,
    }
    assert formula(roofline, "turningRows", WORKS[model], machine, setting) == work.turning_batch(context, *rates)


@given(acceptance=acceptances, length=lengths, cost=prices, requests=counts)
def test_a_gain_is_that_of_the_benchmarks(
    acceptance: float, length: int, cost: float, requests: int, roofline: Any
) -> None:
    machine = {"bytes": H100[0], "operations": H100[1]}
    given = {"work": WORKS["qwen3-8b"], "machine": machine, "cost": cost, "requests": requests}
    given |= {"acceptance": acceptance, "drafts": length}
    near = pytest.approx
    assert formula(roofline, "expectedTokens", acceptance, length) == near(expected_tokens(acceptance, length))
    assert formula(roofline, "gain", given) == near(gain(acceptance, length, cost, requests), rel=1e-12)
    best = formula(roofline, "bestLength", given, 10)
    gains = [1.0, *(gain(acceptance, n, cost, requests) for n in range(1, 11))]
    assert gains[best] == near(max(gains), rel=1e-12)
    from_requests = formula(roofline, "losesFrom", given, 512)
    losses = [n for n in range(1, 513) if gain(acceptance, length, cost, n) < 1]
    assert from_requests == next(iter(losses), None)
    gains = [gain(percent / 100, length, cost, requests) for percent in range(101)]
    assert formula(roofline, "breaksEvenAt", given) == next((n for n, each in enumerate(gains) if each >= 1), None)


@given(lot=st.floats(0, 1), acceptance=acceptances, length=lengths)
def test_a_lot_accepts_as_many_drafts_as_in_the_benchmark(
    lot: float, acceptance: float, length: int, roofline: Any
) -> None:
    accepted = num_accepted_by(lot, acceptance, length)
    assert formula(roofline, "numAccepted", lot, acceptance, length) == accepted


def test_the_roofline_says_what_its_point_shows(browser: Any, write: Any) -> None:
    address = write("roofline", model="smollm2-135m", machine="2x-xeon", bits="32", rows="1")
    with opened(browser, address, origin="file:") as tab:
        assert (
            "A step with 1 row takes at least 27.1 ms, or 27.1 ms a row. It waits for memory: reading 538 MB"
            in told(tab)
        )
        assert "From 20 rows on, a step waits for arithmetic." in told(tab)
        rows = tab.get_by_label("Rows of a step", exact=True)
        rows.press("End")
        assert rows.get_attribute("aria-valuetext") == "1,024"
        assert "It waits for arithmetic" in told(tab)
        tab.get_by_label("Machine", exact=True).select_option("h100")
        assert tab.get_by_label("Bits of a weight", exact=True).input_value() == "16", (
            "a data sheet has no rate of fp32"
        )
        assert tab.locator("option[value='32']").is_disabled()
        tab.get_by_label("Keys and values", exact=True).select_option("4096")
        work = decode_work("smollm2-135m", 16)
        assert work.turning_batch(4096, *H100) is None
        assert "No number of rows is large enough to wait for arithmetic." in told(tab)
        head, *lines = table(tab)
        assert head == ["rows", "reading", "multiplying", "a step", "a row"]
        for line in lines:
            count = int(line[0].replace(",", ""))
            floor = work.floor(4096, *H100, batch=count)
            times = (floor.memory_seconds, floor.compute_seconds, floor.seconds, floor.seconds / count)
            assert [seconds(cell) for cell in line[1:]] == pytest.approx(times, rel=5e-3)


def seconds(text: str) -> float:
    number, unit = text.split()
    return float(number.replace(",", "")) * {"s": 1, "ms": 1e-3, "µs": 1e-6}[unit]


def test_keys_and_a_finger_move_the_point(browser: Any, write: Any) -> None:
    address = write("roofline", model="qwen3-8b", machine="h100", bits="16", rows="6")
    with opened(browser, address, origin="file:", viewport=PHONE, has_touch=True, is_mobile=True) as tab:
        point = tab.locator("circle.point")

        def left() -> float:
            return float(point.get_attribute("cx"))

        rows, before = tab.get_by_label("Rows of a step", exact=True), left()
        rows.press("ArrowRight")
        assert told(tab).startswith("A step with 8 rows takes at least 4.52 ms")
        assert left() > before
        box = tab.locator("figure > svg").bounding_box()
        at_1024 = tab.locator("figure > svg").get_by_text("1,024").bounding_box()
        tab.touchscreen.tap(at_1024["x"] + at_1024["width"] / 2, box["y"] + box["height"] / 2)
        assert told(tab).startswith("A step with 1,024 rows takes at least 15.7 ms")
        rows.press("Home")
        assert told(tab).startswith("A step with 1 row takes")
        tab.get_by_label("Bits of a weight", exact=True).select_option("4.125")
        assert told(tab).startswith("A step with 1 row takes at least 1.44 ms")


def shown(lane: Any) -> list[str]:
    """The brackets that can be seen."""
    return re.findall(
        r"\[(.*?)\]",
        lane.locator("p").evaluate(
            "p => [...p.children].filter(step => step.className !== 'later').map(step => step.textContent).join('')"
        ),
    )


def written_by(time: float, acceptance: float, length: int, cost: float) -> list[str]:
    """The brackets that steps with drafts have written at a time, in plain steps, by the benchmark's lots."""
    text, lot, steps = instruments.story(), 0.5, []
    while text and (len(steps) + 1) * (stretch(length, 1) + length * cost) <= time + 1e-9:
        lot = (lot + GOLDEN) % 1
        count = 1 + num_accepted_by(lot, acceptance, length)
        steps.append("".join(text[:count]))
        text = text[count:]
    return steps


def test_texts_appear_at_the_pace_of_their_steps(browser: Any, guesses: str) -> None:
    with opened(browser, "about:blank", origin="file:") as tab:
        tab.clock.install(time=0)
        tab.goto(guesses)
        tab.clock.pause_at(3600)  # from now on, time passes when the test says so
        lanes, button = tab.locator(".lane"), tab.locator("form button")
        tab.get_by_label("Time, in plain steps", exact=True).press("Home")
        assert [shown(lane) for lane in lanes.all()] == [[], []]
        button.press("Enter")
        expect(button).to_have_text("Pause")
        for steps in range(1, 81):
            tab.clock.run_for(150)
            plain, drafted = (shown(lane) for lane in lanes.all())
            assert plain == instruments.story()[: steps // 2]
            assert drafted == written_by(steps / 2, 0.8, 5, 0.02)
        expect(button).to_have_text("Play")
        assert lanes.last.locator(".count").inner_text() == f"40 tokens, {len(drafted)} steps"
        button.click()  # from the start again
        tab.clock.run_for(450)
        button.click()
        tab.clock.run_for(900)
        assert len(shown(lanes.first)) == 1


def test_with_reduced_motion_the_button_shows_the_end(browser: Any, guesses: str) -> None:
    with opened(browser, guesses, origin="file:", reduced_motion="reduce") as tab:
        tab.locator("form button").click()
        assert "".join(shown(tab.locator(".lane").first)) == "".join(instruments.story())
        expect(tab.locator("form button")).to_have_text("Play")


def test_guesses_say_where_they_become_a_loss(browser: Any, guesses: str) -> None:
    with opened(browser, guesses, origin="file:", viewport=PHONE) as tab:
        assert told(tab) == (
            "A step yields 3.69 tokens on average and takes 1.1 plain steps: 3.35 times as fast, a gain. The best "
            "number of drafts here is 10. With 5, drafts lose from 177 requests on, and here below 10\xa0% accepted."
        )
        assert gain(0.8, 5, 0.02, 176) >= 1 > gain(0.8, 5, 0.02, 177)
        assert gain(0.1, 5, 0.02, 1) >= 1 > gain(0.09, 5, 0.02, 1)
        tab.get_by_label("Cost of a draft, in steps", exact=True).press("End")
        tab.get_by_label("Drafts accepted", exact=True).press("Home")
        assert "0.333 times as fast, a loss" in told(tab)
        assert tab.locator("circle.loss").count() == 1
        tab.get_by_label("Requests", exact=True).press("End")
        assert "and here with any acceptance" in told(tab)
        head, *lines = table(tab)
        assert head == ["drafts", "tokens a step", "time of a step", "speed-up"]
        assert [line[0] for line in lines] == [str(n) for n in range(11)]
        found = [float(line[-1]) for line in lines]
        assert found == pytest.approx([1.0, *(gain(0, n, 0.4, 512) for n in range(1, 11))], rel=5e-3)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("gauge", {"model": "qwen3-8b"}),
        ("roofline", {"model": "gpt-2"}),
        ("roofline", {"model": "qwen3-8b", "machine": "2x-xeon"}),
        ("roofline", {"model": "qwen3-8b", "rows": "5"}),
        ("guesses", {"model": "qwen3-8b", "colour": "red"}),
    ],
)
def test_what_an_instrument_does_not_have_is_refused(kind: str, settings: dict[str, str]) -> None:
    with pytest.raises(instruments.ExtensionError, match=kind):
        instruments.figure(kind, settings, "")
