"""An engine on a CPU beside another program: how fast it still is, beside an engine whose threads are fixed."""

import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TRIALS, TOKENS = 5, 32
WORKER = """
import json, sys
from benchmarks.timing import run
from phases.phase_12.engine import Engine
from shared.engine.config import EngineConfig
engine = Engine(EngineConfig(device="cpu", **json.loads(sys.argv[1])))
for line in sys.stdin:
    print(run(engine, [7] * 16, int(line)).decode_tokens_per_second, flush=True)
"""


@contextmanager
def worker(settings: dict[str, Any], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """An engine in a process of its own, which answers while it is asked."""
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", WORKER, json.dumps(settings)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=variables | environment, cwd=ROOT, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def speed(process: "subprocess.Popen[str]", num_tokens: int = TOKENS) -> float:
    """Tokens a second of one answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{num_tokens}\n")
    process.stdin.flush()
    return float(process.stdout.readline())


@pytest.mark.measured
@pytest.mark.demo
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_an_engine_shares_its_machine(demo_folder: Path, quantization: str | None) -> None:
    """Idle, an engine is as fast as on all cores; beside a loop that keeps one core busy, half as fast or more."""
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        pytest.skip("one core has no threads to choose from")
    settings = {"model": str(demo_folder), "quantization": quantization}
    with ExitStack() as stack:
        fixed = stack.enter_context(worker(settings, {"OMP_NUM_THREADS": str(cores)}))
        chosen = stack.enter_context(worker(settings, {}))
        for process in (fixed, chosen):
            speed(process)
        idle = [(speed(fixed), speed(chosen)) for _ in range(TRIALS)]
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as loop:
            try:
                slowest = speed(fixed, 4)
                speed(chosen)  # finds out
                shared = []
                for _ in range(TRIALS):
                    loop.send_signal(signal.SIGSTOP)
                    alone = speed(fixed)
                    loop.send_signal(signal.SIGCONT)
                    shared.append((alone, speed(chosen)))
            finally:
                loop.kill()
    gains = []
    for pairs in (idle, shared):
        fixed_rate, chosen_rate = (statistics.median(column) for column in zip(*pairs, strict=True))
        print({"fixed threads, idle": fixed_rate, "chosen": chosen_rate, "fixed, beside the loop": slowest})
        gains.append(chosen_rate / fixed_rate)
    assert gains[0] >= 0.95
    assert gains[1] >= 0.5
