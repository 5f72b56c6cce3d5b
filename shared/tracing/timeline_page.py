"""Writes a run as a self-contained HTML file. Introduced in phase 4.

The script draws the timeline; the tables are generated here, so all figures are available without the script, and to
screen readers. Invariant: text from a model or a user is data or escaped, never markup.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from shared.engine.record import StepRecord
from shared.tracing.focus import focus
from shared.tracing.holdings import memory_data
from shared.tracing.inline_page import PAGE, embedded, filled, joined
from shared.tracing.lanes import LANES, activity_lanes
from shared.tracing.told import request_texts, step_texts
from shared.tracing.trace import CellKind, Span, Trace, TracedRequest

POOL = ("pool_cast.js", "pool_blocks.js", "pool_words.js", "pool.js")
SCRIPTS = ("timeline.js", "activity.js", *POOL, "memory.js", "controls.js")
FLAT = 4
"""A lane whose capacity is more than this many times its most is drawn up to the most."""
COUNTED = [kind for kind in CellKind if kind not in (CellKind.PENDING, CellKind.FAILED)]
"""Kinds of cells that the table of requests counts, in the order of its columns."""


def page(traces: Sequence[Trace], title: str, note: str = "") -> str:
    """The HTML of one page with all traces stacked on the same scale; ``note`` is shown below the totals."""
    titles = ["", *(trace.title for trace in traces)]
    return filled(
        PAGE / "timeline.html",
        style=joined(PAGE / name for name in ("timeline.css", "pool.css")),
        script=joined(PAGE / name for name in SCRIPTS),
        title=escape(title),
        data=embedded({"traces": _on_one_scale([trace_data(trace) for trace in traces])}),
        totals=_table("Totals", titles, [[name, *values] for name, values in totals_rows(traces)], name="totals"),
        note=escape(note),
        tables="\n".join(_tables(trace) for trace in traces),
    )


def trace_data(trace: Trace) -> dict[str, Any]:
    """The script's input as JSON values; a step is its whole record plus its start and end."""
    memory = memory_data(trace)
    return {
        "title": trace.title,
        "settings": dict(trace.settings),
        "focus": dataclasses.asdict(focus(trace)),
        "lanes": [
            {
                "name": lane.name,
                "text": lane.text,
                "capacity": lane.capacity(trace),
                "values": [lane.value(step) for step in trace.steps],
            }
            for lane in LANES
        ],
        "steps": [
            {
                **dataclasses.asdict(step.record),
                "told": told,
                "started_ns": step.started_ns,
                "ended_ns": step.ended_ns,
                "host": list(map(dataclasses.asdict, step.host)),
                "gpu": list(map(dataclasses.asdict, step.gpu)),
                **{f"rank {n}": list(map(dataclasses.asdict, spans)) for n, spans in enumerate(step.ranks, 1)},
            }
            for step, told in zip(trace.steps, step_texts(trace), strict=True)
        ],
        "requests": [
            _request_data(trace, request) | {"told": told}
            for request, told in zip(trace.requests, request_texts(trace), strict=True)
        ],
        "memory": memory and memory | {"caption": _where_to_look(trace)},
    }


def _on_one_scale(traces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The traces; each lane gets its ``top``: the most that any has in it, or its capacity if that is not much more."""
    for lanes in zip(*(trace["lanes"] for trace in traces), strict=True):
        peak = max([1, *(value for lane in lanes for value in lane["values"])])
        for lane in lanes:
            capacity = lane["capacity"]
            lane["top"] = capacity if capacity and peak <= capacity <= FLAT * peak else peak
    return traces


def _where_to_look(trace: Trace) -> str:
    """What the picture of the KV cache shows."""
    is_region = trace.steps[0].memory is not None and trace.steps[0].memory.unit == "region"
    pale = "for tokens that may never come" if is_region else "the rest of a request's last block"
    has_prefixes = any(each.num_cached_tokens for each in trace.requests) or any(
        step.memory.cached for step in trace.steps if step.memory is not None
    )
    prefixes = (
        " A block with a number after × is shared by that many requests, whose prompts begin alike; one with a dashed "
        "edge is cached for the next such request."
    )
    return (
        f"Where to look: dark is written; pale is held and empty, {pale}.{prefixes if has_prefixes else ''} "
        f"The slider begins at step {focus(trace).step}."
    )


def totals_rows(traces: Sequence[Trace]) -> list[tuple[str, list[str]]]:
    """The totals as rows: a name, and a formatted value for each trace."""
    totals = [trace.totals for trace in traces]

    def known(value: float | None, pattern: str, unknown: str = "none ran") -> str:
        return unknown if value is None else pattern.format(value)

    cached = [f"{each.num_cached_tokens} of {each.num_prompt_tokens}" for each in totals]
    accepted = [f"{each.num_accepted_drafts} of {each.num_drafts}" for each in totals]
    return [
        ("steps", [str(each.num_steps) for each in totals]),
        ("batch utilisation", [f"{each.batch_utilisation:.1%}" for each in totals]),
        ("most requests in a step", [str(each.most_served) for each in totals]),
        ("mean queue wait", [known(each.mean_queue_steps, "{:.1f} steps") for each in totals]),
        ("longest queue wait", [known(each.longest_queue_steps, "{} steps") for each in totals]),
        ("mean queue wait, time", [known(each.mean_queue_seconds, "{:.3f} s") for each in totals]),
        ("written share of held KV cache", [known(each.written_share, "{:.1%}", "none held") for each in totals]),
        ("generated tokens", [str(each.num_tokens) for each in totals]),
        ("preemptions", [str(each.num_preemptions) for each in totals]),
        ("recomputed tokens", [str(each.num_recomputed_tokens) for each in totals]),
        *([("prompt tokens from the cache", cached)] if any(each.num_cached_tokens for each in totals) else []),
        *([("accepted drafts", accepted)] if any(each.num_drafts for each in totals) else []),
        ("time in steps", [f"{each.seconds:.3f} s" for each in totals]),
        ("tokens per second", [f"{each.tokens_per_second:.1f}" for each in totals]),
    ]


def _request_data(trace: Trace, request: TracedRequest) -> dict[str, Any]:
    tokens = [
        [token.step, token.token_id, token.text, *([token.position] if token.position is not None else [])]
        for token in request.tokens
    ]
    runs, chunks, preemptions = trace.runs(request), trace.chunks(request), trace.preemptions(request)
    return dataclasses.asdict(request) | {"tokens": tokens, "runs": runs, "chunks": chunks, "preemptions": preemptions}


def _tables(trace: Trace) -> str:
    """The timeline as tables: by request and by step."""
    requests = []
    has_cached, has_drafts = trace.totals.num_cached_tokens > 0, trace.totals.num_drafts > 0
    for request in trace.requests:
        cells = trace.cells(request)
        counts = [sum(cell.kind is kind for cell in cells) for kind in COUNTED]
        cached = [request.num_cached_tokens] if has_cached else []
        lengths = (request.num_prompt_tokens, *cached, len(request.tokens))
        accepted = f"{sum(cell.num_accepted_drafts for cell in cells)} of {sum(cell.num_drafts for cell in cells)}"
        drafts = [accepted] if has_drafts else []
        end = request.outcome + (f" ({request.finish_reason})" if request.finish_reason else "")
        requests.append([request.request_id, *lengths, *drafts, request.arrival_step, *counts, end])
    activity = activity_lanes(trace)
    steps = [
        [
            step.record.step,
            f"{(step.ended_ns - step.started_ns) / 1e6:.2f}",
            " ".join(step.record.preempted) or "–",
            " ".join(f"{name} ({count})" for name, count in step.record.prefilled) or "–",
            " ".join(step.record.decoded) or "–",
            *([_verified(step.record)] if has_drafts else []),
            " ".join((*step.record.finished, *step.record.failed)) or "–",
            *(lane.value(step) for lane in LANES),
            *(_durations(spans[step.record.step]) for _, spans in activity),
        ]
        for step in trace.steps
    ]
    by_request = ["request", "prompt tokens", *(["from the cache"] if has_cached else []), "output tokens"]
    by_request += ["accepted drafts"] if has_drafts else []
    by_request += ["arrived before step", "steps in the queue"]
    by_request += ["prefill steps", "decode steps", "stalled steps", "preempted steps", "recompute steps", "end"]
    by_step = ["step", "ms", "preempted", "prefill (tokens)", "decode", *(["accepted drafts"] if has_drafts else [])]
    by_step += ["ended", *(lane.name for lane in LANES)]
    by_step += [f"{name}, ms" for name, _ in activity]
    tables = [
        _table(f"Requests, {trace.title}", by_request, requests),
        _table(f"Steps, {trace.title}", by_step, steps),
        *_positions(trace),
        *_compressions(trace),
    ]
    return "\n".join([f"<details><summary>{escape(trace.title)}, as tables</summary>", *tables, "</details>"])


def _positions(trace: Trace) -> Iterator[str]:
    """The grammar positions in which tokens were sampled, as a table, if there are any."""
    found = [
        (name, token.step, repr(token.text), position.state, position.stack or "–", position.num_allowed)
        for request in trace.requests
        for number, token in enumerate(request.tokens, start=1)
        for name, position in [(f"{request.request_id}, token {number}", token.position)]
        if position is not None
    ]
    if found:
        head = ["request", "step", "text", "state", "open", "allowed tokens"]
        yield _table(f"Grammar, {trace.title}", head, found)


def _compressions(trace: Trace) -> Iterator[str]:
    """What the heads of compressed requests keep, as a table, if any were compressed."""
    found = [
        (f"{name}, step {index}", num_tokens, min(map(min, kept)), max(map(max, kept)), sum(map(sum, kept)))
        for index, step in enumerate(trace.steps)
        for name, num_tokens, kept in step.record.compressed
    ]
    if found:
        head = ["request", "tokens", "least of a KV head", "most of a KV head", "of all layers and heads"]
        yield _table(f"Kept tokens, {trace.title}", head, found)


def _verified(record: StepRecord) -> str:
    found = [f"{name} ({accepted} of {accepted + rejected})" for name, accepted, rejected in record.verified]
    return " ".join(found) or "–"


def _durations(spans: Sequence[Span]) -> str:
    return ", ".join(f"{span.name} {(span.ended_ns - span.started_ns) / 1e6:.2f}" for span in spans) or "–"


def _table(caption: str, head: Sequence[str], rows: Sequence[Sequence[object]], name: str = "") -> str:
    """An HTML table with row headers in its first column."""

    def line(row: Sequence[object]) -> str:
        rest = "".join(f"<td>{escape(str(value))}</td>" for value in row[1:])
        return f'<tr><th scope="row">{escape(str(row[0]))}</th>{rest}</tr>'

    columns = "".join(f'<th scope="col">{escape(text)}</th>' if text else "<td></td>" for text in head)
    body = "\n".join(map(line, rows))
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f'<table class="{name}"><caption>{escape(caption)}</caption><thead><tr>{columns}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )
