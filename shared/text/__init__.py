"""Conversion between text and token ids. No module here uses tensors, and only `tokenizer` uses transformers."""
