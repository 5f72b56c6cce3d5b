"""``infer serve`` as a process of its own, as a user would run it."""

import json
import signal
from pathlib import Path
from typing import Any

import httpx
import openai

from tests.integration.infer_process import InferProcess
from tests.waiting import PATIENCE, wait_until

MODEL = "tiny-llama"
START_SECONDS = 300
EVENTS = {"Accept": "text/event-stream"}


class ServerProcess:
    """A server that runs as a user would run it; what it logs goes to a file."""

    def __init__(self, folder: Path, log: Path, *options: str, descriptors: int | None = None) -> None:
        """``descriptors``: the most that the process may have open; None: as many as this one."""
        self.log = log
        self.process = InferProcess("serve", str(folder), "--port", "0", *options, log=log, descriptors=descriptors)
        wait_until(lambda: bool(self.events("ready")) or self.process.poll() is not None, START_SECONDS)
        assert self.process.poll() is None, log.read_text()
        self.url = self.events("ready")[0]["url"]

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.endswith("}")]
        return [line for line in lines if line["event"] == name]

    def client(self) -> httpx.Client:
        """A client that asks completions for named events."""
        # Without verify=False, each client reads the certificates of the system: 20 ms.
        return httpx.Client(base_url=self.url, timeout=PATIENCE, trust_env=False, verify=False, headers=EVENTS)

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", timeout=PATIENCE, max_retries=0)

    def state(self) -> dict[str, Any]:
        """What the engine says of itself between two steps."""
        with self.client() as client:
            return client.get("/debug/engine").json()

    def wait_until_idle(self) -> None:
        """Nothing runs, nothing waits, and the audit of the memory finds nothing."""
        state: dict[str, Any] = {}

        def is_idle() -> bool:
            state.update(self.state())
            return state["num_open_requests"] == 0 and state["load"]["num_running"] == state["load"]["num_waiting"] == 0

        wait_until(is_idle)
        assert state["audit"] == []
        assert state["load"]["kv_usage"] == 0

    def end(self, sig: int = signal.SIGTERM) -> int:
        """Its exit code after a signal."""
        if self.process.poll() is None:
            self.process.send_signal(sig)
        try:
            return self.process.wait(PATIENCE)
        finally:
            self.process.kill()
