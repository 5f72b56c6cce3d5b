"""Attention over keys and values in blocks: memory with NaN around what may be read, and the formula in fp64."""

import dataclasses
from collections.abc import Callable, Sequence

import torch

from shared.attention.descriptor import DevicePlan
from shared.engine.executor.staging import Staging
from shared.kernels.attention.decode_attention import DecodeWorkspace
from shared.kernels.attention.planned_workspace import PlannedWorkspace
from shared.kernels.launch import INTERPRETED
from shared.ops.attention import visible

NAN = float("nan")
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
Tokens = list[tuple[torch.Tensor, torch.Tensor]]
REAL = [(32, 8, 64, 16), (32, 8, 64, 1), (16, 8, 128, 16), (16, 8, 128, 64), (4, 1, 256, 16), (9, 3, 64, 3)]
"""Hq, Hkv and D of models, and a block size."""
HEADS = [(32, torch.float16), (64, torch.float32), (128, torch.float16), (256, torch.float32)]
"""Head sizes, each in one dtype; real shapes have all."""


def draw_tokens(randn: Callable, lengths: Sequence[int], Hkv: int, D: int, dtype: torch.dtype) -> Tokens:
    """Keys and values ``[Hkv, S, D]`` of each sequence."""
    return [tuple(randn(length, Hkv, D, dtype=dtype).transpose(0, 1) for _ in "kv") for length in lengths]  # type: ignore


class PagedMemory:
    """Sequences in blocks at random places. All that may not be read is NaN, and between the tables, which are in any
    order, there are numbers of blocks that do not exist.

    Args:
        tokens: keys and values of each sequence; without a sequence the memory is of two heads of size 16.
        seen: how many of its last tokens may be read, by default all.
    """

    def __init__(self, tokens: Tokens, block_size: int, seen: Sequence[int] | None = None, seed: int = 0) -> None:
        self.tokens, generator = tokens, torch.Generator().manual_seed(seed)
        lengths = [k.shape[1] for k, _ in tokens]
        counts = [-(-length // block_size) for length in lengths]
        order = torch.randperm(sum(counts) + 3, generator=generator)
        Hkv, _, D = tokens[0][0].shape if tokens else (2, 0, 16)
        dtype = tokens[0][0].dtype if tokens else torch.float32
        shape = (len(order), block_size, Hkv, D)
        self.keys, self.values = (torch.full(shape, NAN, dtype=dtype, device=DEVICE) for _ in "kv")
        tables = torch.full((sum(counts) + 2 * len(counts) + 1,), 2**30, dtype=torch.int32)
        starts, start = [0] * len(counts), 1
        for b in torch.randperm(len(counts), generator=generator).tolist():
            blocks, order = order[: counts[b]], order[counts[b] :]
            tables[start : start + counts[b]] = blocks
            first = 0 if seen is None else lengths[b] - seen[b]
            place = torch.arange(first, lengths[b])
            at = (blocks[place // block_size] * block_size + place % block_size).to(DEVICE)
            for memory, of_sequence in zip((self.keys, self.values), tokens[b], strict=True):
                memory.view(-1, Hkv, D)[at] = of_sequence.transpose(0, 1)[first:]
            starts[b] = start
            start += counts[b] + 2
        self.arrays = self.keys, self.values, tables.to(DEVICE), ints(starts), ints(lengths)


def ints(numbers: Sequence[int]) -> torch.Tensor:
    """int32 on the device."""
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def attention_formula(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """New tokens ``[T, Hq, D]`` of one sequence in fp64: the result, and what its error is measured by, in steps of the
    dtype: the magnitudes of the weighted values; a score's error, in steps of fp32, becomes a relative one."""
    T, Hq, D = q.shape
    Hkv, S, _ = k.shape
    if S == 0:
        return torch.zeros_like(q, dtype=torch.float64), torch.ones_like(q, dtype=torch.float64)
    fp32_steps = torch.finfo(torch.float32).eps / torch.finfo(q.dtype).eps
    k, v = k.double(), v.double()
    grouped = q.double().view(T, Hkv, -1, D).permute(1, 2, 0, 3)  # [Hkv, G, T, D]
    scores, sizes = grouped @ k[:, None].mT * scale, grouped.abs() @ k[:, None].abs().mT * scale
    if softcap is not None:
        scores, sizes = softcap * torch.tanh(scores / softcap), sizes + softcap
    is_seen = visible(T, S, window, q.device)
    weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
    sizes = sizes.masked_fill(~is_seen, 0.0).amax(-1, keepdim=True)
    steps = (1 + sizes * fp32_steps) * (weights @ v[:, None].abs())
    return tuple(x.permute(2, 0, 1, 3).reshape(T, Hq, D) for x in (weights @ v[:, None], steps))  # type: ignore


def assert_attended(
    assert_near: Callable,
    out: torch.Tensor,
    q: torch.Tensor,
    tokens: Tokens,
    num_new: Sequence[int],
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """Each sequence's new tokens are those of the formula; where there is no key, they are zero."""
    assert out.dtype == q.dtype, f"dtype of the result: expected {q.dtype}, got {out.dtype}"
    ulps, parts = 8 if q.dtype == torch.float32 else 2, zip(out.split(num_new), q.split(num_new), tokens, strict=True)
    for b, (attended, queries, (k, v)) in enumerate(parts):
        if len(queries):
            expected, steps = attention_formula(queries, k, v, scale, window, softcap)
            what = f"attention of sequence {b}, {k.shape[1]} keys"
            assert_near(attended, expected, ulps, steps, what, ("token", "head", "dim"))
            assert k.shape[1] or (attended == 0).all(), f"sequence {b} sees no key, and its result is not 0"


def decode_workspace(B: int, Hq: int, Hkv: int, D: int, num_splits: int) -> DecodeWorkspace:
    """A workspace with a number of splits of our choice, its states NaN."""
    states = (B, Hkv, num_splits, Hq // Hkv)
    return dataclasses.replace(
        DecodeWorkspace.of(B, Hq, Hkv, D, 1, DEVICE),
        num_splits=num_splits,
        partial=torch.full((*states, D), NAN, device=DEVICE),
        partial_max=torch.full(states, NAN, device=DEVICE),
        partial_sum=torch.full(states, NAN, device=DEVICE),
    )


def planned_workspace(num_states: int, num_sequences: int, Hq: int, Hkv: int, D: int) -> PlannedWorkspace:
    """A workspace whose states are NaN."""
    workspace = PlannedWorkspace.of(num_states, num_sequences, Hq, Hkv, D, DEVICE)
    workspace.partial.fill_(NAN)
    workspace.partial_log.fill_(NAN)
    return workspace


def named(plan):
    """A plan's arrays by name."""
    return {f"plan {n}": array for n, array in enumerate(plan.arrays())}


def sent(plan) -> DevicePlan:
    """A plan on the device."""
    arrays = named(plan)
    return DevicePlan.of(plan, list(Staging.for_arrays(DEVICE, arrays).send(arrays).values()))
