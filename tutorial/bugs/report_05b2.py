"""With prefill_first everything runs at a quarter of its speed.

With `scheduler_policy="fcfs"` sixteen tokens take sixteen steps. With `"prefill_first"` they take four times as many,
also when no prompt is waiting and nothing else runs. Most steps seem to do nothing.
"""

from pathlib import Path

from shared.checkpoints.make import make_checkpoint
from shared.engine.config import EngineConfig
from shared.lessons import find_lesson
from shared.sampling.params import SamplingParams

Engine = find_lesson("05").engine
model = str(make_checkpoint("tiny-llama", Path("model"), seed=1))
params = SamplingParams(temperature=0, max_new_tokens=16, ignore_eos=True)
took = {}
for policy in ("fcfs", "prefill_first"):
    engine = Engine(EngineConfig(model=model, scheduler_policy=policy))
    engine.add_request(range(10, 30), params)
    took[policy] = 0
    while engine.has_work():
        engine.step()
        took[policy] += 1
print(f"steps for 16 tokens: {took}")
raise SystemExit(took["prefill_first"] > took["fcfs"])
