"""The engine answers one question, and refuses all that follow.

After a start the first prompt works. The second one fails, whatever it is, until we start again. We hold on to nothing:
the first answer was read to its end.
"""

from pathlib import Path

from shared.checkpoints.make import make_checkpoint
from shared.engine.config import EngineConfig
from shared.errors import CapacityError
from shared.lessons import find_lesson
from shared.sampling.params import SamplingParams

Engine = find_lesson("03").engine
model = str(make_checkpoint("tiny-llama", Path("model"), seed=1))
engine = Engine(EngineConfig(model=model))
params = SamplingParams(temperature=0, max_new_tokens=4, ignore_eos=True)
try:
    for number in (1, 2, 3):
        tokens = [output.token_id for output in engine.generate(range(number, number + 10), params)]
        print(f"prompt {number}: {tokens}")
except CapacityError as error:
    raise SystemExit(f"prompt {number}: {error}") from None
