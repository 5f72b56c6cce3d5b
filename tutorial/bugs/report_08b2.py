"""Cancel one request, and others with the same prompt hang.

We send many questions about one document. When the first of them is cancelled while its prompt is still being computed,
the others are never answered. They stay in the queue although nothing runs. A restart helps.
"""

from pathlib import Path

from shared.checkpoints.make import make_checkpoint
from shared.engine.config import EngineConfig
from shared.lessons import find_lesson
from shared.sampling.params import SamplingParams

Engine = find_lesson("08").engine
model = str(make_checkpoint("tiny-llama", Path("model"), seed=1))
engine = Engine(EngineConfig(model=model, block_size=4, max_seq_len=128, prefill_chunk_size=8))
params = SamplingParams(temperature=0, max_new_tokens=2, ignore_eos=True)
document = list(range(10, 74))
engine.add_request([*document, 100], params, "first")
engine.step()
engine.add_request([*document, 200], params, "second")
engine.step()
engine.abort("first")
steps = 0
while engine.has_work() and steps < 100:
    engine.step()
    steps += 1
load = engine.load()
print(f"after {steps} steps: {load.num_running} running, {load.num_waiting} waiting")
raise SystemExit("second" in engine.scheduler)
