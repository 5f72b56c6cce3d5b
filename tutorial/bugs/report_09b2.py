"""Memory is lost with some answers, until nothing is admitted.

The share of the KV cache in use never returns to zero. After a day the engine holds all of it and runs nothing. It
loses some with every answer that ends with an end-of-sequence token; answers of a fixed length lose nothing.
"""

from pathlib import Path
from typing import Any

from shared.checkpoints.make import make_checkpoint
from shared.engine.config import EngineConfig
from shared.lessons import find_lesson
from shared.sampling.params import SamplingParams

Engine = find_lesson("09").engine
model = str(make_checkpoint("tiny-llama", Path("model"), seed=1))
settings: dict[str, Any] = {"overlap_scheduling": True, "use_prefix_caching": False, "block_size": 4, "max_seq_len": 64}
engine = Engine(EngineConfig(model=model, **settings))
free = [engine.pool.free_tokens]
greedy = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
third = list(engine.generate(range(10, 20), greedy))[5].token_id
assert third is not None
for _ in range(3):
    engine.add_request(range(10, 20), SamplingParams(temperature=0, max_new_tokens=12, stop_token_ids=(third,)))
    for _ in range(40):
        engine.step()
    free.append(engine.pool.free_tokens)
print(f"free tokens of the KV cache at the start, and after each answer: {free}")
raise SystemExit(free[-1] < free[0])
