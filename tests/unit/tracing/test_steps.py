"""Recordings of steps: replayed, they give what the engine had at each line; and they change nothing of it."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.config import EngineConfig
from shared.grammar.grammar import Grammar
from shared.lessons import find_lesson
from shared.sampling.params import SamplingParams
from shared.tracing.recorder import Recorder
from shared.tracing.steps.line_tracer import LineTracer
from shared.tracing.steps.patches import State, applied, difference
from shared.tracing.steps.recording import StepRecorder, as_text, record
from shared.tracing.steps.shown import current_sources, functions_in, sources_hash
from shared.tracing.workload import Arrival, run
from tests.unit.tracing.recording import SPECULATING, Clock, add_gpu

PHASES: dict[str, dict[str, Any]] = {
    "04": {},
    "05": {},
    "06": {"block_size": 4, "num_gpu_blocks": 12},
    "06.1": {"block_size": 4, "num_gpu_blocks": 12},
    "07": {"block_size": 4, "num_gpu_blocks": 12, "prefill_chunk_size": 5},
    "08": {"block_size": 4, "num_gpu_blocks": 12, "prefill_chunk_size": 5},
    "09": {"block_size": 4, "num_gpu_blocks": 12, "prefill_chunk_size": 5, "overlap_scheduling": True},
    "10": {"block_size": 4, "num_gpu_blocks": 12, "quantization": "int8"},
    "11": {"block_size": 4, "num_gpu_blocks": 16, **SPECULATING},
    "12": {"block_size": 4, "num_gpu_blocks": 16, **SPECULATING},
}
PROMPTS = ([7, 8, 9, 7, 8, 9, 7, 8], [7, 8, 9, 7, 8, 9, 7, 8, 3], list(range(40, 53)), [5])


def make(folder: Path, phase: str, **settings: Any) -> Any:
    config = EngineConfig(model=str(folder), max_seq_len=40, seed=0, max_batch_size=3, **PHASES[phase] | settings)
    return find_lesson(phase).engine(config)


def arrivals(phase: str = "07") -> list[Arrival]:
    """a and b begin alike, c is long, and d comes late; in phase 12 b has a grammar."""
    greedy = SamplingParams(temperature=0.0, max_new_tokens=9, ignore_eos=True)
    made = [
        Arrival(step, name, tuple(ids), greedy) for step, name, ids in zip((0, 0, 1, 3), "abcd", PROMPTS, strict=True)
    ]
    if phase == "12":
        limited = replace(greedy, structured_output=Grammar.choice(["red", "blue"]), ignore_eos=False)
        made[1] = replace(made[1], params=limited)
    return made


@cache
def recording_of(folder: Path, phase: str) -> dict[str, Any]:
    """A recording that no test changes."""
    return record(make(folder, phase), find_lesson(phase), arrivals(phase))


def recorder_of(folder: Path, phase: str) -> StepRecorder:
    return StepRecorder(make(folder, phase), find_lesson(phase), clock=Clock())


def replayed(recording: dict[str, Any]) -> list[State]:
    """The state after each event."""
    states, state = [], recording["state"]
    for event in recording["events"]:
        state = applied(state, event[2]) if len(event) > 2 else state
        states.append(state)
    return states


def watching(recorder: StepRecorder, see: Callable[[int, State], None]) -> None:
    """Call ``see`` at each reading of the state, with the number of the event that it ends."""
    read = recorder.tracer.read

    def seen(frames: Sequence[FrameType]) -> State:
        state = read(frames)
        see(len(recorder.tracer.events), state)
        return state

    recorder.tracer.read = seen


def moments(recording: dict[str, Any], words: str, function: str = "") -> list[int]:
    """The events on lines with these words, of a function with this name."""
    found = []
    for number, (line, *_) in enumerate(recording["events"]):
        index, offset, *_ = recording["lines"][line]
        shown = recording["functions"][index]
        if words in shown["lines"][offset] and function in shown["name"]:
            found.append(number)
    return found


VALUES = st.recursive(
    st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=3),
    lambda values: st.dictionaries(st.sampled_from("abc"), values, max_size=3),
    max_leaves=12,
)
STATES = st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3)


@given(STATES, STATES)
def test_a_patch_leads_from_one_state_to_the_other(before: State, after: State) -> None:
    patch = difference(before, after)
    assert applied(before, json.loads(json.dumps(patch))) == after
    assert (patch == {}) == (before == after)


@pytest.fixture(scope="module", params=PHASES)
def readings(request: pytest.FixtureRequest, folder: Path) -> tuple[list[State], list[str], list[State]]:
    """The states of a phase's run after each event: as patches give them, as the recorder read them, and as the engine
    is read here once more, with other means than those of the recorder."""
    recorder = recorder_of(folder, request.param)
    engine, full, own = recorder.engine, dict[int, str](), dict[int, State]()

    def look(number: int, state: State) -> None:
        pool, scheduler = engine.pool, engine.scheduler
        held = {request.request_id: blocks for request, blocks in pool.holdings()[1].items()}
        owned = [block for blocks in held.values() for block in blocks]
        full[number] = json.dumps(state, sort_keys=True)
        own[number] = {
            "waiting": [name for name in "abcd" if name in scheduler.waiting],
            "running": [request.request_id for request in scheduler.running.values()],
            "held": held,
            "used": len({*owned, *pool.cached_blocks()}),
            "computed": {name: each.num_computed_tokens for name, each in scheduler.running.items()},
            "ids": {name: each.token_ids for name, each in scheduler.running.items()},
        }

    watching(recorder, look)
    run(recorder, arrivals(request.param))
    states = replayed(json.loads(as_text(recorder.recording())))
    return states, [full[n] for n in range(len(states))], [own[n] for n in range(len(states))]


def test_all_patches_give_the_states_that_were_read(readings: tuple[list[State], list[str], list[State]]) -> None:
    states, full, _ = readings
    assert len(states) > 200
    for number, state in enumerate(states):
        assert json.dumps(state, sort_keys=True) == full[number], number


def test_twelve_moments_are_those_of_the_engine(readings: tuple[list[State], list[str], list[State]]) -> None:
    """At events over the whole run."""
    states, _, engine_states = readings
    for number in range(0, len(states), len(states) // 11):
        state, own = states[number], engine_states[number]
        requests = state["requests"]
        assert sorted(state["queues"]["waiting"]) == own["waiting"]
        assert state["queues"]["running"] == own["running"]
        assert {name: each["blocks"] for name, each in requests.items() if each.get("blocks")} == {
            name: blocks for name, blocks in own["held"].items() if blocks
        }
        assert len(state["pool"]["blocks"]) == own["used"]
        for name in own["running"]:
            assert requests[name]["computed"] == own["computed"][name]
            prompt = list(PROMPTS["abcd".index(name)])
            assert prompt + list(requests[name]["outputs"].values()) == own["ids"][name]


def test_a_run_in_chunks_by_hand(folder: Path) -> None:
    """a and b decode (8 and 9 tokens) when c, of 13, comes in chunks of 5; blocks have 4 tokens."""
    recording = recording_of(folder, "07")
    states = replayed(recording)

    def after(step: int, words: str, function: str) -> State:
        end = [*[each["first"] for each in recording["steps"]], len(states)][step + 1]
        first = recording["steps"][step]["first"]
        return states[[n for n in moments(recording, words, function) if first <= n < end][-1]]

    assert [event[0] for event in recording["events"][:1]] == [0]
    assert recording["functions"][0]["lines"][recording["lines"][0][1]].strip() == "def step(self) -> list[StepOutput]:"
    # Step 0: the first chunks of a and b, 5 tokens each.
    at = after(0, "return tuple(entries)", "Chunks.fill")
    assert [(i["id"], i["start"], i["tokens"], i["kind"], i["rows"]) for i in at["schedule"]["items"]] == [
        ("a", 0, 5, "prefill", 0),
        ("b", 0, 5, "prefill", 0),
    ]
    assert at["requests"]["a"]["blocks"] == [0, 1]
    assert at["pool"]["blocks"]["0"] == [["a"], 1]
    # Step 1: the last ones, and a chunk of c.
    assert after(1, "sizes.append", "Chunks.sizes")["variables"]["3"]["sizes"] == "[3, 4, 5]"
    batch = after(1, "return cls(", "Batch.of")["batch"]
    assert (batch["ids"], batch["num_new"], batch["positions"]) == (
        ["a", "b", "c"],
        [3, 4, 5],
        [5, 6, 7, 5, 6, 7, 8, 0, 1, 2, 3, 4],
    )
    tables = {name: each["blocks"] for name, each in states[-1]["requests"].items() if each.get("blocks")}
    assert tables == {}, "all have ended"
    blocks = after(1, "return cls(", "Batch.of")["requests"]["c"]["blocks"]
    assert batch["slots"][7:] == [4 * blocks[n // 4] + n % 4 for n in range(5)]
    assert batch["logit_rows"] == [2, 6], "c samples with its last chunk"
    assert batch["tables"][2] == blocks[:2]
    # Step 2: a and b decode beside the second chunk.
    at = after(2, "self.scheduler.commit(", "Engine.finish")
    assert list(at["sampled"]) == ["a", "b"]
    assert [(i["id"], i["kind"], i["tokens"]) for i in after(2, "", "Engine.finish")["schedule"]["items"]] == [
        ("a", "decode", 1),
        ("b", "decode", 1),
        ("c", "prefill", 5),
    ]
    assert at["requests"]["a"]["known"] == 8 + 1
    kinds = {recording["lines"][event[0]][3] for event in recording["events"]}
    assert kinds == {"", "launch", "wait"}
    texts = {name: each["text"] for name, each in states[-1]["requests"].items()}
    assert len(texts) == 4


def test_what_is_in_flight_drafted_and_allowed(folder: Path) -> None:
    overlapped = replayed(recording_of(folder, "09"))
    assert max(len(state.get("in_flight", ())) for state in overlapped) == 2, "one is launched before one is awaited"
    drafting = replayed(recording_of(folder, "11"))
    fates = [each for state in drafting for each in state.get("drafts", {}).values() if "accepted" in each]
    assert fates
    for fate in fates:
        assert fate["accepted"] + fate["rejected"] == len(fate["ids"]) == fate["granted"]
    walked = replayed(recording_of(folder, "12"))
    first = next(state["grammar"]["b"] for state in walked if "grammar" in state)
    assert first["examples"]
    assert first["allowed"] == 2, "r and b: the vocabulary's tokens are bytes"
    assert walked[-1]["requests"]["b"]["text"] in ("red", "blue")
    shared = replayed(recording_of(folder, "08"))
    assert any(count == 3 for state in shared for _, count, *_ in state["pool"]["blocks"].values()), "a, b and the tree"
    assert shared[-1]["requests"]["b"].get("cached", 0) % 4 == 0


def test_a_gpu_runs_what_lines_launched_while_later_lines_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(folder, "09")
    recorder = StepRecorder(engine, find_lesson("09"), clock=Clock())
    add_gpu(recorder, 700, monkeypatch)
    run(recorder, arrivals("09"))
    found, events = recorder.recording(), recorder.tracer.events
    trace = [span for step in recorder.trace("").steps for span in step.gpu]
    spans = [span for step in found["steps"] for span in step.get("gpu", ())]
    assert [name for name, *_ in spans] == ["forward", "sample"] * (len(spans) // 2)
    assert len(spans) >= 16
    for (_, first, last, micros), span in zip(spans, trace, strict=True):
        began, ended = span.started_ns + recorder.zero_ns, span.ended_ns + recorder.zero_ns
        has_ended = sum(event.ended_ns < began for event in events)
        assert first == min(has_ended, len(events) - 1), "the first that has not ended, or the run's last"
        assert last == sum(event.ended_ns - event.nanoseconds <= ended for event in events) - 1
        assert micros == 1, "700 ns"
        assert first < last or last == len(events) - 1, "the host went on"
    kinds = [found["lines"][found["events"][first][0]][3] for _, first, *_ in spans]
    assert kinds[0] == "launch"


def test_drafts_keep_their_count_in_the_commit(folder: Path) -> None:
    """The commit makes schedules of accepted drafts alone; the drafts of the step stay what was granted."""
    recording = recording_of(folder, "11")
    states = replayed(recording)
    fates = 0
    for step, end in zip(recording["steps"], [*recording["steps"][1:], {"first": len(states)}], strict=True):
        within = [state.get("drafts", {}) for state in states[step["first"] : end["first"]]]
        is_settled = [any("accepted" in each for each in drafts.values()) for drafts in within]
        for drafts in within[is_settled.index(True) :] if True in is_settled else ():
            assert drafts.keys() == within[-1].keys()
            for name, each in drafts.items():
                assert each.get("ids") == within[-1][name].get("ids")
                assert each["granted"] == within[-1][name]["granted"]
            fates += 1
    assert fates > 20


@pytest.mark.parametrize("phase", ["07", "12"])
def test_recording_changes_nothing(folder: Path, phase: str) -> None:
    plain = Recorder(make(folder, phase), clock=Clock())
    run(plain, arrivals(phase))
    recorder = recorder_of(folder, phase)
    attributes = {name: vars(part).keys() for name, part in vars(recorder.engine).items() if hasattr(part, "__dict__")}
    run(recorder, arrivals(phase))
    assert sys.gettrace() is None or not isinstance(getattr(sys.gettrace(), "__self__", None), LineTracer)
    assert [step.record for step in recorder.steps] == [step.record for step in plain.steps]
    assert recorder.tokens == plain.tokens
    for name, known in attributes.items():
        assert known == vars(vars(recorder.engine)[name]).keys(), name
    texts = {name: each["text"] for name, each in replayed(recorder.recording())[-1]["requests"].items()}
    assert texts == {
        r.request_id: "".join(t.text for t in tokens) for r, tokens in zip(plain.requests, plain.tokens, strict=True)
    }


@pytest.mark.parametrize("phase", ["07", "11"])
def test_two_recordings_differ_in_times_only(folder: Path, phase: str) -> None:
    first, second = (
        each
        | {"events": [[line, 0, *rest] for line, _, *rest in each["events"]]}
        | {"steps": [step | {"ms": 0} for step in each["steps"]]}
        for each in (recording_of(folder, phase), record(make(folder, phase), find_lesson(phase), arrivals()))
    )
    assert as_text(first) == as_text(second)


def test_a_step_that_raises_ends_the_recording(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.scheduling.chunks.BESIDE_DECODING", "many")
    engine = make(folder, "07", prefill_chunk_size=None)
    recording = record(engine, find_lesson("07"), arrivals())
    assert recording["error"].startswith("the last step raised TypeError: ")
    last = [recording["functions"][recording["lines"][event[0]][0]]["name"] for event in recording["events"][-12:]]
    assert "Chunks.sizes" in last
    assert len(recording["steps"]) == 2
    raising = [recording["lines"][event[0]] for event in recording["events"]]
    (function,) = {function for function, *_, kind in raising if kind == "raise"}
    assert recording["functions"][function]["name"] == "Chunks.sizes"


def test_a_statement_of_several_lines_is_one_event() -> None:
    text = '''
@deco
def made(a):
    """Doc."""
    total = sum(
        a,
        1,
    )
    for n in (
        1,
        2,
    ):
        total += n
    return total
'''
    function = functions_in(text, "a.py")["made"]
    assert (function.first, function.start, len(function.lines)) == (2, 3, 13)
    assert [function.statement(line) for line in range(5, 15)] == [5, 5, 5, 5, 9, 9, 9, 9, 13, 14]


def test_a_recording_is_stale_when_a_shown_function_changes(folder: Path) -> None:
    recording = record(make(folder, "05"), find_lesson("05"), arrivals())
    assert current_sources(recording) == recording
    moved = json.loads(as_text(recording))
    moved["functions"][0]["first"] += 7  # lines above it were removed since
    assert current_sources(moved) == recording
    function = recording["functions"][1]
    text = "\n" * (function["first"] - 1) + "\n".join(["class A:", *function["lines"]])
    changed = functions_in(text.replace("self.num_steps += 1", "self.num_steps += 2"), function["path"])
    assert sources_hash(changed.values()) != sources_hash(functions_in(text, function["path"]).values())
    assert current_sources(recording | {"sources_hash": "0"}) is None
    renamed = [each | {"name": "Engine.gone"} for each in recording["functions"]]
    assert current_sources(recording | {"functions": renamed}) is None
