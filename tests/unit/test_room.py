"""What a board knows of a learner, what it refuses, and the times that a workspace records."""

import contextlib
import http.client
import json
import socket
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from urllib.parse import urlsplit

import pytest

from shared.errors import ConfigError
from tutorial.workshop import board as board_module
from tutorial.workshop import handout
from tutorial.workshop.board import Board, board_rows, join, leave, tell
from tutorial.workshop.exercises import exercises, find_exercise
from tutorial.workshop.hunts import HuntFolder, hunts
from tutorial.workshop.standing import Standing, read_standing, received, standing_of
from tutorial.workshop.submission import read_submission
from tutorial.workshop.times import BREAK, Times
from tutorial.workshop.workspace import Workspace

STARTED = {"is_started": True}
PASSED = {"is_started": True, "passed": "digest"}


@pytest.mark.parametrize(
    ("progress", "expected"),
    [
        ({}, Standing("Ada")),
        ({"03x1": STARTED, "03x2": STARTED}, Standing("Ada", "03x1")),
        (
            {"03x1": STARTED, "03x2": STARTED | {"checked": 9.0, "num_failed": 3, "case": "test_a[1]", "hints": 2}},
            Standing("Ada", "03x2", "test_a[1]", 3, 2, 0, 9.0),
        ),
        (
            {"03x1": STARTED, "03x2": PASSED | {"checked": 9.0}, "03x3": STARTED},
            Standing("Ada", "03x3", num_passed=1, checked=9.0),
        ),
        ({"03x1": STARTED, "03x4": PASSED | {"checked": 9.0}}, Standing("Ada", "03x1", num_passed=1, checked=9.0)),
        ({"03x4": PASSED | {"checked": 9.0}}, Standing("Ada", num_passed=1, checked=9.0)),
        ({"77x1": STARTED}, Standing("Ada")),
    ],
    ids=["new", "started", "failing", "the next", "one left", "all passed", "unknown"],
)
def test_a_learner_is_at_what_was_checked_last_or_the_next(progress: dict, expected: Standing) -> None:
    assert standing_of("Ada", progress) == expected


def test_a_standing_is_read_from_a_workspace_and_a_zip_file(tmp_path: Path) -> None:
    workspace, exercise = Workspace(tmp_path / "ada"), find_exercise("02x5")
    workspace.start([exercise])
    for _ in range(2):
        workspace.note_check(exercise, passed=False, case="test_a")
    workspace.note_check(exercise, passed=False, case="test_a", is_new=False)
    found = read_standing(workspace.root, "Ada")
    assert (found.exercise, found.case, found.num_failed, found.problem) == ("02x5", "test_a", 2, "")
    with zipfile.ZipFile(tmp_path / "ada.zip", "w") as archive:
        for file in workspace.root.rglob("*"):
            archive.write(file, Path("workspace") / file.relative_to(workspace.root))
    assert read_standing(tmp_path / "ada.zip", "Ada") == found
    workspace.note_check(exercise, passed=True)
    assert read_standing(workspace.root, "Ada").num_failed == 0
    entries = ('"checked": "x"', '"checked": NaN', '"checked": 1e999', '"is_started": 1, "num_failed": 1e999')
    for text in ("[", "[]", "[" * 100_000, '{"02x5": 3}', *(f'{{"02x5": {{{entry}}}}}' for entry in entries)):
        (workspace.root / ".progress.json").write_text(text)
        assert "cannot be read" in read_standing(workspace.root, "Ada").problem
    assert read_standing(tmp_path, "Eve").problem
    assert board_rows([read_standing(tmp_path / "ada.zip", "Ada")])[0][:6] == (
        "Ada",
        "02x5",
        exercise.title,
        "test_a",
        "2",
        "-",
    )


def test_what_is_no_standing_is_not_received() -> None:
    right = json.loads(Standing("Ada", "06.1x2", "test_a", 1, 0, 2, 9.0).as_json())
    assert received(json.dumps(right).encode()) == Standing(**right)
    for wrong in (
        *({"name": name} for name in ("", " ", "A" * 41, "A\x1b[2J", 7)),
        *({"exercise": number} for number in ("x", "<b>", "03x1;")),
        *({"num_passed": count} for count in (-1, 10**13, "1", None)),
        *({"case": "x" * 201}, {"problem": "x"}, {"checked": float("nan")}, {"code": "x = 1"}),
    ):
        with pytest.raises(ConfigError, match="no standing"):
            received(json.dumps(right | wrong).encode())
    for content in (b"", b"[]", b"\xff", b"3", b"[" * 100_000):
        with pytest.raises(ConfigError, match="no standing"):
            received(content)


@pytest.fixture
def server() -> Iterator[Board]:
    with Board() as made:
        Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield made
        made.shutdown()


def ask(server: Board, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(urlsplit(server.address).netloc, timeout=60)
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_only_who_knows_the_word_looks_and_is_shown(server: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    body, word = Standing("<b>Ada", "02x5").as_json().encode(), server.word
    assert ask(server, "GET", "/")[0] == ask(server, "GET", "/other")[0] == 404
    assert ask(server, "PUT", "/other/key", body)[0] == ask(server, "PUT", f"/{word}", body)[0] == 404
    assert ask(server, "PUT", f"/{word}/key", b"x = 1")[0] == 400
    assert ask(server, "PUT", f"/{word}/key", body + b" " * 5000)[0] == 413
    assert ask(server, "PUT", f"/{word}/key", body)[0] == 204
    monkeypatch.setattr(board_module, "MOST_LEARNERS", 1)
    assert ask(server, "PUT", f"/{word}/other", body)[0] == 507
    assert ask(server, "PUT", f"/{word}/key", body)[0] == 204
    status, page = ask(server, "GET", f"/{word}")
    assert status == 200
    assert "&lt;b&gt;Ada" in page
    assert "<b>" not in page
    assert "<p>1 learner</p>" in page
    assert ask(server, "DELETE", f"/{word}/key")[0] == 204
    assert "Ada" not in ask(server, "GET", f"/{word}")[1]


def test_a_connection_that_a_client_resets_leaves_no_traceback(server: Board, capfd: pytest.CaptureFixture) -> None:
    reset, is_handled, handle = struct.pack("ii", 1, 0), Event(), server.handle_error

    def watched(request: object, client: object) -> None:
        handle(request, client)
        is_handled.set()

    server.handle_error = watched  # type: ignore[method-assign]
    with socket.create_connection(server.server_address[:2]) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        client.sendall(f"PUT /{server.word}/key HTTP/1.1\r\nContent-Length: 9\r\n\r\n".encode())
    assert is_handled.wait(60)
    assert capfd.readouterr().err == ""


def test_a_learner_joins_before_the_first_exercise_and_stays_where_another_board_is_not_there(
    server: Board, tmp_path: Path
) -> None:
    workspace = tmp_path / "workspace"
    join(workspace, server.address, "Ada")
    for url in ("http://[/x", "ftp://x/y", "http://127.0.0.1:0/x"):
        with pytest.raises(ConfigError):
            join(workspace, url, "Ada")
    assert tell(workspace) == ""
    assert [each.name for each in server.standings.values()] == ["Ada"]
    assert leave(workspace) == server.address


def test_a_learner_whose_workspace_cannot_be_written_is_not_left_on_the_board(server: Board, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        join(tmp_path / "file" / "workspace", server.address, "Ada")
    assert server.standings == {}


def test_a_board_that_is_gone_is_said_and_costs_nothing_else(tmp_path: Path) -> None:
    Workspace(tmp_path).start([find_exercise("02x5")])
    with Board() as gone:
        address = gone.address
    for url, message in ((address, "cannot be reached"), ("ftp://x/y", "no address"), ("http://127.0.0.1", "no addr")):
        with pytest.raises(ConfigError, match=message):
            join(tmp_path, url, "Ada")
    joined = {"address": address, "name": "Ada", "key": "key"}
    (tmp_path / ".board.json").write_text(json.dumps(joined))
    assert "cannot be reached; `infer workshop leave` ends it" in tell(tmp_path)
    assert leave(tmp_path) == address
    assert tell(tmp_path) == ""


def test_an_exchange_with_a_board_has_one_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This one answers a byte at a time, each well within the time."""
    monkeypatch.setattr(board_module, "SECONDS", 2.0)
    is_over = Event()

    def answer(listening: socket.socket) -> None:
        client, _ = listening.accept()
        with client, contextlib.suppress(OSError):
            for byte in b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n":
                client.sendall(bytes([byte]))
                is_over.wait(0.5)

    Workspace(tmp_path).start([find_exercise("02x5")])
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = Thread(target=answer, args=[listening], daemon=True)
        thread.start()
        joined = {"address": f"http://127.0.0.1:{listening.getsockname()[1]}/word", "name": "Ada", "key": "key"}
        (tmp_path / ".board.json").write_text(json.dumps(joined))
        assert "cannot be reached" in tell(tmp_path)
        is_over.set()
        thread.join(60)


def test_what_the_hand_out_says_to_pack_holds_what_is_judged_and_no_more(server: Board, tmp_path: Path) -> None:
    exercise, hunt = find_exercise("02x5"), hunts()[0]
    workspace = Workspace(tmp_path / "workspace")
    workspace.start([exercise])
    workspace.note_check(exercise, passed=True)
    Times(workspace.root).agree(True)
    join(workspace.root, server.address, "Ada")
    (command,) = (line for line in handout._README.splitlines() if "zipfile" in line)
    packed = tmp_path / "YOUR-NAME.zip"
    for has_hunt in (False, True):
        if has_hunt:
            HuntFolder(workspace.root, hunt).plant()
        subprocess.run([sys.executable, *command.split()[1:]], cwd=tmp_path, check=True)
        assert read_standing(packed, "Ada") == read_standing(workspace.root, "Ada")
        wanted = [exercise.path, *([hunt.handed_in(hunt.module)] if has_hunt else [])]
        assert read_submission(packed, "Ada", wanted).files == read_submission(workspace.root, "Ada", wanted).files
        assert list(read_submission(packed, "Ada", wanted).files) == wanted
        with zipfile.ZipFile(packed) as archive:
            tops = {Path(name).parts[0] for name in archive.namelist()}
        assert tops == {"shared", ".progress.json"} | ({"bugs"} if has_hunt else set())
    leave(workspace.root)


def test_time_counts_for_what_was_worked_on_until_it_passed(tmp_path: Path) -> None:
    times = Times(tmp_path)
    times.mark(["03x1"], at=0.0)
    assert (times.agreed, times.minutes(), list(tmp_path.iterdir())) == (None, {}, []), "without agreement"
    times.agree(True)
    times.mark(at=0.0)
    times.mark(["03x1"], at=120.0)
    times.mark(["03x1", "03x2"], at=240.0)
    times.mark(["03x1"], ["03x1"], at=240.0 + BREAK + 1)
    times.mark(["03x1"], ["03x1"], at=300.0 + BREAK + 1)
    times.agree(True)
    assert times.minutes() == {"03x1": 3.0, "03x2": 1.0}, "two minutes, one of two; a break; and after it passed none"
    times.agree(False)
    times.mark(["03x1"], at=900.0)
    assert (times.agreed, times.minutes()) == (False, {})


def test_a_torn_line_costs_a_record_of_times_that_line_alone(tmp_path: Path) -> None:
    times = Times(tmp_path)
    times.agree(True)
    times.mark(at=0.0)
    times.mark(["03x1"], at=60.0)
    with times.file.open("ab") as out:
        out.write(b'{"at": 90.0, "on": ["03x\xff')
    assert (times.agreed, times.minutes()) == (True, {"03x1": 1.0})
    times.mark(["03x2"], at=120.0)
    assert times.minutes() == {"03x1": 1.0, "03x2": 1.0}


def test_every_exercise_has_a_number_that_a_board_takes() -> None:
    for exercise in exercises():
        assert received(Standing("Ada", exercise.number).as_json().encode()).exercise == exercise.number
