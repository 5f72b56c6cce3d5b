"""The gain from a compressed cache: memory that no longer grows, more requests at a time; counted at small sizes."""

from pathlib import Path
from typing import Any

import pytest

from phases.phase_09.engine import Engine as Uncompressed
from phases.phase_09_2.engine import Engine
from shared.engine.config import EngineConfig
from shared.sampling.params import SamplingParams
from tests.mixed_requests import GREEDY
from tests.speed import ONE_ANSWER, time_one_answer

SNAP: dict[str, Any] = {
    "compress_method": "snapkv",
    "layer_budget": 32,
    "layer_upper_budget": 64,
    "steps_between_compressions": 16,
    "query_window_size": 8,
}
LONG, BLOCKS = 1024, 64  # tokens of a request; the pool holds one such request without compression


def serve(engine: Any, num_requests: int) -> tuple[int, int]:
    """The maximum requests that decode in a step, and the maximum blocks held by one of them."""
    for n in range(num_requests):
        params = SamplingParams(**GREEDY, max_new_tokens=LONG - 8)
        engine.add_request([n + 5] * 8, params)
    most_requests = most_blocks = 0
    while engine.has_work():
        engine.step()
        most_requests = max(most_requests, len(engine.last_step.decoded))
        tables = engine.pool.holdings()[1].values()
        most_blocks = max([most_blocks, *(len(table) for table in tables)])
    assert engine.pool.audit() == []
    return most_requests, most_blocks


def test_seven_long_answers_in_the_memory_of_one(folder: Path) -> None:
    """A thirty-second of the sizes used on a GPU: 1,024 tokens instead of 32,768, a budget of 64 instead of 2,048."""
    options: dict[str, Any] = {
        "model": str(folder),
        "max_seq_len": LONG,
        "num_gpu_blocks": BLOCKS,
        "max_batch_size": 8,
        "use_prefix_caching": False,
    }
    one = Uncompressed(EngineConfig(**options))
    assert serve(one, 1)[1] == BLOCKS
    engine = Engine(EngineConfig(**options, **SNAP))
    requests, blocks = serve(engine, 7)
    assert requests == 7
    assert blocks <= 0.12 * BLOCKS
    assert engine.load().num_preemptions == 0, "all of them to the end"
    assert engine.runner.num_tokens_computed == 7 * (LONG - 1)


@pytest.mark.measured
@pytest.mark.benchmark(group=ONE_ANSWER)
def test_generate(folder: Path, benchmark) -> None:
    time_one_answer(benchmark, Engine(EngineConfig(model=str(folder), max_batch_size=8, **SNAP)))
