"""Compressions in a trace: what heads keep, in the record, the tables, the focus and the log."""

import logging
from pathlib import Path
from typing import Any

import pytest

from shared.tracing.focus import focus
from shared.tracing.timeline_page import page
from shared.tracing.trace import Trace
from tests.unit.tracing.recording import arrivals, make_engine, recorded
from tests.unit.tracing.written import table

COMPRESSING: dict[str, Any] = {
    "compress_method": "snapkv",
    "layer_budget": 37,
    "layer_upper_budget": 48,
    "p_attn": 0.35,
    "query_window_size": 8,
    "steps_between_compressions": 8,
    "block_size": 2,
}


def run(folder: Path, **settings: Any) -> Trace:
    return recorded(make_engine(folder, "09.2", max_batch_size=2, **COMPRESSING, **settings), arrivals(60, 80))


def test_what_heads_keep_is_in_the_trace(folder: Path, traces: list[Trace], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "infer.engine"):
        trace = run(folder)
        assert caplog.records == [], "logged only if asked"
        run(folder, if_log_compress=True, if_log_num_topp=True)
    compressed = [(step, *one) for step, each in enumerate(trace.steps) for one in each.record.compressed]
    assert [(name, tokens) for _, name, tokens, _ in compressed][:2] == [("b", 45), ("a", 45)]
    for _, _, tokens, kept in compressed:
        assert len({len(heads) for heads in kept}) == 1
        assert all(37 <= count <= min(48, tokens) for heads in kept for count in heads)
    assert len({count for *_, kept in compressed for heads in kept for count in heads}) > 1, "heads differ"

    logged = [(record.message, record.fields) for record in caplog.records]  # type: ignore[attr-defined]
    assert [message for message, _ in logged] == ["compressed", "kept by layer and KV head"] * len(compressed)
    assert [fields["kept"] for _, fields in logged[1::2]] == [kept for *_, kept in compressed]
    for (_, name, tokens, kept), (_, fields) in zip(compressed, logged[::2], strict=True):
        assert (fields["request"], fields["tokens"]) == (name, tokens)
        share = sum(map(sum, kept)) / sum(map(len, kept)) / tokens
        assert fields["kept"] == pytest.approx(share, abs=1e-3)
        assert fields["freed_blocks"] > 0

    step, name, tokens, kept = compressed[0]
    least, most = min(map(min, kept)), max(map(max, kept))
    told = f"before step {step} request {name} is compressed: its heads keep {least} to {most} of {tokens} tokens."
    assert (focus(trace).step, focus(trace).text) == (step, told)
    rows = table(page([trace], "x"), "Kept tokens, here")
    assert rows[0] == [f"{name}, step {step}", str(tokens), str(least), str(most), str(sum(map(sum, kept)))]
    assert len(rows) == len(compressed)
    assert "<caption>Kept tokens" not in page(traces, "x")
