"""The code that all launchers share: launching, counting launches, and checks of the machine.

Introduced in phase 3.1.

A kernel file imports ``tl`` and ``triton`` from here, because some systems that run the ops well have no Triton
packages (macOS): there a stub makes the file importable, and no kernel is launched. Invariant: whether a launcher
launches depends on its tensors' device and on ``TRITON_INTERPRET`` alone, which is read once, at import.

**Launches that overlap** (phase 9). A stream runs one kernel after another, and between two of them memory is idle for
a microsecond: the first kernel's last programs end, the second one starts, and its first loads take time to arrive.
CUDA's *programmatic dependent launch* (PDL) starts programs of the second kernel on multiprocessors that the first no
longer uses. These load data that no kernel of the chain writes, and then wait. A kernel takes part if it has a
parameter ``PDL``, which :func:`launch` sets, and keeps three rules:

- at its start it calls ``launch_dependents(PDL)``, the permission to start the next kernel;
- every program calls ``wait_for_previous(PDL)``, even one that has nothing to do. The wait is for the end of one
  kernel, the previous one, with all its writes. Earlier kernels are ordered only because the previous one also waited;
- before the wait it writes nothing, and loads only constants: weights, RoPE tables, the index arrays of the step, which
  a copy has uploaded before the step's first kernel. A kernel that is still running may write anything else. It may
  also still read memory that this one writes, since the allocator gives a freed block to the next launch.

With these rules, a chain of overlapping launches computes the same as sequential launches. The kernels of
PyTorch do not take part: they start once everything before them has ended. The launches of a draw, some of which load
logits above their wait, call ``launch_dependents`` after it (:mod:`shared.kernels.sampling.sampler`).
"""

import functools
import os
import shutil
import sysconfig
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from shared.errors import ConfigError
from shared.kernels import NO_TRITON

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    TensorDescriptor = None
    triton = SimpleNamespace(__version__=None, jit=lambda kernel=None, **_: kernel or (lambda decorated: decorated))
    tl = SimpleNamespace(constexpr=lambda value: value)

OLDEST_TRITON = (3, 6)
HEAD_SIZES = (16, 32, 64, 128, 256)
INTERPRETED = triton.__version__ is not None and bool(triton.knobs.runtime.interpret)
INTERPRETED_MULTIPROCESSORS = 4  # makes a grid that is sized by multiprocessors have several programs


@dataclass(frozen=True)
class Generation:
    """Features that differ between GPU generations."""

    name: str
    has_pdl: bool  # programmatic dependent launch
    shared_bytes: int  # the maximum shared memory of a program
    has_fp8: bool = False  # converts FP8 (e4m3) and multiplies it
    copies_tiles: bool = False  # has an engine that copies tiles to shared memory, and space for several large ones
    has_warpgroups: bool = False  # multiplies in groups of four warps, while these go on


GENERATIONS = {  # by the first compute capability with these features; Ampere is the first with bf16
    (8, 0): Generation("Ampere", has_pdl=False, shared_bytes=163 * 1024),
    (8, 6): Generation("Ampere", has_pdl=False, shared_bytes=99 * 1024),
    (8, 7): Generation("Ampere", has_pdl=False, shared_bytes=163 * 1024),
    (8, 9): Generation("Ada", has_pdl=False, shared_bytes=99 * 1024, has_fp8=True),
    (9, 0): Generation(
        "Hopper", has_pdl=True, shared_bytes=227 * 1024, has_fp8=True, copies_tiles=True, has_warpgroups=True
    ),
    (10, 0): Generation("Blackwell", has_pdl=True, shared_bytes=227 * 1024, has_fp8=True, copies_tiles=True),
    (12, 0): Generation("Blackwell", has_pdl=True, shared_bytes=99 * 1024, has_fp8=True),
}
OLDEST_CAPABILITY = min(GENERATIONS)

if INTERPRETED:
    # Triton 3.6 applies int() to a one-element array for a scalar loop bound, which NumPy 2.4 rejects.
    from triton.runtime import interpreter

    _patch_tensor = interpreter._patch_lang_tensor

    def _patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: scalar.handle.data.item())

    interpreter._patch_lang_tensor = _patch_tensor_and_index

    # It also patches its language again for each call of a device function such as tl.sum, and checks integer sums and
    # products for overflows that it then does not report. That takes two thirds of many kernels' time.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    _patch_language = interpreter._patch_lang

    @functools.cache
    def _patch_language_once(function: Any) -> Any:
        _patch_language(function)
        return interpreter._LangPatchScope()  # a scope that records no changes, so the patches stay

    interpreter._patch_lang = _patch_language_once

DESCRIPTORS = {TensorDescriptor}
"""The types that describe a matrix to the engine that copies tiles."""
LAUNCHES: Counter[str] = Counter()  # launches so far, by kernel name; read it before and after, or clear() it


def launches(tensor: torch.Tensor) -> bool:
    """Whether a launcher launches its kernel for ``tensor``; otherwise it calls the op."""
    return INTERPRETED or tensor.is_cuda


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch ``kernel`` over ``grid`` and count it.

    Triton binds and specializes the arguments of every call, which takes longer than most of these kernels run. A call
    with the same specialization as an earlier one goes directly to the compiled kernel's launcher, and skips the hooks
    of Triton's profiler.

    Args:
        args: the kernel's arguments in order, a tensor first.
        options: the kernel's constexpr arguments by name, except PDL, plus ``num_warps``, ``num_stages`` and
            ``maxnreg``.
    """
    LAUNCHES[kernel.__name__] += 1
    if INTERPRETED:
        kernel[grid](*args, **options, **overlap(kernel, generation(args[0].device)))
        return
    device = args[0].get_device()
    kind = (id(kernel), device, *options.values(), *specializations(args))
    known = _COMPILED.get(kind)
    if known is None:
        options |= overlap(kernel, generation(args[0].device))
        compiled = kernel[grid](*args, **options)
        constexprs = [options[name] for name in kernel.arg_names[len(args) :]]
        current_stream = triton.runtime.driver.active.get_current_stream
        metadata = (compiled.function, compiled.packed_metadata, None, None, None)
        _COMPILED[kind] = compiled.run, current_stream, metadata, constexprs
        return
    run, current_stream, metadata, constexprs = known
    x, y, z = (*grid, 1, 1)[:3]
    run(x, y, z, current_stream(device), *metadata, *args, *constexprs)


_COMPILED: dict[tuple[Any, ...], tuple[Any, Any, tuple[Any, ...], list[Any]]] = {}
"""By specialization: the launcher, the getter of the current stream, the launcher's leading arguments (device function,
its metadata, absent hooks), and the constexpr arguments."""
_BY_TYPE = (float, bool, type(None))


def specializations(args: Iterable[Any]) -> list[Any]:
    """The specialization key of each argument: arguments with equal keys share a compiled kernel.

    For a tensor: dtype and alignment. For an integer: whether it is 1, a multiple of 16, and too large for 32 bits. At
    least as fine as Triton's own specialization.
    """
    found: list[Any] = []
    for arg in args:  # this loop runs a thousand times per step
        kind = type(arg)
        if kind is int:
            if arg == 1:
                found.append(1)
            elif -(2**31) <= arg < 2**31:
                found.append(0 if arg % 16 else 16)
            else:
                found.append((arg % 16 == 0, arg >= 2**63))
        elif kind in _BY_TYPE:
            found.append(kind)
        elif kind in DESCRIPTORS:
            found.append((arg.base.dtype, *arg.block_shape))
        else:
            offset = arg.data_ptr() % 16
            found.append((arg.dtype, offset) if offset else arg.dtype)
    return found


def overlap(kernel: Any, gpu: Generation) -> dict[str, bool]:
    """The options that let a launch of ``kernel`` overlap the previous one, if the kernel and the GPU can."""
    if "PDL" not in kernel.arg_names:
        return {}
    return {"PDL": True, "launch_pdl": True} if gpu.has_pdl else {"PDL": False}


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Permit the next kernel to start; it starts once all programs of this one have called this or ended."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait for the end of the previous kernel; what it wrote can then be loaded."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(pointers, PDL: tl.constexpr):
    """Request the cache lines of ``pointers`` into the L2 cache, above the wait. All multiprocessors of the GPU share
    this cache and it is coherent, so a line that is written later does no harm."""
    if PDL:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // dummy $0",
            "=r,l",
            [pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@functools.cache
def generation(device: torch.device) -> Generation:
    """The newest generation whose compute capability the GPU has; the oldest for the interpreter."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else OLDEST_CAPABILITY
    return GENERATIONS[max(oldest for oldest in GENERATIONS if oldest <= capability)]


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``: the size of a Triton block of n elements."""
    return 1 << max(0, n - 1).bit_length()


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of the device, cached; a small constant under the interpreter."""
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def check_launchable(device: torch.device) -> None:
    """Raise ConfigError if kernels cannot run on ``device``; a suitable GPU becomes the current one.

    Triton launches on the current device, so this is called once, before anything is computed. A CPU always passes,
    unless Triton's interpreter is requested and Triton is missing.
    """
    if NO_TRITON and os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise ConfigError(f"TRITON_INTERPRET is set, and that {NO_TRITON}. Without it the ops run, on any system.")
    if device.type == "cuda":
        check_kernels(device)
        torch.cuda.set_device(device)


def check_kernels(device: torch.device) -> None:
    """Raise ConfigError if Triton's version, the GPU or the compiler rules out the kernels on this GPU."""
    check_triton_version(triton.__version__)
    check_capability(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
    check_compiler()


def check_triton_version(version: str | None) -> None:
    """Raise ConfigError if Triton is missing or too old for the kernels."""
    oldest = ".".join(map(str, OLDEST_TRITON))
    remedy = f"install it with `pip install 'triton>={oldest}'`, or run on the CPU with --device cpu."
    if version is None:
        raise ConfigError(f"The kernels need Triton {oldest} or later and this environment has none; {remedy}")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TRITON:
        raise ConfigError(f"The kernels need Triton {oldest} or later and this environment has {version}; {remedy}")


def check_capability(name: str, capability: tuple[int, int]) -> None:
    """Raise ConfigError if a GPU is too old to compute in bf16."""
    if capability < OLDEST_CAPABILITY:
        raise ConfigError(
            f"{name} has compute capability {capability[0]}.{capability[1]} and cannot compute in bf16; the kernels "
            f"need {OLDEST_CAPABILITY[0]}.{OLDEST_CAPABILITY[1]} (Ampere) or later: use such a GPU, or --device cpu."
        )


def check_compiler() -> None:
    """Raise ConfigError if Triton cannot build the C part of a launch: no compiler, or no Python headers."""
    named = os.environ.get("CC")
    if not any(shutil.which(compiler) for compiler in ([named] if named else ["gcc", "clang"])):
        found = f"CC names {named!r}, which does not exist" if named else "there is neither gcc nor clang"
        raise ConfigError(
            f"Triton builds a kernel's launcher with a C compiler, and {found}; install gcc (on Debian and Ubuntu: "
            "build-essential) or name a compiler in the environment variable CC, or run on the CPU with --device cpu."
        )
    headers = Path(sysconfig.get_path("include", "posix_prefix"))
    if not (headers / "Python.h").is_file():
        raise ConfigError(
            f"Triton builds a kernel's launcher against Python's headers, and there is no Python.h in {headers}; "
            "install them (on Debian and Ubuntu: python3-dev), or run on the CPU with --device cpu."
        )


def check_head_size(head_dim: int) -> None:
    """Raise ConfigError if the attention kernels do not support this head size."""
    if head_dim not in HEAD_SIZES:
        raise ConfigError(
            f"The model's head size is {head_dim}; the kernels take {', '.join(map(str, HEAD_SIZES))}. Run it on a "
            "CPU with --device cpu, or with a phase up to 3 (--phase 03), which needs no kernels."
        )
