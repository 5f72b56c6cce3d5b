"""The second time that we send a prompt, the engine breaks.

Our health check sends the same prompt every minute. The first time it is answered, the second time it is not. Other
prompts are fine, also those that begin in the same way. Its length is a multiple of the block size, if that matters.
"""

from pathlib import Path

from shared.checkpoints.make import make_checkpoint
from shared.engine.config import EngineConfig
from shared.lessons import find_lesson
from shared.sampling.params import SamplingParams

Engine = find_lesson("08").engine
model = str(make_checkpoint("tiny-llama", Path("model"), seed=1))
engine = Engine(EngineConfig(model=model, block_size=4, max_seq_len=64))
params = SamplingParams(temperature=0, max_new_tokens=3, ignore_eos=True)
for turn in (1, 2):
    engine.add_request(range(10, 26), params, f"turn {turn}")
    tokens: list[int | None] = []
    try:
        for _ in range(20):
            tokens += [output.token_id for output in engine.step() if not output.error] if engine.has_work() else []
    except Exception as error:
        print(f"turn {turn}: {type(error).__name__}: {error}")
    print(f"turn {turn}: {tokens}")
raise SystemExit(len(tokens) != 3)
