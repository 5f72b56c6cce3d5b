"""Memory is lost when many ask the same at the same time.

The KV cache shrinks. Nothing runs, and yet its blocks are neither free nor cached. We lose some whenever several
requests have the same beginning and are computed at the same time. One after the other, they lose nothing.
"""

from pathlib import Path

from shared.checkpoints.make import make_checkpoint
from shared.engine.config import EngineConfig
from shared.lessons import find_lesson
from shared.sampling.params import SamplingParams

Engine = find_lesson("08").engine
model = str(make_checkpoint("tiny-llama", Path("model"), seed=1))
engine = Engine(EngineConfig(model=model, block_size=4, max_seq_len=64, num_gpu_blocks=40))
params = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
free = [engine.pool.free_tokens]
for turn in range(3):
    for number in range(4):
        engine.add_request([turn, 1, 2, 3, 4, 5], params, f"{turn}.{number}")
    while engine.has_work():
        engine.step()
    free.append(engine.pool.free_tokens)
print(f"free tokens of the KV cache at the start, and after each round: {free}")
raise SystemExit(free[-1] < free[0])
