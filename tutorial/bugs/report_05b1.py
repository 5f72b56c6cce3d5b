"""A short question waits until a long answer is complete.

We took phase 05 because a short request should join a batch that runs. It does not: while one long answer runs, a
question of two tokens is answered only when the long one has ended, although the batch has space for 16.
"""

from pathlib import Path

from shared.checkpoints.make import make_checkpoint
from shared.engine.config import EngineConfig
from shared.lessons import find_lesson
from shared.sampling.params import SamplingParams

Engine = find_lesson("05").engine
model = str(make_checkpoint("tiny-llama", Path("model"), seed=1))
engine = Engine(EngineConfig(model=model))
engine.add_request(range(10, 30), SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True), "long")
engine.step()
engine.add_request(range(30, 40), SamplingParams(temperature=0, max_new_tokens=2, ignore_eos=True), "short")
steps = 0
while "short" in engine.scheduler:
    engine.step()
    steps += 1
print(f"the short request took {steps} steps; 2 tokens need 2, and perhaps one to join")
raise SystemExit(steps > 4)
