"""Text that is held back, for a stop string or an incomplete character, when the answer ends."""

from pathlib import Path
from typing import Any

import pytest

from shared.engine.output import OutputStream, StepOutput
from shared.engine.output_processor import OutputProcessor
from shared.engine.request import Request, RequestStatus, TokenLogprobs
from shared.sampling.params import SamplingParams, StructuredOutput
from shared.text.stopping import FinishReason
from shared.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(text_folders: dict[str, Path]) -> Tokenizer:
    return Tokenizer.load(text_folders["smollm2"])


def stream(tokenizer: Tokenizer, ids: list[int], stop: str, max_new_tokens: int) -> list[StepOutput]:
    params = SamplingParams(stop=(stop,), max_new_tokens=max_new_tokens)
    outputs = OutputStream(Request("a", [1], params, 0), tokenizer, 100)
    return [outputs.push(token_id) for token_id in ids]


@pytest.mark.parametrize("reason", [FinishReason.EOS, FinishReason.LENGTH])
@pytest.mark.parametrize(("text", "num_cut"), [("The cat", 0), ("The cat 🥊", 1)])
def test_an_end_releases_what_was_held_back(
    tokenizer: Tokenizer, reason: FinishReason, text: str, num_cut: int
) -> None:
    """The stop string has begun; the character lacks its last byte."""
    ids = tokenizer.encode(text)
    ids = ids[: len(ids) - num_cut]
    expected = tokenizer.decode(ids)
    if reason is FinishReason.EOS:
        ids = [*ids, min(tokenizer.eos_ids)]
    outputs = stream(tokenizer, ids, f"{expected[-2:]} never", len(ids) if reason is FinishReason.LENGTH else 50)
    assert "".join(output.text for output in outputs[:-1]) != expected
    assert "".join(output.text for output in outputs) == expected
    assert [output.finish_reason for output in outputs] == [None] * (len(ids) - 1) + [reason]


def test_what_was_held_back_may_complete_a_stop_string(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("The 🥊")[:-1], min(tokenizer.eos_ids)]
    outputs = stream(tokenizer, ids, " \ufffd", 50)
    assert "".join(output.text for output in outputs) == "The"
    assert (outputs[-1].finish_reason, outputs[-1].stop) == (FinishReason.STOP, " \ufffd")


def test_no_output_follows_the_one_that_ends_a_request(tokenizer: Tokenizer) -> None:
    """Of several tokens that were committed before the outputs were made."""
    request, processor = Request("a", [1], SamplingParams(), 0), OutputProcessor(tokenizer, 100)
    processor.add(request)
    ids = [5, min(tokenizer.eos_ids), 6]
    for token_id in ids:
        request.append(token_id)
    request.num_cached_tokens = 1
    assert processor.catch_up() == [request]
    outputs = processor.take()
    assert [output.token_id for output in outputs] == ids[:2]
    assert [output.num_cached_tokens for output in outputs] == [1, 0], "the first output of a request tells it"
    assert processor.catch_up() == [request], "until it is retired"
    request.status = RequestStatus.FINISHED
    assert (processor.catch_up(), processor.take()) == ([], [])


def test_no_output_follows_the_last_one_after_an_interrupted_call(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call was interrupted before it returned the request, which thus got another token."""
    word, end = tokenizer.encode("a")[-1], min(tokenizer.eos_ids)
    requests, processor = [Request(name, [1], SamplingParams(), 0) for name in "ab"], OutputProcessor(tokenizer, 100)
    for request in requests:
        processor.add(request)
        request.append(word)
    processor.catch_up()
    processor.take()
    for request in requests:
        request.append(end)
    with monkeypatch.context() as patch:
        patch.setattr(processor.streams[requests[1]], "push", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            processor.catch_up()
    for request in requests:
        request.append(word)
    assert processor.catch_up() == requests
    assert [(output.request_id, output.token_id) for output in processor.take()] == [("a", end), ("b", end)]


def test_a_request_of_no_tokens_ends_when_its_prompt_is_computed(tokenizer: Tokenizer) -> None:
    request = Request("a", [1, 2], SamplingParams(max_new_tokens=0, prompt_logprobs=0), 0)
    processor = OutputProcessor(tokenizer, 100)
    processor.add(request)
    assert (processor.catch_up(), processor.take()) == ([], [])
    request.num_computed_tokens = 2
    assert processor.catch_up() == [request]
    assert [(output.token_id, output.finish_reason) for output in processor.take()] == [(None, FinishReason.LENGTH)]


@pytest.mark.parametrize(("stop", "num_accepted"), [((), 3), (("c",), 2), (("b",), 1)])
def test_accepted_drafts_behind_a_stop_string_are_not_part_of_the_output(
    tokenizer: Tokenizer, stop: tuple[str, ...], num_accepted: int
) -> None:
    """A prompt gives the first token; of five drafts that follow three are accepted, and a fifth token follows them."""
    ids = [tokenizer.encode(letter)[0] for letter in "abcde"]
    request = Request("a", [1], SamplingParams(max_new_tokens=5, stop=stop), 0)
    processor = OutputProcessor(tokenizer, 100)
    processor.add(request)
    request.append(ids[0])
    processor.catch_up()
    for token_id in ids[1:]:
        request.append(token_id)
    request.num_accepted_drafts, request.num_rejected_drafts = 3, 2
    processor.catch_up()
    *outputs, last = processor.take()
    assert (last.num_accepted_drafts, last.num_rejected_drafts) == (num_accepted, 5 - num_accepted)
    assert not any(output.num_accepted_drafts or output.num_rejected_drafts for output in outputs)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_stop_token_ends_the_output_and_its_text_is_not_part_of_it(tokenizer: Tokenizer, ignore_eos: bool) -> None:
    """Also where end-of-sequence ids are ignored, as in vLLM."""
    ids = tokenizer.encode("The cat!")
    assert ids.count(ids[-1]) == 1
    params = SamplingParams(stop_token_ids=(ids[-1],), ignore_eos=ignore_eos)
    outputs = OutputStream(Request("a", [1], params, 0), tokenizer, 100)
    answer = [outputs.push(token_id) for token_id in ids]
    assert "".join(output.text for output in answer) == tokenizer.decode(ids[:-1])
    assert [output.finish_reason for output in answer] == [None] * (len(ids) - 1) + [FinishReason.STOP]
    assert (answer[-1].token_id, answer[-1].stop) == (ids[-1], None)


def test_before_min_tokens_no_stop_string_and_no_id_ends_the_output(tokenizer: Tokenizer) -> None:
    (mark,) = tokenizer.encode("!")
    for asked in ({"stop": "!"}, {"stop_token_ids": [mark]}):
        for min_tokens in (0, 1, 3):
            params = SamplingParams(min_tokens=min_tokens, **asked)  # type: ignore[arg-type]
            outputs = OutputStream(Request("a", [1], params, 0), tokenizer, 100)
            answer = [outputs.push(mark) for _ in range(min_tokens + 1)]
            assert [output.finish_reason for output in answer] == [None] * min_tokens + [FinishReason.STOP]
            assert "".join(output.text for output in answer) == "!" * min_tokens


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_new_tokens", "limit"), [(1, 4, 4), (96, 5, 4), (96, 4, 4), (99, 50, 1)]
)
def test_an_output_ends_with_its_limit_or_that_of_the_sequence(
    tokenizer: Tokenizer, num_prompt_tokens: int, max_new_tokens: int, limit: int
) -> None:
    params = SamplingParams(max_new_tokens=max_new_tokens)
    outputs = OutputStream(Request("a", [1] * num_prompt_tokens, params, 0), tokenizer, 100)
    reasons = [outputs.push(tokenizer.encode("a")[-1]).finish_reason for _ in range(limit)]
    assert reasons == [None] * (limit - 1) + [FinishReason.LENGTH]


def test_an_end_id_before_min_tokens_ends_a_grammar(tokenizer: Tokenizer) -> None:
    """Nothing may follow a grammar that is complete."""
    word, end = tokenizer.encode("a")[-1], min(tokenizer.eos_ids)
    for stop_token_ids, last in (([], end), ([word], word)):
        params = SamplingParams(
            min_tokens=9, stop_token_ids=tuple(stop_token_ids), structured_output=StructuredOutput()
        )
        output = OutputStream(Request("a", [1], params, 0), tokenizer, 100).push(last)
        assert output.finish_reason is (FinishReason.EOS if last == end else FinishReason.STOP)


def test_what_ends_an_output_is_masked_until_min_tokens(tokenizer: Tokenizer) -> None:
    """As in vLLM the end-of-sequence ids too if they are ignored; not those that the model cannot sample."""
    params = SamplingParams(min_tokens=2, stop_token_ids=(7,), ignore_eos=True)
    end_ids = params.end_ids({3, 10**6}, 100)
    assert sorted(end_ids) == [3, 7]
    request = Request("a", [1], params, 0, end_ids)
    masks = []
    for token_id in (4, 5, 6):
        masks.append(request.sampling_row().masked_ids)
        request.append(token_id)
    assert masks == [end_ids, end_ids, ()]


@pytest.mark.parametrize(
    "options",
    [{}, {"stop": ("at",)}, {"logprobs": 0}, {"min_tokens": 6}, {"max_new_tokens": 5}, {"ignore_eos": True}],
    ids=str,
)
def test_an_output_is_what_the_stream_returns(tokenizer: Tokenizer, options: dict[str, Any]) -> None:
    """Also where the processor does not ask it: characters of several tokens, an end in the middle, a limit."""
    ids = [*tokenizer.encode("The cat 🥊")[:-1], *tokenizer.encode(" sat.")]
    ids = [*ids, min(tokenizer.eos_ids), *ids]
    params = SamplingParams(**{"max_new_tokens": 50} | options)
    request, processor = Request("a", [1], params, 0), OutputProcessor(tokenizer, 100)
    processor.add(request)
    expected = OutputStream(request, tokenizer, 100)
    for token_id in ids:
        logprobs = None if params.logprobs is None else TokenLogprobs(-1.0, ())
        request.append(token_id, logprobs)
        finished = processor.catch_up()
        assert processor.take() == [expected.push(token_id, logprobs)]
        assert finished == ([request] if expected.has_ended else [])
        if expected.has_ended:
            return
    assert options == {"ignore_eos": True}, "only these go on after the end"
