"""After a preemption answers go wrong, or never end.

When the KV cache is full, a request is preempted and computed again later. Its answer should not change. Ours does, or
the request stays in the engine forever and gets no further token.
"""

from pathlib import Path
from typing import Any

from shared.checkpoints.make import make_checkpoint
from shared.engine.config import EngineConfig
from shared.lessons import find_lesson
from shared.sampling.params import SamplingParams

Engine = find_lesson("07").engine
model = str(make_checkpoint("tiny-llama", Path("model"), seed=1))
params = SamplingParams(temperature=0, max_new_tokens=20, ignore_eos=True)
prompts = {name: list(range(first, first + 12)) for name, first in (("a", 10), ("b", 100), ("c", 200), ("d", 300))}


def answers(names: str, num_gpu_blocks: int | None) -> tuple[dict[str, list[int | None]], int]:
    """The tokens of each request, and how many preemptions there were."""
    settings: dict[str, Any] = {
        "max_seq_len": 64,
        "block_size": 4,
        "prefill_chunk_size": 8,
        "num_gpu_blocks": num_gpu_blocks,
    }
    engine = Engine(EngineConfig(model=model, **settings))
    found: dict[str, list[int | None]] = {engine.add_request(prompts[name], params, name): [] for name in names}
    for _ in range(300):
        for output in engine.step() if engine.has_work() else ():
            found[output.request_id].append(output.token_id)
    return found, engine.load().num_preemptions


got, num_preemptions = answers("abcd", 18)
wrong = 0
for name in "abcd":
    expected = answers(name, None)[0][name]
    print(f"{name}: {len(got[name])} of 20 tokens, {'as alone' if got[name] == expected else 'WRONG'}")
    wrong += got[name] != expected
print(f"preemptions: {num_preemptions}")
raise SystemExit(wrong > 0)
