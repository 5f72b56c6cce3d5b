"""``infer serve`` with speculative decoding: what OpenAI's client is told about drafts."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.server_process import MODEL, ServerProcess

LENGTH = 4
REPEATING: dict[str, Any] = {"prompt": "one two three, one two three, one", "seed": 7, "max_tokens": 60}


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    options = ("--speculative-decoding", "--drafter", "ngram", "--spec-length", str(LENGTH), "--no-adapt-spec-length")
    running = ServerProcess(folder, tmp_path_factory.mktemp("drafting") / "log", *options)
    yield running
    assert running.end() == 0
    assert "Traceback" not in running.log.read_text()


def drafts_of(usage: Any) -> tuple[int, int]:
    """The accepted and the rejected drafts of an answer."""
    details = usage.completion_tokens_details
    return details.accepted_prediction_tokens, details.rejected_prediction_tokens


def complete(server: ServerProcess, **more: Any) -> Any:
    extra = {"ignore_eos": True, **more.pop("extra_body", {})}
    return server.openai().completions.create(model=MODEL, **{"temperature": 0, **REPEATING, **more}, extra_body=extra)


def test_usage_counts_accepted_and_rejected_drafts_in_every_form_of_an_answer(server: ServerProcess) -> None:
    whole = complete(server)
    accepted, rejected = drafts_of(whole.usage)
    assert 0 < accepted < 60
    assert rejected > 0
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = complete(server, stream=True, stream_options=options)
    assert drafts_of(last.usage) == (accepted, rejected)
    assert {chunk.usage.completion_tokens_details for chunk in chunks} == {None}, "they are counted at the end"
    both = complete(server, n=2)
    assert drafts_of(both.usage) == (2 * accepted, 2 * rejected)
    messages: Any = [{"role": "user", "content": REPEATING["prompt"]}]
    settings: Any = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 60}
    settings["extra_body"] = {"ignore_eos": True}
    chat = server.openai().chat.completions
    answer = chat.create(**settings)
    *_, end = chat.create(**settings, stream=True, stream_options={"include_usage": True})
    assert drafts_of(answer.usage) == drafts_of(end.usage)
    assert drafts_of(answer.usage)[0] > 0


def samples(server: ServerProcess) -> dict[str, float]:
    """The metrics of drafts, by what follows the name that they have in common."""
    with server.client() as client:
        text = client.get("/metrics").text
    pattern = r'^infer:spec_decode_num_(\w+)_total{model_name="[^"]*"(?:,position="(\d)")?} (\S+)$'
    found = re.findall(pattern, text, re.MULTILINE)
    return {name + position: float(count) for name, position, count in found}


def test_metrics_and_statistics_count_drafts_by_position(server: ServerProcess) -> None:
    before = samples(server)
    accepted, rejected = drafts_of(complete(server).usage)
    found = {name: count - before[name] for name, count in samples(server).items()}
    at = [found[f"accepted_tokens_per_pos{n}"] for n in range(LENGTH)]
    assert found["accepted_tokens"] == sum(at) == accepted
    assert found["draft_tokens"] == accepted + rejected
    assert found["drafts"] >= at[0] > 0
    assert LENGTH * found["drafts"] >= found["draft_tokens"]
    assert at == sorted(at, reverse=True)
    state = server.state()
    positions = [state["stats"][f"accepted at position {n}"] for n in range(LENGTH)]
    assert positions == state["load"]["num_accepted_by_position"]
    assert sum(positions) == state["stats"]["drafts accepted (tokens)"]
    num_drafts = state["load"]["num_drafts_by_position"]
    assert sum(num_drafts) - sum(positions) == state["stats"]["drafts rejected (tokens)"]
    assert {"verified"} <= state["last_step"].keys()


def test_a_request_that_refuses_drafts_has_none_and_the_same_answer(server: ServerProcess) -> None:
    for more in ({}, {"temperature": 1.0}):
        drafted = complete(server, **more)
        plain = complete(server, **more, extra_body={"use_speculative_decoding": False})
        assert plain.choices[0].text == drafted.choices[0].text
        assert drafts_of(plain.usage) == (0, 0)
        assert sum(drafts_of(drafted.usage)) > 0


def test_a_prediction_is_proposed_and_changes_no_token(server: ServerProcess) -> None:
    """The answer is random letters, each of which is a token: only a prediction can foresee them."""
    letters = {str(token_id): 100 for token_id in range(70, 96)}
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Letters?"}],
        "max_tokens": 60,
        "logit_bias": letters,
    }

    def answer(content: Any = None, **extra: Any) -> tuple[str, int, int]:
        create = server.openai().chat.completions.create
        prediction: Any = {} if content is None else {"prediction": {"type": "content", "content": content}}
        found = create(model=MODEL, seed=5, temperature=2, **fields, **prediction, extra_body=extra)
        return found.choices[0].message.content, *drafts_of(found.usage)

    text, accepted, _ = answer()
    assert len(text) == 60
    assert len(set(text)) > 9
    assert accepted < 5
    steps = -(-59 // (1 + LENGTH))  # after the first token, if every step accepts all
    assert answer(text) == (text, 59 - steps, 0)
    assert answer([{"type": "text", "text": part} for part in (text[:7], text[7:])]) == (text, 59 - steps, 0)
    edited = text[:20] + text[20].upper() + text[21:40] + text[45:]
    same, accepted, rejected = answer(edited)
    assert same == text
    assert accepted > 30
    assert rejected > 0
    assert answer("".join(reversed(text)))[0] == text
    assert answer(text, use_speculative_decoding=False) == (text, 0, 0)
