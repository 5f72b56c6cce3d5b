"""Log-probabilities belong to another request.

We send several requests at a time, and only some of them ask for `logprobs`. The texts are right. The log-probability
that is said of a token is not that of this token: greedy, it should be the highest of the list, and it is not. A
request that is alone in the engine gets the right ones.
"""

from pathlib import Path

from shared.checkpoints.make import make_checkpoint
from shared.engine.llm import LLM
from shared.sampling.params import SamplingParams

model = str(make_checkpoint("tiny-llama", Path("model"), seed=1))
plain = SamplingParams(temperature=0, max_new_tokens=4, ignore_eos=True)
asking = SamplingParams(temperature=0, max_new_tokens=4, ignore_eos=True, logprobs=1)
prompts = [range(first, first + 10) for first in (10, 300)]
answer = LLM(model, phase="04").generate(prompts, [plain, asking], progress=False)[1]
wrong = 0
for token_id, said in zip(answer.token_ids, answer.logprobs or (), strict=True):
    print(f"token {token_id:3}: {said.logprob:.3f}; the most likely one has {said.top[0][1]:.3f}")
    wrong += said.logprob != said.top[0][1]
raise SystemExit(wrong > 0)
