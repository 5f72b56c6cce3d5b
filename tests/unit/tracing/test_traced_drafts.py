"""Drafts in a trace: accepted and rejected ones in the cells, totals, tables and both files."""

from pathlib import Path
from typing import Any

import pytest

from shared.tracing.chrome import chrome_trace
from shared.tracing.focus import focus
from shared.tracing.timeline_page import page, totals_rows
from shared.tracing.trace import CellKind, Trace
from tests.unit.tracing.recording import arrivals, make_engine, recorded
from tests.unit.tracing.written import check_events, embedded, table

SPECULATING: dict[str, Any] = {
    "use_speculative_decoding": True,
    "drafter": "ngram",
    "spec_length": 3,
    "adapt_spec_length": False,
}


@pytest.fixture(scope="module")
def trace(folder: Path) -> Trace:
    """Lookups in answers that repeat themselves, as those of a random model do."""
    return recorded(make_engine(folder, "11", max_batch_size=2, **SPECULATING), arrivals(40, 30, 40))


def test_a_record_and_its_cells_say_what_was_verified(trace: Trace) -> None:
    verified = [(step, *counts) for step, each in enumerate(trace.steps) for counts in each.record.verified]
    assert any(accepted for *_, accepted, _ in verified)
    assert any(rejected for *_, rejected in verified)
    for request in trace.requests:
        mine = {step: counts for step, name, *counts in verified if name == request.request_id}
        for cell in trace.cells(request):
            assert [cell.num_accepted_drafts, cell.num_rejected_drafts] == mine.get(cell.step, [0, 0])
            given = sum(token.step == cell.step for token in request.tokens)
            if cell.kind is CellKind.DECODE:
                assert given == 1 + cell.num_accepted_drafts, "the tokens of the step"
                assert cell.num_drafts <= SPECULATING["spec_length"]


def test_totals_and_tables_count_drafts_where_there_are_any(trace: Trace, traces: list[Trace]) -> None:
    totals = trace.totals
    assert 0 < totals.num_accepted_drafts < totals.num_drafts
    accepted = f"{totals.num_accepted_drafts} of {totals.num_drafts}"
    assert dict(totals_rows([trace]))["accepted drafts"] == [accepted]
    html = page([trace], "x")
    by_request = [row[3].split(" of ") for row in table(html, "Requests, here")]
    assert [sum(int(row[n]) for row in by_request) for n in (0, 1)] == [totals.num_accepted_drafts, totals.num_drafts]
    cells = [row[5] for row in table(html, "Steps, here")]
    for told, step in zip(cells, trace.steps, strict=True):
        counts = [f"{name} ({accepted} of {accepted + rejected})" for name, accepted, rejected in step.record.verified]
        assert told == (" ".join(counts) or "–")
    assert "accepted drafts" not in page(traces, "x")


def test_both_files_have_the_drafts_and_all_tokens_of_a_step(trace: Trace) -> None:
    events = chrome_trace([trace])["traceEvents"]
    check_events(events)
    step = focus(trace).step
    name, accepted, rejected = max(trace.steps[step].record.verified, key=lambda counts: counts[1])
    told = f"step {step} verifies {accepted + rejected} drafts of request {name}, and accepts {accepted}."
    assert focus(trace).text == told
    assert accepted == 3, "as many as a step has"
    about = next(e["args"] for e in events if e["name"] == f"step {step}")
    assert (name, accepted, rejected) in about["verified"]
    spans = [e["args"] for e in events if e["ph"] == "X" and e["name"] == "decode" and e["args"]["step"] == step]
    request = next(request for request in trace.requests if request.request_id == name)
    given = [token for token in request.tokens if token.step == step]
    ids, text = [token.token_id for token in given], "".join(token.text for token in given)
    about = {"step": step, "tokens": 1, "accepted drafts": 3, "rejected drafts": 0, "token ids": ids, "text": text}
    assert about in spans
    assert embedded(page([trace], "x"))["traces"][0]["steps"][step]["verified"] == [
        list(counts) for counts in trace.steps[step].record.verified
    ]
