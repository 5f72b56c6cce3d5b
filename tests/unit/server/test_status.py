"""What the server says of itself: ids of requests, models, health, metrics, memory."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from shared.errors import ModelFolderError
from shared.server.http.middleware import handler_of
from shared.server.metrics import HANDLERS
from tests.unit.server.echo import ENDLESS, LIMIT, EchoEngine, Running, endless, serving, unread
from tests.unit.server.exchange import chat, completion, error_of, samples, thinking_first
from tests.waiting import wait_until


def test_every_response_carries_a_request_id(client: httpx.Client) -> None:
    assert client.get("/health", headers={"x-request-id": "my-id.1"}).headers["x-request-id"] == "my-id.1"
    made = client.post("/v1/completions", json=completion(), headers={"x-request-id": "bad id"}).headers
    assert len(made["x-request-id"]) == 32
    assert len(client.get("/nowhere").headers["x-request-id"]) == 32


def test_models_and_health(folder: Path) -> None:
    engine = EchoEngine(folder)
    engine.pool.request_capacity = 300  # less than a sequence, whose length is a model's
    with serving(engine) as running, running.client() as client:
        assert running.app.state.intake._compiler._process is None, "this engine has no grammars"
        models = client.get("/v1/models").json()
        (model,) = models["data"]
        assert client.get("/v1/models/echo").json() == model
        assert running.app.state.started - 1 < model.pop("created") <= running.app.state.started
        own = {"id": "echo", "object": "model", "owned_by": "infer", "max_model_len": LIMIT}
        assert models == {"object": "list", "data": [own | {"chat_template": "builtin:llama3"}]}
        load = {"num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_usage": 0.0}
        for path in ("/health", "/health/live", "/health/ready"):
            health = client.get(path)
            assert health.status_code == 200
            assert health.json() == {"status": "ok", "message": None, "live": True, "ready": True} | load


def test_gauges_and_memory_show_which_requests_run_and_which_wait(folder: Path) -> None:
    engine = endless(folder, max_batch_size=2)
    with serving(engine) as running, running.client() as client, contextlib.ExitStack() as streams:
        nothing = client.get("/debug/memory").json()
        assert (nothing["unit"], nothing["num_blocks"], nothing["num_free"]) == ("region", 4, 4)
        assert (nothing["holdings"], nothing["written_share"]) == ([], None)
        for _ in range(5):
            streams.enter_context(unread(running, "/v1/completions", completion(**ENDLESS)))
        wait_until(lambda: (len(engine.running), len(engine.waiting)) == (2, 3))
        wait_until(lambda: running.app.state.client.load.num_running == 2)
        found = samples(client)
        assert found["infer:num_requests_running{}"] == 2
        assert found["infer:num_requests_waiting{}"] == 3
        assert found["infer:kv_cache_usage_perc{}"] == 1
        assert client.get("/health").json()["num_requests_waiting"] == 3
        memory = client.get("/debug/memory").json()
        assert [holding["blocks"] for holding in memory["holdings"]] == [[0], [1]]
        assert [holding["request_id"] for holding in memory["holdings"]] == list(engine.running)
        assert (memory["num_free"], memory["num_waiting"], memory["num_preemptions"]) == (2, 3, 0)


def test_each_route_has_its_label_in_the_metrics(echo: Running) -> None:
    labels = {
        "/v1/completions": "completions", "/v1/chat/completions": "chat_completions", "/v1/models": "models",
        "/v1/models/{name:path}": "models", "/v1/segments": "segments", "/v1/segments/{segment_id}": "segments",
        "/v1/chunks": "chunks", "/v1/chunks/{chunk_id}": "chunks", "/health": "health", "/health/live": "health",
        "/health/ready": "health", "/metrics": "metrics", "/debug/engine": "debug", "/debug/memory": "memory",
        "/": "page", "/page/{name}": "page",
    }  # fmt: skip
    assert {route.path: handler_of(route.path) for route in echo.app.state.routes} == labels
    assert {*labels.values(), handler_of("/nowhere"), handler_of("/v1")} == {*HANDLERS}


def test_preemptions_are_counted(folder: Path) -> None:
    engine = EchoEngine(folder)
    with serving(engine) as running, running.client() as client:
        assert samples(client)["infer:num_preemptions_total{}"] == 0
        for preempted in (("a", "b"), (), ("a",)):
            engine.preempted = preempted
            client.post("/v1/completions", json=completion())
        assert samples(client)["infer:num_preemptions_total{}"] == 3


def test_what_is_looked_up_in_the_prefix_cache_is_counted_from_the_start_of_the_server(folder: Path) -> None:
    engine = EchoEngine(folder)
    engine.prefix_lookups = 100, 50  # of the warm-up
    with serving(engine) as running, running.client() as client:
        for lookups in ((140, 50), (140, 50), (155, 66)):
            engine.prefix_lookups = lookups
            client.post("/v1/completions", json=completion())
        found = samples(client)
    assert found["infer:prefix_cache_queries_total{}"] == 55
    assert found["infer:prefix_cache_hits_total{}"] == 16


def test_drafts_are_counted_by_position_from_the_start_of_the_server(folder: Path) -> None:
    engine = EchoEngine(folder)
    engine.drafts = (10, 10, 9), (9, 8, 7)  # of the warm-up
    with serving(engine) as running, running.client() as client:
        for drafts in (((12, 12, 11), (11, 9, 7)), ((12, 12, 11), (11, 9, 7)), ((15, 14, 12), (13, 10, 7))):
            engine.drafts = drafts
            client.post("/v1/completions", json=completion())
        found = samples(client)
    counts = {name: count for name, count in found.items() if "spec_decode" in name}
    assert counts == {
        "infer:spec_decode_num_drafts_total{}": 5,
        "infer:spec_decode_num_draft_tokens_total{}": 5 + 4 + 3,
        "infer:spec_decode_num_accepted_tokens_total{}": 4 + 2,
        "infer:spec_decode_num_accepted_tokens_per_pos_total{position=0}": 4,
        "infer:spec_decode_num_accepted_tokens_per_pos_total{position=1}": 2,
        "infer:spec_decode_num_accepted_tokens_per_pos_total{position=2}": 0,
    }


def test_a_server_without_drafts_counts_none(client: httpx.Client) -> None:
    assert {count for name, count in samples(client).items() if "spec_decode" in name} == {0}


def test_a_slow_step_delays_no_health_check_and_ends_a_question_with_503(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.server.routes.status.DESCRIBE_TIMEOUT", 0.1)
    engine = EchoEngine(folder)
    with serving(engine) as running, running.client() as client, running.client() as other:
        with ThreadPoolExecutor(1) as aside, engine.held():
            answer = aside.submit(client.post, "/v1/completions", json=completion())
            wait_until(lambda: engine.is_held)
            assert [other.get(f"/{name}").status_code for name in ("health", "metrics", "health")] == [200] * 3
            refused = [other.get(f"/debug/{name}") for name in ("memory", "engine")]
        assert answer.result().status_code == 200
        assert [error_of(answer)["code"] for answer in refused] == ["engine_busy"] * 2
        monkeypatch.undo()
        assert client.get("/debug/memory").status_code == 200, "the thread lives on"


@pytest.mark.parametrize(
    ("setting", "name"), [(None, None), ("checkpoint", "checkpoint"), ("builtin:chatml", "builtin:chatml")]
)
def test_the_chat_template_in_use_is_said_and_a_checkpoints_that_differs_refused(
    folder: Path, tmp_path: Path, setting: str | None, name: str | None
) -> None:
    own = thinking_first(folder, tmp_path / "model")
    tools = [{"type": "function", "function": {"name": "now"}}]
    with serving(EchoEngine(own), chat_template=setting) as running, running.client() as client:
        assert client.get("/v1/models").json()["data"][0]["chat_template"] == name
        assert client.post("/v1/completions", json=completion(max_tokens=1)).status_code == 200
        responses = [client.post("/v1/chat/completions", json=chat(**more)) for more in ({}, {"tools": tools})]
    for response in responses:
        if name is not None:
            assert response.status_code == 200, response.text
            continue
        assert response.status_code == 422, response.text
        error = error_of(response)
        assert error["param"] == "model"
        assert all(told in error["message"] for told in ("builtin:llama3", "--chat-template checkpoint"))


def test_a_template_that_is_asked_for_and_cannot_be_used_ends_the_start(folder: Path) -> None:
    with pytest.raises(ModelFolderError), serving(EchoEngine(folder), chat_template="checkpoint"):
        pass


def test_a_server_that_shuts_down_is_alive_and_not_ready(folder: Path) -> None:
    with serving(EchoEngine(folder)) as running, running.client() as client:
        running.app.state.intake.is_draining = True
        for path in ("/health", "/health/ready"):
            found = client.get(path)
            assert (found.status_code, found.json()["status"], found.json()["ready"]) == (503, "shutting down", False)
        assert client.get("/health/live").status_code == 200
        segment = {"model": "echo", "content": "a"}
        for path, body in (
            ("/v1/completions", completion()),
            ("/v1/chat/completions", chat()),
            *((path, body) for path in ("/v1/segments", "/v1/chunks") for body in (segment, None)),
        ):
            refused = client.get(path) if body is None else client.post(path, json=body)
            found = refused.status_code, error_of(refused)["code"], refused.headers["retry-after"]
            assert found == (503, "shutting_down", "1"), path
