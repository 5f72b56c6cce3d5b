"""A wrong draft changes the answer.

Greedy answers must not depend on speculation. While every draft is accepted they agree. After the first rejected draft
the answer misses tokens or has wrong ones, and the request may never end.
"""

from pathlib import Path
from typing import Any

from shared.checkpoints.make import make_checkpoint
from shared.engine.config import EngineConfig
from shared.lessons import find_lesson
from shared.sampling.params import SamplingParams

Engine = find_lesson("11").engine
model = str(make_checkpoint("tiny-llama", Path("model"), seed=1))


def answer(prediction_ids: tuple[int, ...], is_drafting: bool) -> list[int]:
    """24 tokens, as far as 60 steps bring them."""
    drafting: dict[str, Any] = (
        {"use_speculative_decoding": True, "drafter": "ngram", "spec_length": 3} if is_drafting else {}
    )
    engine = Engine(EngineConfig(model=model, max_seq_len=128, **drafting))
    greedy = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True, prediction_ids=prediction_ids)
    engine.add_request(range(10, 20), greedy)
    outputs = [output for _ in range(60) if engine.has_work() for output in engine.step()]
    return [output.token_id for output in outputs if output.token_id is not None]


expected = answer((), is_drafting=False)
got = answer((*expected[:6], 7, *expected[7:]), is_drafting=True)  # one token is guessed wrong
print(f"plain:    {expected}\ndrafting: {got}")
raise SystemExit(got != expected)
