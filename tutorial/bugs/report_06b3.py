"""With penalties, an answer changes when the request is preempted.

Alone, our request repeats no token, as the presence penalty wants it. In a full engine, where it is preempted and goes
on later, it gives other tokens from there on. Requests without a penalty are preempted as often, and do not change.
"""

from pathlib import Path
from typing import Any

from shared.checkpoints.make import make_checkpoint
from shared.engine.llm import LLM
from shared.sampling.params import SamplingParams

model = str(make_checkpoint("tiny-llama", Path("model"), seed=1))
settings: dict[str, Any] = {"phase": "06", "max_seq_len": 64, "block_size": 4}
prompts = [list(range(first, first + 12)) for first in (10, 100, 200, 300, 400)]
each = [
    SamplingParams(temperature=0, presence_penalty=2.0, max_new_tokens=length, ignore_eos=True)
    for length in (6, 30, 30, 30, 30)
]
llm = LLM(model, num_gpu_blocks=20, **settings)
wrong = 0
for number, answer in enumerate(llm.generate(prompts, each, progress=False)):
    alone = LLM(model, **settings).generate([prompts[number]], each[number], progress=False)[0].token_ids
    same = next((n for n, (a, b) in enumerate(zip(answer.token_ids, alone, strict=True)) if a != b), None)
    print(f"request {number}: {'as alone' if same is None else f'another token from token {same} on'}")
    wrong += same is not None
print(f"preemptions: {llm.engine.load().num_preemptions}")
raise SystemExit(wrong > 0)
