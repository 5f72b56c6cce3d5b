"""In Triton's interpreter: what depends on a type alone is made once, not for each operation.

numpy computes an operation on a test's small tile in a microsecond or two. The interpreter makes the type of the result
for it, two tuples of its sizes and a table of all dtypes, which takes several times as long.
"""

import math
from typing import Any


def keep_types() -> None:
    """Make each type, and each tensor's sizes, once from here on."""
    from triton.language import core
    from triton.runtime import interpreter

    init_block, numpy_dtype = core.block_type.__init__, interpreter._get_np_dtype
    blocks: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    sizes: dict[tuple[int, ...], tuple[core.tuple, core.constexpr]] = {}
    dtypes: dict[str, Any] = {}

    def begin_block(self: core.block_type, element_ty: core.dtype, shape: Any) -> None:
        key = element_ty.name, tuple(map(core._unwrap_if_constexpr, shape))
        if key not in blocks:
            init_block(self, element_ty, shape)
            blocks[key] = self.__dict__.copy()
        self.__dict__.update(blocks[key])

    def begin_tensor(self: core.tensor, handle: Any, type: core.dtype) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in sizes:
            shape = [core.constexpr(size) for size in key]
            sizes[key] = core.tuple(shape), core.constexpr(math.prod(key))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = sizes[key]

    def kept_dtype(type: core.dtype) -> Any:
        name = type.scalar.name
        if name not in dtypes:
            dtypes[name] = numpy_dtype(type)
        return dtypes[name]

    core.block_type.__init__, core.tensor.__init__ = begin_block, begin_tensor
    interpreter._get_np_dtype = kept_dtype
