"""The end of long contexts is ignored.

Questions about the end of a long document get answers that do not know it. Short contexts are fine, as long as one
program reads all of their keys. As soon as they are split, the last part does not matter: we can put anything there.
"""

import torch

from shared.attention.states import attention_state, merge_rows
from shared.ops.attention import naive_attention

torch.manual_seed(0)
num_heads, head_dim, num_keys = 2, 16, 120
q = torch.randn(num_heads, head_dim)
k, v = torch.randn(2, num_heads, num_keys, head_dim).unbind(0)
expected = naive_attention(q[None], k, v, scale=0.25)[0]
wrong = 0
for num_splits in (2, 3, 4):
    splits = zip(k.chunk(num_splits, 1), v.chunk(num_splits, 1), strict=True)
    states = [attention_state(q, keys, values, scale=0.25) for keys, values in splits]
    values, logs = (torch.stack(parts) for parts in zip(*states, strict=True))
    got = merge_rows(values, logs, torch.tensor([0, num_splits]), torch.zeros(1, num_heads, head_dim))[0]
    error = (got - expected).abs().max().item()
    print(f"{num_splits} splits: the largest error is {error:.6f}")
    wrong += error > 1e-5
raise SystemExit(wrong > 0)
