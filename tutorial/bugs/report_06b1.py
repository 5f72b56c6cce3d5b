"""The request that came third is answered last.

Under load some users wait far longer than those who came after them. In this script six requests arrive one by one, all
of the same size. The KV cache has no space for all of them. With first come, first served, they should finish in order.
"""

from pathlib import Path

from shared.checkpoints.make import make_checkpoint
from shared.engine.config import EngineConfig
from shared.lessons import find_lesson
from shared.sampling.params import SamplingParams

Engine = find_lesson("06").engine
model = str(make_checkpoint("tiny-llama", Path("model"), seed=1))
engine = Engine(EngineConfig(model=model, max_seq_len=64, block_size=4, num_gpu_blocks=18, max_batch_size=4))
params = SamplingParams(temperature=0, max_new_tokens=20, ignore_eos=True)
for name in "abcdef":
    engine.add_request(range(10, 26), params, name)
finished = []
while engine.has_work():
    finished += [output.request_id for output in engine.step() if output.finish_reason]
print("arrived:  a b c d e f\nfinished:", *finished)
print(f"preemptions: {engine.scheduler.num_preemptions}")
raise SystemExit(finished != sorted(finished))
