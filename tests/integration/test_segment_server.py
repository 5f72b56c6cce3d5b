"""``infer serve --phase 09.1``: segments over HTTP, through OpenAI's client, the engine in a process of its own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from shared.cli import app
from shared.cli.segments import SegmentClient
from shared.sampling.params import SamplingParams
from shared.text.chat import ChatMessage, choose_template, encode_chat
from shared.tracks.segments.llm import SegmentLLM
from tests.integration.server_process import MODEL, ServerProcess

KEY = {"Authorization": "Bearer secret"}
TEXTS = ["The lamp is lit at dusk.", "Boats wait until the tide is high. " * 3]
PARAMS = SamplingParams(temperature=0.0, ignore_eos=True, max_new_tokens=8)
QUESTION: Any = [{"role": "user", "content": "When?"}]


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    options = ("--phase", "09.1", "--engine-process", "--api-key", "secret", "--num-gpu-blocks", "160")
    running = ServerProcess(folder, tmp_path_factory.mktemp("segments") / "log", *options)
    yield running
    assert running.end() == 0
    assert "Traceback" not in running.log.read_text()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client() as client:
        client.headers.update(KEY)
        yield client


def register(client: httpx.Client, content: Any, **more: Any) -> dict[str, Any]:
    response = client.post("/v1/segments", json={"model": MODEL, "content": content, **more})
    assert response.status_code == 200, response.text
    return response.json()


def chat(server: ServerProcess, segments: list[Any], **more: Any) -> Any:
    extra = {"ignore_eos": more.pop("ignore_eos", True), "segments": segments}
    extra |= {"recompute": more.pop("recompute")} if "recompute" in more else {}
    settings = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 8, **more}
    return server.openai().with_options(api_key="secret").chat.completions.create(**settings, extra_body=extra)


@pytest.fixture(scope="module")
def llm(folder: Path) -> SegmentLLM:
    return SegmentLLM(str(folder), max_batch_size=2)


@pytest.fixture(scope="module")
def prompt(llm: SegmentLLM) -> list[int]:
    tokenizer, family = llm.engine.tokenizer, llm.engine.model.config.family
    turns = [ChatMessage("user", QUESTION[0]["content"])]
    return encode_chat(tokenizer, turns, template=choose_template(family, tokenizer), thinking=None)


def error_of(response: httpx.Response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    assert error["message"].endswith((".", ").")), error
    return response.status_code, error["code"], error["param"]


def test_a_chat_over_segments_answers_as_the_engine_does(
    server: ServerProcess, client: httpx.Client, llm: SegmentLLM, prompt: list[int]
) -> None:
    """By id and by content, streamed and whole, in any order; usage counts the segments."""
    names = [llm.register(text) for text in TEXTS]
    assert [register(client, text)["id"] for text in TEXTS] == names
    inline: dict[str, Any] = {"content": TEXTS[1]}
    for order, segments in (([0, 1], [names[0], inline]), ([1, 0], [inline, names[0]]), ([1, 1], [names[1], inline])):
        expected = llm.generate_from_segments([names[n] for n in order], prompt, PARAMS)
        answer = chat(server, segments)
        assert answer.choices[0].message.content == expected.text
        cached = sum(llm.info(names[n])[0].num_tokens for n in order)
        assert answer.usage.prompt_tokens == cached + len(prompt)
        assert answer.usage.prompt_tokens_details.cached_tokens == cached
        pieces = [part.choices[0].delta.content or "" for part in chat(server, segments, stream=True) if part.choices]
        assert "".join(pieces) == expected.text
    assert chat(server, []).usage.prompt_tokens == len(prompt)
    late = register(client, "Asked once.")["id"]
    chat(server, [late])
    assert client.delete(f"/v1/segments/{late}").status_code == 200, "no request uses it any more"
    state = client.get("/debug/engine").json()
    assert (state["audit"], state["stats"]["segments in the cache"]) == ([], 2)


def test_a_part_of_the_segments_may_be_recomputed(
    server: ServerProcess, client: httpx.Client, llm: SegmentLLM, prompt: list[int]
) -> None:
    """The answer is that of the engine; the result is a segment, so a second request finds it."""
    texts = ["The tide is low.", "The boats leave."]
    for fraction in (0.0, 0.3, 1.0):
        blended = llm.blend([llm.register(text) for text in texts], fraction)
        expected = llm.generate_from_segments([blended], prompt, PARAMS).text
        for _ in range(2):
            answer = chat(server, [{"content": text} for text in texts], recompute=fraction)
            assert answer.choices[0].message.content == expected
        assert client.get(f"/v1/segments/{blended}").json()["num_bytes"] > 0
    assert client.get("/debug/engine").json()["audit"] == []


def test_registering_listing_and_deleting(client: httpx.Client) -> None:
    before = [segment["id"] for segment in client.get("/v1/segments").json()["data"]]
    made = [register(client, [n, n + 1, n + 2]) for n in range(20, 25)]
    assert made[0] == {
        "id": made[0]["id"],
        "object": "segment",
        "role": "user",
        "num_tokens": 3,
        "num_bytes": 0,
        "num_users": 0,
    }
    assert register(client, [20, 21, 22])["id"] == made[0]["id"]
    assert register(client, [20, 21, 22], role="system")["id"] not in {segment["id"] for segment in made}
    seen, after = [], None
    while True:
        page = client.get("/v1/segments", params={"limit": 2} | ({"after": after} if after else {})).json()
        seen += [segment["id"] for segment in page["data"]]
        after = page["last_id"]
        if not page["has_more"]:
            break
    assert seen[: len(before)] == before
    assert seen[len(before) : -2] == [segment["id"] for segment in made[1:]], "the first was used again"
    kept = client.get(f"/v1/segments/{made[1]['id']}").json()
    assert kept["num_bytes"] > 0, "it has been computed meanwhile"
    assert client.delete(f"/v1/segments/{made[1]['id']}").json()["deleted"] is True
    for method in ("GET", "DELETE"):
        found = client.request(method, f"/v1/segments/{made[1]['id']}")
        assert error_of(found) == (404, "segment_not_found", "id")
    assert error_of(client.get("/v1/segments", params={"after": "ab"})) == (404, "segment_not_found", "after")
    assert client.get("/debug/engine").json()["audit"] == []


def test_the_former_name_answers_as_before(server: ServerProcess, client: httpx.Client) -> None:
    """`/v1/chunks` and the field `chunks`, with the objects and codes of that name; the segments are the same."""
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 4}
    made = client.post("/v1/chunks", json={"model": MODEL, "content": [30, 31]}).json()
    segment = register(client, [30, 31])
    assert made["object"] == "chunk"
    assert made["id"] == segment["id"]
    got = client.get(f"/v1/chunks/{made['id']}").json()
    assert got == client.get(f"/v1/segments/{made['id']}").json() | {"object": "chunk"}
    pages = [client.get(path).json() for path in ("/v1/chunks", "/v1/segments")]
    assert pages[0] == pages[1] | {"data": [one | {"object": "chunk"} for one in pages[1]["data"]]}
    answers = [
        client.post("/v1/chat/completions", json={**body, "temperature": 0, name: [made["id"]]}).json()
        for name in ("chunks", "segments")
    ]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"] == answers[1]["usage"]
    deleted = client.delete(f"/v1/chunks/{made['id']}").json()
    assert deleted == {"id": made["id"], "object": "chunk.deleted", "deleted": True}
    for response, param in (
        (client.get(f"/v1/chunks/{made['id']}"), "id"),
        (client.delete(f"/v1/chunks/{made['id']}"), "id"),
        (client.get("/v1/chunks", params={"after": "ab"}), "after"),
        (client.post("/v1/chat/completions", json={**body, "chunks": ["ab"]}), "chunks"),
    ):
        assert error_of(response) == (404, "chunk_not_found", param)
    malformed = client.post("/v1/chat/completions", json={**body, "chunks": [7]})
    assert error_of(malformed) == (422, "invalid_value", "chunks")
    assert malformed.json()["error"]["message"].startswith("chunks holds 7;")
    both = {**body, "chunks": [segment["id"]], "segments": [segment["id"]]}
    assert error_of(client.post("/v1/chat/completions", json=both)) == (422, "invalid_value", "chunks")
    listed = CliRunner().invoke(app, ["chunks", "list", "--url", server.url, "--api-key", "secret"]).stdout
    assert pages[1]["data"][0]["id"] in listed
    assert "chunks" not in CliRunner().invoke(app, ["--help"]).stdout


def test_what_is_refused(server: ServerProcess, client: httpx.Client) -> None:
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 4}
    for path, fields, expected in (
        ("/v1/segments", {"content": ""}, (422, "invalid_value", "content")),
        ("/v1/segments", {"content": 3}, (422, "invalid_value", "content")),
        ("/v1/segments", {}, (400, "missing_field", "content")),
        ("/v1/segments", {"content": "a", "role": ""}, (422, "invalid_value", "role")),
        ("/v1/segments", {"content": "a", "name": "b"}, (422, "unknown_field", "name")),
        ("/v1/segments", {"content": [10**6]}, (422, "invalid_value", "content")),
        ("/v1/segments", {"content": "a" * 10**6}, (422, "context_length_exceeded", "content")),
        ("/v1/segments", {"content": "a", "model": "other"}, (422, "model_not_found", "model")),
        ("/v1/chat/completions", {"segments": ["ab"]}, (404, "segment_not_found", "segments")),
        ("/v1/chat/completions", {"segments": "ab"}, (422, "invalid_value", "segments")),
        ("/v1/chat/completions", {"segments": [7]}, (422, "invalid_value", "segments")),
        ("/v1/chat/completions", {"segments": [{"content": []}]}, (422, "invalid_value", "segments")),
        ("/v1/chat/completions", {"segments": [{"role": "user"}]}, (422, "invalid_value", "segments")),
        ("/v1/chat/completions", {"segments": ["a"] * 257}, (422, "invalid_value", "segments")),
        ("/v1/chat/completions", {"recompute": 1.5}, (422, "invalid_value", "recompute")),
    ):
        given = {"model": MODEL, **fields} if path == "/v1/segments" else {**body, **fields}
        assert error_of(client.post(path, json=given)) == expected, fields
    long = [register(client, [n % 200 + 5] * 900)["id"] for n in range(3)]
    response = client.post("/v1/chat/completions", json={**body, "segments": long})
    assert error_of(response)[:2] == (422, "context_length_exceeded"), "together they are too long"
    assert httpx.get(f"{server.url}/v1/segments", trust_env=False).status_code == 401


# the command


def infer(*arguments: Any) -> Any:
    result = CliRunner().invoke(app, ["segments", *map(str, arguments)], prog_name="infer")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_questions_over_a_folder_of_texts(server: ServerProcess, client: httpx.Client, tmp_path: Path) -> None:
    """Files below it in the order of their names, others left out; asked again, only the question is computed."""
    (tmp_path / "a").mkdir()
    for name, text in (("b.txt", TEXTS[1]), ("a/b.md", TEXTS[0]), ("c.pdf", "no text")):
        (tmp_path / name).write_text(text)
    where = ("--url", server.url, "--api-key", "secret")
    registered = infer("register", tmp_path, *where)
    assert registered.exit_code == 0, registered.output
    lines = [line.split() for line in registered.stdout.splitlines()]
    assert [Path(line[-1]).name for line in lines] == ["b.md", "b.txt"]
    names = [line[0] for line in lines]
    for over, order in (([tmp_path], names), ([tmp_path / "b.txt", names[0]], names[::-1])):
        asked = infer("ask", "When?", *over, "--max-tokens", 8, *where)
        answer = chat(server, order, ignore_eos=False)
        assert asked.stdout == answer.choices[0].message.content + "\n"
        counts = answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens
        assert "{} tokens before the answer, {} of them segments".format(*counts) in asked.stderr
    asked = infer("ask", "When?", *names, "--max-tokens", 8, "--recompute", 0.5, *where)
    assert asked.stdout == chat(server, names, ignore_eos=False, recompute=0.5).choices[0].message.content + "\n"
    listed = infer("list", *where).stdout
    assert all(name in listed for name in names)


def test_a_list_has_all_pages_and_each_fact_of_a_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [("a", 1_500_000, 0, "c"), ("b", 0, 12, "d"), ("c", 2_000_000_000, 3, None)]
    asked: list[dict[str, Any]] = []

    def call(client: Any, method: str, path: str, body: Any = None, **params: Any) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": "m"}]}
        name, num_bytes, num_users, last_id = pages[len(asked)]
        asked.append(params)
        segment = {
            "id": name,
            "role": f"role {name}",
            "num_tokens": 1234,
            "num_bytes": num_bytes,
            "num_users": num_users,
        }
        return {"data": [segment], "last_id": last_id, "has_more": last_id is not None}

    monkeypatch.setattr(SegmentClient, "call", call)
    header, *rows = [line.split() for line in infer("list").stdout.splitlines() if "role " in line]
    assert " ".join(header) == "id role tokens in the cache used by"
    sizes = (["1.5", "MB"], ["no"], ["2,000.0", "MB"])
    expected = zip(pages, sizes, strict=True)
    assert rows == [[name, "role", name, "1,234", *size, str(users)] for (name, _, users, _), size in expected]
    assert asked == [{"limit": 1000, **more} for more in ({}, {"after": "c"}, {"after": "d"})]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("ask", "When?", "no-such-file.txt"), "There is no segment 'no-such-file.txt'"),
        (("ask", "When?", "EMPTY"), "has no text files; their names end in .txt or .md"),
        (("register", "LONG"), "long.txt: This model's maximum context length is"),
        (("register", "BYTES"), "cannot be read as UTF-8 text"),
        (("register", "BLANK"), "blank.txt is empty; leave it out."),
        (("list", "--api-key", "wrong"), "API key"),
        (("list", "--url", "http://127.0.0.1:port"), "--url is 'http://127.0.0.1:port' (Invalid port"),
        (("list", "--url", "http://127.0.0.1:9"), "There is no server of this project at http://127.0.0.1:9"),
    ],
)
def test_the_command_says_what_is_wrong(
    server: ServerProcess, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "long.txt").write_text("a b c " * 100_000)
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "blank.txt").write_text(" \n")
    paths = {"EMPTY": "empty", "LONG": "long.txt", "BYTES": "bytes.txt", "BLANK": "blank.txt"}
    where = ["--url", server.url, "--api-key", "secret"]
    given = [str(tmp_path / paths[one]) if one in paths else one for one in arguments]
    result = infer(given[0], *where, *given[1:])
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
