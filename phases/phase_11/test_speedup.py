"""The gain from drafts: several tokens for one pass over the weights."""

from pathlib import Path
from typing import Any

import pytest

from phases.phase_10.engine import Engine as Plain
from phases.phase_11.engine import Engine
from shared.engine.config import EngineConfig
from shared.speculation.adaptive import a_tenth
from tests.speed import ONE_ANSWER, Served, serve, speedup, time_one_answer

NGRAM: dict[str, Any] = {"use_speculative_decoding": True, "drafter": "ngram"}
TEXT = (
    "The lighthouse was built in 1828 by Robert Stevenson. It stands 122 metres above the sea, and its lamp is seen "
    "from a distance of 22 nautical miles. The keepers left in 1998, when the light was automated."
)
EDIT = f"<|im_start|>user\nRepeat this text word for word:\n\n{TEXT}<|im_end|>\n<|im_start|>assistant\n"


def repeat(engine: Any, num_tokens: int) -> Served:
    return serve(engine, [engine.tokenizer.encode(EDIT)], num_tokens)


@pytest.fixture(scope="module")
def engines(demo_folder: Path) -> tuple[Plain, Engine]:
    settings: dict[str, Any] = {"max_seq_len": 256, "max_batch_size": 1, "use_prefix_caching": False}
    folder = str(demo_folder)
    return Plain(EngineConfig(folder, **settings)), Engine(EngineConfig(folder, **settings, **NGRAM))


@pytest.mark.measured
@pytest.mark.benchmark(group=ONE_ANSWER)
def test_generate(folder: Path, benchmark) -> None:
    time_one_answer(benchmark, Engine(EngineConfig(model=str(folder), max_batch_size=8, **NGRAM)))


@pytest.mark.demo
def test_a_text_that_repeats_takes_fewer_than_half_of_the_forward_passes(
    engines: tuple[Plain, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fixed step times: otherwise this machine's would determine how many drafts are tried."""
    monkeypatch.setattr(engines[1].scheduler.lengths, "costs_of", a_tenth)
    plain, drafting = (repeat(engine, 32) for engine in engines)
    assert drafting.answers == plain.answers
    assert drafting.num_forwards < plain.num_forwards / 2


@pytest.mark.measured
@pytest.mark.demo
def test_a_text_that_repeats_is_written_faster(engines: tuple[Plain, Engine]) -> None:
    """Measured: 2.1 to 3.0 times, in 27 % of the steps."""
    plain, drafting = engines
    assert speedup(lambda: repeat(plain, 48).seconds, lambda: repeat(drafting, 48).seconds) > 1.3
