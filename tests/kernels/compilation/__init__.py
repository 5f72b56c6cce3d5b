"""Kernels compiled on a machine without a GPU, for GPUs of several generations.

The interpreter runs a kernel as Python, so it accepts what the compiler refuses: a name whose type changes inside a
branch, a branch that is dead for some arguments. Nor does it know how much shared memory there is. Triton carries its
own assembler, so a process of its own, without ``TRITON_INTERPRET``, can compile what a launch of an engine compiles.
``python -m tests.kernels.compilation`` calls the functions of this folder's modules that begin with ``compile_``.

A variant is worth its second if it takes another branch, has other types, or the largest tiles of its generation.
"""

import functools

import torch


def compile_launch(kernel, grid, *args, capability=(9, 0), num_warps=4, num_stages=3, maxnreg=None, **constants):
    """The PTX of what :func:`shared.kernels.launch.launch` would compile on an H100, or another GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime.jit import mangle_type

    from shared.kernels.launch import GENERATIONS, overlap

    gpu = GENERATIONS[capability]
    options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg}
    for name, value in overlap(kernel, gpu).items():
        (options if name == "launch_pdl" else constants)[name] = value
    values = dict(zip(kernel.arg_names, args, strict=False)) | constants
    signature, constexprs, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        value = values[name]
        if name in constants or value is None or (type(value) is int and value == 1):
            signature[name], constexprs[name] = "constexpr", value
            continue
        signature[name] = mangle_type(value)
        number = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if isinstance(number, int) and number % 16 == 0:
            attributes[(i,)] = [["tt.divisibility", 16]]
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    compiled = compile(source(kernel, signature, constexprs, attributes), target=target, options=options)
    assert compiled.metadata.shared <= gpu.shared_bytes, (kernel.__name__, compiled.metadata.shared, capability)
    assert compiled.metadata.launch_pdl == constants.get("PDL", False), "what Triton's launcher reads"
    ptx = compiled.asm["ptx"]
    for instruction in ("griddepcontrol.launch_dependents", "griddepcontrol.wait"):
        assert (instruction in ptx) == compiled.metadata.launch_pdl, instruction
    print(kernel.__name__)
    return ptx


def compiling(*modules, capability=(9, 0)):
    """The launchers of these modules compile for a GPU instead of launching; returns its generation's getter."""
    from shared.kernels.launch import GENERATIONS

    for module in modules:
        module.launches = lambda tensor: True
        module.launch = functools.partial(compile_launch, capability=capability)
    return lambda device: GENERATIONS[capability]
