"""A room as it is: a board and learners in processes of their own, and the bundle on a machine whose network is off."""

import os
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from shared.cli import app
from tests.integration.infer_process import INFER, InferProcess
from tests.waiting import PATIENCE
from tutorial.workshop.check import CheckServer
from tutorial.workshop.exercises import ROOT, find_exercise
from tutorial.workshop.skeleton import filled
from tutorial.workshop.standing import read_standing

pytestmark = pytest.mark.slow

STOPPING = find_exercise("02x5")


def workshop(workspace: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["workshop", *arguments], env={"INFER_WORKSPACE": str(workspace), "NO_COLOR": "1"})


def test_a_board_shows_where_each_learner_is_until_they_leave(one_server: CheckServer, tmp_path: Path) -> None:
    board = InferProcess("workshop", "board", "--port", "0")
    try:
        address = board.stdout.readline().decode().split()[-1]

        def page() -> str:
            with urllib.request.urlopen(address, timeout=PATIENCE) as answer:
                return answer.read().decode()

        assert "0 learners" in page()
        for name in ("ada", "bob"):
            workshop(tmp_path / name, "start", "02x5")
            joined = workshop(tmp_path / name, "join", address, f"{name} & co")
            assert joined.exit_code == 0, joined.output
            assert "Your lines stay here" in joined.stdout
        file = tmp_path / "ada" / STOPPING.path
        gap, source = file.read_text(), (ROOT / STOPPING.path).read_text()
        line = next(line for line in gap.splitlines() if "raise NotImplementedError" in line)
        file.write_text(gap.replace(line.strip(), "return 'a secret of mine'"))
        assert workshop(tmp_path / "ada", "check", "02x5").exit_code == 1
        shown = page()
        case = read_standing(tmp_path / "ada", "ada").case
        assert f"<td>{case}</td><td>1</td>" in shown
        assert shown.index("ada &amp; co") < shown.index("bob &amp; co"), "those first who are stuck"
        assert "secret" not in shown
        file.write_text(filled(gap, source)[0])
        assert workshop(tmp_path / "ada", "check", "02x5").exit_code == 0
        assert case not in page()
        assert "1/" in page()
        assert address in workshop(tmp_path / "ada", "leave").stdout
        assert "ada" not in page()
        assert "bob" in page()
    finally:
        board.kill()
    told = workshop(tmp_path / "bob", "board", str(tmp_path / "ada"), str(tmp_path / "bob"))
    assert "ada" in told.stdout, "the same from the workspaces, when no board runs"
    checked = workshop(tmp_path / "bob", "check", "02x5")
    assert "02x5  to do" in checked.stdout, checked.output
    assert "cannot be reached" in checked.stderr


OFF = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"])] if hasattr(os, "geteuid") else []
CAN_BE_OFF = bool(shutil.which("unshare")) and subprocess.run([*OFF, "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not CAN_BE_OFF, reason="a process without a network needs `unshare --net`, which this may not do")
def test_the_bundle_is_checked_with_networking_off(tmp_path: Path, session_folder: Path) -> None:
    """In processes without a network, not even this machine's own: the exported exercise, solved, passes."""

    def offline(*command: str) -> subprocess.CompletedProcess[str]:
        variables = {
            "INFER_WORKSPACE": str(tmp_path / "infer-workshop-02" / "workspace"),
            "INFER_WORKSHOP_IDLE": "0",
            "PYTHONPATH": str(ROOT),
            "NO_COLOR": "1",
        }
        environment = {name: value for name, value in os.environ.items() if name != "INFER_SESSION_FOLDER"} | variables
        return subprocess.run(
            [*OFF, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE
        )

    exported = workshop(tmp_path, "export", "2", "--out", str(tmp_path / "hand.zip"))
    assert exported.exit_code == 0, exported.output
    with zipfile.ZipFile(tmp_path / "hand.zip") as archive:
        archive.extractall(tmp_path)
    file = tmp_path / "infer-workshop-02" / "workspace" / STOPPING.path
    file.write_text(filled(file.read_text(), (ROOT / STOPPING.path).read_text())[0])
    connecting = "import socket; socket.create_connection(('127.0.0.1', 9), 1)"
    assert "unreachable" in offline(sys.executable, "-c", connecting).stderr
    checked = offline(*INFER, "workshop", "check", "02x5")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "02x5  passed" in checked.stdout
