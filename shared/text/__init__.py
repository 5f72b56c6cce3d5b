"""Text in, text out: everything between a user's words and token ids.

`tokenizer` and `token_decoder` (phase 1b) turn text into ids and each id back into its exact bytes; `detokenizer`
(phase 2) streams those bytes as text that never shows half a character; `stopping` (phase 2) finds stop strings that
span tokens and says why a generation ended; `chat` (phase 2) renders conversations through the templates in
`templates/`, one Jinja2 file per family. Nothing here touches tensors, and only `tokenizer` knows of transformers.
"""
