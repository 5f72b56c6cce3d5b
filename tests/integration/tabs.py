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
