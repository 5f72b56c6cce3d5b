"""The page's files and policy, and the description of the API."""

import json
import re

import httpx

from shared.server.http.description import _pattern_below
from tests.unit.server.echo import LIMIT, VOCAB


def test_the_page_comes_with_a_policy_and_contacts_no_other_host(client: httpx.Client) -> None:
    page = client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    assert page.headers["content-security-policy"] == policy
    names = ("x-content-type-options", "referrer-policy", "cache-control")
    assert [page.headers[name] for name in names] == ["nosniff", "no-referrer", "no-cache"]
    assert '="/' not in page.text, "links are relative, so that a proxy may serve the page below a path"
    parts = [word.split('"')[0] for word in page.text.split('="page/')[1:]]
    assert {part.rpartition(".")[2] for part in parts} >= {"css", "js", "svg"}
    assert {"pool.js", "pool.css"} <= set(parts), "what the page of a trace draws with too"
    for part in parts:
        assert client.get(f"/page/{part}").status_code == 200
        assert client.get(f"/page/no-{part}").status_code == 404
    assert "http://" not in page.text.replace("http://www.w3.org/", "")
    assert "https://" not in page.text


def test_openapi_describes_bodies_and_errors(client: httpx.Client) -> None:
    described = client.get("/openapi.json").json()
    assert set(described["paths"]) >= {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics"}
    assert "HoldingState" in described["components"]["schemas"]
    assert "HTTPValidationError" not in json.dumps(described)
    for path in ("/v1/completions", "/v1/chat/completions"):
        responses = described["paths"][path]["post"]["responses"]
        assert {"200", "400", "422", "503"} <= set(responses)
    properties = described["components"]["schemas"]["CompletionRequest"]["properties"]
    assert properties["model"] == {"const": "echo"}
    assert properties["seed"]["anyOf"][0]["maximum"] == 2**64 - 1
    assert properties["stop_token_ids"]["anyOf"][0]["items"]["maximum"] == VOCAB - 1
    assert properties["max_tokens"]["anyOf"][0]["maximum"] == LIMIT
    assert [properties["prompt"]["anyOf"][kind]["maxItems"] for kind in (2, 3)] == [64, 64]
    assert [properties[name]["anyOf"][0]["maximum"] for name in ("n", "logprobs", "presence_penalty")] == [16, 20, 2]
    stop, stops = properties["stop"]["anyOf"][:2]
    assert (stop["maxLength"], stops["maxItems"], properties["stop_token_ids"]["anyOf"][0]["maxItems"]) == (
        256,
        16,
        128,
    )
    schemas = described["components"]["schemas"]
    assert {name for name, schema in schemas.items() if schema.get("additionalProperties") is False} == {
        *(f"{kind}Request" for kind in ("Chat", "Completion", "Register")),
        *("FunctionDefinition", "Prediction", "StreamOptions", "TemplateOptions", "ToolDefinition"),
    }, "only messages and their calls may have other fields"
    chat = schemas["ChatRequest"]
    assert chat["properties"]["tool_choice"] == {"enum": ["none", "auto", None]}, "this engine has no grammars"
    assert described["components"]["schemas"]["RegisterRequest"]["properties"]["model"] == {"const": "echo"}
    (pattern,) = properties["logit_bias"]["anyOf"][0]["patternProperties"]
    assert pattern == _pattern_below(VOCAB)
    texts = [f"{number:0{width}}" for width in range(1, 5) for number in range(1100)]
    for limit in (2, 10, 11, 100, 101, 305, VOCAB, 1000):
        assert {text for text in texts if re.match(_pattern_below(limit), text)} == set(map(str, range(limit)))
