"""The server's page in a real Chromium: the playground answers, the charts move, the memory is shown.

The server and the newest phase's engine run on threads of this process, and a test says how many steps the engine may
run: what happens in the middle of an answer is not left to a race. No other host is contacted. Where there
is no Chromium these tests say so.
"""

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.engine.config import EngineConfig
from shared.engine.memory_map import MemoryMap
from shared.lessons import find_lesson
from tests.integration.paused_engine import Steps
from tests.integration.tabs import DESKTOP, PATIENCE, expect, opened, shows
from tests.unit.server.echo import EchoEngine, Running, serving

KEY = "a-key"
BLOCKS = 12
HOLDERS = """() => [...document.querySelectorAll('.pool-holder[data-holder]')].map(holder => [
    holder.dataset.holder, holder.dataset.state,
    holder.querySelector('.pool-edge').getAttribute('d').match(/M[^h]+/g), holder.getAttribute('class')])"""
FREE = "() => document.querySelector('.pool-free').getAttribute('d').split('M').length - 1"
OUTLINED = "kind => document.querySelector(`g.${kind} .pool-edge`).getAttribute('d').split('M').length - 1"
PAPER = "getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="module")
def server(browser: Any, folder: Path) -> Iterator[tuple[Running, Steps]]:
    """A server that asks for a key, with few blocks, and the steps of its engine."""
    config = EngineConfig(model=str(folder), seed=0, block_size=16, num_gpu_blocks=BLOCKS, max_seq_len=16 * BLOCKS)
    engine = find_lesson("12").engine(config)
    steps = Steps(engine)
    with serving(engine, steps.handle, api_key=KEY) as running:
        yield running, steps


@pytest.fixture
def url(server: tuple[Running, Steps]) -> str:
    return server[0].url


@pytest.fixture
def steps(server: tuple[Running, Steps]) -> Iterator[Steps]:
    yield server[1]
    server[1].resume()


@pytest.fixture
def locked(browser: Any, url: str, steps: Steps) -> Iterator[Any]:
    """The page, no key entered."""
    with opened(browser, url, "401", "422", "ERR_FAILED") as tab:  # what these tests provoke
        yield tab


@pytest.fixture
def page(locked: Any) -> Any:
    """The page with the key entered."""
    enter_key(locked)
    return locked


def enter_key(tab: Any) -> None:
    tab.fill("#key", KEY)
    tab.press("#key", "Tab")
    shows(tab, "#model", "echo, up to 192 tokens")


def ask(url: str, number: int = 0) -> None:
    """A long answer for another client."""
    body = {"model": "echo", "prompt": [number + 1] * 10, "max_tokens": 170, "temperature": 0, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {KEY}"}
    httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=PATIENCE, trust_env=False)


def show_memory(page: Any, num_blocks: int, tables: dict[str, list[int]], cached: list[int]) -> dict[str, Any]:
    """Show blocks of 16 tokens in the server's place; what is changed in the result is shown at the next look.

    The last block of each request is half full; of a request that shares blocks, all but the first and the last were
    found in the cache.
    """
    num_free = num_blocks - len({block for blocks in (*tables.values(), cached) for block in blocks})
    memory = {"unit": "block", "block_tokens": 16, "num_blocks": num_blocks, "num_free": num_free, "cached": cached}
    memory |= {"num_waiting": 0, "num_preemptions": 0}
    memory["holdings"] = [
        {
            "request_id": name,
            "state": "decode",
            "num_prompt_tokens": 40,
            "num_tokens": 50,
            "num_written": 16 * len(blocks) - 8,
            "num_cached_tokens": 16 * len(blocks[1:-1]) if cached else 0,
            "blocks": blocks,
        }
        for name, blocks in tables.items()
    ]
    page.route("**/debug/memory", lambda route: route.fulfill(json=memory))
    page.locator("#memory-panel").scroll_into_view_if_needed()
    return memory


def test_a_text_goes_on_token_by_token(page: Any) -> None:
    page.fill("#prompt", "abc")
    page.fill("#max_tokens", "24")
    page.click("#run")
    shows(page, "#summary", r"^24 tokens · first after \d+ ms · [\d.]+ tokens/s · length$")
    tokens = page.locator("#answer .token")
    assert tokens.count() == 24
    assert re.fullmatch(r"token \d+", tokens.first.get_attribute("title"))
    assert page.locator("#answer").inner_text().startswith("abc")
    page.check("#boundaries")
    assert len(set(tokens.evaluate_all("all => all.map(token => getComputedStyle(token).backgroundColor)"))) > 1
    page.click("#clear")
    assert page.locator("#answer").inner_text() == ""


def test_the_controls_reach_the_model(page: Any) -> None:
    answers = []
    for seed in (1, 1, 2):
        values = {"seed": seed, "temperature": 1.5, "top_k": 50, "max_tokens": 12}
        for name, value in values.items():
            page.fill(f"#{name}", str(value))
        with page.expect_request("**/v1/completions") as sent:
            page.press("#prompt", "Control+Enter")
        shows(page, "#summary", "(length|stop)$")
        assert json.loads(sent.value.post_data).items() >= values.items()
        answers.append(page.locator("#answer").inner_text())
        expect(page.locator("#run")).to_be_enabled()
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize("tab", ["complete", "chat"])
def test_a_grammar_is_drawn_while_its_text_streams(page: Any, tab: str) -> None:
    page.click(f"#tab-{tab}")
    assert not page.is_visible("#walk")
    page.fill("#grammar", '{"type": "array", "items": {"enum": ["a", "bc"]}, "minItems": 2, "maxItems": 4}')
    page.fill("#max_tokens", "60")
    page.fill("#prompt" if tab == "complete" else "#message", "abc")
    page.click("#run")
    shows(page, "#summary", "stop$")
    said = "".join(page.locator("#answer .token" if tab == "complete" else ".turn.assistant .token").all_inner_texts())
    assert len(json.loads(said)) in (2, 3, 4)
    columns = page.locator(".walk-token").all()
    titles = [column.get_attribute("title") for column in columns]
    stacks = ["".join(column.locator(".walk-frame").all_inner_texts()) for column in columns]
    texts = [column.locator(".walk-text").inner_text() for column in columns]
    assert texts[-1] == "·", "the end of the output has no text"
    assert re.sub("[ ⏎]", "", "".join(texts[:-1])) == re.sub(r"\s", "", said)
    assert (stacks[0], stacks[-1], '["' in stacks) == ("", "", True)
    for title, stack in zip(titles, stacks, strict=True):
        opened = re.escape(f"{len(stack)} open: {stack}" if stack else "nothing open")
        assert re.search(rf": state \d+ · {opened} · \d+ tokens? allowed$", title)
    assert titles[-1].endswith(page.inner_text("#walk-now"))
    page.click("#clear")
    assert not page.is_visible("#walk")


def test_a_regex_is_a_grammar_and_a_wrong_one_is_refused_in_the_servers_words(page: Any) -> None:
    page.fill("#grammar", "[0-9]{4}")
    page.click("#run")
    shows(page, "#summary", "stop$")
    assert re.fullmatch("[0-9]{4}", "".join(page.locator("#answer .token").all_inner_texts()))
    page.fill("#grammar", "(a")
    page.click("#run")
    shows(page, "#complaint", "an opening parenthesis without a closing one")
    page.fill("#grammar", "")
    page.fill("#max_tokens", "3")
    with page.expect_request("**/v1/completions") as sent:
        page.click("#run")
    shows(page, "#summary", "^3 tokens")
    assert not {"guided_json", "guided_regex", "grammar_progress"} & set(json.loads(sent.value.post_data))
    assert not page.is_visible("#walk")


def test_an_answer_can_be_stopped(page: Any, steps: Steps) -> None:
    page.fill("#max_tokens", "150")
    page.fill("#prompt", "stop me")
    steps.run(10)
    page.click("#run")
    shows(page, "#summary", r"^\d+ tokens")
    assert page.is_disabled("#run")
    page.click("#stop")
    shows(page, "#summary", "stopped$")
    assert 2 <= page.locator("#answer .token").count() <= 10
    expect(page.locator("#run")).to_be_enabled()
    steps.resume()
    shows(page, "#totals", r"ended: abort\s*[1-9]")


def test_a_conversation_is_kept(page: Any) -> None:
    page.press("#tab-complete", "ArrowRight")
    page.fill("#max_tokens", "8")
    page.fill("#system", "Be brief.")
    for count, text in enumerate(("Hello", "And again"), start=1):
        page.fill("#message", text)
        with page.expect_request("**/v1/chat/completions") as sent:
            page.press("#message", "Enter")
        shows(page, "#summary", "^[1-8] tokens? .*(length|stop)$")
        expect(page.locator("#run")).to_be_enabled()
        roles = [message["role"] for message in json.loads(sent.value.post_data)["messages"]]
        assert roles == ["system", *["user", "assistant"] * (count - 1), "user"]
    assert page.locator(".turn.user").all_inner_texts() == ["Hello", "And again"]
    assert page.locator(".turn.assistant").count() == 2


def test_the_first_run_uses_the_key_that_was_just_typed(locked: Any) -> None:
    """The run needs the name of the model, which the server tells only to those who have the key."""
    locked.fill("#max_tokens", "3")
    locked.click("#run")
    shows(locked, "#key-complaint", "needs the API key")
    expect(locked.locator("#key")).to_be_focused()
    locked.keyboard.type("wrong")
    locked.keyboard.press("Enter")
    shows(locked, "#key-complaint", "refuses this key")
    shows(locked, "#model", "needs an API key")
    expect(locked.locator("#run")).to_be_enabled()
    locked.fill("#key", KEY)
    locked.hover("#run")
    locked.mouse.down()  # the field loses the focus and its key is tried: the complaint goes away
    shows(locked, "#model", "echo")
    locked.mouse.up()
    shows(locked, "#summary", "^[1-3] tokens? .*(length|stop)$")
    assert not locked.is_visible("#key-complaint")


def test_a_lost_connection_is_told_in_a_sentence_and_does_not_last(page: Any) -> None:
    page.route("**/health", lambda route: route.abort())
    page.route("**/v1/chat/completions", lambda route: route.abort())
    shows(page, "#trouble", "^The server cannot be reached: it was stopped, or the network is down. Check that")
    shows(page, "#health", "^not reachable$")
    page.click("#tab-chat")
    page.fill("#message", "Hello")
    page.press("#message", "Enter")
    shows(page, "#complaint", "cannot be reached")
    expect(page.locator("#message")).to_have_value("Hello")  # to be sent again
    assert page.locator(".turn").count() == 0
    page.unroute_all()
    shows(page, "#health", "^ready$")
    assert not page.is_visible("#trouble")


def test_a_stream_that_is_cut_short_keeps_its_text(page: Any) -> None:
    begun = 'event: token\ndata: {"choices": [{"text": " begun", "finish_reason": null}], "token_id": 7}\n\n'
    headers = {"Content-Type": "text/event-stream"}
    page.route("**/v1/completions", lambda route: route.fulfill(headers=headers, body=begun))
    page.click("#run")
    shows(page, "#complaint", "cut short: the server was stopped, or the network failed")
    assert page.locator("#answer .token").all_text_contents() == [" begun"]
    shows(page, "#summary", "^1 token ")


def test_the_death_of_the_engine_and_of_the_server_is_told(browser: Any, folder: Path) -> None:
    """The engine dies in the middle of an answer, then the server ends."""
    engine = EchoEngine(folder)
    steps = Steps(engine)
    with (
        serving(engine, steps.handle) as running,
        opened(browser, running.url, "500", "503", "net::ERR_") as tab,
    ):
        steps.run(5)
        tab.click("#run")
        shows(tab, "#summary", "^5 tokens")
        engine.bug = RuntimeError("injected")
        steps.resume()
        shows(tab, "#complaint", "The engine has stopped")
        assert tab.locator("#answer .token").count() == 5
        shows(tab, "#trouble", r"[Tt]he engine has stopped.*\.$")
        shows(tab, "#health", "^the engine has stopped$")
        expect(tab.locator("figure:first-child .outage").first).to_be_attached()
        tab.locator("#memory-panel").scroll_into_view_if_needed()
        shows(tab, "#memory-complaint", "The engine has stopped")
        running.server.should_exit = True
        shows(tab, "#trouble", "The server cannot be reached")
        tab.click("#run")
        shows(tab, "#complaint", "The server cannot be reached")
        shows(tab, "figure:nth-child(1) figcaption", "running –")


def test_the_charts_move_with_the_metrics(page: Any, url: str) -> None:
    is_seen = threading.Event()

    def keep_asking() -> None:
        while not is_seen.is_set():
            ask(url)

    with ThreadPoolExecutor(1) as together:
        asked = together.submit(keep_asking)
        try:
            expect(page.locator("figure")).to_have_count(6)
            expect(page.locator("figure").nth(0)).to_have_attribute("data-running", re.compile(r"\d"))
            expect(page.locator("figure").nth(1)).to_have_attribute("data-generated", re.compile("[1-9]"))
            shows(page, "figure:nth-child(4) figcaption", r"median [\d.]+ m?s\s*P95 [\d.]+ m?s")
            shows(page, "figure:nth-child(5) figcaption", r"median [\d.]+ m?s")
            line = page.locator("figure").nth(1).locator("path").first
            expect(line).to_have_attribute("d", re.compile("L"))  # a line needs two readings
            shows(page, "#totals div:nth-child(2) dd", "[1-9]")
            shows(page, "#health", "^ready$")
        finally:
            is_seen.set()
        asked.result()


def test_the_memory_is_shown_live(page: Any, server: tuple[Running, Steps]) -> None:
    """Four requests that do not fit into the blocks together; the engine pauses where one has been preempted, and where
    one is recomputed."""
    (running, steps), engine = server, server[0].engine
    page.locator("#memory-panel").scroll_into_view_if_needed()
    shows(page, ".pool-figures", rf"\b0 of {BLOCKS}")
    colours: dict[str, set[str]] = {}
    states: set[str] = set()

    def run_until_seen(state: str) -> None:
        steps.run_until(lambda: state in [h.state for h in MemoryMap.of(engine.scheduler, engine.last_step).holdings])
        expect(page.locator(f".pool-list li[data-state={state}]")).not_to_have_count(0)
        holders = page.evaluate(HOLDERS)
        states.update(state for _, state, *_ in holders)
        corners = [corner for _, _, own, _ in holders for corner in own]
        assert len(set(corners)) == len(corners) <= BLOCKS, "no square is drawn for two"
        assert len({colour for *_, colour in holders}) == len(holders)
        for name, _, _, colour in holders:
            colours.setdefault(name, set()).add(colour)

    steps.pause()
    with ThreadPoolExecutor(4) as together:
        answers = [together.submit(ask, running.url, number) for number in range(4)]
        try:
            shows(page, ".pool-list", "4 more in the queue")
            run_until_seen("preempted")
            run_until_seen("recompute")
        finally:
            steps.resume()
    for answer in answers:
        answer.result()
    assert {len(own) for own in colours.values()} == {1}, "a request keeps its colour"
    assert states >= {"decode", "recompute"}
    shows(page, ".pool-figures", rf"\b0 of {BLOCKS}")
    shows(page, ".pool-figures", r"preemptions\s*[1-9]")
    shows(page, "#totals", r"preemptions\s*[1-9]")
    page.click("#memory-full")
    expect(page.locator("#memory-panel:fullscreen")).to_be_visible()


def test_the_memory_is_asked_for_only_in_sight_and_with_the_key(page: Any) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if request.url.endswith("/debug/memory") else None)

    def wait_until_quiet() -> None:
        """Until nothing has been asked between three readings of the metrics, a second apart."""
        for _ in range(20):
            asked.clear()
            for _ in range(3):
                page.wait_for_event("response", lambda response: response.url.endswith("/metrics"))
            if not asked:
                return
        raise AssertionError("the page keeps asking for the memory")

    page.locator("#memory-panel").scroll_into_view_if_needed()
    shows(page, ".pool-figures", r"held\s*0 of ")
    page.evaluate("scrollTo(0, 0)")
    page.set_viewport_size({"width": 1280, "height": 300})
    wait_until_quiet()
    page.set_viewport_size(DESKTOP)
    page.locator("#memory-panel").scroll_into_view_if_needed()
    page.wait_for_event("response", lambda response: response.url.endswith("/debug/memory"))
    page.fill("#key", "wrong")
    page.press("#key", "Tab")
    page.locator("#memory-panel").scroll_into_view_if_needed()
    shows(page, "#memory-complaint", "needs the API key")
    wait_until_quiet()  # until there is another key


def test_shared_and_cached_blocks_are_drawn_with_the_number_of_their_users(page: Any) -> None:
    """Three requests begin with blocks 4 and 5, two of them also with block 6; 7 and 8 are cached."""
    memory = show_memory(page, 16, {"a": [4, 5, 0], "b": [4, 5, 6, 1], "c": [4, 5, 6, 2]}, [7, 8])
    shows(page, ".pool-figures", r"held\s*6 of 16\s*shared\s*3\s*cached\s*2\s*free\s*8\s*.*written\s*75 %")
    shows(page, ".pool-list li[data-holder=b]", r"56 tokens in 4 blocks, 32 of them from the cache$")
    assert [page.evaluate(OUTLINED, kind) for kind in ("shared", "cached")] == [3, 2]
    assert page.locator(".pool-name").all_text_contents() == ["1", "2", "3", "×3", "×3", "×2"]
    page.focus(".pool-frame")
    told = []
    for _ in range(8):
        page.keyboard.press("ArrowRight")
        told.append(page.locator(".pool-told").inner_text())
    assert told[1].startswith("Block 1: request 2 (b), entry 3 of its block table, tokens 48 to 63; 8 of 16 written.")
    assert told[3:] == [
        "Block 3 is free.",
        "Block 4: shared by 3 requests (1, 2, 3), entry 0 of each block table, tokens 0 to 15.",
        "Block 5: shared by 3 requests (1, 2, 3), entry 1 of each block table, tokens 16 to 31.",
        "Block 6: shared by 2 requests (2, 3), entry 2 of each block table, tokens 32 to 47.",
        "Block 7 is cached: its prefix is kept until the block is needed.",
    ]
    memory["num_blocks"] = 160  # the used part alone, a shared block with the first of its requests
    shows(page, ".pool-note", "Only blocks in use are drawn")
    assert page.evaluate(FREE) == 6
    memory["num_blocks"] = 3000
    shows(page, ".pool-figures", "of 3,000")
    page.check("#memory-whole")
    expect(page.locator(".pool-name")).to_have_count(0)  # a square of several blocks has no name
    page.focus(".pool-frame")
    for _ in range(8):
        page.keyboard.press("ArrowLeft")
    whole = (
        "0 to 2: 1 holds 1, 2 holds 1, 3 holds 1, 0 free; 3 to 5: 2 shared, 1 free; 6 to 8: 1 shared, 2 cached, 0 free"
    )
    for blocks in whole.split("; "):
        assert page.locator(".pool-told").inner_text() == f"Blocks {blocks}."
        page.keyboard.press("ArrowRight")


def test_the_theme_that_was_chosen_stays_after_a_reload(page: Any) -> None:
    light = page.evaluate(PAPER)
    page.click("#theme")
    assert page.evaluate(PAPER) != light
    page.reload()
    assert page.evaluate(PAPER) != light
