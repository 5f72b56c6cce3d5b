"""Attention states: the result of attention over a part of the keys, and how two states merge. Introduced in phase 6.1.

Attention is a weighted mean: out = Σ 2^s_i v_i / Σ 2^s_i over the keys i, with scores in base 2 (multiplied by log2 e
beforehand). So the state of a part of the keys is its mean V and the logarithm of its sum of weights, S = log2 Σ 2^s_i
(log-sum-exp, base 2), and two states merge to

    V = (2^(Sa - M) Va + 2^(Sb - M) Vb) / (2^(Sa - M) + 2^(Sb - M))        M = max(Sa, Sb)
    S = M + log2(2^(Sa - M) + 2^(Sb - M))

(FlashInfer, arXiv 2501.01005.) Merging is associative and commutative, so every partition of the keys gives the same
result, up to rounding. Invariant: the state of no keys is (0, -inf), the neutral element of merging.
"""

from itertools import pairwise

import torch
from torch import Tensor

State = tuple[Tensor, Tensor]  # values [..., D] and logarithms [...]


def attention_state(q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None = None) -> State:
    """The state of one new token over some of its keys, computed by the formula.

    Args:
        q: ``[Hq, D]``.
        k, v: ``[Hkv, S, D]``, S keys, possibly none; Hq is a multiple of Hkv.
        softcap: scores become ``c · tanh(scores / c)``.

    Returns:
        Values ``[Hq, D]`` and logarithms ``[Hq]``, in the dtype of ``q``.
    """
    Hkv, S, D = k.shape
    if S == 0:
        return torch.zeros_like(q), torch.full_like(q[:, 0], -torch.inf)
    scores = q.view(Hkv, -1, D) @ k.mT * scale  # [Hkv, G, S]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    values = scores.softmax(-1) @ v
    return values.view(-1, D), scores.logsumexp(-1).view(-1) / torch.log(torch.tensor(2.0, dtype=q.dtype)).item()


def merge(a: State, b: State) -> State:
    """Merge the states of two disjoint sets of keys."""
    (values_a, log_a), (values_b, log_b) = a, b
    # exercise 06.1x2: merge two states
    # hint: the formula is in the module's docstring; the logarithms lack the last dimension of the values
    # hint: relative to the larger logarithm no power of two overflows
    # hint: if both sets are empty, both logarithms are -inf: use 0 for M, and divide by 1 where the weight is 0
    largest = torch.maximum(log_a, log_b)
    largest = torch.where(largest == -torch.inf, 0.0, largest)  # -inf - -inf is NaN
    weight_a, weight_b = torch.exp2(log_a - largest), torch.exp2(log_b - largest)
    total = weight_a + weight_b
    weighted = weight_a[..., None] * values_a + weight_b[..., None] * values_b
    return weighted / torch.where(total == 0, 1.0, total)[..., None], largest + torch.log2(total)
    # end exercise


def merge_rows(partial: Tensor, partial_log: Tensor, output_indptr: Tensor, out: Tensor) -> Tensor:
    """:func:`merge` the states ``output_indptr[i]`` to ``output_indptr[i + 1]`` of each row i into ``out[i]``.

    A row without states keeps its values in ``out [rows, Hq, D]``, which is returned.
    """
    bounds = output_indptr.tolist()
    for row, (begin, end) in enumerate(pairwise(bounds)):
        if begin < end:
            state = partial[begin], partial_log[begin]
            for i in range(begin + 1, end):
                state = merge(state, (partial[i], partial_log[i]))
            out[row] = state[0]
    return out
