"""The gain from an adapter: several tokens per forward where its guesses are right."""

import json
from pathlib import Path
from typing import Any

import pytest

from phases.phase_11_1.engine import Engine
from shared.engine.config import EngineConfig
from shared.engine.llm import LLM
from shared.sampling.params import SamplingParams
from shared.text.chat import ChatMessage, encode_chat
from shared.tracks.multi_token.training.own_texts import PROMPTS
from tests.adapters import random_adapter_of
from tests.drafts import Foresight
from tests.mixed_requests import GREEDY
from tests.speed import ONE_ANSWER, time_one_answer

PROMPT = [7] * 32


def make(folder: Path, **more: Any) -> Engine:
    options = {"use_speculative_decoding": True, "adapter": str(random_adapter_of(folder)), "adapt_spec_length": False}
    return Engine(EngineConfig(model=str(folder), max_batch_size=8, max_seq_len=128, **options | more))


@pytest.mark.measured
@pytest.mark.benchmark(group=ONE_ANSWER)
def test_generate(folder: Path, benchmark) -> None:
    time_one_answer(benchmark, make(folder))


def test_right_guesses_give_four_tokens_a_forward(folder: Path) -> None:
    """Masks are computed in every step, but only real tokens have logits."""
    params = SamplingParams(**GREEDY, max_new_tokens=41)
    plain = Engine(EngineConfig(model=str(folder), max_seq_len=128))
    answer = [output.token_id or 0 for output in plain.generate(PROMPT, params)]
    engine = make(folder)
    engine.drafter = Foresight([answer], error_rate=0.0)
    rows, logits = [], engine.model.logits

    def counting(hidden: Any) -> Any:
        rows.append(len(hidden))
        return logits(hidden)

    engine.model.logits = counting  # type: ignore[method-assign]
    assert [output.token_id for output in engine.generate(PROMPT, params)] == answer
    assert plain.runner.num_forwards == 41
    # the prompt, a first draft, and four tokens per step; the last step gives 3
    assert engine.runner.num_forwards == 2 + 10
    assert rows[2:-1] == [4] * 9
    assert engine.runner.num_tokens_computed > 16 * 9


@pytest.mark.demo
@pytest.mark.slow
def test_the_trained_adapter_accepts_guesses_on_held_out_prompts(demo_folder: Path) -> None:
    options: dict[str, Any] = {"use_speculative_decoding": True, "adapter": "adapters/smollm2-135m"}
    llm = LLM(str(demo_folder), phase="11.1", adapt_spec_length=False, max_batch_size=4, dtype="float32", **options)
    held_out = json.loads(PROMPTS.read_text(encoding="utf-8"))["held_out"][:4]
    prompts = [
        encode_chat(llm.engine.tokenizer, [ChatMessage("user", prompt)], template="chatml") for prompt in held_out
    ]
    llm.generate(prompts, SamplingParams(temperature=0.0, max_new_tokens=32), progress=False)
    stats = llm.engine.stats()
    accepted, rejected = stats["drafts accepted (tokens)"], stats["drafts rejected (tokens)"]
    assert rejected > 0
    assert 1 + 3 * accepted / (accepted + rejected) >= 1.7  # tokens of a step with three guesses
