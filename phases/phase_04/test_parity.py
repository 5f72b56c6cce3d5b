"""Phase 4 gives every request of a batch the same output as it has alone, and isolates failures."""

import logging
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phases.phase_03_1.engine import Engine as Single
from phases.phase_04.engine import Engine
from shared.cache.pool.contiguous import ContiguousKVCachePool
from shared.engine.batch import Batch
from shared.engine.config import EngineConfig
from shared.engine.output import StepOutput
from shared.engine.request import Request
from shared.engine.sampling.sampler import SamplerOutput
from shared.errors import QueueFullError, RequestError
from shared.kernels.launch import LAUNCHES
from shared.parity.reference import load_reference
from shared.sampling.params import SamplingParams
from shared.scheduling.schedule import Schedule, Scheduled
from shared.text.stopping import FinishReason
from tests import mixed_requests
from tests.as_transformers import ASKED, ASKED_OF_DEMO, assert_served
from tests.comparison import assert_equal
from tests.mixed_requests import EARLY as MIXED
from tests.mixed_requests import GREEDY, SENTENCE, Requests, ends, tokens
from tests.random_loads import break_off, serve_through
from tests.reference_tokens import ReferenceTokens


def make(folder: Path, **config: Any) -> Engine:
    return Engine(EngineConfig(model=str(folder), max_seq_len=256, **config))


def run(engine: Any, *, stop_after: int | None = None) -> dict[str, list[StepOutput]]:
    """Step until no work is left, or ``stop_after`` times; the outputs of each request."""
    outputs: dict[str, list[StepOutput]] = {}
    number = 0
    while engine.has_work() and number != stop_after:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        number += 1
    return outputs


def serve(engine: Any, requests: Requests) -> list[list[StepOutput]]:
    """Serve all requests at once; the outputs of each, in the order of the requests."""
    return mixed_requests.serve(engine, requests)[0]


def test_greedy_tokens_of_a_batch_equal_those_of_transformers(
    model_folder: Path, reference_tokens: ReferenceTokens
) -> None:
    assert_served(make(model_folder), reference_tokens, ASKED)


def test_a_request_of_a_mixed_batch_is_answered_as_if_alone(model_folder: Path) -> None:
    answers = serve(make(model_folder, max_batch_size=5), MIXED)
    alone = make(model_folder, max_batch_size=1)
    single = Single(EngineConfig(model=str(model_folder), max_seq_len=256))
    for (prompt, params), answer in zip(MIXED, answers, strict=True):
        expected = list(single.generate(prompt, SamplingParams(**params)))
        assert tokens(answer) == tokens(expected), (prompt, params)
        assert ends(answer) == ends(expected), (prompt, params)
        assert tokens(list(alone.generate(prompt, SamplingParams(**params)))) == tokens(expected), (prompt, params)
    assert {answer[-1].finish_reason for answer in answers} >= {FinishReason.LENGTH, FinishReason.STOP}


def test_an_end_of_sequence_inside_a_batch_ends_its_own_answer_alone(model_folder: Path) -> None:
    requests = [([7 + n] * (3 + n), GREEDY | {"max_new_tokens": 12}) for n in range(5)]
    whole = [tokens(answer) for answer in serve(make(model_folder), requests)]
    engine = make(model_folder)
    engine.tokenizer.eos_ids = frozenset({whole[2][4], whole[4][7]})
    heeding = [(prompt, params | {"ignore_eos": False}) for prompt, params in requests]
    for full, answer in zip(whole, serve(engine, heeding), strict=True):
        places = [place for place, token_id in enumerate(full) if token_id in engine.tokenizer.eos_ids]
        assert tokens(answer) == full[: places[0] + 1 if places else None]
        assert answer[-1].finish_reason is (FinishReason.EOS if places else FinishReason.LENGTH)


@pytest.mark.parametrize("backend", ["naive", "sdpa", "flash"])
def test_every_attention_backend_gives_the_same_tokens(tiny_checkpoints: dict[str, Path], backend: str) -> None:
    folder = tiny_checkpoints["gemma3_text"]
    ours = serve(make(folder, attention_backend=backend), MIXED[:4])
    assert [tokens(a) for a in ours] == [tokens(a) for a in serve(make(folder), MIXED[:4])]


def test_packed_weights_serve_a_batch_too(folder: Path) -> None:
    packed = serve(make(folder, pack_weights=True), MIXED[:5])
    single = Single(EngineConfig(model=str(folder), max_seq_len=256, pack_weights=True))
    expected = [list(single.generate(prompt, SamplingParams(**params))) for prompt, params in MIXED[:5]]
    assert [tokens(a) for a in packed] == [tokens(a) for a in expected]


@pytest.mark.demo
def test_the_demo_model_answers_a_batch_as_transformers_does(
    demo_folder: Path, reference_tokens: ReferenceTokens
) -> None:
    assert_served(make(demo_folder, max_batch_size=3), reference_tokens, ASKED_OF_DEMO)


def test_logprobs_are_those_of_the_raw_logits(model_folder: Path) -> None:
    engine = make(model_folder)
    params = {"seed": 1, "temperature": 0.5, "repetition_penalty": 1.5, "max_new_tokens": 6, "ignore_eos": True}
    with_, without, none = serve(
        engine, [(SENTENCE, params | {"logprobs": 4}), (SENTENCE, params), ("x", params | {"logprobs": 0})]
    )
    assert tokens(with_) == tokens(without), "requesting them changes nothing"
    assert all(output.logprobs is None for output in without)
    assert all(output.logprobs is not None and output.logprobs.top == () for output in none)
    prompt = engine.tokenizer.encode(SENTENCE)
    ids = [int(output.token_id or 0) for output in with_]
    with torch.inference_mode():
        logits = load_reference(model_folder, torch.float32)(torch.tensor([[*prompt, *ids]])).logits[0]
    truth = logits.float().log_softmax(-1)[len(prompt) - 1 : -1]
    for row, output in zip(truth, with_, strict=True):
        assert output.logprobs is not None
        assert output.logprobs.logprob == pytest.approx(row[output.token_id].item(), abs=1e-4)
        top, extra = row.topk(4), output.logprobs.top[4:]
        assert [token_id for token_id, _ in output.logprobs.top[:4]] == top.indices.tolist()
        assert [logprob for _, logprob in output.logprobs.top[:4]] == pytest.approx(top.values.tolist(), abs=1e-4)
        is_among = output.token_id in top.indices.tolist()
        assert extra == (() if is_among else ((output.token_id, output.logprobs.logprob),))
    assert {len(output.logprobs.top) for output in with_ if output.logprobs} == {4, 5}, "both cases occur"


# Batches and their requests.


def test_a_closed_batch_runs_to_its_end(folder: Path) -> None:
    engine = make(folder, max_batch_size=2)
    for name, n in (("a", 2), ("b", 4), ("c", 1)):
        engine.add_request([7] * 5, SamplingParams(**GREEDY, max_new_tokens=n), name)
    records = []
    while engine.has_work():
        engine.step()
        records.append(engine.last_step)
    assert [(r.prefilled, r.decoded, r.finished) for r in records if r] == [
        ((("a", 5), ("b", 5)), (), ()),
        ((), ("a", "b"), ("a",)),
        ((), ("b",), ()),
        ((), ("b",), ("b",)),
        ((("c", 5),), (), ("c",)),
    ]
    assert [r.kv_used_tokens for r in records if r] == [10, 6, 7, 0, 0]
    assert [(r.step, r.num_running, r.num_waiting) for r in records if r] == [
        (0, 2, 1),
        (1, 1, 1),
        (2, 1, 1),
        (3, 0, 1),
        (4, 0, 0),
    ]
    assert engine.runner.num_forwards == 5
    assert engine.runner.num_tokens_computed == 10 + 2 + 1 + 1 + 5, "no token is computed twice, and none is padding"


def entry(request: Request) -> Scheduled:
    """A schedule entry with all uncomputed tokens of a request."""
    return Scheduled(request, request.num_computed_tokens, request.num_tokens - request.num_computed_tokens)


def test_a_batch_holds_arrays_of_the_requests_new_tokens() -> None:
    requests = [Request("a", [3, 4, 5], SamplingParams(), 0), Request("b", [6], SamplingParams(), 0)]
    pool = ContiguousKVCachePool(2, 16)
    for request in requests:
        assert pool.reserve(request, 16), "the pool has room for both"

    def batch(*entries: Scheduled) -> Batch:
        return Batch.of(Schedule(1, entries), pool)

    first = batch(*map(entry, requests))
    assert_equal(first.request_ids, ("a", "b"), "requests of the batch")
    assert_equal(first.token_ids.tolist(), [3, 4, 5, 6], "token ids", ("token",))
    assert_equal(first.positions.tolist(), [0, 1, 2, 0], "positions", ("token",))
    assert_equal(first.num_new_tokens.tolist(), [3, 1], "new tokens", ("sequence",))
    assert_equal((first.logit_rows.tolist(), first.num_tokens), ([2, 3], 4), "logit rows, and tokens")
    assert_equal(first.pending.tolist(), [], "pending tokens")
    for name in ("token_ids", "positions", "num_new_tokens", "pending"):
        assert_equal(getattr(first, name).dtype, np.dtype(np.int64), f"dtype of {name}")
    assert_equal(
        batch(Scheduled(requests[0], 0, 2), entry(requests[1])).token_ids.tolist(),
        [3, 4, 6],
        "token ids of two of three tokens",
        ("token",),
    )
    # Tokens in flight have slots, and no ids yet.
    for request in requests:
        request.num_scheduled_tokens, request.num_pending_tokens = request.num_tokens, 1
    late = batch(Scheduled(requests[0], 3, 1), Scheduled(requests[1], 1, 1))
    assert_equal(late.token_ids.tolist(), [0, 0], "token ids in flight", ("token",))
    assert_equal(late.positions.tolist(), [3, 1], "positions of tokens in flight", ("token",))
    assert_equal(late.pending.tolist(), [0, 1], "pending", ("entry",))
    assert_equal(late.layout.num_cached.tolist(), [3, 1], "cached tokens: those in flight precede them", ("sequence",))
    later = batch(Scheduled(requests[0], 1, 3), Scheduled(requests[1], 1, 1))
    assert_equal(later.token_ids.tolist(), [4, 5, 0, 0], "token ids, the last of each sequence in flight", ("token",))
    assert_equal(later.pending.tolist(), [2, 3], "pending: the last token of each sequence", ("entry",))
    for request in requests:
        pool.commit(request, request.num_tokens)
        request.num_computed_tokens = request.num_tokens
        request.num_pending_tokens = 0
        request.append(9)
    schedule = Schedule(2, tuple(map(entry, requests)))
    second = Batch.of(schedule, pool)
    assert_equal(second.token_ids.tolist(), [9, 9], "token ids of a decode step", ("token",))
    assert_equal(second.positions.tolist(), [3, 1], "positions of a decode step", ("token",))
    assert_equal([row.index for row in schedule.sampling_rows()], [1, 1], "index of the sampled token", ("request",))
    requests[0].num_computed_tokens = 1
    pool.truncate(requests[0], 1)
    again = batch(*map(entry, requests))
    assert_equal(again.positions.tolist(), [1, 2, 3, 1], "positions from the second token on", ("token",))
    assert_equal(again.token_ids.tolist(), [4, 5, 9, 9], "token ids from the second token on", ("token",))
    part = again.part(range(1, 2))
    assert_equal(
        (part.request_ids, part.token_ids.tolist(), part.positions.tolist()),
        (("b",), [9], [1]),
        "requests, token ids and positions of a part",
    )


def test_prompt_tokens_of_a_step_stay_within_the_budget(folder: Path) -> None:
    engine = make(folder, max_num_batched_tokens=64)
    for length in (60, 4, 1, 100, 30):
        engine.add_request([7] * length, SamplingParams(**GREEDY, max_new_tokens=9))
    run(engine, stop_after=1)
    assert engine.last_step is not None
    assert [n for _, n in engine.last_step.prefilled] == [60, 4]
    prefilled = []
    for _ in range(3):
        engine.step()
        prefilled.append([n for _, n in engine.last_step.prefilled])
    assert prefilled == [[1], [100], [30]]


# Failures are isolated to their requests.


def fail_where(engine: Engine, is_culprit: Callable[[list[int]], bool], error: Exception) -> list[int]:
    """Make the model raise in forwards whose ids match ``is_culprit``; returns the number of tokens of each forward."""
    forward, sizes = engine.model.forward, []

    def failing(tokens: Any, *memory: Any) -> torch.Tensor:
        sizes.append(len(tokens.ids))
        hidden = forward(tokens, *memory)
        if is_culprit(tokens.ids.tolist()):
            raise error
        return hidden

    engine.model.forward = failing
    return sizes


def test_a_request_that_fails_in_its_prompt_fails_alone(model_folder: Path, caplog) -> None:
    prompts = [[7 + n] * (3 + n) for n in range(8)]
    params = {"max_new_tokens": 6, "ignore_eos": True}
    expected = serve(make(model_folder), [(p, params | {"seed": n}) for n, p in enumerate(prompts)])
    culprit = min({*range(512)} - {token_id for answer in expected for token_id in tokens(answer)} - {*range(20)})
    engine = make(model_folder)
    sizes = fail_where(engine, lambda ids: culprit in ids, RuntimeError("injected"))
    prompts[5] = [7, culprit, 7]
    with caplog.at_level(logging.ERROR):
        answers = serve(engine, [(p, params | {"seed": n}) for n, p in enumerate(prompts)])
    (failed,) = answers[5]
    assert (failed.token_id, failed.text, failed.finish_reason) == (None, "", FinishReason.ERROR)
    assert failed.error is not None
    assert "injected" not in failed.error
    assert "injected" in caplog.text
    for n in {*range(8)} - {5}:
        assert tokens(answers[n]) == tokens(expected[n]), n
    counts = [len(prompt) for prompt in prompts]
    halves = [range(8), range(4), range(4, 8), range(4, 6), range(4, 5), range(5, 6), range(6, 8)]
    assert sizes[:7] == [sum(counts[n] for n in half) for half in halves], "found by bisection"


@pytest.mark.failing_forwards
def test_requests_that_fail_while_they_decode(folder: Path) -> None:
    prompts = [[7 + n] * 4 for n in range(5)]
    params = GREEDY | {"max_new_tokens": 6}
    expected = [tokens(answer) for answer in serve(make(folder), [(p, params) for p in prompts])]
    culprits = {expected[1][2], expected[4][2]} - {*expected[0], *expected[2], *expected[3]}
    assert len(culprits) == 2, "tokens that no other request gets"
    engine = make(folder)
    fail_where(engine, lambda ids: bool(culprits & {*ids}), ValueError("injected"))
    answers = [tokens(answer) for answer in serve(engine, [(p, params) for p in prompts])]
    assert_equal(
        [answers[n] for n in (0, 2, 3)],
        [expected[n] for n in (0, 2, 3)],
        "answers of the requests that did not fail",
        ("answer", "token"),
    )
    for n in (1, 4):
        got = answers[n]
        assert got[-1] is None, "a request that failed got an answer to its end"
        assert_equal(got[:-1], expected[n][: len(got) - 1], "tokens before the failure", ("token",))
    assert serve(engine, [([9] * 4, params)])[0][-1].finish_reason is FinishReason.LENGTH, "the engine goes on"


@pytest.mark.failing_forwards
def test_a_failure_after_the_forward_changes_nothing_for_the_others(tiny_checkpoints: dict[str, Path]) -> None:
    """No state advances before the tokens are sampled, so a repeated forward gives the same result."""
    folder = tiny_checkpoints["qwen3"]
    requests = [([7 + n] * 4, GREEDY | {"max_new_tokens": 6}) for n in range(4)]
    expected = [tokens(answer) for answer in serve(make(folder), requests)]
    engine, calls = make(folder), 0
    sample = engine.runner.sampler.sample

    def failing(logits: torch.Tensor, rows: Any, places: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (1, 5):
            raise RuntimeError("injected, once in a prefill and once in a decode")
        return sample(logits, rows, places)

    engine.runner.sampler.sample = failing
    assert [tokens(answer) for answer in serve(engine, requests)] == expected


def test_what_no_request_can_be_blamed_for_is_raised(folder: Path) -> None:
    engine = make(folder)
    fail_where(engine, lambda ids: True, NotImplementedError("an operation is missing"))
    engine.add_request("x", SamplingParams(max_new_tokens=2))
    with pytest.raises(NotImplementedError, match="an operation is missing"):
        engine.step()


def test_a_failed_request_raises_from_generate(folder: Path) -> None:
    engine = make(folder)
    fail_where(engine, lambda ids: True, RuntimeError("injected"))
    with pytest.raises(RuntimeError, match="could not compute this request"):
        list(engine.generate("x", SamplingParams(max_new_tokens=2)))
    assert engine.pool.audit() == []


@pytest.mark.parametrize("place", ["model", "forward", "wait", "commit", "process"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, NotImplementedError, RuntimeError])
def test_a_step_that_is_broken_off_loses_no_output(
    folder: Path, error: type[BaseException], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third call is interrupted, and with it the step, even if some requests already got their last token; or
    the first, in the only step that there is."""
    if (error, place) == (RuntimeError, "forward") or (place == "model" and error is not KeyboardInterrupt):
        pytest.skip("an error in a forward fails its own requests")
    requests: Requests = [([7 + n] * 4, GREEDY | {"max_new_tokens": 1 + 2 * (n % 3)}) for n in range(6)]
    expected = [tokens(answer) for answer in serve(make(folder), requests)]
    cases: tuple[tuple[int, int, Callable[[int], bool]], ...]
    cases = (6, 4, lambda number: number % 3 == 1), (1, 1, lambda number: number == 0)
    for num_requests, least_broken_off, is_broken in cases:
        engine = make(folder, max_batch_size=4)
        owner, name = {
            "model": (engine.model, "forward"),
            "forward": (engine.runner, "forward"),
            "wait": (SamplerOutput, "wait"),
            "commit": (engine.pool, "commit"),
            "process": (engine.output_processor, "process"),
        }[place]
        with monkeypatch.context() as patch:
            break_off(owner, name, error, is_broken, patch)
            answers, num_broken_off, _ = serve_through(engine, requests[:num_requests], error)
        assert num_broken_off >= least_broken_off
        assert answers == expected[:num_requests]


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_an_aborted_request_frees_its_region_and_changes_no_other_tokens(folder: Path, num_steps: int) -> None:
    expected = [tokens(answer) for answer in serve(make(folder), MIXED[:4])]
    engine = make(folder, max_batch_size=4)
    names = [engine.add_request(prompt, SamplingParams(**params)) for prompt, params in MIXED[:4]]
    before = run(engine, stop_after=num_steps)
    free = engine.pool.free_tokens
    assert engine.abort(names[1])
    assert not engine.abort(names[1])
    assert engine.pool.free_tokens == (free if num_steps == 0 else free + 256)
    after = run(engine)
    assert names[1] not in after
    for n in (0, 2, 3):
        assert tokens(before.get(names[n], []) + after.get(names[n], [])) == expected[n]
    assert engine.pool.audit() == []


def test_what_cannot_be_served_is_refused_and_leaves_no_trace(folder: Path) -> None:
    engine = make(folder, max_waiting_requests=2, seed=5)
    params = SamplingParams(max_new_tokens=3)
    for prompt, message in (
        ([], "The prompt is empty"),
        ([1, 512], "holds the token id 512"),
        ([7] * 256, "length is 256 tokens. However, you requested 256 tokens"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.add_request(prompt, params)
    assert engine.add_request("a", params, "1") == "1"
    with pytest.raises(RequestError, match="'1' is waiting or running"):
        engine.add_request("a", params, "1")
    assert engine.add_request("b", params) == "0"
    with pytest.raises(QueueFullError, match="2 requests wait"):
        engine.add_request("c", params)
    assert len(engine.scheduler.waiting) == 2
    assert engine.load().num_waiting == 2
    run(engine)
    assert engine.add_request("c", params, "1") == "1", "an id may be reused when its request is finished"
    clean = make(folder, seed=5)
    for prompt in "abc":
        clean.add_request(prompt, params, prompt)
    clean.step()
    seeds = [clean.seeds.getrandbits(64), engine.seeds.getrandbits(64)]
    assert seeds[0] == seeds[1], "a refused request takes no seed from later ones"


def test_iterators_take_turns_and_a_closed_one_is_aborted(folder: Path) -> None:
    params = SamplingParams(**GREEDY, max_new_tokens=9)
    expected = [tokens(answer) for answer in serve(make(folder), [(p, GREEDY | {"max_new_tokens": 9}) for p in "xy"])]
    engine = make(folder)
    first, second = engine.generate("x", params), engine.generate("y", params)
    got = [[next(first)], [next(second)]]
    for iterator, outputs in ((first, got[0]), (second, got[1])):
        outputs += iterator
    assert [tokens(outputs) for outputs in got] == expected
    with closing(engine.generate("x", params)) as third:
        next(third)
        assert engine.has_work()
    assert not engine.has_work()
    assert engine.pool.audit() == []


def test_load_tells_how_busy_the_engine_is(folder: Path) -> None:
    engine = make(folder, max_batch_size=4)
    assert (engine.load().num_running, engine.load().num_waiting, engine.load().kv_usage) == (0, 0, 0.0)
    for _ in range(5):
        engine.add_request([7] * 3, SamplingParams(max_new_tokens=3, ignore_eos=True))
    engine.step()
    assert (engine.load().num_running, engine.load().num_waiting, engine.load().kv_usage) == (4, 1, 1.0)
    assert engine.stats()["cache capacity (tokens)"] == 4 * 256


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["naive", "sdpa", "flash"])
def test_tokens_on_the_gpu_equal_those_of_the_cpu(model_folder: Path, backend: str) -> None:
    on_cpu = serve(make(model_folder), MIXED)
    on_gpu = serve(make(model_folder, device="cuda", dtype="float32", attention_backend=backend), MIXED)
    assert [tokens(answer) for answer in on_gpu] == [tokens(answer) for answer in on_cpu]
    assert [ends(answer) for answer in on_gpu] == [ends(answer) for answer in on_cpu]


@pytest.mark.gpu
@pytest.mark.parametrize("num_sequences", [1, 5, 16])
def test_a_decode_step_writes_and_attends_once_a_layer_for_all(model_folder: Path, num_sequences: int) -> None:
    engine = make(model_folder, device="cuda", dtype="bfloat16")
    for n in range(num_sequences):
        engine.add_request([7] * (20 + n), SamplingParams(**GREEDY, max_new_tokens=8))
    engine.step()
    counts = []
    for _ in range(3):
        before = LAUNCHES.copy()
        engine.step()
        counts.append((LAUNCHES - before)["kv_write_kernel"])
        counts.append((LAUNCHES - before)["decode_attention_kernel"])
    assert counts == [engine.model.config.num_layers] * 6
