"""The offline entry: any number of prompts, in order, within the engine's bounds."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.engine.llm import LLM
from shared.engine.prompt import check_prompt
from shared.errors import ConfigError, RequestError
from shared.sampling.params import SamplingParams
from shared.scheduling.schedule import Schedule
from shared.text.stopping import FinishReason
from tests.random_loads import raise_for

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tiny_checkpoints: dict[str, Path]) -> str:
    return str(tiny_checkpoints["llama"])


@pytest.mark.parametrize("phase", [None, "04", "05"])
def test_answers_come_in_the_order_of_the_prompts(folder: str, phase: str | None) -> None:
    llm = LLM(folder, phase, max_batch_size=3, max_seq_len=128)
    prompts = ["The capital of France is", [7, 8, 9], "x", "Stop", [5] * 60]
    lengths = [9, 2, 14, 1, 5]
    params = [SamplingParams(**GREEDY, max_new_tokens=n, logprobs=1 if n == 2 else None) for n in lengths]
    answers = llm.generate(prompts, params, progress=False)
    for prompt, each, answer in zip(prompts, params, answers, strict=True):
        outputs = list(llm.engine.generate(prompt, each))
        assert answer.token_ids == [output.token_id for output in outputs]
        assert answer.text == "".join(output.text for output in outputs)
        assert (answer.finish_reason, answer.stop, answer.error) == (FinishReason.LENGTH, None, None)
        assert answer.prompt_ids == (llm.engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        assert (answer.logprobs is None) == (each.logprobs is None)
        for ours, output in zip(answer.logprobs or (), outputs, strict=each.logprobs is not None):
            assert ours.logprob == pytest.approx(output.logprobs.logprob, abs=1e-5)
            assert [token_id for token_id, _ in ours.top] == [token_id for token_id, _ in output.logprobs.top]
    assert llm.engine.pool.audit() == []


@pytest.mark.parametrize("length", [1, 5])
def test_nothing_is_in_flight_when_the_answers_are_complete(folder: str, length: int) -> None:
    llm = LLM(folder, max_seq_len=64, overlap_scheduling=True)
    for _ in range(2):
        llm.generate(["x", "yz"], SamplingParams(**GREEDY, max_new_tokens=length), progress=False)
        assert not llm.engine.has_work()
        assert llm.engine.pool.holdings()[1] == {}
    params = SamplingParams(**GREEDY, max_new_tokens=8, prompt_logprobs=0)
    (answer,) = llm.generate("yz", params, progress=False)
    assert answer.prompt_logprobs is not None
    assert [each is None for each in answer.prompt_logprobs] == [True] + [False] * (len(answer.prompt_ids) - 1)
    stop = answer.text[:3]
    (stopped,) = llm.generate("yz", replace(params, stop=(stop,)), progress=False)
    assert (stopped.stop, stopped.text, llm.engine.has_work()) == (stop, "", False), "a step more was in flight"


def test_many_prompts_pass_through_a_short_queue(folder: str, capsys) -> None:
    llm = LLM(folder, max_batch_size=64, max_seq_len=32, max_waiting_requests=10)
    most = 0
    add = llm.engine.add_request

    def counting(*args: Any) -> str:
        nonlocal most
        name = add(*args)
        most = max(most, llm.engine.load().num_waiting)
        return name

    llm.engine.add_request = counting
    prompts = [[n] for n in range(120)]
    answers = llm.generate(prompts, SamplingParams(**GREEDY, max_new_tokens=1))
    assert [answer.prompt_ids for answer in answers] == prompts
    assert all(len(answer.token_ids) == 1 for answer in answers)
    assert most == 10
    assert llm.engine.runner.num_forwards <= 120 / 10 + 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "120/120" in shown.err
    assert "120 tokens" in shown.err


@pytest.mark.parametrize(("batching_mode", "alone"), [("continuous", 4096), ("continuous", 20), ("static", 4096)])
def test_prompts_that_are_added_while_steps_run_make_the_same_steps(
    folder: str, batching_mode: str, alone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where several prompts are divided among steps of ``alone`` tokens."""
    monkeypatch.setattr("shared.scheduling.chunks.ALONE", alone)
    prompts = [[n] * (1 + 7 * n % 30) for n in range(40)]
    params = [SamplingParams(**GREEDY, max_new_tokens=1 + n % 5) for n in range(40)]
    settings: dict[str, Any] = {
        "max_batch_size": 8,
        "max_seq_len": 64,
        "max_num_batched_tokens": 48,
        "use_prefix_caching": False,
    }
    settings["batching_mode"] = batching_mode

    def watched() -> tuple[LLM, list[list[tuple[str, int]]], list[int]]:
        """An LLM, the requests and tokens of its steps, and the lengths of its queue before them."""
        llm, steps, queued = LLM(folder, overlap_scheduling=True, **settings), [], []
        scheduler, schedule = llm.engine.scheduler, llm.engine.scheduler.schedule

        def recorded() -> Schedule:
            queued.append(len(scheduler.waiting))
            scheduled = schedule()
            steps.append([(request.request_id, num_tokens) for request, _, num_tokens, *_ in scheduled])
            return scheduled

        scheduler.schedule = recorded
        return llm, steps, queued

    llm, steps, queued = watched()
    llm.generate(prompts, params, progress=False)
    at_once, expected, _ = watched()
    for prompt, each in zip(prompts, params, strict=True):
        at_once.engine.add_request(prompt, each)
    while at_once.engine.has_work():
        at_once.engine.step()
    assert steps == expected
    if batching_mode == "continuous":
        first = 48 if alone == 4096 else 19  # of the 75 tokens of the prompts that a full step would reach
        assert sum(n for _, n in steps[0]) == first
        assert max(queued) < 10


def test_a_bad_prompt_is_named_before_anything_is_computed(folder: str) -> None:
    llm = LLM(folder, max_seq_len=64)
    for prompts, message in (
        (["x", [1, 999]], r"Prompt 1, counted from 0: The prompt holds the token id 999"),
        (["x", "y", [3] * 64], r"Prompt 2, counted from 0: This model's maximum context length"),
        ([[]], r"Prompt 0, counted from 0: The prompt is empty"),
        ([7, 8], r"Prompt 0 is 7; a prompt is a text or a list of token ids"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.generate(prompts, progress=False)
    with pytest.raises(RequestError, match="There are 2 prompts and 1 params"):
        llm.generate(["x", "y"], [SamplingParams()], progress=False)
    assert llm.generate([], progress=False) == []
    assert llm.engine.runner.num_forwards == 0
    assert not llm.engine.has_work()
    (answer,) = llm.generate("x", SamplingParams(**GREEDY, max_new_tokens=3), progress=False)
    assert len(answer.token_ids) == 3, "a bare text is one prompt"


def test_checked_ids_are_looked_at_again_only_for_a_smaller_vocabulary() -> None:
    ids = check_prompt([3, 9], 10, 8)
    assert check_prompt(ids, 10, 8) is ids
    assert ids == np.frombuffer(ids.packed, np.int64).tolist() == [3, 9]
    with pytest.raises(RequestError, match="the token id 9;"):
        check_prompt(ids, 9, 8)
    with pytest.raises(RequestError, match="maximum context length is 2 tokens"):
        check_prompt(ids, 10, 2)
    for wrong in (True, -1, 10, 2**64, 3.0):
        with pytest.raises(RequestError, match=f"the token id {wrong};"):
            check_prompt([3, wrong], 10, 8)


def test_an_interruption_leaves_nothing_behind(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(folder, max_seq_len=64, max_batch_size=2)
    forward, calls = llm.engine.model.forward, 0

    def interrupted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return forward(*args)

    monkeypatch.setattr(llm.engine.model, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["x"] * 5, SamplingParams(**GREEDY, max_new_tokens=9), progress=False)
    assert not llm.engine.has_work()
    assert llm.engine.pool.audit() == []


@pytest.mark.failing_forwards
def test_a_prompt_that_fails_has_an_error_for_an_answer(folder: str) -> None:
    llm = LLM(folder, max_seq_len=64)
    raise_for(llm.engine, 400)
    params = SamplingParams(**GREEDY, max_new_tokens=2)
    good, bad = llm.generate([[7], [400]], params, progress=False)
    assert (good.error, len(good.token_ids)) == (None, 2)
    assert bad.error is not None
    assert (bad.token_ids, bad.finish_reason) == ([], FinishReason.ERROR)


def test_a_phase_that_answers_one_at_a_time_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"Phase 03 \(.*\) answers one request at a time; choose phase 04"):
        LLM(folder, "03")
