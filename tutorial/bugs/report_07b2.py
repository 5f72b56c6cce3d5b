"""Under load a prompt is misread.

A prompt that arrives while others decode gets an answer that has nothing to do with it. Sent to an idle engine, it is
answered well. It depends on how many others decode: with one more or one less it may be right.
"""

from pathlib import Path

from shared.checkpoints.make import make_checkpoint
from shared.engine.config import EngineConfig
from shared.lessons import find_lesson
from shared.sampling.params import SamplingParams

Engine = find_lesson("07").engine
model = str(make_checkpoint("tiny-llama", Path("model"), seed=1))
params = SamplingParams(temperature=0, max_new_tokens=4, ignore_eos=True)
long = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)
answers = []
for num_others in (0, 1, 2, 3):
    engine = Engine(EngineConfig(model=model, max_num_batched_tokens=4))
    for number in range(num_others):
        engine.add_request([100 + number], long)
    for _ in range(3):
        engine.step()
    engine.add_request(range(10, 20), params, "asked")
    answers.append([output.token_id for _ in range(30) for output in engine.step() if output.request_id == "asked"])
    print(f"beside {num_others} others: {answers[-1]}")
raise SystemExit(any(answer != answers[0] for answer in answers))
