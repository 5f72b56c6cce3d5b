"""Text that is held back, for a stop string or an incomplete character, when the answer ends."""

from pathlib import Path

import pytest

from shared.engine.output import OutputStream, StepOutput
from shared.engine.output_processor import OutputProcessor
from shared.engine.request import Request
from shared.sampling.params import SamplingParams
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
    assert processor.catch_up() == [request]
    assert [output.token_id for output in processor.take()] == ids[:2]
