"""Checkpoints that the project makes itself or fetches. Introduced in phase 1b.

`make` writes random checkpoints of real and tiny shapes (`shapes`) with a byte-level tokenizer (`byte_tokenizer`), for
tests and for benchmarks, whose speed does not depend on the values. `demo` fetches the one small trained model with
which the course speaks, and `gguf_llama` turns its file into what a hub folder holds. Nothing here is imported when a
model is loaded: a folder made here is read like any other.
"""
