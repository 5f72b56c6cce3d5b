"""What drafts buy: several tokens for one reading of the weights."""

import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from phases.phase_10.engine import Engine as Plain
from phases.phase_11.engine import Engine
from shared.engine.config import EngineConfig
from shared.sampling.params import SamplingParams

NGRAM: dict[str, Any] = {"use_speculative_decoding": True, "drafter": "ngram"}
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
TEXT = (
    "The lighthouse was built in 1828 by Robert Stevenson. It stands 122 metres above the sea, and its lamp is seen "
    "from a distance of 22 nautical miles. The keepers left in 1998, when the light was automated."
)
EDIT = f"<|im_start|>user\nRepeat this text word for word:\n\n{TEXT}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.benchmark(group="decode 16 tokens after 32, tiny model")
def test_generate(tiny_checkpoints: dict[str, Path], benchmark) -> None:
    engine = Engine(EngineConfig(model=str(tiny_checkpoints["llama"]), max_batch_size=8, **NGRAM))
    params = SamplingParams(**GREEDY, max_new_tokens=16)
    benchmark.pedantic(lambda: list(engine.generate([7] * 32, params)), rounds=5, warmup_rounds=1)


@pytest.mark.demo
@pytest.mark.slow
def test_a_text_that_repeats_is_written_faster(demo_folder: Path) -> None:
    """Measured: 2.1 to 3.0 times, in 27 % of the steps."""
    about: dict[str, Any] = {"max_seq_len": 256, "max_batch_size": 1, "use_prefix_caching": False}
    engines = [phase(EngineConfig(str(demo_folder), **about, **more)) for phase, more in ((Plain, {}), (Engine, NGRAM))]
    seconds: list[list[float]] = [[], []]
    answers, num_forwards = [], [0, 0]
    for number in (0, 1) * 3:
        engine = engines[number]
        before, begin = engine.runner.num_forwards, time.perf_counter()
        answers.append([o.token_id for o in engine.generate(EDIT, SamplingParams(**GREEDY, max_new_tokens=48))])
        seconds[number].append(time.perf_counter() - begin)
        num_forwards[number] = engine.runner.num_forwards - before
    assert all(answer == answers[0] for answer in answers)
    assert num_forwards[1] < num_forwards[0] / 2
    assert statistics.median(seconds[0]) / statistics.median(seconds[1]) > 1.3, seconds
