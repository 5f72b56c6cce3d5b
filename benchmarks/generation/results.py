"""What the generation benchmark says of a contender: speed, its share of the limit, work on the device, memory.

Introduced in phase 3.1. Invariant: a share is the least time over the measured time, where the least time is the bytes
that a token must read over the bandwidth measured in the same run; so it is below 1, or something was not counted.
"""

import statistics
from itertools import takewhile
from typing import Any

from benchmarks.contenders import Contender
from benchmarks.generation.step_trace import StepTrace
from benchmarks.report import rounded
from benchmarks.roofline import DecodeWork
from benchmarks.timing import Run


def limit_bytes(work: DecodeWork, prompt_tokens: int, num_tokens: int) -> float:
    """Bytes that a decode step of an answer of ``num_tokens`` must read, at its mean context.

    The first decode step runs the first token of the answer and sees the prompt and itself.
    """
    kv = work.mean_kv_bytes(prompt_tokens + 1, prompt_tokens + num_tokens - 1)
    return work.weight_bytes + work.row_bytes + kv


def figures(
    contender: Contender,
    own: list[Run],
    first: list[Run],
    trace: StepTrace,
    work: DecodeWork,
    prompt_tokens: int,
    ceilings: Any,
) -> dict[str, Any]:
    """``own`` answers, those of the ``first`` contender to the same prompts, and what was traced of one more."""
    speeds = [run.decode_tokens_per_second for run in own]
    speed = statistics.median(speeds)
    num_tokens = statistics.median_low(len(run.token_ids) for run in own)
    least_seconds = limit_bytes(work, prompt_tokens, num_tokens) / ceilings.read_bytes_per_second
    kernel_us = trace.kernel_us_per_token if trace.kernels else None

    equal, compared = _least_equal([(a.token_ids, b.token_ids) for a, b in zip(own, first, strict=True)])

    def per_token(count: int) -> float | None:
        return None if kernel_us is None else rounded(count / trace.steps)

    return {
        "title": contender.title,
        "time_to_first_token_ms": rounded(1e3 * statistics.median(run.times[0] for run in own)),
        "decode_tokens_per_second": rounded(speed),
        "decode_tokens_per_second_trials": [rounded(each) for each in speeds],
        "ms_per_token": rounded(1e3 * statistics.median(gap for run in own for gap in run.intervals)),
        "share_of_bandwidth": rounded(least_seconds * speed),
        "tokens_computed": statistics.median_low(run.tokens_computed for run in own),
        "new_tokens": num_tokens,
        "equal_tokens": equal,
        "compared_tokens": compared,
        "kernel_us_per_token": None if kernel_us is None else rounded(kernel_us),
        "kernel_share_of_bandwidth": None if kernel_us is None else rounded(1e6 * least_seconds / kernel_us),
        "kernels_per_token": per_token(sum(kernel.count for kernel in trace.kernels)),
        "copies_per_token": per_token(sum(copy.count for copy in trace.copies)),
        "host_launches_per_token": per_token(trace.host_launches),
        "own_launches_per_token": rounded(trace.own_launches / trace.steps),
        "memory_weights_bytes": contender.weights,
        "memory_kv_bytes": contender.kv,
        "memory_other_bytes": contender.other,
    }


def ratios(runs: dict[str, list[Run]]) -> dict[str, float]:
    """Decode speed of each contender over each one before it: the median over trials of the ratio within a trial."""
    found = {}
    names = list(runs)
    for index, name in enumerate(names):
        for other in names[:index]:
            pairs = zip(runs[name], runs[other], strict=True)
            ratio = statistics.median(a.decode_tokens_per_second / b.decode_tokens_per_second for a, b in pairs)
            if name.startswith("transformers"):  # ours over theirs reads better
                found[f"{other}_over_{name}"] = rounded(1 / ratio)
            else:
                found[f"{name}_over_{other}"] = rounded(ratio)
    return found


def limit(work: DecodeWork, prompt_tokens: int, new_tokens: int, ceilings: Any) -> dict[str, Any]:
    """What a decode step must read, and how fast that could be done."""
    needed = limit_bytes(work, prompt_tokens, new_tokens)
    seconds = needed / ceilings.read_bytes_per_second
    return {
        "weights_bytes_per_token": work.weight_bytes + work.row_bytes,
        "kv_bytes_per_token": round(needed - work.weight_bytes - work.row_bytes),
        "us_per_token": rounded(1e6 * seconds),
        "tokens_per_second": rounded(1 / seconds),
    }


def _least_equal(pairs: list[tuple[list[int], list[int]]]) -> tuple[int, int]:
    """Of pairs of answers the one that parts earliest: how many first tokens are equal, of how many that both have."""
    found = []
    for ours, theirs in pairs:
        both = list(zip(ours, theirs, strict=False))  # an answer that was broken off is the shorter
        found.append((sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both)), len(both)))
    return min(found, key=lambda counts: (counts[0] - counts[1], counts[0]))
