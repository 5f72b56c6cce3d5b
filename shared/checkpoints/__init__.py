"""Checkpoints that the project generates or downloads. Introduced in phase 1b.

`make` writes random checkpoints of real and tiny shapes (`shapes`) with a byte-level tokenizer (`byte_tokenizer`), for
tests and for benchmarks, whose speed does not depend on the values. `demo` downloads the course's small trained model,
and `gguf_llama` converts its file to a hub folder. The loader does not import this package: a generated folder is read
like any other.
"""
