"""Incremental detokenizer: token ids to streamed text, without partial characters or lost spaces.

A token is a piece of bytes, not of text: an emoji may span four tokens, and a word's space belongs to its token.
Decoding each token by itself loses both; decoding the whole output for each token takes quadratic time. So bytes are
collected, and text is released as soon as it is certain. An answer continues its prompt, which may end inside a
character, and only the first word of a whole text loses its space. Introduced in phase 2.

Invariant: the pieces of all `push` calls and `flush`, joined, equal `tokenizer.decode(ids)`; after a prompt they equal
what the sequence adds to the text of the prompt's complete characters.
"""

import codecs
from collections.abc import Sequence

from shared.text.tokenizer import Tokenizer


class IncrementalDecoder:
    """Streams the text of one sequence. State: the bytes seen but not yet emitted.

    Args:
        prompt_ids: the prompt that the sequence continues. Of the prompt's text only an incomplete last character is
            emitted, once it is completed.
        completes: whether the sequence may complete that character; with a grammar it begins a new text.

    Byte-level vocabularies release a character once its last byte arrives. Byte-fallback vocabularies decode a run of
    ``<0xNN>`` tokens as a whole (valid, or every byte becomes U+FFFD), so a run is held until the next ordinary token.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), *, completes: bool = True) -> None:
        self._tokenizer, self._texts = tokenizer, tokenizer.token_texts
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._run = bytearray()
        self._strip, self._num_to_strip = tokenizer.decoder.stripped_prefix
        self._holds_nothing = self._num_to_strip == 0  # no bytes, and no prefix left to strip
        for token_id in self._end_of(prompt_ids):
            self.push(token_id)
        self.settle()
        if not completes:
            self._run.clear()
            self._utf8.reset()

    def push(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is incomplete or for a special token."""
        if self._holds_nothing and (text := self._texts[token_id]) is not None:
            return text  # whole characters, which need no decoding
        piece = self._tokenizer.token_bytes(token_id)
        if not piece:
            return ""
        if self._tokenizer.is_fallback_byte(token_id):
            self._run += piece
            self._holds_nothing = False
            return ""
        text = self._without_prefix(self._end_run() + self._utf8.decode(piece))
        self._holds_nothing = not self._utf8.getstate()[0] and self._num_to_strip == 0
        return text

    def settle(self) -> str:
        """The remaining text at the end of a prompt; an incomplete character is held until it is completed."""
        utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        utf8.decode(bytes(self._run))
        incomplete, _ = utf8.getstate()
        del self._run[len(self._run) - len(incomplete) :]
        text = self._without_prefix(self._end_run())
        self._run += incomplete
        return text

    def flush(self) -> str:
        """The remaining text at the end of the sequence; an incomplete character becomes U+FFFD."""
        return self._without_prefix(self._end_run() + self._utf8.decode(b"", final=True))

    def _end_of(self, prompt_ids: Sequence[int]) -> Sequence[int]:
        """The last tokens of a prompt, from one that is text and after which no prefix is stripped."""
        for start in reversed(range(len(prompt_ids))):
            text = self._texts[prompt_ids[start]]
            if text and (len(text) >= self._num_to_strip or text.strip(self._strip)):
                return prompt_ids[start:]
        return prompt_ids

    def _end_run(self) -> str:
        if not self._run:
            return ""
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _without_prefix(self, text: str) -> str:
        while text and self._num_to_strip:
            if text[0] != self._strip:
                self._num_to_strip = 0
            else:
                self._num_to_strip -= 1
                text = text[1:]
        return text
