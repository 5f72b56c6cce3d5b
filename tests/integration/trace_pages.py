"""What tests of the pages that `infer trace` writes share: the command, a page's data, and a window that opens it.

The browser is not let onto the network, and any request but the one for the page fails the test.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from shared.cli import app

DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
TEXT_CONTRAST, SHAPE_CONTRAST = 4.5, 3.0
"""What WCAG 2.2 asks at level AA of text, and of shapes that carry meaning."""
WORK = ("--requests", "7", "--max-tokens", "24", "--max-batch-size", "2", "--rate", "0.5", "--seed", "4")
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
TWO_FRAMES = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 50))))"


def traced(*arguments: str | Path) -> str:
    """What ``infer trace`` prints, run in this process."""
    result = CliRunner().invoke(app, ["trace", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def page_data(path: Path) -> list[dict[str, Any]]:
    (data,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', path.read_text(), re.DOTALL)
    return json.loads(data)["traces"]


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


def shapes(tab: Any, place: int) -> list[list[Any]]:
    """Request, kind, first step, step after the last and width of every cell or run of cells in a timeline."""
    return (
        tab.locator("section")
        .nth(place)
        .evaluate("""section => [...section.querySelectorAll('[data-request]')]
        .map(shape => [shape.dataset.request, shape.getAttribute('class'), +shape.dataset.first, +shape.dataset.after,
                       shape.getBBox().width])""")
    )
