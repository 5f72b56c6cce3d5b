"""A presence penalty and speculation do not go together.

With a penalty, an answer with speculation differs from one without. Either setting alone is fine. It looks as if a
token were punished for a guess that comes after it.
"""

from pathlib import Path
from typing import Any

from shared.checkpoints.make import make_checkpoint
from shared.engine.llm import LLM
from shared.sampling.params import SamplingParams

model = str(make_checkpoint("tiny-llama", Path("model"), seed=1))
prompt = list(range(10, 22))
penalties: dict[str, Any] = {"temperature": 0, "presence_penalty": 2.0, "max_new_tokens": 24, "ignore_eos": True}
plain = LLM(model, phase="11", max_seq_len=128)
expected = plain.generate([prompt], SamplingParams(**penalties), progress=False)[0].token_ids
params = SamplingParams(**penalties, prediction_ids=tuple(expected))
drafting = LLM(model, phase="11", max_seq_len=128, use_speculative_decoding=True, drafter="ngram", spec_length=4)
got = drafting.generate([prompt], params, progress=False)[0].token_ids
print(f"plain:    {expected}\ndrafting: {got}")
raise SystemExit(got != expected)
