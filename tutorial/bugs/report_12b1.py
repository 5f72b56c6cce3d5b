"""Answers leave their grammar.

Each answer must match `(ab|cd){8}e`. The first letters do, and then the answer continues with letters that cannot
follow, or never ends: it is as if a token were sampled with the mask of an earlier one.
"""

import re
from pathlib import Path

from shared.checkpoints.make import make_checkpoint
from shared.engine.llm import LLM
from shared.grammar.grammar import Grammar
from shared.sampling.params import SamplingParams

PATTERN = "(ab|cd){8}e"
llm = LLM(str(make_checkpoint("tiny-llama", Path("model"), seed=1)), phase="12", max_seq_len=128)
wrong = 0
for seed in range(3):
    grammar = Grammar.regex(PATTERN)
    params = SamplingParams(temperature=1, seed=seed, max_new_tokens=40, structured_output=grammar)
    answer = llm.generate([range(10, 20)], params, progress=False)[0]
    is_right = re.fullmatch(PATTERN, answer.text) is not None
    print(f"{'right' if is_right else 'WRONG'}  {answer.text!r}")
    wrong += not is_right
raise SystemExit(wrong > 0)
