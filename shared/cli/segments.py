"""``infer segments``: questions about documents that a server keeps as segments. Introduced in phase 9.1.

The server holds the segments (``infer serve --phase 09.1``); these commands are its clients. An id follows from the
content, so a file that is named again is neither computed nor kept twice, and no list of ids is kept here. Invariant:
documents precede the question in the given order; those of a folder are sorted by name.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from shared.errors import ConfigError, RequestError
from shared.terminal import examples, printable, stderr_console, stdout_console

if TYPE_CHECKING:
    import httpx

SUFFIXES = (".txt", ".md")
_URL = "http://127.0.0.1:8000"
_TIMEOUT = 600.0  # seconds without a byte: documents may have to be computed first
REGISTER_EPILOG = examples("infer segments register manuals/", "infer segments register house-rules.txt --role system")
LIST_EPILOG = examples("infer segments list", "infer segments list --url http://127.0.0.1:8001")
ASK_EPILOG = examples(
    'infer segments ask "When is the lamp lit?" manuals/',
    'infer segments ask "When is the lamp lit?" manuals/lamp.txt 9b0c24aa00b1fe7f3a3c1d51e7d19b72 --max-tokens 64',
)

app = typer.Typer(
    help="Keep documents as segments on a server of phase 9.1, and ask questions over them.",
    no_args_is_help=True,
    epilog=examples(
        "infer serve --phase 09.1", "infer segments register manuals/", 'infer segments ask "When?" manuals/'
    ),
)
Url = Annotated[str, typer.Option("--url", help="The server's address.")]
ApiKey = Annotated[str | None, typer.Option("--api-key", help="The server's API key.", envvar="INFER_API_KEY")]
Role = Annotated[str, typer.Option("--role", help="Part of the ids; it changes nothing else.")]


class SegmentClient:
    """The server's segments; errors of the server are raised as RequestError, others as ConfigError."""

    def __init__(self, url: str, api_key: str | None) -> None:
        import httpx

        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        try:
            self.http = httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT, trust_env=False)
        except httpx.InvalidURL as error:
            raise ConfigError(f"--url is {url!r} ({error}); give an address such as {_URL}.") from None
        self.url = url
        self.model: str = self.call("GET", "/v1/models")["data"][0]["id"]

    def call(self, method: str, path: str, body: Any = None, **params: Any) -> Any:
        """The body of a response."""
        with self._open(method, path, body, **params) as response:
            return json.loads(response.read())

    def register(self, document: "Document", role: str) -> dict[str, Any]:
        """The server's segment with this document's text."""
        try:
            body = {"model": self.model, "content": document.text, "role": role}
            return cast("dict[str, Any]", self.call("POST", "/v1/segments", body))
        except RequestError as error:
            raise RequestError(f"{document.path}: {error}") from None

    def answer(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The frames of a streamed chat."""
        settings = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        with self._open("POST", "/v1/chat/completions", settings | body) as response:
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if line.startswith("data: ") and data != "[DONE]":
                    frame = json.loads(data)
                    if "error" in frame:
                        raise RequestError(frame["error"]["message"])
                    yield frame

    @contextmanager
    def _open(self, method: str, path: str, body: Any, **params: Any) -> "Iterator[httpx.Response]":
        """A response while it is being read, with its errors as this command's."""
        import httpx

        try:
            with self.http.stream(method, path, json=body, params=params) as response:
                if response.status_code >= 400:
                    response.read()
                    raise self._refusal(response)
                yield response
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _refusal(self, response: "httpx.Response") -> Exception:
        try:
            return RequestError(response.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            return self._unreachable(f"it answers {response.status_code}")

    def _unreachable(self, cause: Any) -> ConfigError:
        return ConfigError(
            f"There is no server of this project at {self.url} ({cause}); start one with `infer serve --phase 09.1`, "
            "or give its address with --url."
        )


class Document:
    """A text file. Raises RequestError if it is not UTF-8, or empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"{path} cannot be read as UTF-8 text ({error}).") from None
        if not self.text.strip():
            raise RequestError(f"{path} is empty; leave it out.")


def documents(path: Path) -> list[Document]:
    """The text file, or all files below a folder, by name. Raises RequestError if there are none."""
    if not path.is_dir():
        return [Document(path)]
    found = [Document(one) for one in sorted(path.rglob("*")) if one.suffix in SUFFIXES and one.is_file()]
    if not found:
        raise RequestError(f"The folder {path} has no text files; their names end in {' or '.join(SUFFIXES)}.")
    return found


@app.command("register", epilog=REGISTER_EPILOG)
def register(
    paths: Annotated[list[Path], typer.Argument(help="Text files, and folders of them.", exists=True)],
    role: Role = "user",
    url: Url = _URL,
    api_key: ApiKey = None,
) -> None:
    """Compute text files as segments, and print their ids."""
    found = [document for path in paths for document in documents(path)]
    client = SegmentClient(url, api_key)
    for document in found:
        segment = client.register(document, role)
        typer.echo(f"{segment['id']}  {segment['num_tokens']:6,} tokens  {printable(str(document.path))}")


@app.command("list", epilog=LIST_EPILOG)
def list_segments(url: Url = _URL, api_key: ApiKey = None) -> None:
    """List the server's segments, the least recently used first."""
    from rich import box
    from rich.table import Table

    client = SegmentClient(url, api_key)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("id", "role"):
        table.add_column(name, no_wrap=True)
    for name in ("tokens", "in the cache", "used by"):
        table.add_column(name, justify="right", no_wrap=True)
    params: dict[str, Any] = {"limit": 1000}
    while True:
        page = client.call("GET", "/v1/segments", **params)
        for segment in page["data"]:
            size = f"{segment['num_bytes'] / 1e6:,.1f} MB" if segment["num_bytes"] else "no"
            row = (f"{segment['num_tokens']:,}", size, str(segment["num_users"]))
            table.add_row(segment["id"], printable(segment["role"]), *row)
        if not page["has_more"]:
            break
        params["after"] = page["last_id"]
    stdout_console().print(table)


@app.command("ask", epilog=ASK_EPILOG)
def ask(
    question: Annotated[str, typer.Argument(help="The question, which follows the documents.")],
    over: Annotated[list[str], typer.Argument(help="Text files, folders of them, and ids of segments, in this order.")],
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Maximum tokens of the answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the most likely token.")] = 0.0,
    recompute: Annotated[
        float | None, typer.Option(min=0, max=1, help="Fraction of the segments to compute again.")
    ] = None,
    role: Role = "user",
    url: Url = _URL,
    api_key: ApiKey = None,
) -> None:
    """Answer a question about documents; the server does not recompute those that it has."""
    given: list[str | Document] = []
    for one in over:
        given += documents(Path(one)) if Path(one).exists() else [one]
    client = SegmentClient(url, api_key)
    ids = [one if isinstance(one, str) else client.register(one, role)["id"] for one in given]
    _show(client, ids, question, {"max_tokens": max_tokens, "temperature": temperature, "recompute": recompute})


def _show(client: SegmentClient, ids: Sequence[str], question: str, settings: dict[str, Any]) -> None:
    """Stream the answer to standard output, then a line of counts to standard error."""
    started, first = time.perf_counter(), 0.0
    usage: dict[str, Any] = {}
    messages = [{"role": "user", "content": question}]
    show = printable if sys.stdout.isatty() else str
    for frame in client.answer({"messages": messages, "segments": ids, **settings}):
        for choice in frame["choices"]:
            text = choice["delta"].get("content") or ""
            first = first or (time.perf_counter() - started if text else 0.0)
            sys.stdout.write(show(text))
            sys.stdout.flush()
        usage = frame.get("usage") or usage
    sys.stdout.write("\n")
    sys.stdout.flush()
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    said = (
        f"first token {first:.3f} s · {usage['prompt_tokens']:,} tokens before the answer, "
        f"{cached:,} of them segments · {usage['completion_tokens']} tokens"
    )
    stderr_console().print(said, style="dim", soft_wrap=True, markup=False)
