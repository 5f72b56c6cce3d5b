"""Requests of many kinds, and a loop that serves them: what the later phases' outputs are compared on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.engine.output import StepOutput
from shared.engine.record import StepRecord
from shared.sampling.params import SamplingParams
from shared.text.stopping import FinishReason
from tests.comparison import assert_equal

SENTENCE = "Zwölf Boxkämpfer jagen Viktor quer über den Sylter Deich 🥊."
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
PENALISED: dict[str, Any] = {
    "seed": 3,
    "temperature": 1.3,
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.4,
    "presence_penalty": -0.3,
    "min_p": 0.02,
    "logit_bias": {5: 2.0, 9: -100.0},
    "min_tokens": 9,
}
Requests = list[tuple[str | list[int], dict[str, Any]]]
MIXED: Requests = [
    ("The capital of France is", GREEDY | {"max_new_tokens": 24}),
    ("x", {"seed": 1, "max_new_tokens": 15, "top_k": 20}),
    (SENTENCE, PENALISED | {"max_new_tokens": 20, "ignore_eos": True}),
    ([7] * 90, GREEDY | {"max_new_tokens": 5}),
    ("Stop", {"seed": 4, "max_new_tokens": 40, "stop": ("e", "a")}),
    (list(range(40)), {"seed": 5, "temperature": 0.9, "top_k": 5, "top_p": 0.5, "max_new_tokens": 17}),
]
ARRIVALS = [0, 0, 2, 3, 3, 9]  # the step before which each request arrives
EARLY: Requests = [  # for the phases before blocks, beside which each request is answered alone
    *MIXED,
    (SENTENCE, PENALISED | {"stop_token_ids": [30, 77], "max_new_tokens": 20, "ignore_eos": True}),
    ("The capital of France is", {"temperature": 0.0, "repetition_penalty": 1.2, "max_new_tokens": 1}),
    (SENTENCE, {"seed": 2, "temperature": 0.7, "top_p": 0.8, "max_new_tokens": 6}),
    ("x", {"seed": 1, "max_new_tokens": 9, "top_k": 20, "logprobs": 3}),
]
EARLY_ARRIVALS = [*ARRIVALS, 9, 12, 12, 12]
SMALL: dict[str, Any] = {"max_seq_len": 128, "block_size": 3, "num_gpu_blocks": 43}  # for one long sequence at a time
LONG: Requests = [
    ([(31 * n) % 500 for n in range(600)], GREEDY | {"max_new_tokens": 12}),
    *MIXED,
    ([(17 * n) % 500 for n in range(300)], GREEDY | {"max_new_tokens": 6}),
]


def small_pools(folder: Path) -> list[dict[str, int]]:
    """Pools for little more than one long request, in blocks of three sizes; of one size for the two families that have
    no windows, which may end inside a block."""
    sizes = {"tiny-llama": [(1, 129)], "tiny-qwen3": [(16, 9)]}.get(folder.name, [(1, 129), (3, 43), (16, 9)])
    return [{"block_size": size, "num_gpu_blocks": count} for size, count in sizes]


STEM = [(11 * n) % 250 for n in range(60)]
ALIKE: Requests = [  # requests that begin with more or less of one stem
    (STEM, GREEDY | {"max_new_tokens": 20}),
    (STEM, {"seed": 1, "max_new_tokens": 9, "temperature": 1.2}),
    (STEM[:48], GREEDY | {"max_new_tokens": 7}),
    ([*STEM[:30], 3, 4, 5], {"seed": 2, "repetition_penalty": 1.3, "max_new_tokens": 12}),
    ([*STEM, *range(20)], GREEDY | {"max_new_tokens": 6}),
    ([9, *STEM], GREEDY | {"max_new_tokens": 5}),
    (STEM[:1], {"seed": 3, "max_new_tokens": 15}),
    (STEM, {"seed": 4, "max_new_tokens": 3, "cache_salt": "tenant"}),
]
ARRIVE = [0, 0, 0, 2, 3, 3, 9, 9]


def serve(
    engine: Any, requests: Sequence[tuple[str | list[int], dict[str, Any]]], arrivals: Sequence[int] | None = None
) -> tuple[list[list[StepOutput]], list[StepRecord]]:
    """Each request's outputs, in the order of the requests; ``arrivals`` holds the step before which each arrives."""
    coming = list(zip(arrivals or [0] * len(requests), requests, strict=True))
    names: list[str] = []
    outputs: dict[str, list[StepOutput]] = {}
    records: list[StepRecord] = []
    while coming or engine.has_work():
        while coming and coming[0][0] <= len(records):
            prompt, params = coming.pop(0)[1]
            names.append(engine.add_request(prompt, SamplingParams(**params)))
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        records.append(engine.last_step)
    assert_equal(engine.pool.audit(), [], "audit of the pool", ("line",))
    return [outputs[name] for name in names], records


def serve_with_aborts(
    engine: Any,
    requests: Sequence[tuple[str | list[int], dict[str, Any]]],
    arrivals: Sequence[int],
    aborted: set[int],
    abort_at: int,
) -> tuple[dict[int, list[int | None]], set[int]]:
    """Abort the requests with these numbers before the step ``abort_at``; the tokens of each, and the aborted ones."""
    outputs: dict[int, list[int | None]] = {n: [] for n in range(len(requests))}
    step = 0
    while step <= max(abort_at, *arrivals) or engine.has_work():
        for n, (prompt, params) in enumerate(requests):
            if arrivals[n] == step:
                engine.add_request(prompt, SamplingParams(**params), request_id=str(n))
        if step == abort_at:
            aborted = {n for n in aborted if engine.abort(str(n))}
        for output in engine.step():
            outputs[int(output.request_id)].append(output.token_id)
        step += 1
    assert engine.pool.audit() == []
    return outputs, aborted


def tokens(outputs: Sequence[StepOutput]) -> list[int | None]:
    return [output.token_id for output in outputs]


def ends(outputs: Sequence[StepOutput]) -> tuple[str, FinishReason | None, str | None]:
    """The text, the finish reason and the stop string; only the last output has a reason."""
    assert [o.finish_reason for o in outputs[:-1]] == [None] * (len(outputs) - 1)
    return "".join(o.text for o in outputs), outputs[-1].finish_reason, outputs[-1].stop


def seen(answers: Sequence[Sequence[StepOutput]]) -> list[list[StepOutput]]:
    """All that clients receive, except for request ids and for what was cached and drafted."""
    uncounted: dict[str, Any] = {"num_cached_tokens": 0, "num_accepted_drafts": 0, "num_rejected_drafts": 0}
    return [[output._replace(request_id="", **uncounted) for output in answer] for answer in answers]
