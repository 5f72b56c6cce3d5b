"""Reports: written whole, read by key, free of paths."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.machine import machine_name
from benchmarks.report import Report, describe_model, engine_settings, read_value, rounded, write_report
from shared.engine.config import EngineConfig
from shared.errors import ConfigError, ModelFolderError

RESULTS = {
    "02": {"decode_tokens_per_second": 7.5, "ms_per_token": {"16": 41.2}, "trials": [7.4, 7.5]},
    "03.1": {"decode_tokens_per_second": 31.0, "ms_per_token": {"16": 30.5}, "peer": None},
}


@pytest.fixture
def report() -> Report:
    model = {"name": "owner/some model", "revision": None, "config_sha256": "0" * 64, "config": {"hidden_size": 8}}
    engines = {"02": engine_settings(EngineConfig(model="/somewhere/on/disk"), model["name"])}
    return Report("ladder", model, engines, seed=7, flags={"trials": 2}, results=RESULTS)


def test_the_file_tells_everything_and_no_path(report, tmp_path):
    (path,) = write_report(report, tmp_path / "a" / "b")
    assert path == tmp_path / "a" / "b" / f"ladder-owner-some-model-{machine_name('cpu')}.json"
    content = json.loads(path.read_text())
    assert content["schema"] == 1
    assert content["seed"] == 7
    assert content["results"] == RESULTS
    assert content["engines"]["02"] == engine_settings(EngineConfig(), "owner/some model")
    assert set(EngineConfig.__dataclass_fields__) <= set(content["engines"]["02"])
    assert {"python", "torch", "transformers"} <= set(content["versions"])
    assert content["machine"]["cpu"]
    assert "versions" not in content["machine"]
    assert "/somewhere" not in path.read_text()
    assert str(tmp_path) not in path.read_text()


def test_table_and_figure_stand_beside_it(report, tmp_path):
    def figure(path: Path) -> None:
        path.write_bytes(b"picture")

    paths = write_report(report, tmp_path, table="| a |", figure=figure)
    assert [path.suffix for path in paths] == [".json", ".md", ".png"]
    assert {path.stem for path in paths} == {report.file_stem}
    assert paths[1].read_text() == "| a |\n"
    assert paths[2].read_bytes() == b"picture"


def test_the_line_is_one_line_of_json_with_the_results(report):
    assert "\n" not in report.line()
    line = json.loads(report.line())
    assert line["results"] == RESULTS
    assert line["machine"] == machine_name("cpu")


def test_a_folder_that_cannot_be_made_is_refused(report, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report(report, tmp_path / "file" / "reports")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("results.02.decode_tokens_per_second", 7.5),
        ("results.02.ms_per_token.16", 41.2),
        ("results.03.1.ms_per_token.16", 30.5),
        ("results.03.1.peer", None),
        ("results.02.trials.1", 7.5),
        ("flags.trials", 2),
        ("seed", 7),
    ],
)
def test_a_value_is_read_by_its_dotted_key(report, tmp_path, key, value):
    assert read_value(write_report(report, tmp_path)[0], key) == value


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("results.04.speedup", "results has 02, 03.1"),
        ("results.03.1.speed", "results.03.1 has decode_tokens_per_second"),
        ("results.02.trials.2", "results.02.trials is a list of 2"),
        ("results.02.trials.-1", "list of 2"),
        ("seed.x", "seed is a plain value"),
        ("", "its top level has"),
    ],
)
def test_a_missing_key_names_those_there_are(report, tmp_path, key, told):
    with pytest.raises(ConfigError) as caught:
        read_value(write_report(report, tmp_path)[0], key)
    assert told in str(caught.value)


@pytest.mark.parametrize("content", [None, "{", '"text'])
def test_a_file_that_is_no_report_is_refused(tmp_path, content):
    path = tmp_path / "report.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"report\.json"):
        read_value(path, "seed")


names = st.text("abc01", min_size=1, max_size=4)
trees = st.recursive(
    st.integers() | st.text(max_size=3),
    lambda inner: st.dictionaries(names, inner, min_size=1, max_size=3),
    max_leaves=12,
)


@given(tree=st.dictionaries(names, trees, min_size=1, max_size=4))
def test_every_leaf_can_be_read(tree, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "tree.json"
    path.write_text(json.dumps(tree))

    def leaves(node, key):
        if isinstance(node, dict):
            for name, value in node.items():
                yield from leaves(value, [*key, name])
        else:
            yield ".".join(key), node

    for key, value in leaves(tree, []):
        assert read_value(path, key) == value


@given(st.floats(min_value=1e-12, max_value=1e12))
def test_rounding_keeps_four_digits(value):
    assert rounded(value) == pytest.approx(value, rel=5.001e-4)
    assert len(f"{rounded(value):.10e}".split("e")[0].replace(".", "").rstrip("0")) <= 4


def test_the_model_is_described_by_name_shape_and_checksum(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 8, "_name_or_path": "/secret/place"}')
    about = describe_model(str(folder))
    assert about["name"] == "my-model"
    assert about["revision"] is None
    assert about["config"] == {"hidden_size": 8}
    before = about["config_sha256"]
    (folder / "config.json").write_text('{"hidden_size": 9}')
    assert describe_model(str(folder))["config_sha256"] != before


def test_a_snapshot_of_the_hub_keeps_its_revision(tmp_path):
    folder = tmp_path / "models--owner--name" / "snapshots" / "abc123"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    about = describe_model(str(folder))
    assert (about["name"], about["revision"]) == ("owner/name", "abc123")


def test_a_model_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ModelFolderError):
        describe_model(str(tmp_path / "nothing"))
