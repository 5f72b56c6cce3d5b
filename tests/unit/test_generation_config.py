"""What a checkpoint's generation_config.json says about sampling."""

import json
from pathlib import Path

import pytest

from shared.errors import ModelFolderError
from shared.loading.generation_config import sampling_defaults

QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2], "max_length": 9}


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (None, {}),
        ({"eos_token_id": 1}, {}),
        (QWEN, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        ({"top_k": 0, "repetition_penalty": 1.1, "min_p": None}, {"repetition_penalty": 1.1}),
        ({"min_p": 0.1}, {"min_p": 0.1}),
    ],
)
def test_the_sampling_settings_of_a_checkpoint(content: object, found: dict[str, float], tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert sampling_defaults(tmp_path) == found


@pytest.mark.parametrize("text", ["{", "[]", '{"temperature": -1}', '{"top_p": "x"}'])
def test_settings_that_are_none_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelFolderError, match="--no-generation-config"):
        sampling_defaults(tmp_path)
