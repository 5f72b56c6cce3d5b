"""The KV cache on the page of ``infer trace``, in a real Chromium: blocks, preemptions, shared prefixes."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.integration.trace_pages import (
    FAINTEST,
    PHONE,
    SHAPE_CONTRAST,
    TEXT_CONTRAST,
    TWO_FRAMES,
    WIDE,
    opened,
    page_data,
    shapes,
    traced,
)

CROWDED = ("--num-gpu-blocks", "8", "--block-size", "4", "--max-seq-len", "32", "--requests", "6", "--max-tokens", "20")
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
OUTLINED = "kind => document.querySelector(`g.${kind} .pool-edge`)?.getAttribute('d').split('M').length - 1 || 0"


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
        assert "20 cached of" not in tab.locator(".names div").nth(7).inner_text()
        assert re.match(r"2 · 20 cached of \d+ \+ ", tab.locator(".names div").nth(8).inner_text())
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
