"""The server's page in a real Chromium: the playground answers, the charts move, no other host is contacted.

Where there is no Chromium these tests say so. The page's policy forbids evaluating strings, so what is waited for is
read off the page.
"""

import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.integration.infer_process import INFER

ROOT = Path(__file__).parents[2]
DESKTOP, TABLET, PHONE = ({"width": width, "height": 900} for width in (1280, 768, 360))
KEY = "a-key"
BLOCKS = 12
PATIENCE = 60
"""Seconds after which what is waited for does not come, however busy the machine is."""
CONTRAST = 4.5
"""What WCAG 2.2 asks of text at level AA."""
TWO_FRAMES = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""What follows the size of the window has been drawn anew."""
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
    return [...document.querySelectorAll(
        'h1, h2, b, p, a, label, button:enabled, dt, dd, .legend, .token, .given, .scale')]
        .filter(element => element.textContent.trim() && element.getBoundingClientRect().width)
        .map(element => {
            const { color, fill } = getComputedStyle(element);
            const [a, b] = [light(channels(element.matches('.scale') ? fill : color)), light(behind(element))];
            return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), element.outerHTML.slice(0, 80)];
        })
        .reduce((least, found) => found[0] < least[0] ? found : least, [21, 'nothing']);
}"""


# Labels of a chart that overlap, or that stand outside it.
COLLISIONS = """() => [...document.querySelectorAll('figure svg')].flatMap(svg => {
    const frame = svg.getBoundingClientRect();
    const labels = [...svg.querySelectorAll('text')].map(text => [text.textContent, text.getBoundingClientRect()]);
    const apart = (a, b) => a.right <= b.left || b.right <= a.left || a.bottom <= b.top || b.bottom <= a.top;
    return labels.filter(([, box], place) =>
        box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1
        || labels.slice(0, place).some(([, other]) => !apart(box, other))).map(([text]) => text);
})"""
# How far each line ends from the right edge of its chart, in pixels.
DISTANCES = """() => [...document.querySelectorAll('.dot')].map(
    dot => dot.closest('svg').getBoundingClientRect().right - dot.getBoundingClientRect().right)"""


STOPS_AFTER_TEN = """() => {
  const summary = document.querySelector("#summary");
  new MutationObserver((_, observer) => {
    if (!/^\\d\\d+ tokens/.test(summary.innerText)) return;
    observer.disconnect();
    document.querySelector("#stop").click();
  }).observe(summary, { childList: true, characterData: true, subtree: true });
}"""


@pytest.fixture(scope="module")
def url(browser: Any, tiny_checkpoints: dict[str, Path]) -> Iterator[str]:
    """A server that asks for a key."""
    with serving(tiny_checkpoints["llama"], "--api-key", KEY) as (address, _):
        yield address


@pytest.fixture(scope="module")
def crowded_url(browser: Any, tiny_checkpoints: dict[str, Path]) -> Iterator[str]:
    """A server with few blocks."""
    sizes = ("--num-gpu-blocks", str(BLOCKS), "--block-size", "16", "--max-seq-len", str(16 * BLOCKS))
    with serving(tiny_checkpoints["llama"], *sizes) as (address, _):
        yield address


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server that is ready: its address and its process."""
    command = [*INFER, "serve", str(folder), "--port", "0", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        ready = next(line for line in process.stderr if '"ready"' in line)
        threading.Thread(target=process.stderr.read, daemon=True).start()
        try:
            yield json.loads(ready)["url"], process
        finally:
            process.terminate()


@contextmanager
def opened(browser: Any, url: str, *expected: str) -> Iterator[Any]:
    """The page of a server; unexpected errors in the browser, or requests to other hosts, fail the test."""
    context = browser.new_context(viewport=DESKTOP, color_scheme="light")
    context.set_default_timeout(1000 * PATIENCE)
    tab = context.new_page()
    complaints: list[str] = []
    tab.on("console", lambda m: complaints.append(m.text) if not any(part in m.text for part in expected) else None)
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("request", lambda r: complaints.append(r.url) if not r.url.startswith(url) else None)
    tab.goto(url)
    yield tab
    context.close()
    assert complaints == []


@pytest.fixture
def locked(browser: Any, url: str) -> Iterator[Any]:
    """The page of the server that asks for a key, none entered."""
    with opened(browser, url, "401", "422", "ERR_FAILED") as tab:  # what these tests provoke
        tab.locator("#key").wait_for()
        yield tab


@pytest.fixture
def page(locked: Any) -> Any:
    """The page with the key entered."""
    locked.fill("#key", KEY)
    locked.press("#key", "Tab")
    expect(locked, "#model", "tiny-llama, up to 2048 tokens")
    return locked


@pytest.fixture
def crowded(browser: Any, crowded_url: str) -> Iterator[Any]:
    """The page of the server with few blocks, the memory in sight."""
    with opened(browser, crowded_url) as tab:
        tab.locator("#memory-panel").scroll_into_view_if_needed()
        expect(tab, ".pool-figures", rf"\b0 of {BLOCKS}")
        yield tab


def expect(page: Any, selector: str, pattern: str) -> str:
    """Wait until the element's text matches, and return it."""
    ends = time.monotonic() + PATIENCE
    while not re.search(pattern, text := page.locator(selector).inner_text()):
        assert time.monotonic() < ends, f"{selector} shows {text!r}, not {pattern}"
        page.wait_for_timeout(50)
    return text


def wait_until(page: Any, is_so: Callable[[], bool]) -> None:
    """Wait for what is read off the page, or is told by it."""
    ends = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < ends, "it did not come in time"
        page.wait_for_timeout(50)


def wait_until_quiet(page: Any, events: list[str]) -> None:
    """Wait until nothing has been noted for three of the periods in which the page asks."""

    def is_quiet() -> bool:
        events.clear()
        page.wait_for_timeout(800)
        return not events

    wait_until(page, is_quiet)


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


@pytest.mark.parametrize("tab", ["complete", "chat"])
def test_a_grammar_is_drawn_while_its_text_streams(page: Any, tab: str) -> None:
    page.click(f"#tab-{tab}")
    assert not page.is_visible("#walk")
    page.fill("#grammar", '{"type": "array", "items": {"enum": ["a", "bc"]}, "minItems": 2, "maxItems": 4}')
    page.fill("#max_tokens", "60")
    page.fill("#prompt" if tab == "complete" else "#message", "abc")
    page.click("#run")
    expect(page, "#summary", "stop$")
    said = "".join(page.locator("#answer .token" if tab == "complete" else ".turn.assistant .token").all_inner_texts())
    assert len(json.loads(said)) in (2, 3, 4)
    columns = page.locator(".walk-token")
    titles = [columns.nth(n).get_attribute("title") for n in range(columns.count())]
    stacks = ["".join(columns.nth(n).locator(".walk-frame").all_inner_texts()) for n in range(len(titles))]
    texts = [columns.nth(n).locator(".walk-text").inner_text() for n in range(len(titles))]
    assert texts[-1] == "·", "the end of the output has no text"
    assert re.sub("[ ⏎]", "", "".join(texts[:-1])) == re.sub(r"\s", "", said)
    assert (stacks[0], stacks[-1], '["' in stacks) == ("", "", True)
    for title, stack in zip(titles, stacks, strict=True):
        opened = re.escape(f"{len(stack)} open: {stack}" if stack else "nothing open")
        assert re.search(rf": state \d+ · {opened} · \d+ tokens? allowed$", title)
    assert titles[-1].endswith(page.inner_text("#walk-now"))
    heights = {columns.nth(n).locator(".walk-allowed").bounding_box()["height"] for n in range(len(titles))}
    assert len(heights) > 1
    page.set_viewport_size(PHONE)
    page.evaluate(TWO_FRAMES)
    assert page.evaluate(WIDE) == []
    page.click("#clear")
    assert not page.is_visible("#walk")


def test_a_regex_is_a_grammar_and_a_wrong_one_is_told(page: Any) -> None:
    page.fill("#grammar", "[0-9]{4}")
    page.click("#run")
    expect(page, "#summary", "stop$")
    assert re.fullmatch("[0-9]{4}", "".join(page.locator("#answer .token").all_inner_texts()))
    page.fill("#grammar", "(a")
    page.click("#run")
    expect(page, "#complaint", "an opening parenthesis without a closing one")
    page.fill("#grammar", "")
    page.fill("#max_tokens", "3")
    with page.expect_request("**/v1/completions") as sent:
        page.click("#run")
    expect(page, "#summary", "^3 tokens")
    assert not {"guided_json", "guided_regex", "grammar_progress"} & set(json.loads(sent.value.post_data))
    assert not page.is_visible("#walk")


def test_an_answer_can_be_stopped(page: Any) -> None:
    page.fill("#max_tokens", "2000")
    page.fill("#prompt", "stop me")
    page.evaluate(STOPS_AFTER_TEN)  # inside the page, since the output may end before a click from here arrives
    page.click("#run")
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


def test_the_first_run_uses_the_key_that_was_just_typed(locked: Any) -> None:
    """The run needs the name of the model, which the server tells only to those who have the key."""
    locked.fill("#max_tokens", "3")
    locked.click("#run")
    expect(locked, "#key-complaint", "needs the API key")
    locked.wait_for_selector("#key:focus")  # waiting for a function would need eval, which the page forbids
    locked.keyboard.type("wrong")
    locked.keyboard.press("Enter")
    expect(locked, "#key-complaint", "refuses this key")
    expect(locked, "#model", "needs an API key")
    expect(locked, "#run:enabled", "Run")
    assert not locked.is_visible("#complaint"), "the sentence stands beside the field alone"
    locked.fill("#key", KEY)
    locked.hover("#run")
    locked.mouse.down()  # the field loses the focus and its key is tried: the complaint goes away
    expect(locked, "#model", "tiny-llama")
    locked.mouse.up()
    expect(locked, "#summary", "^[1-3] tokens? .*(length|stop)$")
    assert not locked.is_visible("#key-complaint")
    locked.fill("#key", "another")
    locked.press("#key", "Tab")
    expect(locked, "#key-complaint", "refuses this key")


def test_a_lost_connection_is_told_in_a_sentence_and_does_not_last(page: Any) -> None:
    page.route("**/health", lambda route: route.abort())
    page.route("**/v1/chat/completions", lambda route: route.abort())
    expect(page, "#trouble", "^The server cannot be reached: it was stopped, or the network is down. Check that")
    expect(page, "#health", "^not reachable$")
    page.click("#tab-chat")
    page.fill("#message", "Hello")
    page.press("#message", "Enter")
    expect(page, "#complaint", "cannot be reached")
    assert page.input_value("#message") == "Hello", "to be sent again"
    assert page.locator(".turn").count() == 0
    page.unroute_all()
    expect(page, "#health", "^ready$")
    assert not page.is_visible("#trouble")


@pytest.mark.parametrize("size", [DESKTOP, TABLET, PHONE], ids=lambda size: str(size["width"]))
def test_no_trouble_moves_the_button_that_is_pressed(page: Any, size: dict[str, int]) -> None:
    page.set_viewport_size(size)
    page.evaluate(TWO_FRAMES)
    expect(page, "#health", "^ready$")
    place, room = page.locator("#run").bounding_box(), page.locator("header").bounding_box()
    long = json.dumps({"ready": False, "status": "the engine has stopped", "message": "The engine has stopped. " * 20})
    page.route("**/health", lambda route: route.fulfill(body=long))
    expect(page, "#trouble", "engine has stopped")
    assert page.locator("header").bounding_box() == room
    assert page.locator("#run").bounding_box() == place
    page.unroute_all()
    page.route("**/health", lambda route: route.abort())
    expect(page, "#trouble", "^The server cannot be reached")
    assert page.locator("#trouble").evaluate("line => line.scrollHeight <= line.clientHeight"), "it is read at once"
    assert page.locator("#run").bounding_box() == place
    page.unroute_all()
    expect(page, "#health", "^ready$")
    assert page.locator("#run").bounding_box() == place


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("", "cut short: the server was stopped, or the network failed"),
        ('event: error\ndata: {"error": {"message": "The engine has stopped."}}\n\n', r"^The engine has stopped\.$"),
    ],
)
def test_a_stream_that_fails_in_the_middle_keeps_its_text(page: Any, body: str, said: str) -> None:
    begun = 'event: token\ndata: {"choices": [{"text": " begun", "finish_reason": null}], "token_id": 7}\n\n'
    headers = {"Content-Type": "text/event-stream"}
    page.route("**/v1/completions", lambda route: route.fulfill(headers=headers, body=begun + body))
    page.click("#run")
    expect(page, "#complaint", said)
    assert page.locator("#answer .token").all_inner_texts() == [" begun"]
    expect(page, "#summary", "^1 token ")


def test_the_death_of_the_engine_and_of_the_server_is_told(browser: Any, tiny_checkpoints: dict[str, Path]) -> None:
    """Each is killed while it answers: sixteen answers one by one, which last long and come no faster than the page can
    show them."""
    with (
        serving(tiny_checkpoints["llama"], "--engine-process", "--max-batch-size", "1") as (address, server),
        opened(browser, address, "500", "503", "net::ERR_") as tab,
    ):
        expect(tab, "#model", "tiny-llama")
        children = psutil.Process(server.pid).children()
        [engine] = (child for child in children if "spawn_main" in " ".join(child.cmdline()))
        long = {"model": "tiny-llama", "prompt": "abc", "max_tokens": 2000, "ignore_eos": True, "n": 16}
        tab.route("**/v1/completions", lambda route: route.continue_(post_data=json.dumps(long)))
        tab.click("#run")
        expect(tab, "#summary", r"^\d+ tokens")
        engine.kill()
        expect(tab, "#complaint", "The engine has stopped")
        expect(tab, "#trouble", r"[Tt]he engine has stopped.*\.$")
        expect(tab, "#health", "^the engine has stopped$")
        tab.locator("figure:first-child .outage").first.wait_for(state="attached")
        tab.locator("#memory-panel").scroll_into_view_if_needed()
        expect(tab, "#memory-complaint", "The engine has stopped")
        server.kill()
        expect(tab, "#trouble", "The server cannot be reached")
        tab.click("#run")
        expect(tab, "#complaint", "The server cannot be reached")
        expect(tab, "figure:nth-child(1) figcaption", "running –")


def test_the_charts_move_with_the_metrics(page: Any) -> None:
    page.fill("#max_tokens", "600")
    page.fill("#prompt", "busy")
    page.click("#run")
    figures = page.locator("figure")
    assert figures.count() == 6
    requests, tokens = figures.nth(0), figures.nth(1)
    wait_until(page, lambda: tokens.get_attribute("data-generated") not in (None, "", "0"))
    wait_until(page, lambda: bool(requests.get_attribute("data-running")))
    expect(page, "figure:nth-child(4) figcaption", r"median [\d.]+ m?s\s*P95 [\d.]+ m?s")
    expect(page, "figure:nth-child(5) figcaption", r"median [\d.]+ m?s")
    wait_until(page, lambda: "L" in tokens.locator("path").first.get_attribute("d"))  # a line needs two readings
    assert int(expect(page, "#totals div:nth-child(2) dd", r"\d").replace(",", "")) > 0
    expect(page, "#health", "^ready$")


SQUARES = """() => [...document.querySelectorAll('.pool-holder[data-holder]')].map(holder => [
    holder.dataset.holder, holder.dataset.state,
    holder.querySelector('.pool-edge').getAttribute('d').match(/M[^h]+/g), holder.getAttribute('class')])"""


def ask(url: str, number: int) -> None:
    """A long answer for another client."""
    body = {"model": "tiny-llama", "prompt": [number + 1] * 10, "max_tokens": 170, "temperature": 0, "ignore_eos": True}
    httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False)


def test_the_memory_is_shown_live(crowded: Any, crowded_url: str) -> None:
    """Four requests that do not fit into the blocks together, so that one is preempted and resumed."""
    colours: dict[str, set[str]] = {}
    states: set[str] = set()
    wanted = {"decode", "preempted", "recompute"}
    answers: list[Future[None]] = []
    ends = time.monotonic() + PATIENCE
    with ThreadPoolExecutor(4) as together:
        while not (wanted <= states and all(answer.done() for answer in answers)):
            if all(answer.done() for answer in answers):  # the page looks now and then, and may have missed a state
                assert time.monotonic() < ends, states
                answers += [together.submit(ask, crowded_url, number) for number in range(4)]
            squares = crowded.evaluate(SQUARES)
            corners = [corner for _, _, own, _ in squares for corner in own]
            assert len(set(corners)) == len(corners) <= BLOCKS, "no square is drawn for two"
            for name, state, _, colour in squares:
                colours.setdefault(name, set()).add(colour)
                states.add(state)
            assert len({colour for *_, colour in squares}) == len(squares)
            states |= set(crowded.locator(".pool-list li").evaluate_all("all => all.map(li => li.dataset.state)"))
            crowded.wait_for_timeout(30)
    for answer in answers:
        answer.result()
    assert {len(own) for own in colours.values()} == {1}, "a request keeps its colour"
    expect(crowded, ".pool-figures", rf"\b0 of {BLOCKS}")
    assert int(crowded.locator(".pool-figures dd").last.inner_text()) >= 1
    label = crowded.locator(".pool-frame").get_attribute("aria-label")
    told = re.search(rf"0 blocks of {BLOCKS} held by 0 requests, (\d+) cached, (\d+) free", label)
    assert int(told[1]) > 0, "what the requests have computed is kept"
    assert int(told[1]) + int(told[2]) == BLOCKS
    expect(crowded, "#totals", r"preemptions\s*[1-9]")


def test_the_memory_tells_a_square_and_can_be_read(crowded: Any, crowded_url: str) -> None:
    frame = crowded.locator(".pool-frame")
    frame.focus()
    crowded.keyboard.press("ArrowRight")
    assert re.match(r"Block 0 is (free\.|cached: its prefix is)", crowded.locator(".pool-told").inner_text())
    has_told = threading.Event()

    def keep_asking() -> None:  # a single request may end between two looks at the memory
        while not has_told.is_set():
            ask(crowded_url, 0)

    with ThreadPoolExecutor(1) as together:
        asking = together.submit(keep_asking)
        try:
            told = expect(crowded, ".pool-told", r"^Block 0: request \d+ ")
        finally:
            has_told.set()
        asking.result()
    found = re.search(
        r"place (\d+) of its block table, tokens (\d+) to \d+; \d+ of 16 written\. The request: .* in \d+ blocks?\.$",
        told,
    )
    assert found is not None, told
    assert int(found[2]) == 16 * int(found[1])
    for scheme in ("dark", "light"):
        crowded.emulate_media(color_scheme=scheme)
        contrast, where = crowded.evaluate(FAINTEST)
        assert contrast >= CONTRAST, where
    crowded.click("#memory-full")
    wait_until(crowded, lambda: crowded.evaluate("document.fullscreenElement?.id") == "memory-panel")


def test_the_memory_is_asked_for_only_in_sight_and_with_the_key(page: Any, url: str) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if request.url.endswith("/debug/memory") else None)
    page.locator("#memory-panel").scroll_into_view_if_needed()
    expect(page, ".pool-figures", r"held\s*0 of ")
    page.evaluate("scrollTo(0, 0)")
    page.set_viewport_size({"width": 1280, "height": 300})
    wait_until_quiet(page, asked)
    page.set_viewport_size(DESKTOP)
    page.locator("#memory-panel").scroll_into_view_if_needed()
    page.fill("#key", "wrong")
    page.press("#key", "Tab")
    expect(page, "#memory-complaint", "needs the API key")
    wait_until_quiet(page, asked)  # until there is another key


def test_a_large_memory_is_drawn_in_squares_of_several_blocks(crowded: Any) -> None:
    """3,000 blocks: a square of three, divided among the requests that hold them."""
    drawn = crowded.evaluate("""() => {
        const parent = document.body.appendChild(document.createElement('div'));
        const picture = new PoolPicture(parent);
        const cast = new PoolCast();
        const holding = (id, blocks, written) => ({
            request_id: id, state: 'decode', num_prompt_tokens: 1, num_tokens: written, num_written: written, blocks });
        const memory = { unit: 'block', block_tokens: 16, num_blocks: 3000, num_waiting: 0, num_preemptions: 0,
            holdings: [holding('a', [0, 1, 2999], 40), holding('b', [2], 16)] };
        picture.show(memory, cast.meet(['a', 'b']));
        picture.select(0);
        const first = picture.told.textContent;
        picture.select(999);
        const told = [picture.squares.length, picture.note.textContent, first, picture.told.textContent,
            parent.querySelectorAll('.pool-name').length];
        parent.remove();
        return told;
    }""")
    assert drawn == [
        1000,
        "A square stands for 3 blocks and is divided among their holders. A block has room for 16 tokens.",
        "Blocks 0 to 2: 1 holds 2, 2 holds 1, 0 free.",
        "Blocks 2997 to 2999: 1 holds 1, 2 free.",
        0,
    ]


@pytest.mark.parametrize("number", [129, 4096, 100_000])
def test_of_a_large_memory_the_used_part_is_drawn(page: Any, url: str, number: int) -> None:
    """The whole pool is behind a click; a square tells which block it is in both."""
    blocks = [number - 1, 5, 70]
    holding = {"request_id": "a", "state": "decode", "num_prompt_tokens": 1, "num_tokens": 41, "num_written": 40}
    memory = {
        "unit": "block",
        "block_tokens": 16,
        "num_blocks": number,
        "num_free": number - len(blocks),
        "num_waiting": 0,
        "num_preemptions": 0,
        "holdings": [{**holding, "blocks": blocks}],
    }
    page.route("**/debug/memory", lambda route: route.fulfill(json=memory))
    page.locator("#memory-panel").scroll_into_view_if_needed()
    expect(page, ".pool-figures", rf"\b3 of {number:,}")
    free = "() => document.querySelector('.pool-free').getAttribute('d').split('M').length - 1"
    assert page.evaluate(free) == len(blocks)
    page.focus(".pool-frame")
    page.keyboard.press("ArrowRight")
    expect(page, ".pool-told", rf"^Block {number - 1}: request 1 \(a\), place 0 of its block table")
    page.check("#memory-whole")
    assert page.evaluate(free) == -(-number // -(-number // 1024))
    page.uncheck("#memory-whole")
    memory |= {"holdings": [], "num_free": number}
    expect(page, ".pool-empty", f"^All {number:,} blocks are free")


def test_shared_and_cached_blocks_are_drawn_with_the_number_of_their_users(page: Any, url: str) -> None:
    """Three requests begin with blocks 4 and 5, two of them also with block 6; 7 and 8 are cached."""
    tables = {"a": [4, 5, 0], "b": [4, 5, 6, 1], "c": [4, 5, 6, 2]}
    holding = {"state": "decode", "num_prompt_tokens": 40, "num_tokens": 50}
    memory = {
        "unit": "block",
        "block_tokens": 16,
        "num_blocks": 16,
        "num_free": 8,
        "num_waiting": 0,
        "num_preemptions": 0,
        "holdings": [
            {
                **holding,
                "request_id": name,
                "num_written": 16 * len(blocks) - 8,
                "num_cached_tokens": 16 * len(blocks[1:-1]),
                "blocks": blocks,
            }
            for name, blocks in tables.items()
        ],
        "cached": [7, 8],
    }
    page.route("**/debug/memory", lambda route: route.fulfill(json=memory))
    page.locator("#memory-panel").scroll_into_view_if_needed()
    expect(page, ".pool-figures", r"held\s*6 of 16\s*shared\s*3\s*cached\s*2\s*free\s*8\s*.*written\s*75 %")
    expect(page, ".pool-list li[data-holder=b]", r"56 tokens in 4 blocks, 32 of them from the cache$")
    outline = "kind => document.querySelector(`g.${kind} .pool-edge`).getAttribute('d').split('M').length - 1"
    assert [page.evaluate(outline, kind) for kind in ("shared", "cached")] == [3, 2]
    assert page.locator(".pool-name").all_text_contents() == ["1", "2", "3", "×3", "×3", "×2"]
    assert page.locator(".pool-legend li:visible").count() == 6
    page.focus(".pool-frame")
    told = []
    for _ in range(8):
        page.keyboard.press("ArrowRight")
        told.append(page.locator(".pool-told").inner_text())
        if len(told) == 2:
            assert page.locator(".pool-name").all_text_contents() == ["1", "[3]", "3", "[0]", "[1]", "[2]"]
    assert told[1].startswith("Block 1: request 2 (b), place 3 of its block table, tokens 48 to 63; 8 of 16 written.")
    assert told[3:] == [
        "Block 3 is free.",
        "Block 4: shared by 3 requests (1, 2, 3), place 0 of each block table, tokens 0 to 15.",
        "Block 5: shared by 3 requests (1, 2, 3), place 1 of each block table, tokens 16 to 31.",
        "Block 6: shared by 2 requests (2, 3), place 2 of each block table, tokens 32 to 47.",
        "Block 7 is cached: its prefix is kept until the block is needed.",
    ]
    memory["num_blocks"] = 160  # the used part alone, a shared block with the first of its requests
    expect(page, ".pool-note", "Only blocks in use are drawn")
    assert page.evaluate("document.querySelector('.pool-free').getAttribute('d').split('M').length - 1") == 6
    memory["num_blocks"] = 3000
    expect(page, ".pool-figures", "of 3,000")
    page.check("#memory-whole")
    expect(page, ".pool-note", "A square stands for 3 blocks")
    page.focus(".pool-frame")
    for _ in range(8):
        page.keyboard.press("ArrowLeft")
    whole = (
        "0 to 2: 1 holds 1, 2 holds 1, 3 holds 1, 0 free; 3 to 5: 2 shared, 1 free; 6 to 8: 1 shared, 2 cached, 0 free"
    )
    for blocks in whole.split("; "):
        assert page.locator(".pool-told").inner_text() == f"Blocks {blocks}."
        page.keyboard.press("ArrowRight")
    memory |= {"holdings": [], "num_blocks": 160}
    page.uncheck("#memory-whole")
    expect(page, ".pool-empty", "^No block is in use")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_can_be_read_in_both_themes_and_on_a_phone(theme: str, page: Any) -> None:
    page.emulate_media(color_scheme=theme)
    page.fill("#max_tokens", "6")
    page.check("#boundaries")
    page.click("#run")
    expect(page, "#summary", "length|stop")
    expect(page, "#health", "^ready$")  # the charts have a reading
    for size in (DESKTOP, TABLET, PHONE):
        page.set_viewport_size(size)
        page.evaluate(TWO_FRAMES)
        assert page.evaluate(WIDE) == []
        assert page.evaluate(COLLISIONS) == []
        assert min(page.evaluate(DISTANCES)) > 5
        axis = page.locator("figure:first-child .scale").all_text_contents()[-3:]
        assert re.fullmatch(r"\d+ s ago,\d+ s ago,now", ",".join(axis))
        contrast, where = page.evaluate(FAINTEST)
        assert contrast >= CONTRAST, where
    paper = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(paper)
    page.click("#theme")
    assert page.evaluate(paper) != before
    page.reload()
    assert page.evaluate(paper) != before
