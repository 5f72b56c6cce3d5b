"""The server's page in a real Chromium: the playground answers, the charts move, nobody else is asked.

Where there is no Chromium these tests say so. The page's policy forbids evaluating strings, so what is waited for is
read off the page.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
INFER = [sys.executable, "-c", "from shared.cli import app; app(prog_name='infer')"]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync --host-resolver-rules='MAP * ~NOTFOUND, EXCLUDE 127.0.0.1'"
)
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
KEY = "a-key"
CONTRAST = 4.5
"""What WCAG 2.2 asks of text at level AA."""
WIDE = """() => [...document.querySelectorAll('body *')]
    .filter(element => element.getBoundingClientRect().right > innerWidth + 1 && !element.closest('.unseen'))
    .map(element => element.outerHTML.slice(0, 100))"""
# The lowest contrast of a text with what is painted behind it.
FAINTEST = """() => {
    const channels = color => color.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => [r, g, b].map(value => value / 255)
        .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
        .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
    const behind = element => {
        const painted = channels(getComputedStyle(element).backgroundColor);
        return painted.length === 4 && painted[3] === 0 ? behind(element.parentElement) : painted;
    };
    return [...document.querySelectorAll('h1, h2, b, p, a, label, button:enabled, dt, dd, .legend, .token, .given')]
        .filter(element => element.textContent.trim() && element.offsetWidth)
        .map(element => {
            const [a, b] = [light(channels(getComputedStyle(element).color)), light(behind(element))];
            return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), element.outerHTML.slice(0, 80)];
        })
        .reduce((least, found) => found[0] < least[0] ? found : least, [21, 'nothing']);
}"""


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


@pytest.fixture(scope="module")
def url(browser: Any, tiny_checkpoints: dict[str, Path]) -> Iterator[str]:
    """A server that asks for a key."""
    command = [*INFER, "serve", str(tiny_checkpoints["llama"]), "--port", "0", "--api-key", KEY]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        ready = next(line for line in process.stderr if '"ready"' in line)
        yield json.loads(ready)["url"]
        process.terminate()


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    """The page with the key entered; complaints of the browser and requests to anybody else fail the test."""
    context = browser.new_context(viewport=DESKTOP, color_scheme="light")
    tab = context.new_page()
    complaints: list[str] = []
    expected = ("401", "422")  # what these tests provoke; the browser notes each as an error
    tab.on("console", lambda m: complaints.append(m.text) if not any(code in m.text for code in expected) else None)
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("request", lambda r: complaints.append(r.url) if not r.url.startswith(url) else None)
    tab.goto(url)
    tab.locator("#key-label").wait_for()
    tab.fill("#key", KEY)
    tab.press("#key", "Tab")
    expect(tab, "#model", "tiny-llama, up to 2048 tokens")
    yield tab
    context.close()
    assert complaints == []


def expect(page: Any, selector: str, pattern: str, seconds: float = 15) -> str:
    """Wait until the element's text matches, and return it."""
    ends = time.monotonic() + seconds
    while not re.search(pattern, text := page.locator(selector).inner_text()):
        assert time.monotonic() < ends, f"{selector} shows {text!r}, not {pattern}"
        page.wait_for_timeout(50)
    return text


def test_a_text_goes_on_token_by_token(page: Any) -> None:
    page.fill("#prompt", "abc")
    page.fill("#max_tokens", "24")
    page.click("#run")
    expect(page, "#summary", r"^24 tokens · first after \d+ ms · [\d.]+ tokens/s · length$")
    tokens = page.locator("#answer .token")
    assert tokens.count() == 24
    assert re.fullmatch(r"token \d+", tokens.first.get_attribute("title"))
    assert page.locator("#answer").inner_text().startswith("abc")
    colour = "element => getComputedStyle(element).backgroundColor"
    assert tokens.nth(0).evaluate(colour) == tokens.nth(1).evaluate(colour)
    page.check("#boundaries")
    assert tokens.nth(0).evaluate(colour) != tokens.nth(1).evaluate(colour)
    page.click("#clear")
    assert page.locator("#answer").inner_text() == ""


def test_the_controls_reach_the_model(page: Any) -> None:
    answers = []
    for seed in ("1", "1", "2"):
        page.fill("#seed", seed)
        page.fill("#temperature", "1.5")
        page.fill("#top_k", "50")
        page.fill("#max_tokens", "12")
        with page.expect_request("**/v1/completions") as sent:
            page.press("#prompt", "Control+Enter")
        expect(page, "#run:enabled", "Run")
        expect(page, "#summary", "length|stop")
        body = json.loads(sent.value.post_data)
        assert (body["seed"], body["temperature"], body["top_k"], body["max_tokens"]) == (int(seed), 1.5, 50, 12)
        answers.append(page.locator("#answer").inner_text())
    assert answers[0] == answers[1] != answers[2]


def test_an_answer_can_be_stopped(page: Any) -> None:
    page.fill("#max_tokens", "2000")
    page.fill("#prompt", "stop me")
    page.click("#run")
    expect(page, "#summary", r"^\d\d+ tokens")
    page.click("#stop")
    expect(page, "#summary", "stopped$")
    assert page.locator("#answer .token").count() < 2000
    assert page.locator("#run").is_enabled()


def test_a_conversation_is_kept(page: Any) -> None:
    page.click("#tab-chat")
    page.fill("#max_tokens", "8")
    page.fill("#system", "Be brief.")
    for count, text in enumerate(("Hello", "And again"), start=1):
        page.fill("#message", text)
        with page.expect_request("**/v1/chat/completions") as sent:
            page.press("#message", "Enter")
        expect(page, "#summary", "^[1-8] tokens? .*(length|stop)$")
        expect(page, "#run:enabled", "Run")
        roles = [message["role"] for message in json.loads(sent.value.post_data)["messages"]]
        assert roles == ["system", *["user", "assistant"] * (count - 1), "user"]
    assert page.locator(".turn.user").all_inner_texts() == ["Hello", "And again"]
    assert page.locator(".turn.assistant").count() == 2


def test_a_refusal_is_shown_in_the_servers_words(page: Any) -> None:
    page.fill("#prompt", "")
    page.click("#run")
    assert "prompt is empty" in expect(page, "#complaint", "prompt")
    page.fill("#prompt", "abc")
    page.fill("#key", "wrong")
    page.press("#key", "Tab")
    expect(page, "#model", "needs an API key")
    page.click("#run")
    assert "API key" in expect(page, "#complaint", "key")


def test_the_charts_move_with_the_metrics(page: Any) -> None:
    page.fill("#max_tokens", "600")
    page.fill("#prompt", "busy")
    page.click("#run")
    figures = page.locator("figure")
    assert figures.count() == 6
    requests, tokens = figures.nth(0), figures.nth(1)
    ends = time.monotonic() + 20
    while tokens.get_attribute("data-generated") in (None, "", "0") or not requests.get_attribute("data-running"):
        assert time.monotonic() < ends
        page.wait_for_timeout(100)
    expect(page, "figure:nth-child(4) figcaption", r"median [\d.]+ m?s\s*P95 [\d.]+ m?s")
    expect(page, "figure:nth-child(5) figcaption", r"median [\d.]+ m?s")
    assert "L" in tokens.locator("path").first.get_attribute("d")
    assert int(expect(page, "#totals div:nth-child(2) dd", r"\d").replace(",", "")) > 0
    expect(page, "#health", "^ready$")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_can_be_read_in_both_themes_and_on_a_phone(theme: str, page: Any) -> None:
    page.emulate_media(color_scheme=theme)
    page.fill("#max_tokens", "6")
    page.check("#boundaries")
    page.click("#run")
    expect(page, "#summary", "length|stop")
    for size in (DESKTOP, PHONE):
        page.set_viewport_size(size)
        assert page.evaluate(WIDE) == []
        contrast, where = page.evaluate(FAINTEST)
        assert contrast >= CONTRAST, where
    paper = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(paper)
    page.click("#theme")
    assert page.evaluate(paper) != before
    page.reload()
    assert page.evaluate(paper) != before
