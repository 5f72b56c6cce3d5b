"""The stepper's page in a browser, for tests: open it, and go to an event of its recording."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.integration.tabs import expect, opened


@contextmanager
def stepper(browser: Any, url: str, address: str = "", **settings: Any) -> Iterator[Any]:
    """The page, when it has unpacked its recording."""
    with opened(browser, f"{url}{address}", origin=url, **settings) as tab:
        expect(tab.locator(".side").last).to_be_visible()
        yield tab


def address(recording: dict[str, Any], event: int) -> str:
    """The part of an address that leads to an event."""
    firsts = [step["first"] for step in recording["steps"]]
    step = max(number for number, first in enumerate(firsts) if first <= event)
    return f"#step={step}&event={event - firsts[step]}"


def event_of(tab: Any) -> int:
    return int(tab.locator("#moment").input_value())


def go_to(tab: Any, recording: dict[str, Any], event: int) -> None:
    beside = "&beside=1" if tab.locator("body").get_attribute("data-sides") == "2" else ""
    tab.evaluate("hash => { location.hash = hash }", address(recording, event) + beside)
    expect(tab.locator("#moment")).to_have_value(str(event))
