"""``infer deploy`` as a process: the same answers as ``infer serve``, replicas that are killed, updates under load."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from shared.engine.llm import LLM
from shared.sampling.params import SamplingParams
from tests.integration.infer_process import INFER, heed_interrupts
from tests.integration.server_process import MODEL, START_SECONDS, ServerProcess
from tests.ranks import checkpoint_for_ranks
from tests.waiting import PATIENCE, wait_until

pytest.importorskip("ray", reason="Ray is not installed; pip install '.[ray]'")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
KEY = {"Authorization": "Bearer secret"}
OPTIONS = ("--api-key", "secret", "--served-model-name", MODEL, "--max-num-batched-tokens", "256")
FLEET = ("--replicas", "2", "--cpus", "0.5", "--port", "0", *OPTIONS)
LONG = 2000
"""Tokens of a stream that takes seconds."""


class Deployed:
    """``infer deploy`` in the foreground, with the Ray that it started."""

    def __init__(self, folder: Path, log: Path, *options: str) -> None:
        self.log = log
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [*INFER, "deploy", str(folder), *FLEET, *options]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output, preexec_fn=heed_interrupts
            )
        wait_until(lambda: "is served at" in self.text() or self.process.poll() is not None, START_SECONDS)
        assert self.process.poll() is None, self.text()
        found = re.search(r"is served at (\S+)", self.text())
        assert found is not None
        self.url = found[1]

    def text(self) -> str:
        return self.log.read_text()

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE, trust_env=False, verify=False, headers=KEY)

    def replica_pids(self) -> list[int]:
        """Ray's processes are descendants of the command."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [one.pid for one in found if any("ServeReplica:infer:Replica" in part for part in one.cmdline())]

    def health(self) -> dict[str, Any]:
        with self.client() as client:
            return client.get("/health").json()

    def counts(self, name: str) -> list[float]:
        """A metric of each replica."""
        with self.client() as client:
            text = client.get("/metrics").text
        return [float(count) for count in re.findall(rf"{name}.*\}} (\S+)", text)]

    def num_running(self) -> list[float]:
        return self.counts(r"infer:num_requests_running\{")

    def num_aborted(self) -> float:
        return sum(self.counts(r'infer:request_success_total\{.*finished_reason="abort"'))

    def stream(self, prompt: str, num_tokens: int) -> tuple[str, list[dict[str, Any]]]:
        """The replica's name, and the events of a long stream, `[DONE]` left out."""
        body = {**completion(prompt, num_tokens), "stream": True, "ignore_eos": True}
        with self.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
        assert lines.pop() == "[DONE]"
        return response.headers["x-replica"], [json.loads(line) for line in lines]


def completion(prompt: str, num_tokens: int = 8) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}


def infer(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*INFER, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=START_SECONDS)


GROUPS = """
import json, ray
ray.init("auto", log_to_driver=False, logging_level="error")
groups = ray.util.placement_group_table().values()
print(json.dumps([[group["state"], group["strategy"], group["bundles"]] for group in groups]))
"""


def test_two_ranks_stand_in_one_placement_group_and_an_interrupt_ends_everything(
    session_folder: Path, tmp_path: Path
) -> None:
    """The first test, because later ones share a cluster that this command would join."""
    model = checkpoint_for_ranks("llama", session_folder)
    running = Deployed(model, tmp_path / "log", "--replicas", "1", "--cpus", "1", "--tensor-parallel-size", "2")
    assert "phase 12.1" in running.text()

    found = subprocess.run([sys.executable, "-c", GROUPS], capture_output=True, text=True, timeout=START_SECONDS)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout.splitlines()[-1]) == [["CREATED", "STRICT_PACK", {"0": {"CPU": 1.0}}]]
    (replica,) = running.replica_pids()
    started = psutil.Process(replica).children(recursive=True)
    assert len([one for one in started if any("shared.tracks.ranks.worker" in part for part in one.cmdline())]) == 1

    with running.client() as client:
        answer = client.post("/v1/completions", json=completion("Once upon a time")).json()
    params = SamplingParams(temperature=0.0, max_new_tokens=8)
    (alone,) = LLM(str(model), max_seq_len=64).generate(["Once upon a time"], params, progress=False)
    assert answer["choices"][0]["text"] == alone.text

    processes = psutil.Process(running.process.pid).children(recursive=True)
    assert len(processes) > 5
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(PATIENCE) == 130
    assert "interrupted" in running.text()
    assert "logging.cc" not in running.text()
    _, alive = psutil.wait_procs(processes, PATIENCE)
    assert not alive


@pytest.fixture(scope="module")
def deployed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    running = Deployed(folder, tmp_path_factory.mktemp("deployed") / "log")
    try:
        yield running
        down = infer("deploy", "down")
        assert down.returncode == 0, down.stderr
        assert running.process.wait(PATIENCE) == 0
    finally:
        running.process.send_signal(signal.SIGTERM)
        running.process.wait(PATIENCE)


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    running = ServerProcess(folder, tmp_path_factory.mktemp("served") / "log", *OPTIONS)
    yield running
    running.end()


TALK = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0}
REQUESTS = [
    ("POST", "/v1/completions", completion("the same answer")),
    ("POST", "/v1/completions", {**completion("two of them"), "n": 2}),
    ("POST", "/v1/completions", {**completion("as a stream"), "stream": True}),
    ("POST", "/v1/chat/completions", {**TALK, "stream": True}),
    ("POST", "/v1/completions", completion("too many", 10**9)),
    ("POST", "/v1/completions", {**completion("x"), "unknown": 1}),
    ("POST", "/v1/completions", {**completion("x"), "model": "another"}),
    ("POST", "/v1/completions", []),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/another", None),
    ("GET", "/nowhere", None),
    ("DELETE", "/v1/models", None),
    ("GET", "/openapi.json", None),
    ("GET", "/", None),
]


@pytest.mark.parametrize(("method", "path", "body"), REQUESTS)
def test_it_answers_as_one_server_does(
    deployed: Deployed, served: ServerProcess, method: str, path: str, body: Any
) -> None:
    answers = []
    for url in (deployed.url, served.url):
        with httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False, headers=KEY) as client:
            answer = client.request(method, path, json=body)
            unique = re.sub(r'"(id|created)":("[^"]*"|\d+)', r'"\1":0', answer.text)
            assert len(answer.headers.get_list("x-request-id")) == 1
            answers.append((answer.status_code, answer.headers["content-type"], unique))
    assert answers[0] == answers[1]


def test_the_key_and_the_length_are_checked_before_a_replica_is_chosen(deployed: Deployed) -> None:
    with deployed.client() as client:
        refused = client.post("/v1/completions", json=completion("x"), headers={"Authorization": "Bearer wrong"})
        too_long = client.post("/v1/completions", content=b" " * (2**21 + 1))
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    assert (too_long.status_code, too_long.json()["error"]["code"]) == (413, "body_too_large")
    assert "x-replica" not in {**refused.headers, **too_long.headers}


def test_health_metrics_and_status_count_every_replica(deployed: Deployed) -> None:
    assert deployed.health() == {
        "status": "ok",
        "message": None,
        "live": True,
        "ready": True,
        "replicas": {"RUNNING": 2},
    }
    with deployed.client() as client:
        text = client.get("/metrics").text
    assert len(set(re.findall(r'infer:num_requests_running\{.*replica="(\w+)"', text))) == 2
    assert "# TYPE infer:generation_tokens_total counter" in text
    shown = infer("deploy", "status")
    assert shown.returncode == 0
    assert "2 running" in shown.stdout


def test_requests_with_one_beginning_go_to_one_replica(deployed: Deployed) -> None:
    beginnings = [f"{name} " * 60 for name in ("alpha", "beta", "gamma", "delta")]
    with deployed.client() as client:
        replicas = [
            {
                client.post("/v1/completions", json=completion(f"{beginning}{turn}", 1)).headers["x-replica"]
                for turn in range(6)
            }
            for beginning in beginnings
        ]
        session = {"X-Session-Id": "s"}
        of_session = {
            client.post("/v1/completions", json=completion(f"{turn}", 1), headers=session).headers["x-replica"]
            for turn in range(6)
        }
    assert [len(names) for names in (*replicas, of_session)] == [1] * 5


def test_a_client_that_leaves_ends_its_request_in_the_engine(deployed: Deployed) -> None:
    before = deployed.num_aborted()
    body = {**completion("leaving", LONG), "stream": True, "ignore_eos": True}
    with deployed.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())

    wait_until(lambda: deployed.num_running() == [0, 0])
    assert deployed.num_aborted() == before + 1, "it was not answered to its end"


def test_a_killed_replica_loses_its_own_streams_alone(deployed: Deployed) -> None:
    victim = psutil.Process(deployed.replica_pids()[0])
    with ThreadPoolExecutor(8) as threads:
        streams = [threads.submit(deployed.stream, f"{index} kill", LONG) for index in range(8)]
        wait_until(lambda: len(busy := deployed.num_running()) == 2 and min(busy) > 0)
        victim.kill()
        wait_until(lambda: deployed.health()["status"] == "degraded")
        with deployed.client() as client:  # the other replica serves meanwhile
            assert client.post("/v1/completions", json=completion("after")).status_code == 200
        ended = [stream.result() for stream in streams]
    lost = {replica for replica, events in ended if "error" in events[-1]}
    assert len(lost) == 1
    for replica, events in ended:
        if replica in lost:
            assert events[-1]["error"]["code"] == "replica_lost"
        else:
            assert events[-1]["choices"][0]["finish_reason"] == "length"
    wait_until(lambda: deployed.health()["status"] == "ok", START_SECONDS)
    assert victim.pid not in deployed.replica_pids()


def test_an_update_and_scaling_under_load_lose_nothing(deployed: Deployed, folder: Path) -> None:
    """Three streams are a load for one replica, so one of two drains and leaves after the update; nine are for two."""
    scaling = ("--replicas", "1", "--max-replicas", "2", "--target-ongoing-requests", "4")
    delays = ("--upscale-delay", "1", "--downscale-delay", "15")
    is_over = threading.Event()

    def one_after_another(index: int) -> list[tuple[str, list[dict[str, Any]]]]:
        ended = []
        while not is_over.is_set():
            ended.append(deployed.stream(f"{index} update", 300))
        return ended

    def is_running(num_replicas: int) -> bool:
        return deployed.health()["replicas"] == {"RUNNING": num_replicas}

    before = deployed.replica_pids()
    with ThreadPoolExecutor(9) as threads:
        try:
            loads = [threads.submit(one_after_another, index) for index in range(3)]
            update = infer("deploy", str(folder), *FLEET, *scaling, *delays)
            assert update.returncode == 0, update.stderr
            assert not {*before} & {*deployed.replica_pids()}
            wait_until(lambda: is_running(1), START_SECONDS)
            loads += [threads.submit(one_after_another, index) for index in range(3, 9)]
            wait_until(lambda: is_running(2), START_SECONDS)
            wait_until(lambda: min(deployed.num_running()) > 0)  # the new one has a share of the load
        finally:
            is_over.set()
        ended = [stream for load in loads for stream in load.result()]
    assert len({replica for replica, _ in ended}) > 3  # old ones, new ones, and the one that came with the load
    assert {events[-1].get("choices", [{}])[0].get("finish_reason") for _, events in ended} == {"length"}
