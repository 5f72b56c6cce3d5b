"""Reports: written whole, read by key, free of paths; and the machine, told well enough to judge a figure."""

import json
import os
import re
import socket
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import machine
from benchmarks.report import Report, describe_model, engine_settings, read_value, write_report
from benchmarks.view import Bar, Bars, Column, Table, View, text
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
    rows = [{"name": number} | result for number, result in RESULTS.items()]
    columns = [text("phase", "name"), Column("tok/s", "decode_tokens_per_second")]
    panel = Bars("Speed", [("", [Bar(row["name"], row["decode_tokens_per_second"], "") for row in rows])])
    view = View("Speed: a model", ["about"], [Table("", columns, rows)], panels=[panel])
    paths = write_report(report, tmp_path / "a" / "b", view=view)
    stem = f"ladder-owner-some-model-{machine.machine_name('cpu')}"
    assert [path.name for path in paths] == [stem + end for end in (".json", ".md", ".png")]
    content = json.loads(paths[0].read_text())
    assert (content["schema"], content["seed"], content["results"]) == (1, 7, RESULTS)
    assert content["engines"]["02"] == engine_settings(EngineConfig(), "owner/some model")
    assert {"python", "torch", "transformers"} <= set(content["versions"])
    assert "/somewhere" not in paths[0].read_text()
    assert "| 03.1 | 31.0 |" in paths[1].read_text()
    assert paths[2].stat().st_size > 1000
    assert json.loads(report.line())["results"] == RESULTS
    assert "\n" not in report.line()
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report(report, paths[0] / "reports", view=view)


def test_a_value_is_read_by_its_dotted_key_and_a_missing_one_names_those_there_are(report, tmp_path):
    path = write_report(report, tmp_path, view=View("Speed: a model", [], []))[0]
    found = {"results.02.ms_per_token.16": 41.2, "results.03.1.peer": None, "results.02.trials.1": 7.5, "seed": 7}
    assert {key: read_value(path, key) for key in found} == found
    for key, told in (
        ("results.04.speedup", "results has 02, 03.1"),
        ("results.03.1.speed", "results.03.1 has decode_tokens_per_second"),
        ("results.02.trials.-1", "results.02.trials has 0, 1"),
        ("seed.x", "seed has nothing"),
        ("", "its top level has"),
    ):
        with pytest.raises(ConfigError, match=told):
            read_value(path, key)
    path.write_text("{")
    for wrong in (path, tmp_path / "none.json"):
        with pytest.raises(ConfigError, match=wrong.name):
            read_value(wrong, "seed")


def test_a_model_is_described_by_name_revision_shape_and_checksum(tmp_path):
    folder = tmp_path / "models--owner--name" / "snapshots" / "abc123"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"hidden_size": 8, "_name_or_path": "/secret/place"}')
    about = describe_model(str(folder))
    assert (about["name"], about["revision"], about["config"]) == ("owner/name", "abc123", {"hidden_size": 8})
    plain = folder.rename(tmp_path / "my-model")
    assert describe_model(str(plain)) == about | {"name": "my-model", "revision": None}
    (plain / "config.json").write_text("{}")
    assert describe_model(str(plain))["config_sha256"] != about["config_sha256"]
    with pytest.raises(ModelFolderError):
        describe_model(str(folder))


def test_the_machine_is_named_by_what_computes_and_not_by_whose_it_is():
    found = machine.describe_machine()
    assert 1 <= found["cores"] <= (os.cpu_count() or 1)
    assert (found["gpu"] is None) == (found["num_gpus"] == 0)
    words = set(re.findall(r"[\w.-]+", json.dumps(found)))
    assert socket.gethostname() not in words
    assert not any(path != Path("/") and str(path) in json.dumps(found) for path in (Path.home(), Path.cwd()))


@pytest.mark.parametrize(
    ("cpu", "threads", "name", "title"),
    [
        ("Intel(R) Xeon(R) Processor @ 2.50GHz", 2, "cpu-2x-xeon-2.5ghz", "Intel Xeon 2.5GHz, 2 threads"),
        ("AMD EPYC 7763 64-Core Processor", 99, "cpu-64x-epyc-7763", "AMD EPYC 7763 64-Core, 64 threads"),
        ("", 3, "cpu-3x-unknown", None),
    ],
)
def test_a_processor_gets_a_short_name(monkeypatch, cpu, threads, name, title):
    monkeypatch.setattr(machine, "cpu_model", lambda: cpu)
    monkeypatch.setattr(machine, "num_cores", lambda: 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert machine.machine_name("cpu") == name
    assert title is None or machine.machine_title("cpu") == title


def test_a_gpu_names_the_machine_unless_the_cpu_computes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert machine.machine_name() == machine.machine_name("cuda:0") == "4x-nvidia-h100-80gb-hbm3"
    assert machine.machine_name("cpu").startswith("cpu-")


@given(st.text())
def test_a_slug_is_safe_in_a_file_name(told):
    made = machine.slug(told)
    assert re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", made)
    assert machine.slug(made) == made
