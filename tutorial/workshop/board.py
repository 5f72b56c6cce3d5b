"""A teacher's board: who is at which exercise, and stuck on which case, on a page that renews itself.

`Board` is a small HTTP server in the teacher's process; a learner who has joined it tells it their `Standing` after
each check. The address holds a random word, which one must know to look and to be shown. Introduced in phase 1b.
Invariants: the board keeps standings in memory alone, at most `MOST_LEARNERS` of them; a board that cannot be reached
costs a check `SECONDS` at most, and no result.
"""

import html
import http.client
import json
import secrets
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from urllib.parse import urlsplit

from shared.errors import ConfigError
from tutorial.workshop.exercises import exercises
from tutorial.workshop.standing import Standing, checked_name, read_standing, received

MOST_LEARNERS = 200
SECONDS = 1.0
"""That a learner's process waits for the board, from looking up its name to the answer."""
SECONDS_PER_LOOK = 5
_MOST_BYTES = 4096
_JOINED = ".board.json"
COLUMNS = ("name", "at", "exercise", "stuck on", "failed checks", "hints", "passed", "last check")
_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>infer workshop</title>
<meta http-equiv="refresh" content="{seconds}"><style>
body {{ font: 1.1rem system-ui, sans-serif; margin: 2rem; color-scheme: light dark }}
td, th {{ text-align: left; padding: .3rem 1rem .3rem 0 }}
</style></head><body><h1>infer workshop</h1><table><tr>{head}</tr>{rows}</table><p>{count}</p></body></html>"""


class Board(ThreadingHTTPServer):
    """The server; a context manager. ``address`` is where learners join and the teacher looks.

    Args:
        host: an address of this machine, 0.0.0.0 for all of them.
        port: 0 chooses one that is free.
        word: the secret part of the address; by default a random one.
    """

    daemon_threads = True

    def __init__(self, host: str = "127.0.0.1", port: int = 0, word: str | None = None) -> None:
        self.word = word or secrets.token_urlsafe(6)
        self.standings: dict[str, Standing] = {}  # by the key that a learner's workspace chose
        self.lock = Lock()
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise ConfigError(f"No board can listen at {host}:{port} ({error.strerror}).") from None

    @property
    def address(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}/{self.word}"

    def note(self, key: str, standing: Standing | None) -> bool:
        """Show a learner's standing instead of their last one, or with None no more; False if the board is
        full."""
        with self.lock:
            if standing is None:
                self.standings.pop(key, None)
            elif key in self.standings or len(self.standings) < MOST_LEARNERS:
                self.standings[key] = standing
            else:
                return False
        return True

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of a client that closed its connection; the terminal is the teacher's."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def page(self) -> str:
        """The page that the teacher looks at."""
        with self.lock:
            found = list(self.standings.values())
        rows = "".join(f"<tr>{_cells('td', row)}</tr>" for row in board_rows(found))
        head = _cells("th", COLUMNS)
        count = "1 learner" if len(found) == 1 else f"{len(found)} learners"
        return _PAGE.format(seconds=SECONDS_PER_LOOK, head=head, rows=rows, count=count)


class _Handler(BaseHTTPRequestHandler):
    server: Board
    timeout = 10  # seconds in which a client sends its request

    def do_GET(self) -> None:
        is_right = self.path == f"/{self.server.word}"
        self._answer(*((HTTPStatus.OK, self.server.page()) if is_right else (HTTPStatus.NOT_FOUND, "")))

    def do_PUT(self) -> None:
        key = self._key()
        length = self.headers.get("Content-Length", "")
        if key is None:
            self._answer(HTTPStatus.NOT_FOUND)
        elif not length.isdecimal() or int(length) > _MOST_BYTES:
            self._answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        else:
            try:
                is_noted = self.server.note(key, received(self.rfile.read(int(length))))
                self._answer(HTTPStatus.NO_CONTENT if is_noted else HTTPStatus.INSUFFICIENT_STORAGE)
            except ConfigError:
                self._answer(HTTPStatus.BAD_REQUEST)

    def do_DELETE(self) -> None:
        if key := self._key():
            self.server.note(key, None)
        self._answer(HTTPStatus.NO_CONTENT if key else HTTPStatus.NOT_FOUND)

    def _key(self) -> str | None:
        """The learner's key in the path, ``/WORD/KEY``; None if the word is another."""
        _, word, key = [*self.path.split("/", 2), "", ""][:3]
        return key if word == self.server.word and 0 < len(key) <= 64 else None

    def _answer(self, status: HTTPStatus, text: str = "") -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """The terminal is the teacher's."""


def join(workspace: Path, address: str, name: str) -> None:
    """Have each check of this workspace tell a board where its learner is, from now on.

    Raises ConfigError if the name cannot be shown, or the board cannot be reached; then a board that had been joined
    stays joined.
    """
    if not _is_address(address):
        raise ConfigError(f"{address} is no address of a board; it looks like http://192.168.0.7:8077/WORD.")
    address, before = address.rstrip("/"), _joined(workspace)
    is_renamed = before is not None and before["address"] == address
    key = before["key"] if before and is_renamed else secrets.token_urlsafe(12)
    joined = {"address": address, "name": checked_name(name), "key": key}
    if problem := _send(joined, read_standing(workspace, name)):
        raise ConfigError(f"The board at {address} {problem}; ask your teacher for its address.")
    try:
        workspace.mkdir(parents=True, exist_ok=True)  # before the first exercise there is none
        (workspace / _JOINED).write_text(json.dumps(joined) + "\n", encoding="utf-8")
    except OSError as error:
        _send(joined, None)
        raise ConfigError(f"{workspace / _JOINED} cannot be written ({error.strerror}).") from None
    if before is not None and not is_renamed:
        _send(before, None)


def leave(workspace: Path) -> str:
    """Tell the board nothing more, and have it forget this learner; its address, empty if none had been joined."""
    if (joined := _joined(workspace)) is None:
        return ""
    _send(joined, None)
    (workspace / _JOINED).unlink(missing_ok=True)
    return joined["address"]


def tell(workspace: Path) -> str:
    """Tell the board, if one was joined, where the learner is now; what to say if it does not hear it, else empty."""
    if (joined := _joined(workspace)) is None:
        return ""
    problem = _send(joined, read_standing(workspace, joined["name"]))
    return f"The board at {joined['address']} {problem}; `infer workshop leave` ends it." if problem else ""


def board_rows(standings: Iterable[Standing]) -> list[Sequence[str]]:
    """The rows of a board, those first whose checks failed most often."""
    titles = {exercise.number: exercise.title for exercise in exercises()}
    ordered = sorted(standings, key=lambda one: (-one.num_failed, one.name))
    return [
        (
            one.name,
            one.exercise or "-",
            titles.get(one.exercise, one.problem or "-"),
            one.case or "-",
            str(one.num_failed or "-"),
            str(one.num_hints or "-"),
            f"{one.num_passed}/{len(titles)}",
            ago(one.checked),
        )
        for one in ordered
    ]


def ago(at: float) -> str:
    """How long ago a moment was, in words."""
    minutes = int((time.time() - at) / 60)
    if not at:
        return "never"
    if minutes < 1:
        return "now"
    return f"{minutes} min ago" if minutes < 120 else f"{minutes // 60} h ago"


def _is_address(address: str) -> bool:
    try:
        found = urlsplit(address)
        return found.scheme == "http" and bool(found.hostname and found.path.strip("/"))
    except ValueError:  # brackets that do not hold an IPv6 address
        return False


def _joined(workspace: Path) -> dict[str, str] | None:
    try:
        joined = json.loads((workspace / _JOINED).read_text(encoding="utf-8"))
        return {key: str(joined[key]) for key in ("address", "name", "key")}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _send(joined: dict[str, str], standing: Standing | None) -> str:
    """Why the board has not taken a standing (with None, that the learner leaves); empty if it has."""
    content = None if standing is None else Standing(**vars(standing) | {"problem": ""}).as_json().encode()
    try:
        address = urlsplit(f"{joined['address']}/{joined['key']}")
        port = 80 if address.port is None else address.port
    except ValueError:
        return "cannot be reached"
    connection = http.client.HTTPConnection(address.hostname or "", port, timeout=SECONDS)
    statuses: list[int] = []

    def exchange() -> None:
        with suppress(OSError, http.client.HTTPException, ValueError):
            connection.request("DELETE" if content is None else "PUT", address.path, content)
            statuses.append(connection.getresponse().status)
        connection.close()

    # A timeout of the socket holds for each of its operations alone; this one holds for all of them.
    thread = Thread(target=exchange, daemon=True)
    thread.start()
    thread.join(SECONDS)
    if (connected := connection.sock) is not None:
        with suppress(OSError):
            connected.shutdown(socket.SHUT_RDWR)  # ends the thread
    if not statuses:
        return "cannot be reached"
    if statuses[0] == HTTPStatus.INSUFFICIENT_STORAGE:
        return "is full"
    return "" if statuses[0] == HTTPStatus.NO_CONTENT else f"does not take it ({statuses[0]})"


def _cells(tag: str, texts: Sequence[str]) -> str:
    return "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts)
