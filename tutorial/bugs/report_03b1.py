"""From the second token on, the answer is another one.

We moved from phase 02 to phase 03, greedy, same model, same prompt. The first token is always the same, and then the
two go apart. It happens with every prompt that we tried.
"""

from pathlib import Path

from shared.checkpoints.make import make_checkpoint
from shared.engine.config import EngineConfig
from shared.lessons import find_lesson
from shared.sampling.params import SamplingParams

Plain = find_lesson("02").engine
Cached = find_lesson("03").engine
model = str(make_checkpoint("tiny-llama", Path("model"), seed=1))
params = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
expected, got = (
    [output.token_id for output in kind(EngineConfig(model=model)).generate(range(10, 30), params)]
    for kind in (Plain, Cached)
)
print(f"phase 02: {expected}\nphase 03: {got}")
raise SystemExit(got != expected)
