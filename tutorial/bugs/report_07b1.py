"""Under load new prompts get no answer at all.

As long as enough other requests are being answered, a new prompt gets nothing: no token, no error. It starts when one
of the others ends, so with steady traffic it never does. We use a small `max_num_batched_tokens`.
"""

from pathlib import Path

from shared.checkpoints.make import make_checkpoint
from shared.engine.config import EngineConfig
from shared.lessons import find_lesson
from shared.sampling.params import SamplingParams

Engine = find_lesson("07").engine
model = str(make_checkpoint("tiny-llama", Path("model"), seed=1))
engine = Engine(EngineConfig(model=model, max_num_batched_tokens=4, max_batch_size=8))
long = SamplingParams(temperature=0, max_new_tokens=200, ignore_eos=True)
for number in range(4):
    engine.add_request([10 + number], long)
for _ in range(4):
    engine.step()
engine.add_request([50, 51, 52], SamplingParams(temperature=0, max_new_tokens=1, ignore_eos=True), "new")
steps = next((n for n in range(1, 101) if any(output.request_id == "new" for output in engine.step())), None)
print(f"the first token of a prompt of three tokens came after {steps or 'more than 100'} steps")
raise SystemExit(steps is None)
