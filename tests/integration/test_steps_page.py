"""The stepper in a real Chromium, opened as a file: what it shows at a moment is what the recording says there.

The recordings are those of the course. What a moment holds is replayed here by Python, not by the page's script.
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shared.tracing.steps.moments import code_of, text_of
from shared.tracing.steps.page import write
from shared.tracing.steps.patches import applied
from tests.integration.stepper import address, event_of, go_to, stepper
from tests.integration.tabs import CONTRASTS, PHONE, expect, opened

RECORDINGS = Path(__file__).parents[2] / "tutorial/recordings"
# What the panels show: texts, and of each square the requests that hold its block.
SHOWN = """() => {
    const texts = (selector, within = document) => [...within.querySelectorAll(selector)].map(each => each.innerText);
    const line = document.querySelector('.lines [aria-current]');
    return {
        number: line.querySelector('.number').textContent,
        line: line.textContent,
        function: texts('.stack li').at(-1),
        queues: [...document.querySelectorAll('.queues .row')].map(row => texts('.name, .chip', row)),
        scheduled: texts('.schedule .row .chip'),
        figures: texts('.requests .row[data-request] .figure'),
        answers: [...document.querySelectorAll('.answer')].map(answer => answer.textContent),
        owners: [...document.querySelectorAll('.square')].map(square => square.dataset.request ?? ''),
        token_ids: texts('.tokens .token_ids'),
    };
}"""


@cache
def recording(name: str) -> dict[str, Any]:
    return json.loads((RECORDINGS / f"{name}.json").read_text(encoding="utf-8"))


@cache
def states(name: str) -> list[dict[str, Any]]:
    """The state after each event."""
    data = recording(name)
    found, state = [], data["state"]
    for event in data["events"]:
        state = applied(state, event[2]) if len(event) > 2 else state
        found.append(state)
    return found


def moments(name: str, function: str, text: str = "") -> list[int]:
    """The events of a function, on lines that contain the text."""
    data = recording(name)
    events = range(len(data["events"]))
    return [each for each in events if code_of(data, each)[0]["name"] == function and text in text_of(data, each)]


def exercise_of(name: str, event: int) -> str:
    """The exercise whose lines an event executed; empty for other lines."""
    code, offset = code_of(recording(name), event)
    before, after = code["lines"][:offset], code["lines"][offset:]
    begins = [number for number, line in enumerate(before) if line.lstrip().startswith("# exercise ")]
    ends = [number for number, line in enumerate(before) if line.strip() == "# end exercise"]
    is_within = bool(begins) and begins[-1] > max(ends, default=-1) and "# end exercise" in map(str.strip, after)
    return before[begins[-1]].split()[2].rstrip(":") if is_within else ""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Writes the page of a recording once, and says where it is."""
    folder = tmp_path_factory.mktemp("steps")

    @cache
    def page(name: str, other: str | None = None) -> str:
        path = folder / f"{name}{other or ''}.html"
        asked = {
            "name": "chunk",
            "step": 2,
            "line": "return Schedule",
            "ask": "How many of C?",
            "answers": ["22", "12"],
        }
        asked |= {"right": 1, "reveal": "A chunk has at most 12 tokens."}
        data = recording(name) | ({"questions": [asked]} if name == "phase_07" else {})
        path.write_text(write(data, other=recording(other) if other else None), encoding="utf-8")
        return path.as_uri()

    return page


@pytest.fixture
def tab(browser: Any, pages: Any) -> Iterator[Any]:
    with stepper(browser, pages("phase_07")) as tab:
        yield tab


def go(tab: Any, name: str, event: int) -> None:
    go_to(tab, recording(name), event)


def test_keys_go_by_lines_and_by_steps(tab: Any) -> None:
    firsts = [step["first"] for step in recording("phase_07")["steps"]]
    last = len(recording("phase_07")["events"]) - 1
    way = [("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("Shift+ArrowRight", firsts[1])]
    way += [("Shift+ArrowRight", firsts[2]), ("ArrowRight", firsts[2] + 1), ("Shift+ArrowLeft", firsts[2])]
    way += [("Shift+ArrowLeft", firsts[1]), ("End", last), ("ArrowRight", last), ("Home", 0), ("ArrowLeft", 0)]
    for key, event in way:
        tab.keyboard.press(key)
        assert event_of(tab) == event, key
    tab.keyboard.press("c")
    assert event_of(tab) == next(n for n, event in enumerate(recording("phase_07")["events"]) if n and len(event) > 2)
    tab.locator("#moment").focus()
    tab.keyboard.press("ArrowRight")
    assert tab.locator("#moment").get_attribute("aria-valuetext").startswith("step 0, line ")


@pytest.mark.parametrize("name", ["phase_06", "phase_07", "phase_08", "phase_11"])
def test_a_moment_shows_what_the_recording_says(name: str, browser: Any, pages: Any) -> None:
    data = recording(name)
    url = pages(name)
    with stepper(browser, url) as tab:
        for event in range(5, len(data["events"]), len(data["events"]) // 12):
            go(tab, name, event)
            shown, state = tab.evaluate(SHOWN), states(name)[event]
            index, offset, *_ = data["lines"][data["events"][event][0]]
            code = data["functions"][index]
            assert shown["number"] == str(code["first"] + offset)
            assert shown["line"].endswith(code["lines"][offset].strip())
            assert shown["function"] == code["name"]
            for queue, *ids in shown["queues"]:
                assert ids == state["queues"].get(queue, [])
            assert shown["scheduled"] == [item["id"] for item in state.get("schedule", {"items": []})["items"]]
            served = [state["requests"].get(request["id"]) for request in data["requests"]]
            assert shown["figures"] == [f"{one['computed']} of {one['known']}" if one else "" for one in served]
            assert shown["answers"] == [one["text"] if one else "" for one in served]
            blocks = state["pool"]["blocks"]
            wanted = [" ".join(blocks.get(str(number), [[]])[0]) for number in range(state["pool"]["num_blocks"])]
            assert shown["owners"] == wanted
            batch = state.get("batch", {"token_ids": []})
            assert [id for id in shown["token_ids"] if id != "?"] == [
                str(id) for number, id in enumerate(batch["token_ids"]) if number not in batch.get("pending", [])
            ]


def test_a_prompt_keeps_its_length_when_its_token_is_known(tab: Any) -> None:
    committed = recording("phase_07")["steps"][4]["first"] - 1
    assert states("phase_07")[committed]["requests"]["C"]["known"] == 23
    go(tab, "phase_07", committed)
    assert "tokens 12 to 21 of 22" in tab.locator(".schedule").inner_text()


def test_variables_are_those_of_the_function_that_is_shown(tab: Any) -> None:
    data, names = recording("phase_07"), ".variables .name"
    depths = [data["lines"][line][2] for line, *_ in data["events"]]
    inner = [len(state.get("variables", {})) - 1 for state in states("phase_07")]
    calls = next(e for e, depth in enumerate(depths) if inner[e] > depth and states("phase_07")[e]["variables"]["0"])
    go(tab, "phase_07", calls)
    assert tab.locator(names).all_inner_texts() == list(states("phase_07")[calls]["variables"][str(depths[calls])])
    returns = next(
        e for e, depth in enumerate(depths) if inner[e] < depth and states("phase_07")[e - 1]["variables"][str(depth)]
    )
    go(tab, "phase_07", returns)
    had = states("phase_07")[returns - 1]["variables"][str(depths[returns])]
    assert tab.locator(names).all_inner_texts() == list(had)
    assert tab.locator(".variables .changed").count() == 0


def test_what_compression_keeps_is_shown_and_told(browser: Any, pages: Any) -> None:
    url, name = pages("phase_09_2"), "phase_09_2"
    event, kept = next((e, state["kept"]["A"]) for e, state in enumerate(states(name)) if "kept" in state)
    with stepper(browser, url) as tab:
        go(tab, name, event)
        heads = [" ".join(map(str, layer)) for layer in kept["layers"]]
        assert tab.locator(".kept .changed").all_inner_texts() == [f"of {kept['tokens']} tokens", *heads]
        assert "Of 56 tokens of A, each KV head keeps 36 to 40" in tab.inner_text("#told")


def test_what_the_line_changed_is_marked_and_told(tab: Any) -> None:
    data = recording("phase_07")
    before = data["state"]
    for event, (state, (_, _, *patch)) in enumerate(zip(states("phase_07"), data["events"], strict=True)):
        taken = state.get("sampled", {}) if state.get("sampled") != before.get("sampled") else {}
        old = before["requests"]
        new = [name for name, one in state["requests"].items() if one["status"] != old.get(name, {}).get("status")]
        before = state
        if not (taken or new) and event % 97:
            continue
        go(tab, "phase_07", event)
        assert tab.locator(".sampled .row:has(.changed) .chip").all_inner_texts() == list(taken)
        assert tab.locator(".requests .row:has(.status.changed) .chip").all_inner_texts() == new, event
        said = tab.locator("#told").inner_text()
        assert all(f"is sampled for {name}" in said for name in taken)
        now = state["requests"]
        words = {name: "is " + one["status"] if name in old else "arrives with" for name, one in now.items()}
        assert all(f"{name} {words[name]}" in said for name in new)
        assert patch or said == "This line changes nothing that is shown.", event


@pytest.mark.parametrize(
    ("name", "said"), [("phase_06", "Blocks 0 and 1 are allocated"), ("phase_08", "0 to 3 are cached")]
)
def test_blocks_that_no_request_holds_are_cached_only_where_a_phase_caches(
    name: str, said: str, browser: Any, pages: Any
) -> None:
    unheld = (
        event
        for event, state in enumerate(states(name))
        if any(count and not owners for owners, count, *_ in state["pool"]["blocks"].values())
    )
    with stepper(browser, pages(name)) as tab:
        go(tab, name, next(unheld))
        assert said in tab.inner_text("#told")
        assert tab.locator(".square.kept").first.get_attribute("title").endswith(said.split()[-1])


def test_the_address_keeps_the_moment(tab: Any) -> None:
    within = moments("phase_07", "ChunkedScheduler.schedule")
    first = next(event for event in within if event >= recording("phase_07")["steps"][3]["first"])
    tab.evaluate("location.hash = '#step=3&line=schedule'")
    expect(tab.locator("#moment")).to_have_value(str(first))
    entries = next(event for event in moments("phase_07", "ChunkedScheduler.schedule", "entries =") if event > first)
    tab.evaluate("location.hash = '#step=3&line=entries ='")
    expect(tab.locator("#moment")).to_have_value(str(entries))
    tab.keyboard.press("ArrowRight")
    tab.wait_for_url("**" + address(recording("phase_07"), entries + 1))
    tab.reload()
    expect(tab.locator("#moment")).to_have_value(str(entries + 1))


def test_a_request_is_followed_everywhere(tab: Any) -> None:
    within = moments("phase_07", "Scheduler.commit")
    event = next(each for each in within if len(states("phase_07")[each].get("batch", {"ids": []})["ids"]) == 3)
    go(tab, "phase_07", event)
    tab.locator("[data-follow='C']").click()
    state = states("phase_07")[event]
    assert tab.locator(".square.followed").all_inner_texts() == list(map(str, sorted(state["requests"]["C"]["blocks"])))
    columns = tab.locator(".tokens .positions").evaluate_all("all => all.map(each => each.matches('.followed'))")
    batch = state["batch"]
    assert columns == [
        id == "C" for id, count in zip(batch["ids"], batch["num_new"], strict=True) for _ in range(count)
    ]
    assert tab.locator(".requests .followed .chip").all_inner_texts() == ["C"]
    assert tab.locator(".passage.followed .chip").all_inner_texts() == ["C"]
    tab.wait_for_url("**&follow=C")
    tab.reload()
    expect(tab.locator("[data-follow='C']")).to_have_attribute("aria-pressed", "true")
    tab.locator(".requests .chip", has_text="A").click()
    assert tab.locator(".passage.followed .chip").all_inner_texts() == ["A"]
    tab.keyboard.press("Escape")
    assert tab.locator(".followed").count() == 0
    go(tab, "phase_07", event + 1)
    tab.evaluate("location.hash = '#step=3&follow=missing'")
    expect(tab.locator("#moment")).to_have_value(str(recording("phase_07")["steps"][3]["first"]))
    assert tab.locator(".side").get_attribute("data-following") == "no"


def test_the_lines_of_an_exercise_are_folded_and_one_click_opens_them(tab: Any) -> None:
    data = recording("phase_07")
    hidden = [event for event in range(len(data["events"])) if exercise_of("phase_07", event)]
    go(tab, "phase_07", hidden[0])
    row = tab.locator(".lines [aria-current]")
    expect(row).to_be_hidden()
    summary = tab.locator(".fold summary.holds")
    assert summary.inner_text().strip() == f"…  # exercise {exercise_of('phase_07', hidden[0])}"
    summary.click()
    expect(row).to_be_visible()
    expect(row).to_be_in_viewport()
    tab.keyboard.press("ArrowRight")
    assert event_of(tab) == hidden[0] + 1


def test_it_plays_until_it_is_paused(tab: Any) -> None:
    tab.locator("#speed").select_option("40")
    tab.locator("#play").click()
    assert tab.locator("#play").get_attribute("aria-label") == "pause"
    expect(tab.locator("#moment")).to_have_value(re.compile(r"[6-9]\d|\d{3,}"))
    tab.locator("#play").click()
    assert tab.locator("#play").get_attribute("aria-label") == "play"


@pytest.mark.parametrize(("name", "other"), [("phase_07", "phase_07_by_06_1"), ("phase_12", None)])
def test_texts_have_contrast(name: str, other: str | None, browser: Any, pages: Any) -> None:
    url = pages(name, other)
    count = len(recording(name)["events"])
    with stepper(browser, url, "#beside=06.1" if other else "") as tab:

        def weak() -> list[tuple[float, str]]:
            """Texts of little contrast in either scheme."""
            found = []
            for scheme in ("light", "dark"):
                tab.emulate_media(color_scheme=scheme)
                found += tab.evaluate(CONTRASTS)
            return [(round(ratio, 2), text) for ratio, text in found if ratio < 4.5]

        for event in range(3, count, count // 8):
            go(tab, name, event)
            assert weak() == [], event
        tab.locator("[data-follow]").first.click()
        assert weak() == []
        for _ in range(2):
            tab.locator("#theme").click()
            assert weak() == []


def test_a_phone_shows_one_station_at_a_time(browser: Any, pages: Any) -> None:
    url = pages("phase_12")
    with stepper(browser, url, viewport=PHONE, has_touch=True, is_mobile=True) as tab:
        seen = "all => all.filter(each => each.checkVisibility()).map(each => each.dataset.station)"
        assert tab.locator("section.station").evaluate_all(seen) == ["requests"]
        for button in tab.locator(".stations button").all():
            button.tap()
            assert tab.locator("section.station").evaluate_all(seen) == [button.get_attribute("data-station")]
        before = event_of(tab)
        tab.locator("#on").tap()
        tab.locator("#step-on").tap()
        assert event_of(tab) == recording("phase_12")["steps"][1]["first"] > before
        line = tab.locator(".lines [aria-current] .number").first.text_content()
        assert tab.locator("#now").inner_text().startswith(str(line)), "the line that runs is told beside any station"


def test_a_question_hides_its_answer_until_it_is_opened(browser: Any, pages: Any) -> None:
    url = pages("phase_07")
    with stepper(browser, url, "#ask=chunk") as tab:
        shown = moments("phase_07", "ChunkedScheduler.schedule", "return Schedule")[2]
        expect(tab.locator("#moment")).to_have_value(str(shown))
        assert "How many of C?" in tab.locator("#question").inner_text()
        for panel in ("requests", "schedule", "batch", "variables"):
            assert tab.locator(f".{panel} .body .row").count() == 0
        tab.keyboard.press("ArrowLeft")
        tab.keyboard.press("ArrowRight")
        assert "prefill" not in tab.inner_text("#told")
        tab.get_by_role("button", name="22", exact=True).click()
        assert "You said “22”; it is “12”. A chunk has at most 12 tokens." in tab.inner_text("#question")
        assert "tokens 0 to 11 of 22" in tab.locator(".schedule").inner_text()
        tab.get_by_role("button", name="Close").click()
        expect(tab.locator("#question")).to_be_hidden()
        tab.get_by_role("button", name="question 1: How many of C?").click()
        expect(tab.locator(".schedule .row")).to_have_count(0)


def test_two_phases_go_side_by_side(browser: Any, pages: Any) -> None:
    url = pages("phase_07", "phase_07_by_06_1")
    with stepper(browser, url) as tab:
        expect(tab.locator(".side").first).to_be_hidden()
        tab.get_by_role("button", name="beside phase 06.1").click()
        tab.wait_for_url("**&beside=06.1")
        for _ in range(3):
            tab.keyboard.press("Shift+ArrowRight")
        sides = tab.locator(".side").all()
        firsts = [recording(name)["steps"][3]["first"] for name in ("phase_07_by_06_1", "phase_07")]
        names = ("phase_07_by_06_1", "phase_07")
        for side, name, first in zip(sides, names, firsts, strict=True):
            state = states(name)[first]
            figures = [f"{one['computed']} of {one['known']}" for one in state["requests"].values()]
            assert [text for text in side.locator(".figure").all_inner_texts() if text] == figures
        # The long prompt: whole in one phase, a chunk in the other.
        assert states(names[0])[firsts[0]]["requests"]["C"]["computed"] == 22
        assert states(names[1])[firsts[1]]["requests"]["C"]["computed"] == 12
        sign = "all => [...new Set(all.map(each => getComputedStyle(each, '::before').content))]"
        assert [side.locator(".differs .sign").evaluate_all(sign) for side in sides] == [['"−"'], ['"+"']]


def test_a_step_is_a_table_too(tab: Any) -> None:
    firsts = [step["first"] for step in recording("phase_07")["steps"]]
    tab.evaluate("location.hash = '#step=1'")
    tab.locator("#table summary").click()
    rows = tab.locator("#rows tr")
    expect(rows).to_have_count(firsts[2] - firsts[1])
    assert rows.first.locator("td").first.inner_text() == "Engine.step"
    assert rows.first.get_attribute("aria-current") == "true"
    assert any("is sampled for A" in text for text in rows.locator("td:last-child").all_inner_texts())


def test_every_control_shows_its_focus(tab: Any) -> None:
    reached = set()
    for _ in range(60):
        tab.keyboard.press("Tab")
        found = tab.evaluate(
            "(() => { const it = document.activeElement, look = getComputedStyle(it);"
            " return it === document.body ? null : [it.id || it.className, look.outlineStyle]; })()"
        )
        if found is None:
            break
        reached.add(found[0])
        assert found[1] != "none", found
    assert {"play", "on", "back", "step-on", "step-back", "change", "moment", "speed", "theme", "lines"} <= reached


def test_launching_and_waiting_are_told_apart(tab: Any) -> None:
    data = recording("phase_07")
    for kind, said in (("launch", "launches work"), ("wait", "waits for the device")):
        event = next(number for number, (line, *_) in enumerate(data["events"]) if data["lines"][line][3] == kind)
        go(tab, "phase_07", event)
        assert tab.inner_text("#kind").startswith(said)
        assert kind in tab.locator(".lines [aria-current]").get_attribute("class")


def test_without_its_script_the_page_says_so(browser: Any, pages: Any) -> None:
    with opened(browser, pages("phase_07"), java_script_enabled=False) as tab:
        assert tab.locator("noscript p").is_visible()
