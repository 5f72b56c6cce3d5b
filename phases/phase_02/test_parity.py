"""Phase 2 generates the same tokens as transformers, stops at the right token, and refuses invalid requests."""

from pathlib import Path

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from phases.phase_02.engine import Engine
from shared.engine.config import EngineConfig
from shared.engine.output import StepOutput
from shared.errors import CapacityError, ConfigError, RequestError
from shared.parity.reference import load_reference
from shared.sampling.params import SamplingParams
from shared.text.stopping import FinishReason
from tests.as_transformers import ASKED_OF_DEMO, assert_generated
from tests.comparison import assert_equal
from tests.mixed_requests import GREEDY, SENTENCE
from tests.reference_tokens import ReferenceTokens

PROMPTS = ["The capital of France is", "x", SENTENCE]


def answer(engine: Engine, prompt: str | list[int], **params: object) -> list[StepOutput]:
    return list(engine.generate(prompt, SamplingParams(**params)))  # type: ignore[arg-type]


def ids(outputs: list[StepOutput]) -> list[int]:
    return [output.token_id for output in outputs]


def text(outputs: list[StepOutput]) -> str:
    return "".join(output.text for output in outputs)


@pytest.fixture(scope="module")
def llama(folder: Path) -> Engine:
    return Engine(EngineConfig(model=str(folder)))


@pytest.mark.from_empty("llama")
def test_greedy_tokens_equal_those_of_transformers(model_folder: Path, reference_tokens: ReferenceTokens) -> None:
    engine = Engine(EngineConfig(model=str(model_folder)))
    assert_generated(engine, reference_tokens, model_folder, [(PROMPTS[0], 60), (PROMPTS[1], 20), (PROMPTS[2], 20)])


@pytest.mark.demo
def test_greedy_tokens_of_the_demo_model_equal_those_of_transformers(
    demo_folder: Path, reference_tokens: ReferenceTokens
) -> None:
    assert_generated(Engine(EngineConfig(model=str(demo_folder))), reference_tokens, demo_folder, ASKED_OF_DEMO)


def test_the_streamed_text_is_the_decoded_answer(llama: Engine) -> None:
    outputs = answer(llama, PROMPTS[0], max_new_tokens=60, **GREEDY)
    assert text(outputs) == llama.tokenizer.decode(ids(outputs))


@pytest.mark.from_empty
def test_the_same_seed_gives_the_same_answer_and_another_seed_another(llama: Engine) -> None:
    first = ids(answer(llama, "x", seed=7, max_new_tokens=20, ignore_eos=True))
    answer(llama, "something else in between", seed=1, max_new_tokens=3)
    again, other = (ids(answer(llama, "x", seed=seed, max_new_tokens=20, ignore_eos=True)) for seed in (7, 8))
    assert again == first, "the same seed sampled other tokens the second time"
    assert other != first, "seeds 7 and 8 sampled the same tokens"


@pytest.mark.from_empty
def test_sampled_tokens_have_the_distribution_of_transformers(llama: Engine, folder: Path) -> None:
    """The first token of many answers, against transformers' temperature, top-k and top-p."""
    prompt_ids = torch.tensor([llama.tokenizer.encode(PROMPTS[0])])
    with torch.inference_mode():
        logits = load_reference(folder, torch.float32)(prompt_ids).logits[:, -1]
    for warper in (TemperatureLogitsWarper(0.5), TopKLogitsWarper(6), TopPLogitsWarper(0.7)):
        logits = warper(prompt_ids, logits)
    expected, num_answers = logits.softmax(-1)[0], 200
    settings = {"temperature": 0.5, "top_k": 6, "top_p": 0.7, "max_new_tokens": 1}
    tokens = [ids(answer(llama, PROMPTS[0], seed=seed, **settings))[0] for seed in range(num_answers)]
    shares = torch.bincount(torch.tensor(tokens), minlength=len(expected)) / num_answers
    assert 1 < expected.count_nonzero() < 6, "top-p removes some tokens that top-k keeps"
    num_excluded = int((shares[expected == 0] > 0).sum())
    assert num_excluded == 0, f"{num_excluded} tokens were sampled that top-k or top-p excludes"
    deviations = (expected * (1 - expected) / num_answers).sqrt()
    worst = (expected - shares).argmax()  # what one token has in excess, others lack
    told = f"token {worst} was sampled in {shares[worst]:.0%} of the answers; its probability is {expected[worst]:.0%}"
    is_close = bool(((shares - expected).abs() <= 5 * deviations).all())
    assert is_close, told


def test_requests_without_a_seed_differ_unless_the_engine_has_one(folder: Path) -> None:
    def twice(seed: int | None) -> list[list[int]]:
        engine = Engine(EngineConfig(model=str(folder), seed=seed))
        return [ids(answer(engine, "x", max_new_tokens=20, ignore_eos=True)) for _ in range(2)]

    assert twice(3) == twice(3)
    assert twice(3)[0] != twice(3)[1]
    assert twice(None) != twice(None)


def test_an_answer_ends_at_its_length(llama: Engine) -> None:
    outputs = answer(llama, "x", max_new_tokens=5, **GREEDY)
    assert len(outputs) == 5
    assert [output.finish_reason for output in outputs] == [None] * 4 + [FinishReason.LENGTH]


@pytest.mark.from_empty
def test_with_a_top_k_of_one_the_most_likely_token_is_sampled(llama: Engine) -> None:
    found = ids(answer(llama, "x", seed=7, temperature=1.0, top_k=1, max_new_tokens=4, ignore_eos=True))
    assert_equal(found, ids(answer(llama, "x", max_new_tokens=4, **GREEDY)), "tokens with top-k 1", ("token",))


@pytest.mark.from_empty
def test_an_answer_ends_with_an_end_id(llama: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ids(answer(llama, "x", max_new_tokens=12, **GREEDY))
    monkeypatch.setattr(llama.tokenizer, "eos_ids", frozenset({plain[3]}))
    expected = plain[: plain.index(plain[3]) + 1]
    found = ids(answer(llama, "x", max_new_tokens=12, temperature=0.0))
    assert_equal(found, expected, f"tokens, {plain[3]} being an end of text", ("token",))


def test_an_answer_ends_at_any_end_id_and_its_text_is_left_out(llama: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = answer(llama, "x", max_new_tokens=12, **GREEDY)
    end = next(output for i, output in enumerate(plain) if output.text and output.token_id not in ids(plain[:i]) and i)
    monkeypatch.setattr(llama.tokenizer, "eos_ids", frozenset({10**6, end.token_id}))
    outputs = answer(llama, "x", max_new_tokens=12, temperature=0.0)
    at = ids(plain).index(end.token_id)
    assert ids(outputs) == ids(plain[: at + 1])
    assert outputs[-1].finish_reason is FinishReason.EOS
    assert text(outputs) == text(plain[:at])


def test_a_stop_string_that_spans_tokens_ends_the_answer_and_is_never_shown(llama: Engine) -> None:
    plain = answer(llama, "x", max_new_tokens=20, **GREEDY)
    whole = text(plain)
    cut = len(text(plain[:8]))
    stop = whole[cut - 2 : cut + 2]  # begins in one token and ends in the next
    outputs = answer(llama, "x", max_new_tokens=20, stop=(stop,), **GREEDY)
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert outputs[-1].stop == stop
    assert text(outputs) == whole[: whole.index(stop)]
    assert all(output.finish_reason is None for output in outputs[:-1])


def test_text_held_back_for_a_stop_that_does_not_come_is_released_at_the_end(llama: Engine) -> None:
    plain = answer(llama, "x", max_new_tokens=6, **GREEDY)
    stop = text(plain)[-2:] + "never"
    outputs = answer(llama, "x", max_new_tokens=6, stop=(stop,), **GREEDY)
    assert text(outputs) == text(plain)
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_an_answer_ends_by_length_when_the_sequence_is_full(folder: Path) -> None:
    engine = Engine(EngineConfig(model=str(folder), max_seq_len=8))
    outputs = answer(engine, [5, 6, 7], max_new_tokens=100, **GREEDY)
    assert len(outputs) == 5
    assert outputs[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty"),
        ("", "prompt is empty"),
        ([10**9], "token id 1000000000; this model's ids are integers from 0 to"),
        ([-1], "token id -1"),
        ([True], "token id True"),
        ([5] * 5000, r"length is \d+ tokens. However, you requested 5000 tokens"),
    ],
)
def test_bad_prompts_are_refused_before_anything_is_computed(
    tiny_checkpoints: dict[str, Path], prompt: str | list[int], message: str
) -> None:
    engine = Engine(EngineConfig(model=str(tiny_checkpoints["qwen3"])))
    with pytest.raises(RequestError, match=message):
        answer(engine, prompt)
    assert engine.num_tokens_computed == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_seq_len": 1}, "max_seq_len is 1"),
        ({"max_seq_len": 10**6}, "max_seq_len is 1000000 and the model supports"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_bad_settings_are_refused(folder: Path, settings: dict, message: str) -> None:
    with pytest.raises((ConfigError, CapacityError), match=message):
        Engine(EngineConfig(model=str(folder), **settings))
