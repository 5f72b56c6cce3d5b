"""Which request held which KV cache block after each step, and which were cached, for a trace's page.

Introduced in phase 6.

A map for each step would be redundant: a block table grows until all its blocks are freed, and otherwise rarely changes
(a full block may be exchanged for another request's with the same tokens). So each request records the steps at which
its blocks were allocated and freed. Invariant: the blocks that a request holds after a step, in this list's order, are
its block table at that step.
"""

from typing import Any

from shared.tracing.trace import Trace, TracedRequest

SHOWN = 8
"""Blocks after the last one that was ever held are not drawn; the picture ends at a multiple of this number."""


def memory_data(trace: Trace) -> dict[str, Any] | None:
    """The KV cache over all steps, as JSON values; None if it was not recorded."""
    first = trace.steps[0].memory if trace.steps else None
    if first is None:
        return None
    holdings = [_holdings(trace, request) for request in trace.requests]
    cached = _cached(trace)
    held = [span for holding in holdings for span in holding["blocks"]]
    used = 1 + max((block for block, *_ in held + cached), default=0)
    return {
        "unit": first.unit,
        "block_tokens": first.block_tokens,
        "num_blocks": first.num_blocks,
        "num_shown": min(first.num_blocks, -(-used // SHOWN) * SHOWN if first.unit == "block" else used),
        "holdings": holdings,
        "cached": cached,
    }


def _holdings(trace: Trace, request: TracedRequest) -> dict[str, Any]:
    """The request's blocks, each with the steps after which it was first held and first freed, and the number of
    written tokens after each step from the request's arrival to its end.
    """
    ended: list[list[int]] = []
    written = []
    table: list[list[int]] = []
    steps = range(request.arrival_step, len(trace.steps) if request.end_step is None else request.end_step)
    for step in steps:
        memory = trace.steps[step].memory
        mine = memory.of_request(request.request_id) if memory is not None else None
        blocks = mine.blocks if mine is not None else ()
        kept = 0
        while kept < min(len(table), len(blocks)) and table[kept][0] == blocks[kept]:
            kept += 1
        for entry in table[kept:]:
            entry[2] = step
        table = table[:kept] + [[block, step, steps.stop] for block in blocks[kept:]]
        ended += table[kept:]
        written.append(mine.num_written if mine is not None else 0)
    return {"blocks": ended, "written": written}


def _cached(trace: Trace) -> list[list[int]]:
    """The blocks of cached prefixes that no request held, each with the steps after which that began and ended."""
    spans: list[list[int]] = []
    last: dict[int, list[int]] = {}  # the latest span of each block
    for index, step in enumerate(trace.steps):
        for block in step.memory.cached if step.memory is not None else ():
            if block not in last or last[block][2] < index:
                last[block] = [block, index, index]
                spans.append(last[block])
            last[block][2] = index + 1
    return spans
