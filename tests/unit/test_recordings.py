"""The recordings of the course: small, of today's sources, and what a phase is there for happens in its own."""

import json
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from shared.lessons import find_lesson, lessons
from shared.tracing.steps.patches import State, applied
from shared.tracing.steps.recording import as_text
from shared.tracing.steps.shown import current_sources
from tutorial.recordings.__main__ import with_questions
from tutorial.recordings.course import FOLDER, recordings, workloads

MOST_BYTES = 150_000


@cache
def recording(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return values


@cache
def states(name: str) -> list[State]:
    """After each event."""
    found, state = [], recording(name)["state"]
    for event in recording(name)["events"]:
        state = applied(state, event[2]) if len(event) > 2 else state
        found.append(state)
    return found


def launched(name: str) -> list[State]:
    """After each event that launched something."""
    stored = recording(name)
    kinds = [stored["lines"][event[0]][3] for event in stored["events"]]
    return [state for state, kind in zip(states(name), kinds, strict=True) if kind == "launch"]


def kinds(state: State) -> set[str]:
    return {item["kind"] for item in state.get("schedule", {}).get("items", ())}


def test_there_are_those_of_the_workloads_and_no_others() -> None:
    assert {path.name for path in FOLDER.glob("*.json")} == set(recordings())
    assert set(workloads()) == {each.number for each in lessons() if each.batches}


@pytest.mark.parametrize("name", recordings())
def test_a_recording_is_small_and_of_todays_sources(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert len(text.encode()) <= MOST_BYTES
    stored = recording(name)
    assert as_text(stored) == text
    workload, lesson = recordings()[name]
    assert (stored["phase"], stored["device"]) == (lesson.number, "cpu")
    assert [each["id"] for each in stored["requests"] if not each["id"].startswith("segment")] == [
        each["id"] for each in sorted(workload.requests, key=lambda each: each.get("arrives", 0))
    ]
    assert 8 <= len(stored["steps"]) <= 40
    assert current_sources(stored) is not None, "a function that it shows has changed: make recordings"


@pytest.mark.parametrize("name", recordings())
def test_questions_are_those_of_the_table_and_name_moments_that_exist(name: str) -> None:
    stored, (workload, lesson) = recording(name), recordings()[name]
    assert as_text(with_questions(stored, workload, lesson)) == as_text(stored)
    for question in stored.get("questions", ()):
        first = stored["steps"][question["step"]]["first"]
        end = [*[each["first"] for each in stored["steps"]], len(stored["events"])][question["step"] + 1]
        functions = {stored["lines"][event[0]][0] for event in stored["events"][first:end]}
        assert question["line"] in {stored["functions"][each]["name"].split(".")[-1] for each in functions}
        assert 0 <= question["right"] < len(question["answers"])


@pytest.mark.parametrize("name", recordings())
def test_every_request_ends_with_the_text_of_its_tokens(name: str) -> None:
    last, texts = states(name)[-1], recording(name)["texts"]
    assert "error" not in recording(name)
    for request in last["requests"].values():
        assert request["status"] == "finished"
        told = "".join(texts[str(token_id)] for token_id in request["outputs"].values())
        assert request["text"] in (told, ""), "segments give no text"
    assert not last["queues"]["running"]


def test_a_chapter_opens_its_recording_at_two_moments_and_asks_its_question() -> None:
    """That the moments exist is checked with the chapter's other links."""
    for number in workloads():
        name = find_lesson(number).folder.name
        chapter = (FOLDER.parent / f"{name}.md").read_text(encoding="utf-8")
        assert chapter.count("](recordings/phase_") >= 3
        assert f"](recordings/{name}.json#step=" in chapter
        assert f"](recordings/{name}.json#ask=" in chapter


def test_a_short_request_leaves_its_row_empty_in_phase_4_and_not_in_phase_5() -> None:
    static, continuous = launched("phase_05_by_04.json"), launched("phase_05.json")
    assert len(recording("phase_05.json")["steps"]) < len(recording("phase_05_by_04.json")["steps"])

    def waits_beside_a_free_row(state: State) -> bool:
        return len(state["queues"]["running"]) == 1 and bool(state["queues"]["waiting"])

    assert any(map(waits_beside_a_free_row, static))
    assert not any(map(waits_beside_a_free_row, continuous))


def test_phase_6_preempts() -> None:
    assert any(
        each["status"] == "preempted" for state in states("phase_06.json") for each in state["requests"].values()
    )


def test_phase_7_computes_a_chunk_beside_decoding_requests() -> None:
    assert any(kinds(state) == {"decode", "prefill"} for state in states("phase_07.json"))
    items = [item for state in states("phase_07.json") for item in state.get("schedule", {}).get("items", ())]
    sizes = {item["tokens"] for item in items if item["id"] == "C" and item["kind"] == "prefill"}
    assert len(sizes) > 1
    assert max(sizes) <= 12


def test_phase_8_shares_blocks_and_evicts() -> None:
    found = states("phase_08.json")
    assert any(count >= 3 for state in found for _, count, *_ in state["pool"]["blocks"].values())
    assert found[-1]["requests"]["B"]["cached"] > 0
    blocks = [{block for node in state.get("tree", {}).values() for block in node["blocks"]} for state in found]
    assert any(before - after for before, after in pairwise(blocks)), "a cached block was evicted"


def test_phase_9_launches_a_step_before_it_awaits_the_one_before() -> None:
    assert max(len(state.get("in_flight", ())) for state in states("phase_09.json")) == 2
    assert max(len(state.get("in_flight", ())) for state in states("phase_09_by_08.json")) == 1


def test_phase_9_2_drops_keys() -> None:
    kept = [each for state in states("phase_09_2.json") for each in state.get("kept", {}).values()]
    assert kept
    assert all(count < each["tokens"] for each in kept for layer in each["layers"] for count in layer)


def test_phase_11_accepts_drafts_and_rejects_some() -> None:
    fates = [
        each for state in states("phase_11.json") for each in state.get("drafts", {}).values() if "accepted" in each
    ]
    assert any(each["accepted"] for each in fates)
    assert any(each["rejected"] for each in fates)


def test_phase_12_masks_and_forces_and_gives_valid_json() -> None:
    found = states("phase_12.json")
    assert any(each.get("forced") for state in found for each in state.get("drafts", {}).values())
    assert min(each["allowed"] for state in found for each in state.get("grammar", {}).values()) < 10
    assert json.loads(found[-1]["requests"]["A"]["text"])["country"]
    assert found[-1]["requests"]["B"]["text"] in (" yes", " no")
