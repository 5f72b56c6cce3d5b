"""What a report says of the machine: enough to judge a figure, nothing that tells whose machine it is."""

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

SLUG = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")


def test_it_names_what_computes():
    found = machine.describe_machine()
    assert found["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert found["torch_threads"] == torch.get_num_threads()
    assert 1 <= found["cores"] <= (os.cpu_count() or 1)
    assert found["memory_gib"] > 0
    assert (found["gpu"] is None) == (found["num_gpus"] == 0)
    assert found["cpu"]


def test_it_does_not_tell_whose_machine_it_is():
    text = json.dumps(machine.describe_machine())
    words = set(re.findall(r"[\w.-]+", text))
    assert socket.gethostname() not in words
    for path in (Path.home(), Path.cwd()):
        assert path == Path("/") or str(path) not in text


@pytest.mark.parametrize(
    ("cpu", "threads", "name", "title"),
    [
        ("Intel(R) Xeon(R) Processor @ 2.50GHz", 2, "cpu-2x-xeon-2.5ghz", "Intel Xeon 2.5GHz, 2 threads"),
        ("Intel(R) Xeon(R) CPU @ 2.00GHz", 1, "cpu-1x-xeon-2ghz", "Intel Xeon 2GHz, 1 thread"),
        ("AMD EPYC 7763 64-Core Processor", 8, "cpu-8x-epyc-7763", "AMD EPYC 7763 64-Core, 8 threads"),
        ("11th Gen Intel(R) Core(TM) i7-1185G7 @ 3.00GHz", 4, "cpu-4x-core-i7-1185g7-3ghz", None),
        ("Apple M2", 8, "cpu-8x-apple-m2", "Apple M2, 8 threads"),
        ("", 3, "cpu-3x-unknown", None),
    ],
)
def test_a_processor_gets_a_short_name(monkeypatch, cpu, threads, name, title):
    monkeypatch.setattr(machine, "cpu_model", lambda: cpu)
    monkeypatch.setattr(machine, "num_cores", lambda: 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert machine.machine_name("cpu") == name
    assert title is None or machine.machine_title("cpu") == title


def test_threads_beyond_the_cores_do_not_count(monkeypatch):
    monkeypatch.setattr(machine, "cpu_model", lambda: "Apple M2")
    monkeypatch.setattr(machine, "num_cores", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert machine.machine_name("cpu") == "cpu-2x-apple-m2"


@pytest.mark.parametrize(("count", "name"), [(1, "nvidia-h100-80gb-hbm3"), (4, "4x-nvidia-h100-80gb-hbm3")])
def test_a_gpu_names_the_machine_unless_the_cpu_computes(monkeypatch, count, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    assert machine.machine_name() == machine.machine_name("cuda") == machine.machine_name("cuda:0") == name
    assert machine.machine_name("cpu").startswith("cpu-")


@given(st.text())
def test_a_slug_is_safe_in_a_file_name(text):
    made = machine.slug(text)
    assert SLUG.fullmatch(made)
    assert machine.slug(made) == made
