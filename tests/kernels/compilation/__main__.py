"""Compile every kernel; prints the name of each that is compiled."""

from tests.kernels.compilation import attention, products, steps

if __name__ == "__main__":
    for module in (attention, products, steps):
        for name, function in vars(module).items():
            if name.startswith("compile_") and function.__module__ == module.__name__:
                function()
