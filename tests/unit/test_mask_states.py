"""The states of mask tokens belong to the step that was launched last, whatever becomes of its requests: aborts, ends,
failures, preemption, and drafts that another drafter proposes. The guesses of each step are made as on a GPU, ahead of
the host, by a head whose passes are repeated instead of recorded."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from phases.phase_11.engine import Engine as Plain
from phases.phase_11_1.engine import Engine
from shared.engine.config import EngineConfig
from shared.engine.executor.graphs import CapturedStep, Computed
from shared.text.stopping import FinishReason
from shared.tracks.multi_token.captured_head import CapturedHead
from shared.tracks.multi_token.mask_states import MaskStates
from tests.adapters import random_adapter_of
from tests.drafts import Foresight
from tests.mixed_requests import ALIKE, GREEDY, Requests, serve, tokens
from tests.random_loads import Answers, Load, assert_as_alone, loads, sizes

REQUESTS: Requests = [(prompt, GREEDY | {"max_new_tokens": 8 + n}) for n, (prompt, _) in enumerate(ALIKE)]


def repeat(run: Callable[[], Computed]) -> CapturedStep:
    """Instead of a recording, runs the function again, and writes to the memory of the first results."""
    results = run()

    def replay() -> None:
        results.hidden.copy_(run().hidden)

    return CapturedStep(replay, results)


def make(folder: Path, **options: Any) -> Any:
    """An engine whose guesses are made ahead, and which notes for how many sequences they were."""
    arguments = {"max_seq_len": 96, "use_speculative_decoding": True, "adapt_spec_length": False, "spec_length": 2}
    engine = Engine(EngineConfig(str(folder), adapter=str(random_adapter_of(folder)), **arguments | options))
    drafter: Any = engine.drafter
    drafter.logits = drafter.captured = CapturedHead(drafter.adapter, engine.model, engine.pool.max_sequences, repeat)
    follow, engine.num_followed = drafter.follow, []

    def noting(launched: Any, *sampled: Any) -> None:
        assert drafter.states.keys() <= set(launched.batch.request_ids), "states of no other step"
        kept = [states.hidden for states in drafter.states.values()]
        assert all(each.untyped_storage().nbytes() == each.nbytes for each in kept), "copies"
        follow(launched, *sampled)
        assert not (sampled[1].errors and drafter.ahead), "rows that failed would shift the guesses of the others"
        engine.num_followed.append(len(drafter.ahead.first_rows) if drafter.ahead else 0)

    propose, collect, before = drafter.propose, drafter.collect, dict[str, MaskStates]()

    def proposing(schedule: Any) -> None:
        before.clear()
        before.update(drafter.states if drafter.ahead else {})
        propose(schedule)
        drafts = {
            (request.serial, len(request.output_ids) + n)
            for request, *_, num_drafts, _, _ in schedule
            for n in range(num_drafts)
        }
        assert drafter.distributions.keys() <= drafts, "of no earlier step"
        engine.num_distributions += len(drafter.distributions)

    def collecting() -> None:
        requests = {*drafter.drawn[0][0]} - {None} if drafter.drawn and before else ()
        collect()
        for request in requests:
            states, previous = before[request.request_id], request.last_token_id
            group = states.hidden[request.num_tokens - 2 - states.start]
            for guess, hidden in zip(request.draft_ids, group, strict=False):
                logits = drafter.adapter.logits(engine.model, torch.tensor([previous]), hidden[None])
                assert guess == logits.argmax(), "a guess made ahead is the likeliest after the one before"
                previous = guess

    drafter.collect = collecting
    engine.runner.observers[0].follow, engine.num_distributions, drafter.propose = noting, 0, proposing
    return engine


@pytest.fixture(scope="module")
def alone(tiny_checkpoints: dict[str, Path]) -> Answers:
    plain = Plain(EngineConfig(str(tiny_checkpoints["qwen3"]), max_seq_len=96))
    return [serve(plain, [request])[0][0] for request in REQUESTS]


@settings(max_examples=8)
@given(options=sizes(), load=loads())
def test_whatever_the_sizes_arrivals_and_aborts(
    tiny_checkpoints: dict[str, Path], alone: Answers, options: dict[str, Any], load: Load
) -> None:
    assert_as_alone(make(tiny_checkpoints["qwen3"], **options), load, alone, REQUESTS)


def test_guesses_are_made_behind_several_requests_while_others_end_or_are_preempted(
    tiny_checkpoints: dict[str, Path], alone: Answers
) -> None:
    engine = make(tiny_checkpoints["qwen3"], block_size=3, num_gpu_blocks=40, use_prefix_caching=False)
    assert [tokens(answer) for answer in serve(engine, REQUESTS, [0, 0, 0, 2, 3, 3, 9, 9])[0]] == [
        tokens(each) for each in alone
    ]
    assert max(engine.num_followed) >= 2
    assert engine.load().num_preemptions > 0
    assert engine.scheduler.num_rejected_drafts > 0


def test_the_states_of_a_step_that_no_drafter_reads_go_with_the_step(
    tiny_checkpoints: dict[str, Path], alone: Answers
) -> None:
    """Another drafter leaves the states where they are."""
    engine = make(tiny_checkpoints["qwen3"])
    expected = [tokens(each) for each in alone]
    engine.drafter = Foresight(expected, 0.3)
    answers = serve(engine, REQUESTS, [0, 0, 0, 2, 3, 3, 9, 9])[0]
    assert [tokens(answer) for answer in answers] == expected
    assert sum(engine.num_followed) > 0
    assert engine.scheduler.num_accepted_drafts > 0


def test_distributions_are_those_of_the_drafts_of_a_step(tiny_checkpoints: dict[str, Path]) -> None:
    engine = make(tiny_checkpoints["qwen3"], acceptance_method="rejection")
    serve(engine, [("a", {"seed": n, "max_new_tokens": 12, "ignore_eos": True}) for n in range(3)], [0, 2, 3])
    assert engine.num_distributions > 10


def forgotten(states: dict[str, MaskStates], name: str) -> None:
    states.pop(name, None)


def moved(states: dict[str, MaskStates], name: str, by: int) -> None:
    if name in states:
        states[name] = replace(states[name], start=states[name].start + by)


@pytest.mark.parametrize(
    "spoil", [forgotten, partial(moved, by=9), partial(moved, by=-9)], ids=["forgotten", "later", "earlier"]
)
def test_a_request_whose_states_are_not_those_of_the_step_before_has_no_guesses(
    tiny_checkpoints: dict[str, Path], alone: Answers, spoil: Callable[[dict[str, MaskStates], str], None]
) -> None:
    engine = make(tiny_checkpoints["qwen3"])
    propose, made = engine.drafter.propose, {"1": 0, "2": 0}

    def spoiling(schedule: Any) -> None:
        spoil(engine.drafter.states, "1")
        propose(schedule)
        for request, *_, num_drafts, _, _ in schedule:
            if num_drafts and request.request_id in made:
                made[request.request_id] += len(request.draft_ids)

    engine.drafter.propose = spoiling
    answers = serve(engine, REQUESTS[:3])[0]
    assert [tokens(answer) for answer in answers] == [tokens(each) for each in alone[:3]]
    assert made["1"] == 0 < made["2"]


@pytest.mark.failing_forwards
def test_a_request_that_fails_takes_no_other_with_it(tiny_checkpoints: dict[str, Path], alone: Answers) -> None:
    """Its third token cannot be computed; the forward of the others is run again without it."""
    engine = make(tiny_checkpoints["qwen3"], max_batch_size=5)
    forward = engine.runner.compute

    def failing(batch: Any) -> Any:
        if "1" in batch.request_ids and len(engine.scheduler.running["1"].output_ids) >= 3:
            raise RuntimeError("injected")
        return forward(batch)

    engine.runner.compute = failing
    answers = serve(engine, REQUESTS)[0]
    assert answers[1][-1].finish_reason is FinishReason.ERROR
    for number, answer in enumerate(answers):
        ids, expected = tokens(answer), tokens(alone[number])
        assert ids == expected if number != 1 else ids[:-1] == expected[: len(ids) - 1]
    assert engine.num_followed[-1] > 0


EDITED: tuple[dict[str, Any], ...] = (
    {"presence_penalty": 2.0},
    {"logit_bias": {5: -0.7, 6: -9.0}},
    {"min_tokens": 12, "stop_token_ids": [5]},
)


@pytest.mark.parametrize("edited", EDITED, ids=[next(iter(each)) for each in EDITED])
@pytest.mark.parametrize("length", [1, 2])
def test_guesses_are_made_of_logits_as_they_will_be_edited(
    tiny_checkpoints: dict[str, Path], length: int, edited: dict[str, Any]
) -> None:
    """Penalties count the text and earlier guesses of the step, but no guess of a step before that was rejected."""
    engine = make(tiny_checkpoints["qwen3"], spec_length=length)
    drafter, scores, num_checked = engine.drafter, torch.zeros(engine.model.config.vocab_size), 0
    scores[[5, 6, 7]] = torch.tensor([9.0, 8.5, 8.0])
    drafter.logits = lambda previous, hidden: scores.repeat(len(previous), 1)
    collect = drafter.collect

    def edits(token: int, seen: set[int]) -> float:
        bias, is_masked = edited.get("logit_bias", {}).get(token, 0.0), token in edited.get("stop_token_ids", ())
        return float("-inf") if is_masked else bias - edited.get("presence_penalty", 0.0) * (token in seen)

    def checked() -> None:
        nonlocal num_checked
        requests = [] if not drafter.drawn else list(drafter.drawn[0][0])
        collect()
        for request in requests:
            if request is None or request.request_id == "0":
                continue
            seen = {*request.output_ids}
            for guess in request.draft_ids:
                assert guess == max((5, 6, 7), key=lambda token: scores[token] + edits(token, seen))
                seen.add(guess)
                num_checked += 1

    drafter.collect = checked
    request = ("a", GREEDY | {"max_new_tokens": 12} | edited)
    serve(engine, [REQUESTS[0], request, request], [0, 4, 4])  # the first one's guesses are made ahead until then
    assert num_checked > 10
