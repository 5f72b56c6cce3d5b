"""Speculative decoding over HTTP: usage, counters, and requests that leave themselves out."""

from pathlib import Path
from typing import Any

import pytest

from tests.integration.server_process import MODEL, ServerProcess
from tests.unit.server.exchange import samples

REPEATING = "red green blue " * 12
ASK: dict[str, Any] = {"model": MODEL, "prompt": REPEATING, "max_tokens": 40, "seed": 3, "temperature": 0}


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    options = ("--speculative-decoding", "--drafter", "ngram", "--spec-length", "3", "--no-adapt-spec-length")
    running = ServerProcess(folder, tmp_path_factory.mktemp("speculation") / "log", *options)
    yield running
    running.wait_until_idle()
    assert running.end() == 0
    assert "Traceback" not in running.log.read_text()


def test_usage_and_counters_tell_what_became_of_drafts(server: ServerProcess) -> None:
    client = server.openai()
    about: dict[str, Any] = ASK | {"extra_body": {"ignore_eos": True}}
    done = client.completions.create(**about)
    details = done.usage.completion_tokens_details
    accepted, rejected = details.accepted_prediction_tokens, details.rejected_prediction_tokens
    assert accepted > 0
    assert rejected > 0
    chunks = list(client.completions.create(**about, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens_details == details
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == done.choices[0].text
    with server.client() as http:
        found = samples(http)
    assert found["infer:spec_decode_num_draft_tokens_total{}"] == 2 * (accepted + rejected)
    assert found["infer:spec_decode_num_accepted_tokens_total{}"] == 2 * accepted
    by_position = [found[f"infer:spec_decode_num_accepted_tokens_per_pos_total{{position={n}}}"] for n in range(3)]
    assert sum(by_position) == 2 * accepted
    assert by_position == sorted(by_position, reverse=True)
    assert found["infer:spec_decode_num_drafts_total{}"] >= by_position[0]


def test_a_request_may_leave_itself_out(server: ServerProcess) -> None:
    client = server.openai()
    with_drafts = client.completions.create(**ASK, extra_body={"ignore_eos": True})
    without = client.completions.create(**ASK, extra_body={"ignore_eos": True, "use_speculative_decoding": False})
    assert without.choices[0].text == with_drafts.choices[0].text
    assert without.usage.completion_tokens_details is None
