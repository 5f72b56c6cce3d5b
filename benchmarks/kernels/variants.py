"""The cuts that a sweep tries: of each kernel the constants it could have had. Introduced in phase 3.1.

Invariant: a variant reaches its kernel as an engine's choice does, through the ``cut`` argument of ``gemv.linear`` or
the constants of the kernel's module; nothing here knows how a kernel uses them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks.bench_kernels import CONTEXTS, PROJECTIONS, dtype_of
from benchmarks.kernels.cases import KernelCase, ModelShapes, ProjectionShape, gated_case, projection_case
from benchmarks.kernels.decode_cases import attention_case, kv_write_case, sampler_cases
from shared.kernels import decode_attention, gated, kv_write, sampler
from shared.kernels.launch import next_power_of_two, num_multiprocessors
from shared.kernels.tiling import Tiling, tiling

SWEPT = (*PROJECTIONS, "gated", "kv_write", "decode_attention", "sampler_greedy", "sampler_drawn")
SHARED_MEMORY = 99 << 10  # bytes a program may have on the smallest GPUs


@dataclass(frozen=True)
class Variant:
    """A case under other constants, which hold while ``patches`` (module, name, value) are applied."""

    settings: dict[str, Any]
    make: Callable[[], KernelCase]
    patches: tuple[tuple[Any, str, Any], ...] = ()
    make_small: Callable[[], KernelCase] | None = None  # compiles to the same kernel with less memory


@contextmanager
def applied(variant: Variant) -> Iterator[None]:
    """Inside the block the modules have the variant's constants."""
    originals = [getattr(module, name) for module, name, _ in variant.patches]
    for module, name, value in variant.patches:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), original in zip(variant.patches, originals, strict=True):
            setattr(module, name, original)


def gemv_cuts(shape: ProjectionShape, rows: int, itemsize: int) -> list[Tiling]:
    """Tilings of one product that keep the invariants of :mod:`shared.kernels.tiling`."""
    whole = next_power_of_two(shape.K)
    matrices = 1 if shape.activation is None else 2
    cuts = []
    if rows <= 4:
        widths = [k for k in (512, 1024, 2048, 4096, 8192) if k <= whole] if rows == 1 else [whole]
        for block_n, block_k, num_warps in product((1, 2, 4, 8), widths, (2, 4, 8)):
            if 16 // itemsize <= block_n * block_k // (32 * num_warps) <= 64 // matrices:
                cuts.append(Tiling(block_n, block_k, num_warps))
    if rows > 1:
        for block_n, block_k, num_warps, num_stages in product(
            (16, 32, 64, 128), (64, 128, 256, 512), (4, 8), (3, 4, 5)
        ):
            tile = block_n * matrices * block_k * itemsize
            if tile >= 4096 and num_stages * (tile + 16 * block_k * itemsize) <= SHARED_MEMORY:
                cuts.append(Tiling(block_n, block_k, num_warps, num_stages, dot=True))
    return cuts


def projection_variants(shape: ProjectionShape, rows: int, dtype: torch.dtype) -> list[Variant]:
    """The table's cut first."""
    table = tiling(rows, shape.N, shape.K, shape.activation is not None, dtype.itemsize)
    small = replace(shape, N=256 if shape.N % 16 == 0 else 257)  # Triton compiles for multiples of 16 apart

    def variant(cut: Tiling) -> Variant:
        return Variant(
            asdict(cut),
            make=lambda: projection_case(shape, rows, dtype, cut),
            make_small=lambda: projection_case(small, rows, dtype, cut),
        )

    return [variant(cut) for cut in dict.fromkeys((table, *gemv_cuts(shape, rows, dtype.itemsize)))]


def constant_variants(module: Any, make: Callable[[], KernelCase], **choices: Sequence[int]) -> list[Variant]:
    """Every combination of a module's constants, the present one first."""
    names = list(choices)
    present = tuple(getattr(module, name) for name in names)
    return [
        Variant(
            {name.lower(): value for name, value in zip(names, values, strict=True)},
            make,
            tuple((module, name, value) for name, value in zip(names, values, strict=True)),
        )
        for values in dict.fromkeys((present, *product(*choices.values())))
    ]


def attention_variants(shapes: ModelShapes, context: int, dtype: torch.dtype, device: torch.device) -> list[Variant]:
    """The present tiling first; of those that come to the same number of splits one."""
    _, Hkv, _ = shapes.block.heads
    D, present = shapes.block.head_dim, decode_attention.TILINGS[shapes.block.head_dim]
    variants: dict[tuple[int, ...], Variant] = {}
    tilings = [(present, decode_attention.PROGRAMS_PER_MULTIPROCESSOR)]
    for tile, num_warps, num_stages, splits, programs in product(
        (16, 32, 64, 128), (4, 8), (1, 2, 3), (64, 128, 256), (1, 2, 4)
    ):
        if num_stages * 2 * tile * D * dtype.itemsize <= 2 * SHARED_MEMORY:
            other = replace(present, tile=tile, max_splits=splits, num_warps=num_warps, num_stages=num_stages)
            tilings.append((other, programs))
    for one, programs in tilings:
        variant = Variant(
            asdict(one) | {"programs_per_multiprocessor": programs},
            lambda: attention_case(shapes, context, None, dtype, device),
            (
                (decode_attention, "TILINGS", decode_attention.TILINGS | {D: one}),
                (decode_attention, "PROGRAMS_PER_MULTIPROCESSOR", programs),
            ),
        )
        with applied(variant):
            splits = decode_attention.choose_splits(Hkv, context, D, num_multiprocessors(device))
        variants.setdefault((one.tile, one.num_warps, one.num_stages, splits), variant)
    return list(variants.values())


def variants_of(
    shapes: ModelShapes, kernels: Sequence[str], rows: Sequence[int], device: torch.device
) -> dict[tuple[str, str], list[Variant]]:
    """By kernel and size."""
    dtype = dtype_of(device)
    found: dict[tuple[str, str], list[Variant]] = {}
    for count in rows:
        for shape in shapes.projections():
            found[shape.kernel, str(count)] = projection_variants(shape, count, dtype)
        found["gated", str(count)] = constant_variants(
            gated, partial(gated_case, shapes, count, dtype), BLOCK=(256, 512, 1024, 2048)
        )
        found["kv_write", str(count)] = constant_variants(
            kv_write,
            partial(kv_write_case, shapes, count, dtype, device),
            NUMBERS_PER_PROGRAM=(128, 256, 512, 1024, 2048),
            NUM_WARPS=(1, 2, 4),
        )
        for kernel in ("sampler_greedy", "sampler_drawn"):
            found[kernel, str(count)] = constant_variants(
                sampler,
                partial(_sampler_case, kernel, shapes, count, dtype, device),
                BLOCK=(512, 1024, 2048, 4096),
                NUM_WARPS=(4, 8),
            )
    for context in CONTEXTS:
        if "decode_attention" in kernels:
            found["decode_attention", str(context)] = attention_variants(shapes, context, dtype, device)
    return {key: variants for key, variants in found.items() if key[0] in kernels}


def _sampler_case(kernel: str, shapes: ModelShapes, rows: int, dtype: torch.dtype, device: torch.device) -> KernelCase:
    return next(case for case in sampler_cases(shapes, rows, dtype, device) if case.kernel == kernel)
