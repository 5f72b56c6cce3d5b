"""Answers go wrong after a few tokens, sooner with small blocks.

Phase 06 agrees with phase 05 at first, and then writes other tokens. With `block_size=4` it goes wrong earlier than
with 16, and with a block as large as the whole text it never does. Nothing is refused, and nothing is logged.
"""

from pathlib import Path
from typing import Any

from shared.checkpoints.make import make_checkpoint
from shared.engine.llm import LLM
from shared.sampling.params import SamplingParams

model = str(make_checkpoint("tiny-llama", Path("model"), seed=1))
params = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)


def answer(**settings: Any) -> list[int]:
    return LLM(model, max_seq_len=64, **settings).generate([range(10, 20)], params, progress=False)[0].token_ids


expected, wrong = answer(phase="05"), 0
for block_size in (64, 16, 4):
    got = answer(phase="06", block_size=block_size)
    same = next((n for n, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b), len(expected))
    print(f"blocks of {block_size:2}: the first {same} of {len(expected)} tokens are those of phase 05")
    wrong += same < len(expected)
raise SystemExit(wrong > 0)
