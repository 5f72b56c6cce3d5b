"""The memory of a crowded server as `/debug/memory` shows it, after each step of an engine with few blocks."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from phases.phase_12.engine import Engine
from shared.engine.config import EngineConfig
from shared.lessons import find_lesson
from shared.sampling.params import SamplingParams
from tests.unit.server.echo import serving
from tests.unit.server.exchange import completion, events, samples

BLOCKS, BLOCK_SIZE = 12, 8
GREEDY = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
PROMPTS = [[n + 1] * 10 for n in range(4)]
"""Their answers of 60 tokens need 9 blocks each: the fourth request is preempted, and waits until another has ended."""


def test_the_memory_of_a_crowded_server_is_shown_truly(folder: Path) -> None:
    engine: Any = Engine(EngineConfig(str(folder), max_seq_len=96, num_gpu_blocks=BLOCKS, block_size=BLOCK_SIZE))
    engine.may_step = threading.Event()  # which `serving` sets at its end
    step, has_work, num_steps, num_allowed = engine.step, engine.has_work, 0, 0

    def counted_step() -> Any:
        nonlocal num_steps
        num_steps += 1
        return step()

    engine.step, engine.has_work = counted_step, lambda: num_steps < num_allowed and has_work()
    states: dict[str, list[str]] = {}
    with serving(engine) as running, running.client() as client, ThreadPoolExecutor(len(PROMPTS)) as aside:
        answers = [
            aside.submit(client.post, "/v1/completions", json=completion(prompt, **GREEDY)) for prompt in PROMPTS
        ]
        while not all(answer.done() for answer in answers):
            num_allowed = num_steps + 1  # one more step after this question, which wakes the engine
            memory = client.get("/debug/memory").json()
            blocks = [block for holding in memory["holdings"] for block in holding["blocks"]]
            assert len(set(blocks)) == len(blocks) == BLOCKS - memory["num_free"] - len(memory["cached"])
            assert (memory["unit"], memory["block_tokens"], memory["num_blocks"]) == ("block", BLOCK_SIZE, BLOCKS)
            written = 0
            for holding in memory["holdings"]:
                states.setdefault(holding["request_id"], []).append(holding["state"])
                written += holding["num_written"]
                if holding["state"] == "preempted":
                    assert (holding["blocks"], holding["num_written"]) == ([], 0)
                else:
                    assert len(holding["blocks"]) >= -(-holding["num_written"] // BLOCK_SIZE)
            if blocks:
                assert memory["written_share"] == pytest.approx(written / len(blocks) / BLOCK_SIZE)
        plain = find_lesson("03").engine(EngineConfig(str(folder)))
        params = SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True)
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            found = [data["token_id"] for _, data in events(answer.result().text)[:-1]]
            assert found == [output.token_id for output in plain.generate(prompt, params)]
        assert client.get("/debug/memory").json()["holdings"] == []
        state, metrics = client.get("/debug/engine").json(), samples(client)
    assert (state["audit"], state["load"]["kv_usage"]) == ([], 0)
    preempted = [name for name, seen in states.items() if "preempted" in seen]
    assert preempted
    assert len(states) == len(PROMPTS)
    assert metrics["infer:num_preemptions_total{}"] == state["load"]["num_preemptions"] >= len(preempted)
    # A preempted and readmitted request is one request, with one first token and one wait in the queue.
    assert metrics["infer:time_to_first_token_seconds_count{}"] == 4
    assert metrics["infer:request_queue_time_seconds_count{}"] == 4
    assert metrics["infer:prompt_tokens_total{}"] == 40
