"""Drafts in a trace: accepted and rejected ones in the cells, totals, tables and both files."""

from pathlib import Path

from shared.tracing.chrome import chrome_trace
from shared.tracing.focus import focus
from shared.tracing.timeline_page import page, totals_rows
from shared.tracing.trace import CellKind, Trace
from tests.unit.tracing.recording import SPECULATING, arrivals, make_engine, recorded
from tests.unit.tracing.written import check_events, embedded, table


def test_drafts_are_in_the_cells_the_totals_and_both_files(folder: Path, traces: list[Trace]) -> None:
    """Lookups in answers that repeat themselves, as those of a random model do."""
    trace = recorded(make_engine(folder, "11", max_batch_size=2, **SPECULATING), arrivals(40, 30, 40))
    verified = [(step, *counts) for step, each in enumerate(trace.steps) for counts in each.record.verified]
    num_accepted, num_rejected = (sum(counts[n] for counts in verified) for n in (2, 3))
    assert min(num_accepted, num_rejected) > 0
    for request in trace.requests:
        mine = {step: counts for step, name, *counts in verified if name == request.request_id}
        for cell in trace.cells(request):
            assert [cell.num_accepted_drafts, cell.num_rejected_drafts] == mine.get(cell.step, [0, 0])
            if cell.kind is CellKind.DECODE:
                given = sum(token.step == cell.step for token in request.tokens)
                assert given == 1 + cell.num_accepted_drafts, "the tokens of the step"
                assert cell.num_drafts <= SPECULATING["spec_length"]

    assert dict(totals_rows([trace]))["accepted drafts"] == [f"{num_accepted} of {num_accepted + num_rejected}"]
    assert "accepted drafts" not in page(traces, "x")
    html = page([trace], "x")
    by_request = [row[3].split(" of ") for row in table(html, "Requests, here")]
    sums = [sum(int(row[n]) for row in by_request) for n in (0, 1)]
    assert sums == [num_accepted, num_accepted + num_rejected]
    for row, step in zip(table(html, "Steps, here"), trace.steps, strict=True):
        counts = [f"{name} ({accepted} of {accepted + rejected})" for name, accepted, rejected in step.record.verified]
        assert row[5] == (" ".join(counts) or "–")

    step = focus(trace).step
    name, accepted, rejected = max(trace.steps[step].record.verified, key=lambda counts: counts[1])
    told = f"step {step} verifies {accepted + rejected} drafts of request {name}, and accepts {accepted}."
    assert (focus(trace).text, accepted) == (told, SPECULATING["spec_length"])
    assert embedded(html)["traces"][0]["steps"][step]["verified"] == [
        list(counts) for counts in trace.steps[step].record.verified
    ]
    events = chrome_trace([trace])["traceEvents"]
    check_events(events)
    assert (name, accepted, rejected) in next(e["args"] for e in events if e["name"] == f"step {step}")["verified"]
    request = next(request for request in trace.requests if request.request_id == name)
    given = [token for token in request.tokens if token.step == step]
    ids, text = [token.token_id for token in given], "".join(token.text for token in given)
    cell = {"step": step, "tokens": 1, "accepted drafts": 3, "rejected drafts": 0, "token ids": ids, "text": text}
    assert cell in [e["args"] for e in events if e["ph"] == "X" and e["name"] == "decode"]
