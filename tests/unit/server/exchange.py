"""Requests as they are sent, and answers as they are read, with a look at their shape."""

import json
import shutil
from pathlib import Path
from typing import Any

import httpx

THINKING_FIRST = """
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ '{"name": ' ~ call.function.name | tojson ~ ', "arguments": ' ~ call.function.arguments | tojson ~ '}' }}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""
"""The chat template of a checkpoint whose answers begin within thoughts, as those of Qwen3-4B-Thinking-2507."""


def thinking_first(folder: Path, target: Path) -> Path:
    """A copy of a checkpoint with this template."""
    shutil.copytree(folder, target)
    (target / "chat_template.jinja").write_text(THINKING_FIRST)
    return target


def completion(prompt: Any = "ab", **more: Any) -> dict[str, Any]:
    return {"model": "echo", "prompt": prompt, "max_tokens": 4, **more}


def chat(text: str = "ab", **more: Any) -> dict[str, Any]:
    return {"model": "echo", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **more}


def events(text: str) -> list[tuple[str | None, Any]]:
    """(name, data) of each frame; data stays text where it is no JSON. Every line of the stream is accounted for."""
    found: list[tuple[str | None, Any]] = []
    assert text.endswith("\n\n")
    for block in text[:-2].split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        assert set(fields) <= {"event", "data"}, block
        if fields:
            data = fields["data"]
            found.append((fields.get("event"), data if data == "[DONE]" else json.loads(data)))
    return found


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of a response, after a look at its shape."""
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"].strip().endswith(".")
    return body["error"]


def assert_refused(response: httpx.Response, param: str, told: str = "", status: int = 422) -> None:
    """The response refuses the field ``param`` with a message that has the words ``told``."""
    assert response.status_code == status, response.text
    error = error_of(response)
    assert error["param"] == param
    assert told in error["message"]


def samples(client: httpx.Client) -> dict[str, float]:
    """The metrics by name with labels, as Prometheus would read them."""
    from prometheus_client.parser import text_string_to_metric_families

    found = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()) if key != "model_name")
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found
