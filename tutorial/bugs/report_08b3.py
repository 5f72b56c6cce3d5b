"""A prompt that was asked before gets a wrong answer the second time.

The same prompt, greedy, has two answers: the first time the right one, and later another one that begins well and then
goes astray. Prompts that only begin like an earlier one are answered well. With `use_prefix_caching=False` all is well.
"""

from pathlib import Path

from shared.checkpoints.make import make_checkpoint
from shared.engine.llm import LLM
from shared.sampling.params import SamplingParams

model = str(make_checkpoint("tiny-llama", Path("model"), seed=1))
params = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
llm = LLM(model, phase="08", block_size=4, max_seq_len=64)
answers = [llm.generate([range(10, 26)], params, progress=False)[0].token_ids for _ in range(2)]
print(f"the first time:  {answers[0]}\nthe second time: {answers[1]}")
raise SystemExit(answers[0] != answers[1])
