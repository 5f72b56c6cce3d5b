"""When one answer ends, the others get each other's tokens.

Several requests decode together and all is well, until one of them ends. From then on answers of the others are
wrong, although nothing was added. With `overlap_scheduling=False` they are right.
"""

from pathlib import Path

from shared.checkpoints.make import make_checkpoint
from shared.engine.llm import LLM
from shared.sampling.params import SamplingParams

model = str(make_checkpoint("tiny-llama", Path("model"), seed=1))
prompts = [list(range(first, first + 8)) for first in (10, 100, 200)]
lengths = (4, 16, 16)
params = [SamplingParams(temperature=0, max_new_tokens=length, ignore_eos=True) for length in lengths]
expected, got = (
    LLM(model, phase="09", overlap_scheduling=overlaps).generate(prompts, params, progress=False)
    for overlaps in (False, True)
)
wrong = 0
for number, (one, other) in enumerate(zip(expected, got, strict=True)):
    same = sum(a == b for a, b in zip(one.token_ids, other.token_ids, strict=True))
    print(f"request {number}: {same} of {lengths[number]} tokens are right")
    wrong += same < lengths[number]
raise SystemExit(wrong > 0)
