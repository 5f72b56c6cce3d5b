"""Conversion between text and token ids.

`tokenizer` and `token_decoder` (phase 1b) turn text into ids and each id back into its exact bytes; `detokenizer`
(phase 2) streams those bytes as text that never shows half a character; `stopping` (phase 2) finds stop strings that
span tokens and gives the finish reason; `chat` (phase 2) renders conversations with the templates in `templates/`, one
Jinja2 file per family, and `chat_format` chooses the one that equals the checkpoint's own. No module here uses
tensors, and only `tokenizer` uses transformers.
"""
