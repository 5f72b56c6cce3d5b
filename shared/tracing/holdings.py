"""When each block of the memory belonged to whom, for the page of a trace. Introduced in phase 6.

A map for each step would say the same thing over and over: a table only grows, until all of it is given back. So what
is kept of a request is when each of its blocks came and went. Invariant: the blocks that a request holds after a step,
in the order in which they stand here, are its block table then.
"""

from typing import Any

from shared.tracing.trace import Trace, TracedRequest


def memory_data(trace: Trace) -> dict[str, Any] | None:
    """The memory through all steps, as JSON values; None where none was recorded."""
    first = trace.steps[0].memory if trace.steps else None
    if first is None:
        return None
    return {
        "unit": first.unit,
        "block_tokens": first.block_tokens,
        "num_blocks": first.num_blocks,
        "holdings": [_holdings(trace, request) for request in trace.requests],
    }


def _holdings(trace: Trace, request: TracedRequest) -> dict[str, Any]:
    """Its blocks, each with the first step after which it held it and the first after which it did not; and for each
    step from its arrival to its end, the tokens written.
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
