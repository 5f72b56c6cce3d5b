"""Flash attention is wrong, except for some lengths.

We compared `decode_attention` with plain attention. With 64 or 128 keys the two agree. With any other number of keys
the kernel's outputs are too small, and the fewer keys there are, the smaller. Nothing is NaN, so we noticed it late.
(The script runs the kernel through Triton's interpreter; on a GPU it is the same.)
"""

import torch

from shared.kernels.attention.decode_attention import DecodeWorkspace, decode_attention
from shared.ops.attention import sdpa_attention

torch.manual_seed(0)
num_heads, num_kv_heads, head_dim, capacity = 4, 2, 16, 160
q = torch.randn(1, num_heads, head_dim)
keys, values = torch.randn(2, 1, num_kv_heads, capacity, head_dim).unbind(0)
workspace = DecodeWorkspace.of(1, num_heads, num_kv_heads, head_dim, capacity, torch.device("cpu"))
wrong = 0
for length in (64, 128, 100, 20, 3):
    lengths = torch.tensor([length], dtype=torch.int32)
    got = decode_attention(q, keys, values, torch.tensor([0]), lengths, scale=0.25, workspace=workspace)
    expected = sdpa_attention(q, keys[0, :, :length], values[0, :, :length], scale=0.25)
    is_right = torch.allclose(got, expected, atol=1e-5)
    print(f"{length:3} keys: norm {got.norm():.3f}, expected {expected.norm():.3f}{'' if is_right else '  WRONG'}")
    wrong += not is_right
raise SystemExit(wrong > 0)
