"""Gemma answers nonsense with fused parts, and no other model does.

With phase 03.1 our Llama and Qwen models answer as before. Gemma's first token is wrong already. With
`pack_weights=True`, which fuses nothing, it is right.
"""

from pathlib import Path

from shared.checkpoints.make import make_checkpoint
from shared.engine.config import EngineConfig
from shared.lessons import find_lesson
from shared.sampling.params import SamplingParams

Engine = find_lesson("03.1").engine
params = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
wrong = 0
for shape in ("tiny-llama", "tiny-qwen3", "tiny-gemma3"):
    model = str(make_checkpoint(shape, Path(shape), seed=1))
    packed, fused = (
        [output.token_id for output in engine.generate(range(10, 30), params)]
        for engine in (Engine(EngineConfig(model=model, pack_weights=is_packed)) for is_packed in (True, False))
    )
    print(f"{shape:12} packed {packed}\n{'':12} fused  {fused}")
    wrong += packed != fused
raise SystemExit(wrong > 0)
