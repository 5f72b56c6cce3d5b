"""A tab of the browser for a test: what the browser complains of and requests to other hosts fail the test.

All waiting in the browser is Playwright's own, and its limit is set here.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="the browser is driven by the package playwright").expect

PATIENCE = 120
"""Seconds after which what is waited for does not come, however busy the machine is."""
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}

# Of every visible text, on the page or within an element: its contrast with what is under it, by the formula of WCAG 2.
CONTRASTS = """within => {
    const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
    const rgb = colours => {
        canvas.clearRect(0, 0, 1, 1);
        for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const luminance = parts => {
        const [r, g, b] = parts.map(part => part / 255)
            .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const found = [];
    const walker = document.createTreeWalker(document.querySelector(within ?? 'body'), NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const element = walker.currentNode.parentElement;
        if (!walker.currentNode.data.trim() || !element.checkVisibility() || element.matches('script, style')) continue;
        const under = [];
        for (let each = element; each; each = each.parentElement) under.unshift(getComputedStyle(each).backgroundColor);
        const behind = luminance(rgb(under));
        const { color, fill } = getComputedStyle(element);
        const text = luminance(rgb([...under, element instanceof SVGElement ? fill : color]));
        const [dark, light] = [behind, text].sort((one, other) => one - other);
        found.push([(light + 0.05) / (dark + 0.05), walker.currentNode.data.trim().slice(0, 30)]);
    }
    return found;
}"""

expect.set_options(timeout=1000 * PATIENCE)


def complaints_of(tab: Any, origin: str, *expected: str) -> list[str]:
    """A list that grows: warnings and errors, and requests to anything but ``origin``."""
    complaints: list[str] = []

    def note(text: str, kind: str = "error") -> None:
        if kind in ("error", "warning") and not any(part in text for part in expected):
            complaints.append(text)

    tab.on("console", lambda message: note(f"console: {message.text}", message.type))
    tab.on("pageerror", lambda error: note(f"script: {error}"))
    tab.on("request", lambda request: None if request.url.startswith((origin, "data:")) else note(request.url))
    return complaints


@contextmanager
def opened(browser: Any, url: str, *expected: str, origin: str | None = None, **settings: Any) -> Iterator[Any]:
    """A page in a context of its own; complaints without one of the ``expected`` texts fail the test.

    It may request what begins with ``origin``; None: what its server has, or of a file only itself.
    """
    own = re.match(r"http://[^/]*|.*", url)
    assert own is not None
    context = browser.new_context(**{"viewport": DESKTOP, "color_scheme": "light", **settings})
    context.set_default_timeout(1000 * PATIENCE)
    tab = context.new_page()
    complaints = complaints_of(tab, origin or own[0], *expected)
    tab.goto(url)
    try:
        yield tab
    finally:
        context.close()
    assert complaints == []


def shows(tab: Any, selector: str, pattern: str) -> None:
    """Wait until the visible text of the element matches."""
    expect(tab.locator(selector)).to_have_text(re.compile(pattern), use_inner_text=True)
