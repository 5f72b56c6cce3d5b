"""Grammars in a trace: where each token was sampled, in the record, in the tables and in both files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shared.errors import RequestError
from shared.grammar.grammar import Grammar
from shared.grammar.progress import Progress
from shared.tracing.chrome import chrome_trace
from shared.tracing.focus import focus
from shared.tracing.recorder import Recorder
from shared.tracing.timeline_page import page
from shared.tracing.trace import Trace
from shared.tracing.workload import constrained, run
from tests.unit.tracing.recording import arrivals, make_engine, recorded
from tests.unit.tracing.written import check_events, embedded, table

GRAMMAR = Grammar.json_schema({"type": "array", "items": {"enum": ["a", "bc"]}, "minItems": 2, "maxItems": 3})


@pytest.fixture(scope="module")
def trace(folder: Path) -> Trace:
    """Request a is free, b and c have the grammar."""
    free, *others = arrivals(12, 40, 40)
    workload = [free, *(replace(each, params=constrained(each.params, GRAMMAR)) for each in others)]
    return recorded(make_engine(folder, "12", max_batch_size=3), workload)


def test_a_record_says_where_each_token_was_drawn(trace: Trace, folder: Path) -> None:
    free, *constrained_requests = trace.requests
    assert {token.position for token in free.tokens} == {None}
    engine = make_engine(folder, "12")
    fsm = engine.constraints.grammars.get(GRAMMAR)
    for request in constrained_requests:
        assert request.finish_reason == "eos"
        text, state = "", fsm.initial_state
        for token in request.tokens:
            assert token.position is not None
            assert token.position.state == state.state
            assert token.position.num_allowed == len(fsm.allowed_tokens(state))
            assert token.token_id in fsm.allowed_tokens(state)
            assert token.position.stack == ("[" if text and not text.endswith("]") else "") + '"' * (
                text.count('"') % 2
            )
            text += engine.tokenizer.token_bytes(token.token_id).decode()
            state = fsm.next_state(state, token.token_id) or state
        assert len(json.loads("".join(token.text for token in request.tokens))) in (2, 3)
    assert len({token.position for token in constrained_requests[0].tokens}) > 3
    recorder, (arrival,) = Recorder(engine), arrivals(2)
    for params in (constrained(arrival.params, GRAMMAR), arrival.params):
        run(recorder, [replace(arrival, step=len(recorder.steps), params=params)])
    positions = [[token.position is None for token in request.tokens] for request in recorder.trace("x").requests]
    assert positions == [[False] * 2, [True] * 2], "an id that is used again is another request"


def test_a_progress_ends_with_its_grammar(folder: Path) -> None:
    engine = make_engine(folder, "12")
    progress = Progress(engine.constraints.grammars.get(Grammar.choice(["a"])))
    (a,), (end, *_) = engine.tokenizer.encode("a", add_special_tokens=False), engine.tokenizer.eos_ids
    assert progress.read(a) == (0, "", 1)
    assert progress.read(end) == (1, "", len(engine.tokenizer.eos_ids))
    assert progress.read(a) is None


def test_both_files_have_the_positions_and_the_caption_leads_to_one(trace: Trace) -> None:
    events = chrome_trace([trace])["traceEvents"]
    check_events(events)
    told = [position for event in events for position in event.get("args", {}).get("grammar", [])]
    drawn = [token for request in trace.requests for token in request.tokens if token.position]
    assert told == [token.position._asdict() for token in drawn if token.position]
    html = page([trace], "x")
    (data,) = embedded(html)["traces"]
    assert [len(token) for token in data["requests"][0]["tokens"]] == [3] * 12
    shown = [token[3] for request in data["requests"][1:] for token in request["tokens"]]
    assert shown == [list(token.position) for token in drawn if token.position]
    rows = [row[3:] for row in table(html, "Grammar, here")]
    assert rows == [[str(state), stack or "–", str(allowed)] for state, stack, allowed in shown]
    assert "Grammar, here" not in page([replace(trace, requests=trace.requests[:1])], "x")
    deepest, found = max(drawn, key=lambda token: len(token.position.stack)), focus(trace)
    assert found.step == deepest.step
    assert f"in state {deepest.position.state} of its grammar, from {deepest.position.num_allowed} " in found.text


def test_a_phase_without_grammars_refuses_them(folder: Path) -> None:
    recorder = Recorder(make_engine(folder, "11"))
    with pytest.raises(RequestError, match="the engine of phase 12 does"):
        recorder.add_request([1], constrained(arrivals(1)[0].params, GRAMMAR))
