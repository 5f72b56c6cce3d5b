"""``infer deploy`` without Ray, and its arguments; with Ray, tests/integration/test_deploy.py."""

import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from shared.cli import app, deploy
from shared.cli.serve import load_warm
from shared.server.settings import ServerConfig


@pytest.mark.parametrize("arguments", [["tiny"], ["--replicas", "2", "tiny"], ["status"], ["down"]])
def test_without_ray_one_sentence_says_what_to_install(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["deploy", *arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    said = "infer deploy needs Ray Serve: pip install 'infer-course[ray]', or '.[ray]' in a checkout."
    assert result.stderr == f"error: {said}\n"


def test_help_lists_the_commands_and_each_has_its_own() -> None:
    for arguments in (["deploy", "--help"], ["deploy"]):
        assert "Show which replicas are running" in CliRunner().invoke(app, arguments).output
    assert "--max-replicas" in CliRunner().invoke(app, ["deploy", "start", "--help"]).stdout


class Recorded(SimpleNamespace):
    """In place of the application: notes each call; ``is_joined``: there is a cluster."""

    def __init__(self, *, is_joined: bool) -> None:
        super().__init__(
            calls=[], Fleet=lambda **fleet: fleet, join=lambda address: self.note("join", address) or is_joined
        )
        for name in ("start", "check_proxies", "listen", "deploy", "is_deployed", "end"):
            setattr(self, name, partial(self.note, name))

    def note(self, name: str, *given: Any, **more: Any) -> None:
        self.calls.append((name, *given, *more.values()))


@pytest.mark.parametrize("is_joined", [False, True])
def test_what_is_deployed(is_joined: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of the fleet and of each server; Ray is started and ended only where there is no cluster."""
    ray = Recorded(is_joined=is_joined)
    monkeypatch.setattr(deploy, "find_spec", lambda name: name)
    monkeypatch.setattr("shared.deployment.application", ray, raising=False)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    fleet = ("--replicas", "2", "--max-replicas", "5", "--target-ongoing-requests", "7", "--upscale-delay", "1")
    fleet += ("--downscale-delay", "2", "--router", "two-choices", "--cpus", "0", "--gpus", "0.5", "--address", "here")
    server = ("--served-model-name", "m", "--api-key", "k", "--named-events", "--allowed-hosts", "a,b", "--grace", "9")
    server += ("--chat-template", "builtin:chatml", "--max-body-bytes", "8", "--port", "0", "--host", "127.0.0.1")
    engine = ("--max-batch-size", "3", "--max-waiting-requests", "4", "--phase", "09")
    for arguments in ((*fleet, *server, *engine), ("--port", "0", "--max-batch-size", "3")):
        result = CliRunner().invoke(app, ["deploy", str(folder), *arguments])
        assert result.exit_code == 0, result.output
    (_, load, config, made, is_process), (_, _, default, alone, _) = (call for call in ray.calls if call[0] == "deploy")
    assert config == ServerConfig(
        "m",
        api_key="k",
        named_events=True,
        allowed_hosts=("a", "b"),
        grace=9.0,
        chat_template="builtin:chatml",
        max_body_bytes=8,
    )
    assert (default, is_process) == (ServerConfig(folder.name), False)
    names = ("replicas", "max_replicas", "target_ongoing_requests", "upscale_delay", "downscale_delay")
    names += ("max_ongoing_requests", "ranks", "cpus", "gpus", "router")
    assert made == dict(zip(names, (2, 5, 7, 1.0, 2.0, 7, 1, 0.0, 0.5, "two-choices"), strict=True))
    assert alone == dict(zip(names, (1, 1, 3, 10.0, 300.0, 1027, 1, 1.0, 0.0, "prefix"), strict=True))
    assert (load.func, load.args) == (load_warm, ("09", str(folder), "json", False))
    assert (load.keywords["max_batch_size"], load.keywords["device"]) == (3, "cpu")
    steps = (
        ["join", "check_proxies", "listen", "deploy"]
        if is_joined
        else ["join", "start", "listen", "deploy", "is_deployed", "end"]
    )
    assert [call[0] for call in ray.calls] == 2 * steps
    assert [call[1] for call in ray.calls if call[0] == "join"] == ["here", None]
    assert all(call[1] == "127.0.0.1" and (call[2] > 0) is not is_joined for call in ray.calls if call[0] == "listen")
