"""A request that was cancelled in the queue is answered all the same.

Our users close their windows. We call `abort`, which says that it found nothing, and later the engine computes the
whole answer, which no user waits for. It only happens to requests that have not begun.
"""

from pathlib import Path

from shared.checkpoints.make import make_checkpoint
from shared.engine.config import EngineConfig
from shared.lessons import find_lesson
from shared.sampling.params import SamplingParams

Engine = find_lesson("04").engine
model = str(make_checkpoint("tiny-llama", Path("model"), seed=1))
engine = Engine(EngineConfig(model=model, max_batch_size=1))
params = SamplingParams(temperature=0, max_new_tokens=4, ignore_eos=True)
engine.add_request(range(10, 20), params, "running")
engine.add_request(range(30, 40), params, "cancelled")
engine.step()
print("abort says", engine.abort("cancelled"))
computed = [output.request_id for _ in range(20) if engine.has_work() for output in engine.step()]
print("tokens that came afterwards are of:", computed)
raise SystemExit("cancelled" in computed)
