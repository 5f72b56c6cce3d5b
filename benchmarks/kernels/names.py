"""Kernel names as a reader wants them: without types, namespaces and arguments. Introduced in phase 3.1.

A C++ kernel is reported by its whole signature, hundreds of characters of template arguments, of which one tells what
it does: the functor. A Triton kernel's name is its function's. Invariant: names of PyTorch's operations, of
copies and of Triton's kernels stay as they are.
"""

import re

_TEMPLATE = re.compile(r"<[^<>]*>")
_TELLING = re.compile(r"\b(?:\w+Functor(?:_\w+)?|\w+_kernel_cuda|\w+Ops?|cutlass_\w{8,})\b")
_WRAPPERS = {"ReduceOp", "BinaryFunctor", "AUnaryFunctor", "BUnaryFunctor"}  # what they wrap is told behind them
_GENERIC = {"kernel", "run", "operator", "device_kernel", "Kernel", "Kernel2"}  # names that say nothing by themselves
LONGEST = 72


def short_name(name: str) -> str:
    """``elementwise_kernel [CUDAFunctor_add]`` of a signature with all its types; at most `LONGEST` characters."""
    if ("::" not in name and "<" not in name) or name.startswith("aten::"):
        return _cut(name)
    name = name.replace("(anonymous namespace)::", "").replace("->", "")
    bare = name
    while (shorter := _TEMPLATE.sub("", bare)) != bare:
        bare = shorter
    path = bare.partition("(")[0].strip().split(" ")[-1].split("::")
    base = "::".join(path[-2:]) if path[-1] in _GENERIC and len(path) > 1 else path[-1]
    found = _TELLING.findall(name, name.find(path[-1]) + len(path[-1]))
    telling = next((functor for functor in found if functor not in _WRAPPERS), None)
    return _cut(f"{base} [{telling}]" if telling else base)


def _cut(name: str) -> str:
    return name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"
