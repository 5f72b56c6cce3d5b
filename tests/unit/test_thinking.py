"""Budget forcing: the redirection of logits, the limits of a request, and what becomes of them with guesses."""

import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phases.phase_11.engine import Engine as WithoutLimits
from phases.phase_11_1.engine import Engine
from shared.engine.config import EngineConfig
from shared.engine.request import Request
from shared.errors import RequestError
from shared.sampling import thinking
from shared.sampling.params import SamplingParams
from shared.sampling.redirect import RedirectProcessor
from shared.sampling.sampler import SamplingRow
from shared.sampling.thinking import ThinkingLimits, chosen
from shared.text.chat import ChatMessage, encode_chat
from shared.text.thoughts import ends_in_thoughts, thinks
from shared.text.tokenizer import Tokenizer
from tests.adapters import random_adapter_of
from tests.comparison import assert_equal
from tests.drafts import Foresight
from tests.mixed_requests import Requests, serve, tokens

OPEN, CLOSE, WAIT, END, TURN = 10, 11, 12, 13, 14


def row(temperature: float, redirect: tuple[int, int | None] | None) -> SamplingRow:
    return SamplingRow(SamplingParams(temperature=temperature), 0, 0, redirect=redirect)


@given(seed=st.integers(0, 99), temperature=st.sampled_from([1e-3, 0.4, 1.0, 2.5]), bf16=st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_draw_is_distributed_as_a_draw_whose_token_was_replaced(seed: int, temperature: float, bf16: bool) -> None:
    logits = torch.randn(4, 20, generator=torch.Generator().manual_seed(seed)).mul(3)
    logits = logits.bfloat16() if bf16 else logits
    before = logits.clone()
    processor = RedirectProcessor.of(
        [row(temperature, (5, 7)), row(1, None), row(1, (3, None)), row(temperature, (7, 5))]
    )
    assert processor is not None
    found = processor.sent(lambda array: array)(logits)
    assert torch.equal(logits, before)
    assert torch.equal(found[1], logits[1].float())
    assert found[2].softmax(-1).tolist() == [float(n == 3) for n in range(20)]
    for number, target, source in ((0, 5, 7), (3, 7, 5)):
        expected = (logits[number].float() / temperature).softmax(-1)
        expected[target] += expected[source]
        expected[source] = 0
        torch.testing.assert_close((found[number] / temperature).softmax(-1), expected, rtol=1e-4, atol=1e-6)


def test_the_most_likely_token_is_replaced() -> None:
    logits = torch.tensor([[1.0, 5.0, 2.0, 4.0], [1.0, 4.0, 2.0, 5.0], [4.0, 4.0, 2.0, 4.5]]).bfloat16()
    processor = RedirectProcessor.of([row(0, (0, 1))] * len(logits))
    assert processor is not None
    expected = torch.tensor([[5.0, -torch.inf, 2.0, 4.0], [4.0, -torch.inf, 2.0, 5.0], [4.0, -torch.inf, 2.0, 4.5]])
    assert_equal(processor(logits), expected, "logits", ("row", "token"))
    assert RedirectProcessor.of([row(0, None)]) is None


def limits(**options: Any) -> ThinkingLimits:
    return ThinkingLimits(**{"open_id": OPEN, "close_id": CLOSE, "is_open": False, "least": 0, "most": None} | options)


def rows_of(kept: ThinkingLimits, output_ids: list[int]) -> list[tuple[tuple[int, ...], tuple[int, int | None] | None]]:
    """What the limits ask of each row up to the one after these outputs."""
    found = []
    for index in range(len(output_ids) + 1):
        made = kept(SamplingRow(SamplingParams(), 0, index, output_ids=output_ids[:index]))
        found.append((tuple(made.masked_ids), made.redirect))
    return found


FREE = ((), None)


def test_thinking_does_not_end_before_its_least_length() -> None:
    kept = limits(least=2, end_ids=(END,), replacements=(WAIT, 20))
    forced, first, second = ((), (OPEN, None)), ((END,), (WAIT, CLOSE)), ((END,), (20, CLOSE))
    assert rows_of(kept, [OPEN, 1, 2, 3]) == [forced, first, second, FREE, FREE]
    within = limits(least=2, end_ids=(END,), replacements=(WAIT, 20), is_open=True)
    assert rows_of(within, [1, 2, 3]) == [first, second, FREE, FREE]
    masked = ((END, CLOSE), None)
    assert rows_of(limits(least=2, end_ids=(END,), is_open=True), [1, 2]) == [masked, masked, FREE]


def test_thinking_is_closed_behind_its_budget() -> None:
    closed = ((), (CLOSE, None))
    assert rows_of(limits(most=2), [OPEN, 1, 2, CLOSE, 4]) == [FREE, FREE, FREE, closed, FREE, FREE]
    assert rows_of(limits(most=2), [OPEN, CLOSE, 2, 3, 4])[3] == FREE, "it ended before"
    assert rows_of(limits(most=2), [1, 2, 3, 4]) == [FREE] * 5, "this answer has no thoughts"
    assert rows_of(limits(most=2), [1, OPEN, 3, 4, 5]) == [FREE] * 6, "it does not begin with them"
    assert rows_of(limits(most=0, is_open=True), [CLOSE]) == [closed, FREE]


def test_each_row_sees_the_drafts_in_front_of_it_and_none_is_remembered() -> None:
    request = Request(
        "r", [1], SamplingParams(thinking_budget=3), 0, (END,), [5], limit_row=limits(most=3, is_open=True)
    )
    for drafts, expected in (([6, CLOSE], None), ([6, 7], (CLOSE, None)), ([CLOSE, 7], None), ([8, 9], (CLOSE, None))):
        request.draft_ids = drafts
        assert [request.sampling_row(number).redirect for number in range(3)] == [None, None, expected]


def test_words_are_chosen_by_the_noise_of_the_request() -> None:
    some = chosen([4, 5], 3, 0, 200)
    assert some[50:] == chosen([4, 5], 3, 50, 150)
    assert some != chosen([4, 5], 4, 0, 200)
    assert 60 < Counter(some)[4] < 140
    assert chosen([], 3, 0, 9) == ()


def limits_of(params: SamplingParams, prompt: list[int], texts: list[list[int]]) -> ThinkingLimits:
    """Those of a tokenizer that knows the marks of thinking, and spells the words with these ids."""
    marks = dict(zip(thinking.MARKS, (OPEN, CLOSE), strict=True))
    words = dict(zip(thinking.WORDS, texts, strict=True))
    tokenizer: Any = SimpleNamespace(
        token_id=marks.get, encode=lambda text, **_: words[text], special_ids=frozenset({TURN})
    )
    found = ThinkingLimits.of(params, prompt, 3, (END,), tokenizer)
    assert found is not None
    return found


def test_limits_are_those_of_the_parameters() -> None:
    params, no_words = SamplingParams(min_thinking_tokens=4, thinking_budget=9, max_new_tokens=3), [[4, 5], [6, 7]]
    found = limits_of(params, [101, OPEN, 102, CLOSE, 103, OPEN, 104], no_words)
    assert found == ThinkingLimits(OPEN, CLOSE, True, 3, 9, (END,))
    assert not limits_of(params, [OPEN, 102, CLOSE, 103], no_words).is_open
    assert not limits_of(params, [OPEN, 102, TURN, 103], no_words).is_open, "thoughts of an earlier turn"
    tokenizer: Any = None
    assert ThinkingLimits.of(SamplingParams(), [OPEN], 0, (), tokenizer) is None


def test_only_the_last_turn_of_a_conversation_says_whether_thoughts_are_open(tiny_checkpoints: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(tiny_checkpoints["qwen3"])
    said, open_ = ChatMessage("user", "What does <think> do?"), ChatMessage("assistant", "<think>\nHm")
    params = SamplingParams(thinking_budget=3)

    def is_open(messages: list[ChatMessage], **how: bool) -> bool:
        ids = encode_chat(tokenizer, messages, template="qwen3", **how)
        if not how.get("add_generation_prompt", True):  # the message continues
            ids = ids[: -1 - ids[::-1].index(tokenizer.token_id("<|im_end|>"))]  # type: ignore[arg-type]
        found = ThinkingLimits.of(params, ids, 0, (), tokenizer)
        assert found is not None
        return found.is_open

    for role in ("system", "user", "tool"):
        assert not is_open([ChatMessage("user", "x"), ChatMessage(role, "<think>")]), role
    assert not is_open([said, open_, said])
    assert not is_open([said], thinking=False)
    assert is_open([said, open_], add_generation_prompt=False)


@pytest.mark.parametrize(
    ("text", "is_open"),
    [
        ("<|start_header_id|>assistant<|end_header_id|>\n\n<think>\n", True),
        ("<|start_header_id|>assistant<|end_header_id|>\n\n<think>\na</think> b", False),
        ("<|start_header_id|>assistant<|end_header_id|>\n\n<think>\na", True),
        ("<think>\n<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", False),
        ("<think>\n</think> no special token <think>", True),
        ("", False),
    ],
)
def test_marks_that_are_no_tokens_are_read_in_the_text_of_the_turn(
    text: str, is_open: bool, tiny_checkpoints: dict[str, Path]
) -> None:
    tokenizer = Tokenizer.load(tiny_checkpoints["llama"])
    assert not thinks(tokenizer)
    assert ends_in_thoughts(tokenizer.encode(text, add_special_tokens=False), tokenizer) == is_open


@pytest.mark.parametrize(("text", "is_open"), [("What is <think>?", False), ("[INST] x [/INST] <think>\n", True)])
def test_where_no_special_token_begins_a_turn_a_mark_in_the_middle_may_be_a_user_s(
    text: str, is_open: bool, tiny_checkpoints: dict[str, Path]
) -> None:
    tokenizer = Tokenizer.load(tiny_checkpoints["llama"])
    assert ends_in_thoughts(tokenizer.encode(text), tokenizer) == is_open


@pytest.mark.parametrize(("ids", "words"), [([5], (4, 5)), ([5, 6], (4,))])
@pytest.mark.parametrize(("prompt", "first"), [([OPEN], 0), ([], 1)])
def test_words_of_one_token_stand_by_their_index_in_the_output(
    ids: list[int], words: tuple[int, ...], prompt: list[int], first: int
) -> None:
    found = limits_of(SamplingParams(min_thinking_tokens=40), prompt, [[4], ids])
    assert found.replacements == chosen(words, 3, first, 40)


@pytest.mark.parametrize("given", [{"thinking_budget": 5}, {"min_thinking_tokens": 5}])
def test_where_nothing_thinks_the_limits_are_refused(tiny_checkpoints: dict[str, Path], given: dict[str, int]) -> None:
    (field,) = given
    engine = Engine(EngineConfig(str(tiny_checkpoints["llama"]), max_seq_len=64))
    with pytest.raises(
        RequestError, match=f"^{field} is 5; it must be left out: this model does not think, .*</think>"
    ):
        engine.add_request([1], SamplingParams(**given))
    assert not engine.has_work()
    older = WithoutLimits(EngineConfig(str(tiny_checkpoints["qwen3"]), max_seq_len=64))
    with pytest.raises(RequestError, match=f"^{field} is 5; it must be left out: .* the engine of phase 11.1 does"):
        older.add_request([1], SamplingParams(**given))
    assert not older.has_work()


def test_the_server_passes_the_limits_on(tiny_checkpoints: dict[str, Path]) -> None:
    import httpx

    from tests.unit.server.echo import serving  # the other tests also run where no server is installed

    tokenizer = Tokenizer.load(tiny_checkpoints["qwen3"])
    engine: Any = Engine(EngineConfig(str(tiny_checkpoints["qwen3"]), max_seq_len=96))
    engine.may_step = threading.Event()  # what `serving` sets when it ends
    asked: list[SamplingParams] = []
    add = engine.add_request
    engine.add_request = lambda prompt, params, name: asked.append(params) or add(prompt, params, name)
    body: dict[str, Any] = {"model": "echo", "max_tokens": 12, "temperature": 0}
    chat = body | {"messages": [{"role": "user", "content": "x"}]}
    limits = {"thinking_budget": 3, "min_thinking_tokens": 5}
    with serving(engine) as running, httpx.Client(base_url=running.url) as client:
        ids = [tokenizer.token_id("<think>"), 101]
        text = client.post("/v1/completions", json={**body, "prompt": ids, "logprobs": 0, **limits}).json()
        assert text["choices"][0]["logprobs"]["tokens"][3] == "</think>"
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        for more in ({}, off):
            assert client.post("/v1/chat/completions", json={**chat, **limits, **more}).status_code == 200
        fields = client.get("/openapi.json").json()["components"]["schemas"]["ChatRequest"]["properties"]
        assert fields["thinking_budget"]["anyOf"][0]["minimum"] == 0
    assert [(params.thinking_budget, params.min_thinking_tokens) for params in asked] == [(3, 3), (3, 3), (3, 0)]


SETTINGS: dict[str, Any] = {"max_seq_len": 96, "block_size": 3, "num_gpu_blocks": 40}
PROMPT = [(11 * n) % 250 for n in range(12)]
THINKS = {"thinking_budget": 21, "min_thinking_tokens": 14, "ignore_eos": False}
REQUESTS: Requests = [
    (PROMPT, {"seed": 7, "temperature": 0.0, "max_new_tokens": 40, **THINKS}),
    (PROMPT[:5], {"seed": 1, "temperature": 0.7, "top_k": 4, "max_new_tokens": 40, **THINKS}),
    (PROMPT[3:], {"seed": 8, "temperature": 0.0, "max_new_tokens": 40, **THINKS, "min_thinking_tokens": 0}),
    (PROMPT, {"seed": 2, "temperature": 0.5, "repetition_penalty": 1.2, "max_new_tokens": 40, **THINKS}),
]


@pytest.fixture(scope="module")
def close_id(tiny_checkpoints: dict[str, Path]) -> int:
    """A token that the random model often samples."""
    engine = Engine(EngineConfig(str(tiny_checkpoints["qwen3"]), **SETTINGS))
    params = [(prompt, {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}) for prompt, _ in REQUESTS]
    drawn = [token_id for answer in serve(engine, params)[0] for token_id in tokens(answer)]
    return Counter(drawn).most_common(1)[0][0]


@pytest.fixture
def folder(tiny_checkpoints: dict[str, Path], close_id: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose prompts end within thoughts, which ``close_id`` closes."""

    def of(params: SamplingParams, prompt_ids: Any, seed: int, end_ids: Any, tokenizer: Any) -> ThinkingLimits | None:
        words = chosen([40, 41], seed, 0, params.min_thinking_tokens)
        least, most = params.min_thinking_tokens, params.thinking_budget
        return limits(close_id=close_id, is_open=True, least=least, most=most, end_ids=end_ids, replacements=words)

    monkeypatch.setattr(thinking.ThinkingLimits, "of", staticmethod(of))
    return tiny_checkpoints["qwen3"]


def test_a_greedy_answer_is_the_plain_one_with_replacements(folder: Path, close_id: int) -> None:
    """The definition, token by token: sample without limits, and replace."""
    (prompt, options), *_ = REQUESTS
    engine = Engine(EngineConfig(str(folder), **SETTINGS))
    answer = tokens(serve(engine, [(prompt, options)])[0][0])
    words, expected, num_replaced = chosen([40, 41], 7, 0, 14), [], 0
    for index in range(len(answer)):
        params = SamplingParams(temperature=0, max_new_tokens=1, ignore_eos=True)
        (output,) = WithoutLimits.generate(engine, [*prompt, *answer[:index]], params)
        drawn = output.token_id
        if index < 14 and drawn == close_id:
            drawn = words[index]
            num_replaced += 1
        if index == 21 and close_id not in answer[:21]:
            drawn = close_id
        expected.append(drawn)
    assert answer == expected
    assert num_replaced > 0


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_limits_hold_whatever_is_guessed(folder: Path, close_id: int, overlaps: bool, device: str) -> None:
    few: dict[str, Any] = {"max_batch_size": 4, "max_num_batched_tokens": 96}  # so that few steps are captured
    where = few | {"device": device, "dtype": "float32", "overlap_scheduling": overlaps, **SETTINGS}
    answers = serve(Engine(EngineConfig(str(folder), **where)), REQUESTS)[0]
    ids = [tokens(answer) for answer in answers]
    for (_, options), answer in zip(REQUESTS, ids, strict=True):
        assert close_id not in answer[: options["min_thinking_tokens"]]
        assert close_id in answer[:22]
    assert any(token_id in (40, 41) for answer in ids for token_id in answer[:14])
    options = where | {"use_speculative_decoding": True, "adapt_spec_length": False}
    for method in ("coupled", "rejection"):
        for foreseen in (None, answers):
            config = EngineConfig(
                str(folder), adapter=str(random_adapter_of(folder)), acceptance_method=method, **options
            )
            engine = Engine(config)
            if foreseen is not None:
                engine.drafter = Foresight(ids, 0.4)  # type: ignore[assignment]
                engine.drafter.distributions = {}  # type: ignore[attr-defined]
            found = [tokens(answer) for answer in serve(engine, REQUESTS, [0, 0, 2, 5])[0]]
            assert engine.scheduler.num_rejected_drafts > 0
            assert engine.scheduler.num_accepted_drafts > 0 or foreseen is None
            for number, ((_, params), answer) in enumerate(zip(REQUESTS, found, strict=True)):
                if method == "coupled" or params["temperature"] == 0:
                    assert answer == ids[number]
                assert close_id not in answer[: params["min_thinking_tokens"]]
                assert close_id in answer[:22]
