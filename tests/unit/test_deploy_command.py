"""``infer deploy`` without Ray, and its arguments; with Ray, tests/integration/test_deploy.py."""

import pytest
from typer.testing import CliRunner

from shared.cli import app, deploy


@pytest.mark.parametrize("arguments", [["tiny"], ["--replicas", "2", "tiny"], ["status"], ["down"]])
def test_without_ray_one_sentence_says_what_to_install(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["deploy", *arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    said = "infer deploy needs Ray Serve: pip install 'infer-course[ray]', or '.[ray]' in a checkout."
    assert result.stderr == f"error: {said}\n"


def test_help_lists_the_commands_and_each_has_its_own() -> None:
    assert "status" in CliRunner().invoke(app, ["deploy", "--help"]).stdout
    assert "--max-replicas" in CliRunner().invoke(app, ["deploy", "start", "--help"]).stdout
