"""Random quantized matrices, stored as each format's publication says, and what they mean.

Nothing here is shared with the readers: packing is a loop over the numbers of an int32, and the weight of (n, k) is
found by indices.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch


class Stored(NamedTuple):
    """A matrix W ``[N, K]``: its tensors in a checkpoint, by the ends of their names, and its weights in fp32."""

    tensors: dict[str, torch.Tensor]
    weight: torch.Tensor
    zeros: np.ndarray | None = None


Store = Callable[[np.random.Generator, int, int], Stored]


def packed(numbers: np.ndarray, bits: int = 4, order: Sequence[int] = range(8)) -> torch.Tensor:
    """Numbers ``[.., K]`` as int32 ``[.., ceil(K / n)]``: number ``order[i]`` of n is at bit ``bits * i``. What fills
    the last int32 is not zero."""
    n = 32 // bits
    filled = np.pad(numbers, [(0, 0)] * (numbers.ndim - 1) + [(0, -numbers.shape[-1] % n)], constant_values=9)
    out = np.zeros((*filled.shape[:-1], filled.shape[-1] // n), np.uint32)
    for i in range(n):
        out |= filled[..., order[i] :: n].astype(np.uint32) << np.uint32(bits * i)
    return torch.from_numpy(out.view(np.int32))


def scales(
    random: np.random.Generator, rows: int, columns: int, unit: float, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return torch.from_numpy(random.uniform(0.5, 2, (rows, columns)) * unit).to(dtype)


def meant(numbers: Any, of_blocks: torch.Tensor, zeros: Any = 0) -> torch.Tensor:
    """``(numbers[n, k] - zero) * scale``, with the scale and the zero of the block of (n, k)."""
    N, K = numbers.shape
    rows = np.arange(N)[:, None] // (128 if len(of_blocks) < N else 1)
    columns = np.arange(K) // (K // of_blocks.shape[1])
    zero = torch.as_tensor(np.asarray(zeros)[rows, columns] if np.ndim(zeros) else zeros)
    return (torch.as_tensor(numbers).float() - zero) * of_blocks.float()[rows, columns]


def floats(random: np.random.Generator, N: int, K: int) -> torch.Tensor:
    return torch.from_numpy(random.standard_normal((N, K), np.float32)).to(torch.float8_e4m3fn)


def fp8_blocks(random: np.random.Generator, N: int, K: int, dtype: torch.dtype = torch.float32) -> Stored:
    """Blocks of 128 x 128, as DeepSeek and Qwen publish them."""
    values, of_blocks = floats(random, N, K), scales(random, -(-N // 128), K // 128, 0.06, dtype)
    return Stored({"weight": values, "weight_scale_inv": of_blocks}, meant(values.float(), of_blocks))


def eight_bits(
    random: np.random.Generator,
    N: int,
    K: int,
    kind: str = "int",
    scale: str = "channel",
    dtype: torch.dtype = torch.float32,
) -> Stored:
    """FP8, INT8, or INT8 packed into int32, of compressed-tensors; ``scale``: channel, tensor, or scalar."""
    values = floats(random, N, K) if kind == "float" else random.integers(-128, 128, (N, K), np.int8)
    of_rows = scales(random, N if scale == "channel" else 1, 1, 0.06 if kind == "float" else 0.001, dtype)
    weight = meant(torch.as_tensor(values).float(), of_rows.expand(N, 1))
    stored = {"weight_scale": {"channel": of_rows, "tensor": of_rows[0], "scalar": of_rows[0, 0].clone()}[scale]}
    if kind == "packed":
        shape = torch.tensor([N, K])
        return Stored(stored | {"weight_packed": packed(values.astype(int) + 128, 8), "weight_shape": shape}, weight)
    return Stored(stored | {"weight": torch.as_tensor(values)}, weight)


def four_bits(
    random: np.random.Generator, N: int, K: int, group: int, dtype: torch.dtype, *, zeros: bool
) -> tuple[np.ndarray, np.ndarray, torch.Tensor, Stored]:
    """Numbers ``[N, K]``, zeros and scales ``[N, K / group]``, and a matrix without tensors."""
    numbers = random.integers(0, 16, (N, K))
    of_groups = random.integers(0, 16, (N, K // group)) if zeros else np.full((N, K // group), 8)
    found = scales(random, N, K // group, 0.01, dtype)
    return numbers, of_groups, found, Stored({}, meant(numbers, found, of_groups), of_groups if zeros else None)


def packed_groups(
    random: np.random.Generator, N: int, K: int, group: int, *, zeros: bool, dtype: torch.dtype = torch.bfloat16
) -> Stored:
    """Compressed-tensors: numbers packed along K, zeros along N."""
    numbers, of_groups, found, stored = four_bits(random, N, K, group, dtype, zeros=zeros)
    stored.tensors.update(weight_packed=packed(numbers), weight_scale=found, weight_shape=torch.tensor([N, K]))
    if zeros:
        stored.tensors["weight_zero_point"] = packed(of_groups.T).T.contiguous()
    return stored


def gptq(
    random: np.random.Generator, N: int, K: int, group: int, *, zeros: bool, version: int = 1, has_index: bool = True
) -> Stored:
    """The transposed matrix: numbers packed along K, zeros along N; the first version stores zeros less one."""
    numbers, of_groups, found, stored = four_bits(random, N, K, group, torch.float16, zeros=zeros)
    below = (of_groups.T + (15 if version == 1 else 0)) % 16
    stored.tensors.update(qweight=packed(numbers).T.contiguous(), qzeros=packed(below), scales=found.T.contiguous())
    if has_index:
        stored.tensors["g_idx"] = torch.tensor([k // group for k in range(K)], dtype=torch.int32)
    return stored


def awq(random: np.random.Generator, N: int, K: int, group: int, *, zeros: bool) -> Stored:
    """The transposed matrix, packed along N in the order of AutoAWQ's gemm kernel."""
    numbers, of_groups, found, stored = four_bits(random, N, K, group, torch.float16, zeros=zeros)
    in_order = partial(packed, order=(0, 2, 4, 6, 1, 3, 5, 7))
    stored.tensors.update(qweight=in_order(numbers.T), scales=found.T.contiguous())
    if zeros:
        stored.tensors["qzeros"] = in_order(of_groups.T)
    return stored
